"""(a) How fast a sketch is, and how much curvature it captures; (b) what it adds to a client's round."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.flop_counter import FlopCounterMode

import fipa
from bench.common import Record, briefly_trained, capture, gemm_speed, images, local_epochs, once, seconds
from fipa.curvature.routes import curvature_of
from fipa.models import cnn, resnet20

RANK = 100
EXAMPLES = 250  # of a client's 500 that its cheap sketch looks at


def authors_scheme(model: nn.Module, x: Tensor, rank: int, extra: int = 50, passes: int = 9) -> Tensor:
    """Our plain re-statement of the published code: all Jacobians anew in each of q + 1 passes."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def jacobians(batch: Tensor) -> Tensor:
        parts = vmap(jacrev(lambda p, one: functional_call(model, p, (one[None],))[0]), (None, 0))(params, batch)
        return torch.cat([part.flatten(2) for part in parts.values()], dim=2)

    def product(V: Tensor) -> Tensor:
        out = torch.zeros_like(V)
        for batch in x.split(50):
            J = jacobians(batch)
            p = model(batch).softmax(1)
            JV = J @ V
            SJV = p[:, :, None] * (JV - (p[:, :, None] * JV).sum(1, keepdim=True))
            out += torch.einsum("ncp,ncl->pl", J, SJV)
        return out / len(x)

    with torch.no_grad():
        V = torch.randn(
            sum(p.numel() for p in params.values()), rank + extra, generator=torch.Generator().manual_seed(0)
        )
        for _ in range(passes):
            V = torch.linalg.qr(product(V)).Q
        _, W = torch.linalg.eigh(V.T @ product(V))
        return V @ W.flip(1)[:, :rank]


def curvlinops_scheme(model: nn.Module, x: Tensor, y: Tensor, rank: int, tolerance: float) -> Tensor:
    """The same eigenvectors with public tools: curvlinops' Gauss-Newton operator under scipy's Lanczos solver."""
    from curvlinops import GGNLinearOperator
    from scipy.sparse.linalg import eigsh

    params = [p for p in model.parameters() if p.requires_grad]
    operator = GGNLinearOperator(model, nn.CrossEntropyLoss(), params, [(x, y)], check_deterministic=False)
    start = np.random.default_rng(0).standard_normal(operator.shape[0]).astype(np.float32)
    _, vectors = eigsh(operator.to_scipy(), k=rank, which="LA", tol=tolerance, v0=start)
    return torch.from_numpy(vectors).flip(1).float()


def top_curvature(model: nn.Module, x: Tensor, rank: int) -> float:
    """Sum of the `rank` largest eigenvalues, by a Gram matrix of all rows."""
    with curvature_of(model, x, route="rows", memory_limit=8 * 2**30) as (operator, _, _):
        return float(torch.linalg.eigvalsh(operator.gram().double())[-rank:].sum())


def autodiff_flops(model: nn.Module, x: Tensor, rows_per_example: int) -> float:
    """One forward pass over x and `rows_per_example` backward passes.

    Counted on an ordinary batch: the counter takes the grouped convolutions of per-example gradients for full ones.
    """
    with FlopCounterMode(display=False) as forward:
        z = model(x)
    with FlopCounterMode(display=False) as backward:
        z.sum().backward()
    model.zero_grad()
    return float(forward.get_total_flops() + rows_per_example * backward.get_total_flops())


def exact_flops(rows: int, p: int, rank: int) -> float:
    """Gram matrix of the rows, and the eigenvectors from it."""
    return 2.0 * rows * p * (rows + rank)


def krylov_flops(rows: int, p: int, rank: int, oversampling: int, iterations: int) -> float:
    """2 q + 1 products with A or its transpose, Rayleigh-Ritz, and the eigenvectors."""
    columns = (rank + oversampling) // 2
    basis = columns * (iterations + 1)
    return 2.0 * p * ((2 * iterations + 1) * rows * columns + basis * (basis + rank))


