"""What a run has measured, as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fipa.errors import FipaError, instead_of, missing
from fipa.federation.record import NUMBERS
from fipa.report.data import after, summary
from fipa.report.files import GAP, load_results
from fipa.report.statistics import Array, table
from fipa.report.words import number

NAMES = (*NUMBERS, "accepted", GAP)


@dataclass(frozen=True, eq=False)
class Results:
    """Results of a run in its directory; `fipa.run` returns them.

    Attributes
    ----------
    directory
        Where the run is.
    content
        All of results.json.
    """

    directory: Path
    content: dict[str, Any]

    @classmethod
    def load(cls, directory: str | Path) -> Results:
        """Load the results of a run that `fipa run` or `fipa.run` wrote."""
        return cls(Path(directory), load_results(Path(directory)))

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms that have finished a round."""
        return tuple(self.content["arms"])

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds that any arm has run."""
        return tuple(dict.fromkeys(int(seed) for records in self.content["arms"].values() for seed in records))

    def status(self, arm: str) -> dict[int, str]:
        """Status of each seed: "finished", "running" or "diverged"."""
        return {int(seed): record["status"] for seed, record in self._arm(arm).items()}

    def metric(self, arm: str) -> Array:
        """The metric after each round (seeds x rounds); NaN where it was not evaluated, and after the end."""
        return self.series("metric", arm)

    def series(self, name: str, arm: str) -> Array:
        """A number per round (seeds x rounds), such as "loss", "averaged_metric" or "uplink_bytes".

        See `fipa.federation.record.RoundRecord` for their names. NaN where there is none.
        """
        if name not in NAMES:
            raise FipaError(f"there is no series {name!r}: {instead_of(name, NAMES)}. For others see `content`")
        records = self._arm(arm)
        rows = [records.get(str(seed), {}).get(name) or [] for seed in self.seeds]
        longest = max(len(record["metric"]) for record in records.values())
        return table([*rows, [None] * longest])[:-1]

    def theta(self, arm: str, seed: int | None = None) -> Tensor:
        """The flat parameters after the last round; of the first seed by default."""
        run = _needs_extra("Results.theta").Run.open(self.directory)
        self._arm(arm)
        seed = self.seeds[0] if seed is None else seed
        saved = run.folder(arm, seed).load()
        if saved is None:
            raise FipaError(f"{self.directory} has no arm {arm!r} on seed {seed}")
        return saved.state.theta

    def frame(self) -> Any:
        """A pandas DataFrame with a row per arm, seed and round."""
        try:
            import pandas as pd  # type: ignore[import-untyped, import-not-found, unused-ignore]
        except ModuleNotFoundError as error:
            raise FipaError("Results.frame needs pandas: pip install pandas") from error
        return pd.DataFrame.from_records(list(self._rows()))

    def report(self) -> Path:
        """Write figures and report.html into the run's directory; returns the path of the page."""
        return _needs_extra("Results.report").write_report(self.directory)

    def _arm(self, arm: str) -> dict[str, Any]:
        if arm not in self.content["arms"]:
            raise FipaError(f"there is no arm {arm!r}: {instead_of(arm, self.arms)}")
        return self.content["arms"][arm]

    def _rows(self) -> Iterator[dict[str, Any]]:
        for arm, records in self.content["arms"].items():
            for seed, record in records.items():
                columns = {name: record[name] for name in NAMES if record.get(name)}
                for k in range(len(record["metric"])):
                    where = {"arm": arm, "seed": int(seed), "round": after(self.content, arm) + k + 1}
                    yield where | {name: column[k] if k < len(column) else None for name, column in columns.items()}

    def __repr__(self) -> str:
        metric = self.content["metric"]["name"]
        lines = [("arm", "rounds", f"{metric}, median", "averaged", "status")]
        for s in summary(self.content):
            mean = "-" if s.averaged is None else number(s.averaged.final_median)
            lines.append((s.arm, str(s.after + s.rounds), number(s.final_median), mean, s.status))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([f"Results of {self.content['experiment']} in {self.directory}", *rows])


def _needs_extra(what: str) -> Any:
    try:
        from fipa import launch
    except ImportError as error:
        if (remedy := missing(error, "cli")) is None:
            raise
        raise FipaError(f"{what} {remedy}") from error
    return launch
