"""What client and server cost by parameters, rank, columns, examples and clients: `python -m bench.costs`.

Every point is the least CPU time of a few calls with one thread. Writes docs/results/costs.csv and .png, with the
exponent of each line beside that of the leading term on the maths page.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.console import Console
from torch import Tensor, nn

import fipa
from bench.common import images
from fipa.curvature.basis import basis_curvature
from fipa.federation.basis import Basis
from fipa.federation.exact import GRID
from fipa.layout import Layout
from fipa.models import cnn
from fipa.report.style import BRIGHT

RESULTS = Path("docs/results/costs.csv")
CALLS = 5
CHANNELS = (4, 7, 12, 20)  # of the first layer
CLIENT, SERVER, SHARED_CLIENT, SHARED_SERVER = (
    "sketch of a client", "server, damped", "curvature in a shared basis", "widening a shared basis",
)  # fmt: skip
# what the leading term of docs/maths.md says, at the sizes below
THEORY = {
    (CLIENT, "p"): "1", (CLIENT, "r"): "0 to 1", (CLIENT, "n"): "1",
    (SERVER, "p"): "1", (SERVER, "r"): "2", (SERVER, "clients"): "2",
    (SHARED_CLIENT, "p"): "1", (SHARED_CLIENT, "k"): "0 to 1", (SHARED_CLIENT, "n"): "1",
    (SHARED_SERVER, "p"): "1", (SHARED_SERVER, "k"): "1", (SHARED_SERVER, "clients"): "1",
}  # fmt: skip
RANGES = {
    "p": CHANNELS, "r": (25, 50, 100, 200), "k": (25, 50, 100, 200), "n": (100, 200, 400, 800),
    "clients": (2, 4, 8, 16),
}  # fmt: skip
USUAL = {"p": 7, "r": 50, "k": 100, "n": 400, "clients": 5}
WORDS = {
    "p": "parameters p", "r": "rank r", "k": "columns k of the basis", "n": "examples n", "clients": "clients",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """The CPU seconds of one piece of work at one size."""

    work: str
    variable: str
    size: int
    seconds: float


def network(channels: int) -> nn.Module:
    """Of the form of CNN-8k, which has 4 channels in its first layer."""
    model = cnn([channels, 2 * channels], 4 * channels, generator=torch.Generator().manual_seed(0))
    return model.eval()


def parameters(channels: int) -> int:
    return sum(p.numel() for p in network(channels).parameters())


def orthonormal(p: int, columns: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(p, columns, generator=torch.Generator().manual_seed(seed))).Q


def sketching(p: int, r: int, n: int, **_: int) -> Callable[[], object]:
    model, (x, y, _data) = network(p), images(n)
    return lambda: fipa.sketch(model, (x, y), "cross_entropy", rank=r, sampled_labels=1, solver="krylov", iterations=2)


def solving(p: int, r: int, clients: int, **_: int) -> Callable[[], object]:
    layout = Layout(("w",), ((parameters(p),),))
    values = 50 * torch.arange(1, r + 1).float() ** -1.5
    updates = []
    for client in range(clients):
        sketch = fipa.Sketch(orthonormal(layout.numel, r, client), values, layout).canonical()
        updates.append(fipa.ClientUpdate(orthonormal(layout.numel, 1, 100 + client)[:, 0], 100, sketch))
    theta = torch.zeros(layout.numel)
    return lambda: fipa.aggregate(theta, updates, fipa.FIPA(damping=0.5))


def seeing(p: int, k: int, n: int, **_: int) -> Callable[[], object]:
    model, (x, y, _data), basis = network(p), images(n), orthonormal(parameters(p), k)
    return lambda: basis_curvature(model, (x, y), "cross_entropy", basis=basis, sampled_labels=1)


def widening(p: int, k: int, clients: int, **_: int) -> Callable[[], object]:
    columns = (orthonormal(parameters(p), k).double() * GRID).round() / GRID
    basis = Basis(columns.float())
    news = list(torch.randn(clients, len(columns), generator=torch.Generator().manual_seed(1)))
    return lambda: basis.widened(news, torch.Generator().manual_seed(2))


WORK: dict[str, Callable[..., Callable[[], object]]] = {
    CLIENT: sketching, SERVER: solving, SHARED_CLIENT: seeing, SHARED_SERVER: widening,
}  # fmt: skip


def measured() -> Iterator[Point]:
    for work, variable in THEORY:
        for size in RANGES[variable]:
            call = WORK[work](**(USUAL | {variable: size}))
            call()
            yield Point(work, variable, parameters(size) if variable == "p" else size, min(map(_cpu, [call] * CALLS)))


def _cpu(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def exponent(points: list[Point]) -> float:
    """The slope of a line through the logarithms."""
    x, y = np.log([point.size for point in points]), np.log([point.seconds for point in points])
    return float(np.polyfit(x, y, 1)[0])


def draw(points: list[Point], out: Path) -> None:
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    *panels, words = figure.subplots(2, 3).flat
    for axes, variable in zip(panels, RANGES, strict=True):
        for colour, work in zip(BRIGHT, WORK, strict=False):
            own = [point for point in points if (point.work, point.variable) == (work, variable)]
            if own:
                label = f"{exponent(own):.2f} (maths: {THEORY[work, variable]})"
                axes.plot([p.size for p in own], [p.seconds for p in own], "o-", color=colour, label=label)
        _finish(axes, variable, sorted({point.size for point in points if point.variable == variable}))
    for axes in (panels[0], panels[3]):
        axes.set_ylabel("CPU seconds", fontsize=9.5)
    words.set_axis_off()
    for colour, work in zip(BRIGHT, WORK, strict=False):
        words.plot([], [], "o-", color=colour, label=work)
    usual = [f"{name} = {parameters(v) if name == 'p' else v:,}" for name, v in USUAL.items()]
    words.legend(title="What is not varied:\n" + ", ".join(usual[:3]) + ",\n" + ", ".join(usual[3:]),
                 fontsize=9, title_fontsize=9, frameon=False, loc="center", alignment="left")  # fmt: skip
    figure.savefig(out, dpi=150)


def _finish(axes: Axes, variable: str, ticks: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 10_000 else f"{tick / 1000:.0f}k" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.01), max(high * (high / low) ** 0.5, 2.0))  # room for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_xlabel(WORDS[variable], fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    torch.set_num_threads(1)
    console, points = Console(), list[Point]()
    for point in measured():
        points.append(point)
        console.print(point)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["work", "variable", "size", "seconds"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) | {"seconds": f"{point.seconds:.5f}"} for point in points)
    draw(points, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
