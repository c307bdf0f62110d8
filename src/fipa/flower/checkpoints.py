"""The server's states on disk: the last one to resume from, some before it, and the best one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.common.logger import log
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.checkpoint import load_state, save_state
from fipa.federation.coordinator import State


class Checkpoints:
    """`run.pt` is the last state; `run-12.pt` those after single rounds, and `run-best.pt` that of the lowest loss.

    Parameters
    ----------
    path
        Of the last state; None keeps nothing.
    keep
        How many states of single rounds stay.
    """

    def __init__(self, path: Path | None, keep: int) -> None:
        self.path = path
        self._keep = keep

    def load(self) -> tuple[State, dict[str, Any]] | None:
        """The last state and what was saved beside it; None if there is none."""
        if self.path is None:
            return None
        try:
            loaded = load_state(self.path)
            if loaded is not None and "names" not in loaded[1]:
                raise FipaError(f"{self.path} was written by another version of fipa")
            return loaded
        except FipaError as error:
            raise FipaError(
                f"the checkpoint {error}: delete it to start again, choose another file, or copy one of "
                f"{self._beside('*')} to its place"
            ) from error

    def save(self, state: State, best: bool, **extra: Any) -> None:
        """Replace the last state in one step; then the others, which nothing depends on."""
        if self.path is None:
            return
        save_state(self.path, state, durable=True, **extra)
        names = [str(state.round_number)] * bool(self._keep) + ["best"] * best
        for name in names:
            partial = self._beside(f"{name}.part")
            shutil.copyfile(self.path, partial)
            os.replace(partial, self._beside(name))
        kept = [(int(end), file) for file in self.path.parent.glob(self._beside("*").name)
                if (end := file.stem.rpartition("-")[2]).isdigit()]  # fmt: skip
        for _, file in sorted(kept)[: -self._keep or None]:
            file.unlink(missing_ok=True)

    def _beside(self, name: str) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.stem}-{name}{self.path.suffix}")

    def resumed(self, loaded: tuple[State, dict[str, Any]], fixed: Mapping[str, str], free: Mapping[str, str]) -> State:
        """The state to resume from under the present settings: `fixed` ones must be as they were, others need not."""
        state, before = loaded[0], loaded[1].get("settings", {})
        for name, value in fixed.items():
            if value != before.get(name):
                raise FipaError(
                    f"the checkpoint {self.path} was written with {name} = {before.get(name)}, now it is {value}: use "
                    f"the same, or another checkpoint. {', '.join(fixed)} must not change; all else may"
                )
        changed = [name for name, value in free.items() if value != before.get(name)]
        for name in changed:
            log(INFO, "resuming with %s = %s, before it was %s", name, free[name], before.get(name))
        log(INFO, "resuming after round %d of %s", state.round_number, self.path)
        return replace(state, control_value=None) if any(name.startswith("stage") for name in changed) else state

    def check_arrays(self, before: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        """Refuse another architecture, by the first array that differs."""
        now = {name: list(tensor.shape) for name, tensor in arrays.items()}
        for name in (*before, *now):
            if before.get(name) != now.get(name):
                then, here = (f"of shape {s[name]}" if name in s else "not there" for s in (before, now))
                raise FipaError(
                    f"the checkpoint {self.path} is of another model: {name!r} was {then}, now it is {here}: use the "
                    "same model, or another checkpoint"
                )
