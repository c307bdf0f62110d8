"""The server's state on disk after every round, so that a restarted server goes on where the last one was."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fipa.errors import FipaError


@dataclass(frozen=True, eq=False)
class Progress:
    """What one round hands to the next."""

    arrays: dict[str, Tensor]
    round_number: int = 0
    rule_state: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)  # by kind and round


def save(path: Path, progress: Progress, settings: dict[str, str]) -> None:
    """Replace the checkpoint in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        torch.save({"settings": settings, **vars(progress)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path, settings: dict[str, str]) -> Progress | None:
    """The state after the last round, or None if there is none yet; settings must be those of then."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise FipaError(f"the checkpoint {path} cannot be read: delete it to begin anew") from error
    if not isinstance(content, dict) or "settings" not in content:
        raise FipaError(f"{path} is no checkpoint of FIPA on Flower: choose another file")
    before = content.pop("settings")
    changed = [name for name in settings if settings[name] != before.get(name)]
    if changed:
        name = changed[0]
        raise FipaError(
            f"the checkpoint {path} was written with {name} = {before.get(name)}, now it is {settings[name]}: "
            "use the same settings, or another checkpoint"
        )
    return Progress(**content)
