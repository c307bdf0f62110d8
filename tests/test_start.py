"""What is imported, and when: a command that computes nothing does without torch, and every system can import us."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fipa
from fipa.shipped import names, settings

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numpy", "matplotlib", "plotly", "pydantic", "numba", "flwr")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)


# --- public names ---


def declared() -> dict[str, tuple[str, str]]:
    """Where type checkers are told that the public names live."""
    tree = ast.parse(Path(fipa.__file__).read_text("utf-8"))
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_names_are_where_type_checkers_are_told() -> None:
    told = declared()
    assert set(told) == set(fipa.__all__)
    assert len(set(fipa.__all__)) == len(fipa.__all__)
    modules = {name for name, (module, _) in told.items() if module == "fipa"}
    homes = {name: (f"fipa.{module}", attribute) for name, (module, attribute) in fipa._HOMES.items()}
    assert homes == {name: place for name, place in told.items() if name not in modules}
    for name in fipa.__all__:
        assert getattr(fipa, name) is not None
    assert set(fipa.__all__) < set(dir(fipa))


def test_names_that_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'fipa' has no attribute 'nonsense'"):
        fipa.nonsense  # noqa: B018
    assert not hasattr(fipa, "_nonsense")
    with pytest.raises(ImportError, match="nonsense"):
        exec("from fipa import nonsense")
    assert fipa.linalg.__name__ == "fipa.linalg"  # modules, too


@pytest.mark.long
def test_importing_fipa_imports_no_torch() -> None:
    code = "import sys, fipa\nprint('torch' in sys.modules, fipa.FipaError.__name__, 'torch' in sys.modules)\n"
    code += "from fipa import *\nprint(FedAvg.__name__, 'torch' in sys.modules)"
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("False FipaError False\nFedAvg True\n", "")


# --- commands ---

COMMAND = """\
import sys
import fipa.__main__ as program
sys.argv = ["fipa", *{arguments!r}]
try:
    program.entry()
finally:
    print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["run", "--help"], ["list"], ["list", "--json"], ["show", "demo"],
     ["show", "cifar10-silo", "--json"]],
    ids=" ".join,
)  # fmt: skip
def test_commands_that_compute_nothing_import_nothing_heavy(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if arguments[0] == "show":
        settings(arguments[1])  # are kept once they have been worked out
    done = python("-c", COMMAND.format(arguments=arguments, heavy=HEAVY))
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout


def test_python_m_fipa_is_the_command() -> None:
    done = python("-m", "fipa", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{fipa.__version__}\n", "")
    assert python("-m", "fipa", "bogus").returncode == 2


def test_the_shell_completes_commands_and_experiments() -> None:
    complete = {"_FIPA_COMPLETE": "complete_bash", "COMP_WORDS": "fipa re", "COMP_CWORD": "1"}
    assert python("-m", "fipa", **complete).stdout.split() == ["resume", "report"]
    complete |= {"COMP_WORDS": "fipa run pde-", "COMP_CWORD": "2"}
    assert python("-m", "fipa", **complete).stdout.split() == [n for n in names() if n.startswith("pde-")]


# --- other systems ---

ELSEWHERE = """\
import importlib, multiprocessing, os, pkgutil, signal, sys
import fipa

def modules():
    return [found.name for found in pkgutil.walk_packages(fipa.__path__, "fipa.")]

for name in modules():  # so that all that others import is there
    importlib.import_module(name)
for name in [name for name in sys.modules if name == "fipa" or name.startswith("fipa.")]:
    del sys.modules[name]
for name in ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "crypt"):
    sys.modules[name] = None
POSIX = "fork killpg sched_ getuid geteuid getgid setsid sysconf uname nice getpgid wait3 wait4 mkfifo chown "
POSIX += "getloadavg pread pwrite SIG pthread_ alarm setitimer sigwait"
EVERYWHERE = "SIG_DFL SIG_IGN SIGINT SIGTERM SIGABRT SIGFPE SIGILL SIGSEGV".split()
for module in (os, signal):
    for name in [name for name in vars(module) if name.startswith(tuple(POSIX.split())) and name not in EVERYWHERE]:
        delattr(module, name)
multiprocessing.get_all_start_methods = lambda: ["spawn"]
sys.platform = "win32"
import fipa
for name in modules():
    importlib.import_module(name)
from fipa.machine import cores, memory
print(cores() > 0, hasattr(os, "fork"), hasattr(signal, "SIGKILL"))
"""


@pytest.mark.long
def test_every_module_is_imported_where_there_is_no_posix() -> None:
    done = python("-c", ELSEWHERE)
    assert (done.returncode, done.stdout) == (0, "True False False\n"), done.stderr
