"""What a memory of clients costs the server: `python docs/results/memory.py` measures it, and writes memory.csv.

For each size a process of its own builds the memory, takes the news of ten clients, pools all quadratics and turns the
basis: what a round does. Its peak of resident memory, less what it had after importing torch, is the cost.
"""

from __future__ import annotations

import csv
import resource
import subprocess
import sys
import time
from pathlib import Path

COLUMNS = ("parameters", "columns", "clients", "precision", "peak_mib", "tensors_mib", "seconds")
SIZES = [(8_748, 200, 100), (8_748, 200, 1000), (272_474, 200, 100), (272_474, 200, 1000)]


def measured(parameters: int, columns: int, clients: int, precision: str) -> str:
    """A row of the table; in a process that does nothing else."""
    import torch

    from fipa.federation.basis import Basis
    from fipa.federation.quadratics import News, Quadratics

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    generator = torch.Generator().manual_seed(0)
    theta, matrix = torch.randn(parameters, generator=generator), torch.eye(columns)
    basis = Basis(torch.linalg.qr(torch.randn(parameters, columns, generator=generator))[0])
    kept = torch.bfloat16 if precision == "bfloat16" else None
    known = Quadratics.none(theta, kept).widened(columns)
    known = known.told(*(News(client, 500, 1, theta, 1.0, matrix) for client in range(clients)))
    begun = time.perf_counter()
    known = known.told(*(News(client, 500, 2, theta, 1.0, matrix) for client in range(10)))
    weights = known.weights(2)
    known.pull(basis, weights, trained=False)
    turn = basis.turn(known.curvature(weights), columns * 3 // 4)
    known.turned(turn.turn(basis.gram()), basis.gram())
    seconds = time.perf_counter() - begun
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    size = sum(t.numel() * t.element_size() for t in known.tensors().values()) / 2**20
    return ",".join(map(str, (parameters, columns, clients, precision, round(peak), round(size), round(seconds, 1))))


def main() -> None:
    """Measure all sizes."""
    rows = []
    for size in SIZES:
        for precision in ("full", "bfloat16"):
            command = [sys.executable, __file__, *map(str, size), precision]
            rows.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split(","))
            print(*rows[-1])
    with (Path(__file__).parent / "memory.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measured(*map(int, sys.argv[1:4]), sys.argv[4]))  # type: ignore[arg-type]
    else:
        main()
