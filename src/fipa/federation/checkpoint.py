"""A coordinator's state on disk, replaced in one step: whoever is killed resumes after the last complete round."""

from __future__ import annotations

import os
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fipa.aggregation.update import ClientUpdate
from fipa.curvature.registry import summaries
from fipa.errors import FipaError
from fipa.federation.coordinator import State
from fipa.federation.messages import Late
from fipa.federation.safety import Pace
from fipa.layout import Layout


def save_state(path: Path, state: State, *, durable: bool = False, **extra: Any) -> None:
    """Write the state, and plain data beside it; `durable` also survives a loss of power."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    content = {field.name: getattr(state, field.name) for field in fields(state)}
    with partial.open("wb") as file:
        torch.save({"state": content, **extra}, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)


def load_state(path: Path) -> tuple[State, dict[str, Any]] | None:
    """What `save_state` wrote, or None if nobody has; nothing in the file can run code.

    Errors say what is wrong with it, not what to do: that depends on whose it is.
    """
    if not path.exists():
        return None
    try:
        with torch.serialization.safe_globals([ClientUpdate, Late, Layout, Pace, *summaries()]):
            content = torch.load(path, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise FipaError(f"{path} cannot be read") from error
    state = content.pop("state", None) if isinstance(content, dict) else None
    known = {field.name for field in fields(State)}
    if not isinstance(state, dict) or "theta" not in state:
        raise FipaError(f"{path} is no checkpoint of FIPA")
    if not set(state) <= known:
        raise FipaError(f"{path} was written by another version of fipa")
    return State(**state), content