def sketches() -> Iterator[Record]:
    """(a): CNN-23k, 500 samples, 10 classes, rank 100."""
    model = briefly_trained(cnn([6, 12], 32, generator=torch.Generator().manual_seed(0)))
    x, y, source = images(500)
    best = top_curvature(model, x, RANK)
    speed = gemm_speed()

    theirs, vectors = seconds(lambda: authors_scheme(model, x, RANK), repeats=1)
    their_capture = capture(model, x, vectors, best)
    public, public_vectors = seconds(lambda: curvlinops_scheme(model, x, y, RANK, tolerance=0.1), repeats=1)
    public_capture = capture(model, x, public_vectors, best)
    p = sum(t.numel() for t in model.parameters())
    work = autodiff_flops(model, x, 9) + krylov_flops(500 * 9, p, RANK, 10, 3)
    time, sketch = seconds(lambda: fipa.sketch(model, x, rank=RANK, iterations=3))
    captured = capture(model, x, sketch.eigenvectors, best)
    yield Record(
        "sketch: block Krylov (q = 3) against the authors' scheme",
        theirs / time if captured >= 0.99 else 0.0,
        5.0,
        "x faster",
        {
            "data": source,
            "seconds": time,
            "capture": captured,
            "authors_seconds": theirs,
            "authors_capture": their_capture,
            "gemm_share": work / time / speed,
        },
    )
    time, sketch = seconds(lambda: fipa.sketch(model, x, rank=RANK, iterations=5))
    captured = capture(model, x, sketch.eigenvectors, best)
    yield Record(
        "sketch: block Krylov (q = 5) against curvlinops + eigsh",
        public / time if captured >= public_capture - 5e-4 else 0.0,
        5.0,
        "x faster",
        {"seconds": time, "capture": captured, "public_seconds": public, "public_capture": public_capture},
    )
    work = autodiff_flops(model, x, 1) + exact_flops(500, p, RANK)
    time, sketch = seconds(lambda: fipa.sketch(model, x, rank=RANK, sampled_labels=1))
    captured = capture(model, x, sketch.eigenvectors, best)
    yield Record(
        "sketch: one sampled label against the authors' scheme",
        theirs / time if captured >= 0.85 else 0.0,
        40.0,
        "x faster",
        {"seconds": time, "capture": captured, "authors_seconds": theirs, "gemm_share": work / time / speed},
    )


def clients() -> Iterator[Record]:
    """(b): sketch + 5 local epochs against the epochs alone."""
    x, y, source = images(500)
    speed = gemm_speed()
    generator = torch.Generator().manual_seed(0)
    for name, model in (
        ("CNN-23k", cnn([6, 12], 32, generator=generator)),
        ("ResNet-20", resnet20(generator=generator)),
    ):
        briefly_trained(model, epochs=2)
        best = top_curvature(model, x, RANK)

        def run(model: nn.Module = model) -> fipa.Sketch:
            return fipa.sketch(model, x, rank=RANK, sampled_labels=1, max_examples=EXAMPLES)

        def epochs(model: nn.Module = model) -> None:
            local_epochs(copy.deepcopy(model), x, y, epochs=5, seed=0)

        # alternate, so that noise of the machine falls on both
        pairs = [(once(run)[0], once(epochs)[0]) for _ in range(10 if name == "CNN-23k" else 4)][1:]
        sketching, training = (sorted(times)[len(times) // 2] for times in zip(*pairs, strict=True))
        captured = capture(model, x, run().eigenvectors, best)
        p = sum(t.numel() for t in model.parameters())
        work = autodiff_flops(model, x[:EXAMPLES], 1) + exact_flops(EXAMPLES, p, RANK)
        detail = {
            "data": source,
            "examples_sketched": f"{EXAMPLES} of {len(x)}, one label each",
            "sketch_seconds": sketching,
            "epochs_seconds": training,
            "capture": captured,
            "sketch_gemm_share": work / sketching / speed,
            "epochs_gemm_share": 5 * autodiff_flops(model, x, 1) / training / speed,
        }
        ratio = 1 + sketching / training if captured >= 0.85 else float("inf")
        yield Record(f"client: sketch + 5 epochs against the epochs, {name}", ratio, 1.6, "x the time", detail, True)
