"""(c) The linear head of a ResNet-18: a sketch for little more than one forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

import fipa
from bench.common import Record, gemm_speed, images, once
from fipa.models import resnet18

RANK = 20


def heads() -> Iterator[Record]:
    """100 classes, 256 images, rank 20."""
    model = resnet18(classes=100, generator=torch.Generator().manual_seed(0)).eval()
    x, _, source = images(256)

    def forward() -> None:
        with torch.no_grad():
            for batch in x.split(128):
                model(batch)

    def run() -> fipa.Sketch:
        return fipa.sketch(model, x, rank=RANK, params="head.*", iterations=3)

    speed = gemm_speed()
    forward()
    pairs = [(once(run)[0], once(forward)[0]) for _ in range(3)]
    sketching, passing = (sorted(times)[1] for times in zip(*pairs, strict=True))
    with FlopCounterMode(display=False) as counter:
        forward()
    rows, p = len(x) * 99, 100 * 513
    # the products of the solver: with features (n x 513) for all classes, and with the factors of the softmax
    products = 2 * 3 + 1
    columns = (RANK + 10) // 2
    solver = products * columns * (2.0 * len(x) * p + 2.0 * rows * 100) + 2.0 * p * (4 * columns) ** 2
    detail = {
        "data": source,
        "sketch_seconds": sketching,
        "forward_seconds": passing,
        "residual": run().residual,
        "forward_gemm_share": counter.get_total_flops() / passing / speed,
        "sketch_gemm_share": (counter.get_total_flops() + solver) / sketching / speed,
    }
    yield Record(
        "head: sketch against one forward pass, ResNet-18", sketching / passing, 1.3, "x the time", detail, at_most=True
    )
