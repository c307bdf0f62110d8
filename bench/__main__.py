"""`make bench`: ratios measured in one run. Writes build/bench.json; --record also rewrites docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.common import Record, gemm_speed
from bench.fitting import fitting
from bench.head import heads
from bench.many import many
from bench.pde import pdes
from bench.replies import flower_memory
from bench.rounds import against_peers, rounds
from bench.server import additive_memory, many_replies, solves
from bench.sketching import clients, sketches
from bench.start import start
from bench.steps import steps

PARTS = {
    "sketch": sketches,
    "client": clients,
    "steps": steps,
    "head": heads,
    "server": solves,
    "replies": many_replies,
    "additive": additive_memory,
    "flower": flower_memory,
    "fitting": fitting,
    "pde": pdes,
    "peers": against_peers,
    "rounds": rounds,
    "start": start,
    "many": many,
}
MARK = "<!-- measured -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part (may be repeated)")
    parser.add_argument("--record", action="store_true", help="write the table into docs/benchmarks.md")
    args = parser.parse_args()
    torch.manual_seed(0)
    console = Console()
    speed = {str(t).removeprefix("torch."): gemm_speed(t) / 1e9 for t in (torch.float32, torch.float64)}
    console.print(f"{torch.get_num_threads()} threads; matrix products at {speed['float32']:.0f} Gflop/s in float32")
    records: list[Record] = []
    for name in args.only or PARTS:
        with console.status(f"measuring {name} ..."):
            for record in PARTS[name]():
                records.append(record)
                console.print(f"{'ok  ' if record.met else 'MISS'} {record.name}: {_measured(record)}")
        if args.record:  # part by part: a run that is broken off loses only its last one
            _write_docs(records, speed)
    table = Table("what", "measured", "floor", "detail", title="ratios within this run")
    for record in records:
        table.add_row(record.name, _measured(record), _floor(record), _detail(record))
    console.print(table)
    out = Path("build/bench.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps([r.as_json() for r in records], indent=1))
    console.print(f"written: {out}")
    missed = [r.name for r in records if not r.met]
    if missed:
        console.print(f"[red]below the floor:[/] {'; '.join(missed)}")
    return 1 if missed else 0


def _measured(record: Record, bold: str = "") -> str:
    """A ratio that could not be measured is NaN, and its unit says why."""
    return record.unit if math.isnan(record.ratio) else f"{bold}{record.ratio:.2f}{bold} {record.unit}"


def _floor(record: Record) -> str:
    return "" if record.floor is None else f"{'at most' if record.at_most else 'at least'} {record.floor:g}"


def _detail(record: Record) -> str:
    def show(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key}: {show(v)}" for key, v in value.items())
        if isinstance(value, int) and value > 10**6:
            return f"{value / 2**20:.0f} MiB"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return "; ".join(f"{key.replace('_', ' ')} {show(value)}" for key, value in record.detail.items())


def _write_docs(records: list[Record], speed: dict[str, float]) -> None:
    path = Path("docs/benchmarks.md")
    head, _, old = path.read_text().partition(MARK)
    rows = {row[2:].split(" | ")[0]: row for row in old.splitlines() if row.startswith("| ")}
    rows.pop("what", None)  # the table's head
    rows |= {r.name: f"| {r.name} | {_measured(r, '**')} | {_floor(r)} | {_detail(r)} |" for r in records}
    about = (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, matrix products at "
        f"{speed['float32']:.0f} Gflop/s in float32 and {speed['float64']:.0f} in float64.\n\n"
    )
    table = "| what | measured | floor | detail |\n|---|---|---|---|\n" + "\n".join(rows.values())
    path.write_text(f"{head}{MARK}\n\n{about}{table}\n")


if __name__ == "__main__":
    sys.exit(main())
