"""How fast FIPA's parameters approach those of centralised Gauss-Newton: `python docs/results/theorem.py RUN`.

RUN is one of `fipa run fit-theorem`. Each arm and seed goes to fit-theorem.csv: the distance of the parameters,
relative to their length, after 10 rounds and after the last, and its exponent, the slope of a line through log distance
over log round from round 10 on. The bound of the theorem, O(1/K), is an exponent of -1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from tables import HERE, write

COLUMNS = ("arm", "seed", "rounds", "gap_10", "gap_last", "exponent", "last")
FIRST = 10
ROUNDING = 1e-13  # distances below it are rounding, and have no exponent


def main(directory: str) -> None:
    results, rows = json.loads((Path(directory) / "results.json").read_text("utf-8")), []
    for arm, seeds in results["arms"].items():
        for seed, run in seeds.items():
            gap = np.array(run.get("gap") or [])[FIRST - 1 :]
            if not len(gap):
                continue  # the reference
            k = np.arange(FIRST, FIRST + len(gap))
            slope = float(np.polyfit(np.log(k), np.log(gap), 1)[0]) if gap.max() > ROUNDING else None
            rows.append(
                {"arm": arm, "seed": int(seed), "rounds": int(k[-1]), "gap_10": f"{gap[0]:.3g}",
                 "gap_last": f"{gap[-1]:.3g}", "exponent": None if slope is None else round(slope, 2),
                 "last": f"{run['metric'][-1]:.3g}"}
            )  # fmt: skip
    write(HERE / "fit-theorem.csv", COLUMNS, rows)


if __name__ == "__main__":
    main(sys.argv[1])
