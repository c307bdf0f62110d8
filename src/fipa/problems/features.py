"""What a frozen network makes of images: computed once, kept on disk, and never read for another network."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fipa.curvature.modes import evaluation_mode
from fipa.data.images import Images, ImageSet
from fipa.data.registry import data_root
from fipa.errors import FipaError

CACHE = ".fipa-cache"
BLOCK = 50  # images that go through the network at once: few of them stay in the processor's cache
SEEN = 8  # images by which stored features are compared with the network's
SAMPLED = 1000  # images of each part that the name of a file depends on

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """Features (n x d, float32) and labels (n) of training and test images, and the names of set and classes."""

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]


def features(
    data: ImageSet, backbone: nn.Module, *, root: str | Path | None = None, progress: Progress | None = None
) -> FeatureSet:
    """What a network makes of all images of a set, in eval mode.

    They are kept under the data folder in `.fipa-cache`, if it can be written to, as float32: a network of your own may
    have features of any size, which float16 would not hold. The file's name has the set, the network's class, and a
    digest of its weights, its layers (`repr`) and images. Before it is used, the features of a few images are computed
    anew: a network whose code has changed reads no old ones.

    Parameters
    ----------
    data, backbone
        The images, and any module that makes features (n x d) of images (n x channels x height x width) with values
        from 0 to 255.
    root
        The data folder; see `fipa.data.load`.
    progress
        Is called with the number of images done and of all; by default it is seen on the terminal.
    """
    file = data_root(root) / CACHE / f"features-{_slug(data.name)}-{_slug(type(backbone).__name__)}-"
    file = file.with_name(f"{file.name}{_digest(data, backbone)}.safetensors")
    with torch.no_grad(), evaluation_mode(backbone):
        parts = _stored(file, data, backbone)
        if parts is None:
            total = len(data.train) + len(data.test)
            told = progress or _Shown(f"features of {data.name} by {type(backbone).__name__}")
            train = _through(backbone, data.train, lambda done: told(done, total))
            test = _through(backbone, data.test, lambda done: told(len(data.train) + done, total))
            parts = {"train": train, "test": test}
            try:
                _store(parts, file)
            except OSError as error:  # a folder that cannot be written to, or a full disk
                warnings.warn(f"the features are not kept for the next time: {error}", stacklevel=2)
    return FeatureSet(data.name, parts["train"], data.train.labels, parts["test"], data.test.labels, data.classes)


def _through(backbone: nn.Module, images: Images, progress: Callable[[int], None]) -> Tensor:
    found: list[Tensor] = []
    for start in range(0, len(images), BLOCK):
        found.append(_block(backbone, images.pixels[start : start + BLOCK]))
        progress(start + len(found[-1]))
    return torch.cat(found)


def _block(backbone: nn.Module, pixels: Tensor) -> Tensor:
    made = backbone(pixels.float())
    if not isinstance(made, Tensor) or made.dim() != 2 or len(made) != len(pixels):
        got = tuple(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise FipaError(
            f"{type(backbone).__name__} made {got} of {len(pixels)} images: a backbone makes a row of features of each"
        )
    if not bool(made.isfinite().all()):
        raise FipaError(f"{type(backbone).__name__} made NaN or infinity of images with values from 0 to 255")
    return made.float().contiguous()


def _stored(file: Path, data: ImageSet, backbone: nn.Module) -> dict[str, Tensor] | None:
    """What the file holds, if it is of these images and of this network as it is now."""
    try:
        parts = load_file(file)
    except (OSError, SafetensorError):
        return None
    if {name: len(t) for name, t in parts.items()} != {"train": len(data.train), "test": len(data.test)}:
        return None
    now = _block(backbone, data.test.pixels[:SEEN])
    then = parts["test"][:SEEN]
    return parts if now.shape == then.shape and torch.allclose(now, then, rtol=1e-3, atol=1e-3) else None


def _store(parts: dict[str, Tensor], file: Path) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=file.parent)
    os.close(handle)
    try:
        save_file(parts, temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def _digest(data: ImageSet, backbone: nn.Module) -> str:
    """Changes with the network's layers and weights, and with the images."""
    digest = hashlib.blake2b(repr(backbone).encode(), digest_size=8)
    for name, tensor in sorted(backbone.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for part in (data.train, data.test):
        some = part.pixels[:: max(1, len(part) // SAMPLED)]
        digest.update(f"{tuple(part.pixels.shape)}".encode() + some.contiguous().numpy().tobytes())
        digest.update(part.labels.numpy().tobytes())
    return digest.hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class _Shown:
    """One line on the terminal that says how far it is; nothing where there is no terminal."""

    def __init__(self, what: str) -> None:
        self._what, self._start = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        left = (time.monotonic() - self._start) * (total - done) / done
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{self._what}: {done} of {total}, {left / 60:.0f} min left {end}")
        sys.stderr.flush()
