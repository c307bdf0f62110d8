"""What the benchmarks share: a clock, a record, the machine's matrix-product speed, images to sketch on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fipa.curvature.routes import curvature_of
from fipa.federation.memory import reset_peak

T = TypeVar("T")


@dataclass
class Record:
    """One measured ratio. `floor` is what it must reach: at least, or at most if `at_most`."""

    name: str
    ratio: float
    floor: float | None
    unit: str
    detail: dict[str, Any]
    at_most: bool = False

    @property
    def met(self) -> bool:
        if self.floor is None:
            return True
        return self.ratio <= self.floor if self.at_most else self.ratio >= self.floor

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def seconds(function: Callable[[], T], repeats: int = 3) -> tuple[float, T]:
    """Median wall time of a few calls after one to warm up, and the last result."""
    result = function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], result


def once(function: Callable[[], T]) -> tuple[float, T]:
    """Wall time of one call, for what is too slow to repeat."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def gemm_speed(dtype: torch.dtype = torch.float32, side: int = 2048) -> float:
    """The machine's matrix-product speed now, in flop/s."""
    a = torch.randn(side, side, dtype=dtype)
    return 2 * side**3 / seconds(lambda: a @ a, 5)[0]


class PeakMemory:
    """Highest resident memory above that at entry, as Linux keeps it for a process."""

    def __enter__(self) -> PeakMemory:
        reset_peak([os.getpid()])
        self.start = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = _status("VmHWM") - self.start


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def real_images() -> Path | None:
    """The first file of CIFAR-10, if FIPA_DATA has it."""
    root = os.environ.get("FIPA_DATA")
    file = Path(root or "") / "cifar-10-batches-bin" / "data_batch_1.bin"
    return file if root and file.exists() else None


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor, str]:
    """Normalised 32x32 colour images with ten classes: CIFAR-10 if FIPA_DATA has it, else made up."""
    generator = torch.Generator().manual_seed(seed)
    if found := real_images():
        raw = torch.from_numpy(np.fromfile(found, dtype=np.uint8).reshape(-1, 3073))
        raw = raw[torch.randperm(len(raw), generator=generator)[:count]]
        mean, std = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
        x = (raw[:, 1:].reshape(-1, 3, 32, 32) / 255 - mean[:, None, None]) / std[:, None, None]
        return x, raw[:, 0].long(), "CIFAR-10"
    labels = torch.randint(10, (count,), generator=generator)
    coarse = torch.randn(10, 3, 4, 4, generator=generator)[labels] + torch.randn(count, 3, 4, 4, generator=generator)
    x = nn.functional.interpolate(coarse, size=32, mode="bilinear") + 0.3 * torch.randn(
        count, 3, 32, 32, generator=generator
    )
    return x, labels, "made-up images"


def local_epochs(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int, lr: float = 0.1) -> None:
    """A client of the paper: SGD, batches of 50, weight decay, random crop and flip."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(augment(x[batch], generator)), y[batch]).backward()
            optimizer.step()


def augment(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Edge-padded random crops and flips, all images at once."""
    n, _, side, _ = x.shape
    padded = nn.functional.pad(x, (padding,) * 4, mode="replicate")
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator)
    columns = left + torch.arange(side)
    flip = torch.rand(n, 1, generator=generator) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    rows = top + torch.arange(side)
    return padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def briefly_trained(model: nn.Module, epochs: int = 5, seed: int = 1) -> nn.Module:
    """Some epochs on other images than the benchmark sketches on."""
    x, y, _ = images(2000, seed=seed)
    local_epochs(model, x, y, epochs, seed, lr=0.05)
    return model.eval()


def capture(model: nn.Module, x: Tensor, vectors: Tensor, best: float) -> float:
    """Share of the exact top-r curvature in a subspace: Tr(U^T H U) / sum of the top r eigenvalues."""
    with curvature_of(model, x, route="rows", memory_limit=0) as (operator, _, _):
        return float(operator.forward(torch.linalg.qr(vectors).Q).double().square().sum()) / best
