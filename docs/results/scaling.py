"""The tables of docs/scaling.md: `python docs/results/scaling.py` prints them; a test compares them with the page.

MB and GB are 10^6 and 10^9 bytes. Bytes are those of the arrays, as `fipa.flower` sends them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from fipa.flower.codec import BLOCK
from fipa.flower.secure import vector_length
from fipa.flower.secure.client import SEALED_SIZE
from fipa.flower.secure.masks import KEY_SIZE
from fipa.flower.secure.shamir import SHARE_SIZE

MODELS = {"CNN-8k": 8_748, "CNN-23k": 25_706, "ResNet-20": 272_474, "ResNet-18": 11_173_962}
RANK, WIDTH = 20, 40
WORD = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes of a number in a matrix

DEVICES, FAN_IN, COHORT = 1_000_000, 100, 1000
UPLINK, LINK = 10e6, 10e9  # bits per second: of a device, and between servers
KEYSTREAM = 0.5e9  # bytes of mask per second and core
CORE_HOUR, EGRESS, BETWEEN = 0.05, 0.09, 0.01  # dollars: per core hour, per GB to devices, per GB between servers


def matrix_bytes(p: int, columns: int, precision: str) -> int:
    """Of p x columns numbers, with the scales of int8."""
    return WORD[precision] * p * columns + (4 * columns * math.ceil(p / BLOCK) if precision == "int8" else 0)


def sketch_bytes(p: int, rank: int = RANK, precision: str = "float32") -> int:
    """Update, eigenvectors and eigenvalues."""
    return 4 * p + 4 * rank + matrix_bytes(p, rank, precision)


def additive_bytes(p: int, width: int = WIDTH, precision: str = "float32") -> int:
    """Update, response and products."""
    return 8 * p + matrix_bytes(p, width, precision)


def masked_bytes(p: int, width: int = WIDTH) -> int:
    """Integers modulo 2^64."""
    return 8 * vector_length(p, width)


def share_bytes(clients: int) -> int:
    """What a client sends next to its vector: two keys, a sealed pair of shares for each other, then one share each."""
    return 2 * KEY_SIZE + (clients - 1) * SEALED_SIZE + KEY_SIZE + clients * SHARE_SIZE


def sampling_error(clients: int, devices: int = DEVICES) -> float:
    """Standard error of the mean over a uniform sample, in standard deviations between the devices."""
    return math.sqrt((1 - clients / devices) / clients)


def tables() -> dict[str, str]:
    """All of them, by name."""
    return {
        "measured": _measured(),
        "sampling": _sampling(),
        "bytes": _bytes(),
        "uplink": _uplink(),
        "server": _server(),
        "tree": _tree(),
        "masks": _masks(),
        "cost": _cost(),
    }


def results() -> list[dict[str, str]]:
    """What bench/scaling.py measured."""
    with (Path(__file__).parent / "scaling.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def seconds_per_reply() -> float:
    """Measured: ResNet-20, width 40, 1000 clients, one core."""
    row = next(r for r in results() if (r["rule"], r["size"], r["clients"]) == ("additive", "40", "1000"))
    return float(row["seconds"]) / 1000


def _measured() -> str:
    names = {"paper": "paper's rule, rank", "additive": "additive, width"}
    lines = []
    for row in results():
        there = row["measured"] == "yes"
        seconds = f"{float(row['seconds']):.3g}" if there else "not measured"
        memory = f"{float(row['peak_mib']):,.0f}" if there else f"not measured; keeps {float(row['peak_mib']):,.0f}"
        lines.append([f"{names[row['rule']]} {row['size']}", row["clients"], row["reply_mib"], seconds, memory])
    lines.sort(key=lambda line: (line[0].startswith("additive"), int(line[0].split()[-1]), int(line[1])))
    return _table(["server", "clients", "MiB per reply", "seconds", "peak MiB"], lines)


def _sampling() -> str:
    head = ["asked per round", "error of a mean", "share of all devices", "rounds between two turns", "GB up per round"]
    rows = [
        [f"{n:,}", f"{sampling_error(n):.1%}", f"{n / DEVICES:.3%}", f"{DEVICES / n:,.0f}", _mega(n * a / 1e3)]
        for n, a in ((n, additive_bytes(MODELS["ResNet-20"])) for n in (10, 100, 1000, 10_000))
    ]
    return _table(head, rows)


_KINDS = ["FedAvg", *(f"rank {RANK}, {w}" for w in WORD), *(f"width {WIDTH}, {w}" for w in WORD), "masked"]


def _all_bytes(p: int) -> list[int]:
    sketches = [sketch_bytes(p, precision=precision) for precision in WORD]
    return [4 * p, *sketches, *(additive_bytes(p, precision=precision) for precision in WORD), masked_bytes(p)]


def _bytes() -> str:
    return _table(["p", *_KINDS], ([f"{p:,}", *(_mega(n) for n in _all_bytes(p))] for p in MODELS.values()))


def _uplink() -> str:
    rows = ([f"{p:,}", *(_time(8 * n / UPLINK) for n in _all_bytes(p))] for p in MODELS.values())
    return _table(["p", *_KINDS], rows)


def _server() -> str:
    """What is kept, and the Gram matrix of the paper's rule, whose upper half takes p R^2 operations."""
    head = ["p", "clients", f"paper's rule, rank {RANK}: GB kept", "its Gram matrix: Tflop"]
    head += [f"additive, width {WIDTH}: GB kept", "its sums: Tflop"]
    rows = []
    for p in (MODELS["ResNet-20"], MODELS["ResNet-18"]):
        for n in (100, 1000, 10_000):
            kept, work = 4 * p * (RANK + 1) * n, p * (n * RANK) ** 2 / 1e12
            sums = 2 * p * (WIDTH + 2) * n / 1e12
            rows.append(
                [f"{p:,}", f"{n:,}", _mega(kept / 1e3), _short(work), _mega(4e-3 * p * (WIDTH + 2)), _short(sums)]
            )
    return _table(head, rows)


