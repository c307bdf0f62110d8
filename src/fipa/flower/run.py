"""The rounds of one call of a strategy's `start`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fipa.federation.coordinator import Coordinator
from fipa.federation.engine import carry
from fipa.flower.journal import CENTRAL, EVALUATE, TRAIN
from fipa.flower.names import Names
from fipa.flower.transport import Cargo, Patience

if TYPE_CHECKING:
    from fipa.flower.strategy import FIPA


class Run:
    """One call of `start`, with what clients say of their model."""

    def __init__(
        self, strategy: FIPA, grid: Grid, initial: Mapping[str, Tensor], names: Names, settled: bool,
        patience: Patience, loaded: Any,
    ) -> None:  # fmt: skip
        self._strategy, self._grid, self._initial, self._names = strategy, grid, initial, names
        self._settled, self._patience, self._loaded = settled, patience, loaded
        self._cargo, self._theta = Cargo.of(initial, names)

    def rounds(
        self, last: int, config: ConfigRecord | None, evaluate_config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> Result:  # fmt: skip
        """Up to the last round."""
        strategy, cargo, order = self._strategy, self._cargo, tuple(self._initial)
        journal, (fixed, free) = strategy.journal, strategy.settings()
        coordinator = Coordinator(strategy.arm(last), strategy.seed, survives=True)
        transport = strategy.transport(
            self._grid, cargo, order, self._patience, config, evaluate_config=evaluate_config, settled=self._settled
        )
        state = coordinator.start(self._theta, cargo.buffers)
        if self._loaded is not None:
            journal.restore(self._loaded[1])
            state = strategy.checkpoints.resumed(self._loaded, fixed, free)
        arrays = cargo.arrays(state.theta, state.buffers, order)
        if evaluate_fn and state.round_number == coordinator.arm.after and 0 not in journal.metrics.get(CENTRAL, {}):
            journal.note(CENTRAL, state.round_number, evaluate_fn(state.round_number, arrays))
        while state.round_number < last:
            state, record = carry(coordinator.round(state), transport)
            transport.settled = True
            k, arrays = state.round_number, cargo.arrays(state.theta, state.buffers, order)
            journal.keep(record, state)
            strategy.judge(k, arrays, transport, evaluate_config)
            if evaluate_fn:
                journal.note(CENTRAL, k, evaluate_fn(k, arrays))
            strategy.checkpoints.save(
                state, journal.best, settings=fixed | free, **journal.plain(),
                names=(list(self._names.trained), list(self._names.averaged), dict(self._names.tied)),
                shapes={name: list(tensor.shape) for name, tensor in self._initial.items()},
            )  # fmt: skip
            if strategy.output is not None:
                name = type(strategy).__name__
                journal.write_results(strategy.output, name, strategy.seed, k == last, fixed | free)
            journal.check_progress(strategy.stop_after)
        numbers = {
            kind: {k: MetricRecord(values) for k, values in journal.metrics.get(kind, {}).items()}
            for kind in (TRAIN, EVALUATE, CENTRAL)
        }
        return Result(arrays, **numbers)
