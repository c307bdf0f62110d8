"""What `fipa doctor` finds: what is installed and usable on this machine, and what to do about what is not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fipa import __version__
from fipa.errors import CALLED, EXTRAS, missing
from fipa.machine import cores, memory, processor

CORE = ("torch", "numpy", "safetensors", "typing_extensions")
BROWSER = ("chromium", "chromedriver")  # programs that the tests of the report page drive
USES = {
    "cli": "the command line",
    "serve": "`fipa serve` and `fipa run --serve`",
    "images": "reading JPEG files",
    "tensorboard": "`fipa run --tensorboard`",
    "flower": "fipa.flower",
    "fast": "training small CNNs at full speed",
    "backbone": "the backbone of the experiments head-*",
    "privacy": "fipa.privacy, which tells what noise is worth,",
}
BUILT_IN = ("tomli",)  # needed where Python has none of its own, before 3.11


def examine(root: Path | None = None) -> dict[str, Any]:
    """All findings, as plain data. `usable` says whether the library computes at all; `advice` is what to do.

    Parameters
    ----------
    root
        The folder with the image sets; `FIPA_DATA`, or else `./data`, by default.
    """
    extras = {extra: _absent(modules) for extra, modules in EXTRAS.items()}
    core = _core()
    found: dict[str, Any] = {
        "usable": core is None,
        "why": core,
        "versions": {"fipa": __version__, "python": platform.python_version()} | _versions(),
        "machine": {"system": platform.platform(), "processor": processor(), "cores": cores(), "memory": memory()},
        "torch": _torch() if core is None else {},
        "data": _data(root) if core is None else {},
        "extras": {extra: {"installed": not absent, "missing": absent} for extra, absent in extras.items()},
        "flower": _flower() if core is None else {"usable": False, "deployment": False, "why": core},
        "browser": _browser(),
    }
    return found | {"advice": _advice(found)}


def _core() -> str | None:
    """Why a round of two clients cannot be computed; None if it can."""
    absent = _absent(CORE)
    if absent:
        return f"needs {', '.join(absent)}"
    try:
        import torch

        import fipa

        model, x = torch.nn.Linear(2, 2), torch.ones(4, 2)
        curvature = fipa.sketch(model, x, loss="cross_entropy", rank=1)
        updates = [fipa.ClientUpdate(torch.ones(6), 4, curvature) for _ in range(2)]
        fipa.aggregate(torch.zeros(6), updates, fipa.CompletedFIPA(damping=0.5))
    except Exception as error:  # whatever it is, the user is told
        return f"{type(error).__name__}: {error}"
    return None


def _torch() -> dict[str, Any]:
    import torch

    return {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "cuda": torch.cuda.is_available(),
    }


def _versions() -> dict[str, str | None]:
    modules = dict.fromkeys(module for names in (CORE, *EXTRAS.values(), ("selenium",)) for module in names)
    found = {CALLED.get(module, module).replace("_", "-"): _version(CALLED.get(module, module)) for module in modules}
    return {name: number for name, number in found.items() if name not in BUILT_IN}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _absent(modules: tuple[str, ...]) -> list[str]:
    """Packages of these modules that are not installed."""
    spare = BUILT_IN if sys.version_info >= (3, 11) else ()
    return [CALLED.get(name, name) for name in modules if name not in spare and not _is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # somebody has put something else in its place
        return False


def _data(root: Path | None) -> dict[str, Any]:
    from fipa.data.registry import SETS, data_root

    folder = data_root(root).resolve()
    found = {name: source.find(folder) for name, source in SETS.items()}
    return {"root": str(folder), "sets": {name: place and str(place) for name, place in found.items()}}


def _flower() -> dict[str, Any]:
    """Whether apps and strategies can be used, and whether `fipa deploy-demo` can; if not, why."""
    try:
        import fipa.flower
        from fipa.flower.deployment import Deployment
    except ImportError as error:
        return {"usable": False, "deployment": False, "why": missing(error, "flower") or str(error)}
    try:
        Deployment(nodes=1)
    except fipa.FipaError as error:
        return {"usable": True, "deployment": False, "why": str(error)}
    return {"usable": True, "deployment": True, "why": None}


def _browser() -> dict[str, Any]:
    paths = {program: shutil.which(program) for program in BROWSER}
    return {"usable": all(paths.values()) and _is_there("selenium")} | paths


def _advice(found: dict[str, Any]) -> list[str]:
    """One sentence for each thing that is amiss or could be better."""
    told = []
    if not found["usable"]:
        told.append(f"the library does not compute: {found['why']}. Install it anew: pip install --upgrade fipa")
    for extra, state in found["extras"].items():
        if not state["installed"]:
            told.append(f"{USES[extra]} needs {', '.join(state['missing'])}: pip install 'fipa[{extra}]'")
    if found["flower"]["usable"] and not found["flower"]["deployment"]:
        told.append(f"`fipa deploy-demo` does not work here: {found['flower']['why']}")
    elif found["usable"] and not found["flower"]["usable"] and found["extras"]["flower"]["installed"]:
        told.append(f"Flower does not work here: {found['flower']['why']}")
    absent = [name for name, place in found["data"].get("sets", {}).items() if place is None]
    if absent:
        told.append(f"image sets that are not there: {', '.join(absent)}. `fipa data get NAME` gets one; --data, or "
                    "FIPA_DATA, names the folder if you have them")  # fmt: skip
    if not found["browser"]["usable"]:
        told.append(
            "tests of the report page (for developers only) need chromium, chromedriver and selenium: "
            "apt install chromium chromium-driver; pip install selenium"
        )
    threads, usable = found["torch"].get("threads", 1), found["machine"]["cores"]
    if threads > usable:
        told.append(f"torch has {threads} threads on {usable} cores: set OMP_NUM_THREADS={usable}")
    if os.environ.get("ATEN_CPU_CAPABILITY"):
        told.append("ATEN_CPU_CAPABILITY is set: torch does not use all that this processor can do")
    return told
