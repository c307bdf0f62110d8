"""One gradient of a batch, in one thread: what the layout of tensors, bfloat16 and gradients one by one change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.common import Record, images, seconds
from fipa.curvature.routes import curvature_of
from fipa.layout import Layout, parameters_of
from fipa.models import cnn, resnet20

BATCH, REPEATS = 50, 9
MODELS: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "CNN-207k": lambda generator: cnn([12, 24, 48], 61, generator=generator),
    "ResNet-20": lambda generator: resnet20(generator=generator),
}


def steps() -> Iterator[Record]:
    """For networks that torch's own convolutions run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, make in MODELS.items():
            yield from _steps(name, make(torch.Generator().manual_seed(0)))
    finally:
        torch.set_num_threads(threads)


def _steps(name: str, model: nn.Module) -> Iterator[Record]:
    x, y, data = images(BATCH)
    usual, _ = seconds(lambda: gradient(model, x, y), REPEATS)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    x = x.contiguous(memory_format=torch.channels_last)
    innermost, exact = seconds(lambda: gradient(model, x, y), REPEATS)
    short, rough = seconds(lambda: gradient(model, x, y, bfloat16=True), REPEATS)
    one_each, _ = seconds(lambda: one_by_one(model, x), REPEATS)
    common = {"seconds": innermost, "data": data}
    size = f"{name}, batch of {BATCH}"
    yield Record(
        f"steps: channels innermost against torch's usual layout, {size}", usual / innermost, None, "x faster",
        {**common, "usual_seconds": usual},
    )  # fmt: skip
    yield Record(
        f"steps: bfloat16 against float32, {size}", innermost / short, None, "x faster",
        {
            **common, "bfloat16_seconds": short, "processor_has_bfloat16": "avx512_bf16" in _flags(),
            "relative_difference": float((rough - exact).norm() / exact.norm()),
        },
    )  # fmt: skip
    yield Record(
        f"steps: gradients of single images against one of all, {size}", one_each / innermost, None, "x the time",
        {**common, "single_seconds": one_each},
    )  # fmt: skip


def _flags() -> set[str]:
    """What the processor says that it can do, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def gradient(model: nn.Module, x: Tensor, y: Tensor, bfloat16: bool = False) -> Tensor:
    """Of the mean cross entropy, flat."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        nn.functional.cross_entropy(model(x), y).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Layout.of(parameters_of(model)).flatten(found)


def one_by_one(model: nn.Module, x: Tensor) -> None:
    """Rows of the Gauss-Newton matrix, one for each image."""
    with curvature_of(model, x, route="rows", sampled_labels=1) as (operator, _, _):
        assert operator.rows == len(x)
