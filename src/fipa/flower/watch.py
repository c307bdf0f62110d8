"""What happens around an app's own functions: what stands in for them, how long they take, and what they read."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from fipa.errors import FipaError
from fipa.flower.request import KEY

RATES = ("lr", "learning-rate", "learning_rate")  # of a train config: the server scales them
SCALE = "lr-scale"
DEFAULT = "default"  # Flower's name for functions without one
Function = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Function], Message]


class Watched(ConfigRecord):
    """A config that notes which of its entries were read."""

    def __init__(self, entries: Any) -> None:
        super().__init__(dict(entries))
        self.__dict__["read"] = set()

    def __getitem__(self, key: str) -> Any:
        """As that of a dict."""
        self.__dict__.setdefault("read", set()).add(key)
        return super().__getitem__(key)


@dataclass(eq=False)
class Training:
    """One call of a train function."""

    config: Watched | None = None
    begun: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.begun

    def unread(self) -> str | None:
        """The entry with the learning rate that nobody has read; None if somebody has."""
        if self.config is None:
            return None
        name = next((name for name in RATES if name in self.config), SCALE)
        return None if name in self.config.__dict__["read"] else name


current: ContextVar[Training | None] = ContextVar("current", default=None)


def replaceable(register: Callable[..., Any], stand_in: Function, mods: tuple[Mod, ...] = ()) -> Callable[..., Any]:
    """Register a function by an app's `train` or `evaluate`; what comes back is to take that method's place.

    The app's own function, if it registers one later, replaces it, and runs within these mods. `own()` of what comes
    back tells whether there is one.
    """
    own = [stand_in]

    def standing(message: Message, context: Context) -> Message:
        return own[-1](message, context)

    def registering(action: str = DEFAULT, *, mods: list[Mod] | None = None) -> Callable[[Function], Function]:
        def decorator(function: Function) -> Function:
            if action != DEFAULT or not stands:
                return register(action, mods=[*first, *(mods or [])])(function)
            if len(own) > 1:
                raise ValueError(f"two functions are registered with @app.{register.__name__}()")
            own.append(_within([*first, *(mods or [])], function))
            return function

        return decorator

    first, stands = mods, True
    try:
        register()(standing)
    except ValueError:  # the app came with a function of its own
        stands = False
    registering.own = lambda: not stands or len(own) > 1  # type: ignore[attr-defined]
    return registering


def _within(mods: list[Mod], function: Function) -> Function:
    """A function within mods, the first of them outermost."""
    if not mods:
        return function
    inner = _within(mods[1:], function)
    return lambda message, context: mods[0](message, context, inner)


def watched(message: Message, context: Context, call_next: Function) -> Message:
    """A mod of Flower's for train functions."""
    if KEY not in message.content:
        return call_next(message, context)
    config = message.content.config_records.get("config")
    training = Training(None if config is None else Watched(config))
    if training.config is not None:
        message.content["config"] = training.config
    token = current.set(training)
    try:
        reply = call_next(message, context)
    finally:
        current.reset(token)
    if not reply.has_error() and KEY not in reply.content and "secure" not in reply.content:
        raise FipaError(
            "the train function did not end with `return fipa.flower.reply(message, context, model, data, metrics)`: "
            "without it the server learns nothing of the curvature"
        )
    return reply