def _tree() -> str:
    head = ["p", "one pool, MB", f"into a server of fan-in {FAN_IN}, GB", "seconds at 10 Gbit/s"]
    rows = []
    for p in MODELS.values():
        one = 4 * p * (WIDTH + 2)
        rows.append([f"{p:,}", _mega(one), _mega(FAN_IN * one / 1e3), _short(8 * FAN_IN * one / LINK)])
    return _table(head, rows)


def _masks() -> str:
    p = MODELS["ResNet-20"]
    head = ["clients of one sum", "keys and shares, KB per client", "masks made by a client, GB", "seconds for them"]
    head += ["shares passing the server, MB", "masks taken off by the server, GB", "more for each who leaves, GB"]
    rows = []
    for n in (10, 100, 1000):
        own = n * masked_bytes(p)
        shares = [_short(share_bytes(n) / 1e3), _short(own / 1e9), _short(own / KEYSTREAM)]
        rows.append([f"{n:,}", *shares, _short(n * (n - 1) * SEALED_SIZE / 1e6), _short(own / 1e9), _short(own / 1e9)])
    return _table(head, rows)


def _cost() -> str:
    head = ["p", "to the devices, GB", "from them, GB", "between servers, GB", "core hours", "dollars"]
    rows = []
    for p in MODELS.values():
        down, up = COHORT * 4 * p / 1e9, COHORT * additive_bytes(p) / 1e9
        between = COHORT / FAN_IN * 4 * p * (WIDTH + 2) / 1e9
        hours = COHORT * seconds_per_reply() * p / MODELS["ResNet-20"] / 3600
        price = down * EGRESS + between * BETWEEN + hours * CORE_HOUR
        rows.append([f"{p:,}", *(_short(value) for value in (down, up, between, hours)), f"{price:.2g}"])
    return _table(head, rows)


def _mega(nbytes: float) -> str:
    """In millions, three digits."""
    return _short(nbytes / 1e6)


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _time(seconds: float) -> str:
    return f"{_short(seconds)} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


if __name__ == "__main__":
    for name, table in tables().items():
        print(f"{name}\n\n{table}\n")
