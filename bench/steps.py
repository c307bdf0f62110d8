"""One gradient of a batch, in one thread: what layout, bfloat16, kept memory and gradients one by one change."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from bench.common import Record, images, seconds
from fipa.curvature.routes import curvature_of
from fipa.layout import Layout, parameters_of
from fipa.machine import keep_memory
from fipa.models import cnn, resnet20

BATCH, REPEATS, PROCESSES = 50, 9, 5
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
    apart = [(_in_a_process(name, "usual"), _in_a_process(name, "kept")) for _ in range(PROCESSES)]  # in turn
    given_back, kept = (median(times) for times in zip(*apart, strict=True))
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
        f"steps: memory kept against given back to the system, {size}", given_back / kept, None, "x faster",
        {"cpu_seconds": kept, "given_back_cpu_seconds": given_back, "data": data, "processes": 2 * PROCESSES},
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


def _in_a_process(name: str, memory: str) -> float:
    """CPU seconds of a gradient in a new process: what a C library does with memory cannot be taken back."""
    command = [sys.executable, "-m", "bench.steps", name, memory]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _gradient_seconds(name: str, memory: str) -> float:
    torch.set_num_threads(1)
    if memory == "kept" and not keep_memory():
        raise SystemExit("this C library cannot be told to keep memory")
    model = MODELS[name](torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y, _ = images(BATCH)
    x = x.contiguous(memory_format=torch.channels_last)
    for _ in range(REPEATS):
        gradient(model, x, y)
    before = time.process_time()
    for _ in range(5 * REPEATS):
        gradient(model, x, y)
    return (time.process_time() - before) / (5 * REPEATS)


if __name__ == "__main__":
    print(_gradient_seconds(*sys.argv[1:]))
