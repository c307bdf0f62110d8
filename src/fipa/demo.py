"""`make demo`: two clients, each with half of the domain, fit sin(2 pi x) together.

The clients are the same in every arm: full-batch Adam at learning rate 1e-4, 400 samples each, and the same number of
local steps in all. What the server does with their updates differs. The arms: FedAvg with the paper's 1000 local steps
per round; FedAvg with 200 and a tuned server step; FIPA with the settings of the published experiments; and completed
FIPA with a damping that falls from round to round.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import fipa
from fipa.models import mlp

try:
    import matplotlib
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:
    sys.exit(f"the demo needs {error.name}: pip install 'fipa[cli]'")

Curves = dict[str, list[float]]

EDGES = (0.0, 0.5, 1.0)
SAMPLES = 400


@dataclass(frozen=True)
class Arm:
    """One way to run the same problem."""

    name: str
    rule: Callable[[int], fipa.Rule]  # of a round, counted from 0
    rank: fipa.RelativeThreshold | None  # of the clients' sketches; None: they send none
    local_steps: int
    rounds: int


RANK = fipa.RelativeThreshold(1e-12, max_rank=20)

ARMS = (
    Arm("FedAvg (1000 steps)", lambda k: fipa.FedAvg(), None, local_steps=1000, rounds=6),
    # FedAvg's server step was chosen among 1, 2, 4, 8, 16 on seeds 5 to 7, the last arm's two numbers on seeds 5 to 8.
    Arm("FedAvg (server step 2)", lambda k: fipa.FedAvg(step=2.0), None, local_steps=200, rounds=30),
    Arm("FIPA (as published)", lambda k: fipa.FIPA(step=0.5), RANK, local_steps=200, rounds=30),
    # careful at first, bolder as the fit gets better
    Arm("FIPA completed", lambda k: fipa.CompletedFIPA(damping=0.01 * 0.85**k), RANK, local_steps=200, rounds=30),
)


def target(x: Tensor) -> Tensor:
    """The function that the clients see one half of each."""
    return torch.sin(2 * math.pi * x)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Full-batch Adam on the mean squared error."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def run(arm: Arm, seed: int, after_round: Callable[[float], None]) -> tuple[Curves, Tensor]:
    """Federate for `arm.rounds` rounds; return the curves, and the final fit on the test grid."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp([1, 20, 20, 20, 1], generator=generator)
    clients = [
        low + (high - low) * torch.rand(SAMPLES, 1, generator=generator, dtype=torch.float64)
        for low, high in pairwise(EDGES)
    ]
    grid = torch.linspace(0, 1, 1024, dtype=torch.float64)[:, None]
    theta = fipa.parameters_of(model)
    curves: Curves = {"metric": [], "loss": [], "seconds": [], "uplink_bytes": [], "rank": []}
    for k in range(arm.rounds):
        start = time.perf_counter()
        updates, losses = [], []
        for client, x in enumerate(clients):
            model.load_state_dict(theta)
            with torch.no_grad():
                losses.append(float(nn.functional.mse_loss(model(x), target(x))))
            sketch = None if arm.rank is None else fipa.sketch(model, (x, target(x)), loss="mse", rank=arm.rank)
            train(model, x, target(x), arm.local_steps)
            delta = {name: p.detach() - theta[name] for name, p in model.named_parameters()}
            updates.append(fipa.ClientUpdate(delta, num_examples=SAMPLES, sketch=sketch, client_id=client))
        theta = fipa.aggregate(theta, updates, rule=arm.rule(k)).theta
        seconds = time.perf_counter() - start
        model.load_state_dict(theta)
        with torch.no_grad():
            fit = model(grid)
        sketches = [u.sketch for u in updates if isinstance(u.sketch, fipa.Sketch)]
        size = sum(t.numel() * t.element_size() for t in theta.values())
        curves["metric"].append(float(nn.functional.mse_loss(fit, target(grid))))
        curves["loss"].append(sum(losses) / len(losses))
        curves["seconds"].append(seconds)
        curves["uplink_bytes"].append(len(updates) * size + sum(s.nbytes for s in sketches))
        curves["rank"].append(max((s.rank for s in sketches), default=0))
        after_round(curves["metric"][-1])
    return curves, fit


def draw(results: dict[str, dict[int, Curves]], fits: dict[str, Tensor], path: Path) -> None:
    """Test error by local work, one line per seed, and the first seed's fits with the clients' halves."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    grid = torch.linspace(0, 1, 1024, dtype=torch.float64)
    for i, (low, high) in enumerate(pairwise(EDGES)):
        right.axvspan(low, high, color=("#4477aa", "#ee6677")[i], alpha=0.10, lw=0)
        right.text((low + high) / 2, 1.32, f"client {i + 1}", ha="center", color="#555555")
    right.plot(grid, target(grid), color="black", lw=4, alpha=0.25, label="truth")
    for arm, color in zip(ARMS, ("#999999", "#ccbb44", "#66ccee", "#228833"), strict=True):
        work = [arm.local_steps * (k + 1) for k in range(arm.rounds)]
        for curves in results[arm.name].values():
            left.semilogy(work, curves["metric"], color=color, marker="o" if arm.rounds < 20 else None, ms=3)
        right.plot(grid, fits[arm.name][:, 0], color=color, label=arm.name, lw=1.5)
    left.set(xlabel="local steps per client", ylabel="test MSE", title="error against local work")
    left.grid(alpha=0.3)
    right.set(xlabel="x", ylabel="u(x)", title="fit after the last round", ylim=(-1.5, 1.5))
    right.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def summary(results: dict[str, dict[int, Curves]]) -> Table:
    """Last round of every arm: median over the seeds, and range."""
    table = Table(title=f"after {ARMS[0].rounds * ARMS[0].local_steps} local steps per client")
    for heading in ("arm", "rounds", "test MSE", "seconds", "MiB up"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for arm in ARMS:
        runs = list(results[arm.name].values())
        errors = [run["metric"][-1] for run in runs]
        spread = f" [{min(errors):.0e}, {max(errors):.0e}]" if len(errors) > 1 else ""
        table.add_row(
            arm.name,
            str(arm.rounds),
            f"{median(errors):.1e}{spread}",
            f"{median(sum(run['seconds']) for run in runs):.1f}",
            f"{median(sum(run['uplink_bytes']) for run in runs) / 2**20:.1f}",
        )
    return table


def main() -> None:
    """Run all arms, show a table and a picture, say where they are."""
    parser = argparse.ArgumentParser(prog="python -m fipa.demo", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # these matrices are too small to share out
    console = Console()
    results: dict[str, dict[int, Curves]] = {arm.name: {} for arm in ARMS}
    fits: dict[str, Tensor] = {}
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TextColumn("round {task.completed}/{task.total}  test MSE {task.fields[error]:.1e}"),
        TimeRemainingColumn(),
    )
    seeds = ", ".join(map(str, args.seeds))
    console.print(f"[bold]sin(2πx) from two halves[/]: 2 clients x {SAMPLES} samples, seed {seeds}")
    with Progress(*columns, console=console) as progress:
        for arm in ARMS:
            task = progress.add_task(arm.name, total=arm.rounds * len(args.seeds), error=float("nan"))

            def advance(error: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, error=error)

            for seed in args.seeds:
                results[arm.name][seed], fit = run(arm, seed, advance)
                fits.setdefault(arm.name, fit)
    console.print(summary(results))
    record = {"experiment": "demo", "metric": "test MSE on 1024 points", "arms": results}
    (args.out / "results.json").write_text(json.dumps(record, indent=1))
    draw(results, fits, args.out / "demo.png")
    console.print(f"picture [bold]{args.out / 'demo.png'}[/], numbers [bold]{args.out / 'results.json'}[/]")
    console.print("next: [bold].venv/bin/python -m fipa.demo --seeds 1 2 3[/]; for your own model see README.md")


if __name__ == "__main__":
    main()
