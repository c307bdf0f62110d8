"""The rounds of one call of a strategy's `start`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import INFO
from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fipa.errors import FipaError
from fipa.federation.coordinator import Coordinator
from fipa.federation.engine import carry
from fipa.flower.names import Names
from fipa.flower.transport import Cargo, OtherNames, Patience
from fipa.report.flower import CENTRAL, EVALUATE, TRAIN

if TYPE_CHECKING:
    from fipa.flower.strategy import FIPA


class Run:
    """The rounds of a strategy on a grid, from the first or from where a checkpoint ends.

    Parameters
    ----------
    last
        The last round.
    config, evaluate_config
        For the app's own functions.

    Attributes
    ----------
    state, arrays
        After the last round, and its whole model.
    """

    def __init__(
        self, strategy: FIPA, grid: Grid, initial: Mapping[str, Tensor], last: int, patience: Patience,
        config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
    ) -> None:  # fmt: skip
        loaded = strategy.checkpoints.load()
        self._decided = strategy.decide(grid, loaded and loaded[1].get("settings", {}).get("rule of stage 0"))
        self._strategy, self._grid, self._initial, self._last = strategy, grid, initial, last
        self._patience, self._config, self._evaluate_config = patience, config, evaluate_config or ConfigRecord()
        self._journal, (self._fixed, self._free) = strategy.journal, strategy.settings()
        self._begun = False
        self._coordinator = Coordinator(strategy.arm(last), strategy.seed, survives=True)
        if loaded is None:
            self._take(Names.guessed(initial).chosen(strategy.params), settled=False)
            return
        strategy.checkpoints.check_arrays(loaded[1].get("shapes", {}), initial)
        state = strategy.checkpoints.resumed(loaded, self._fixed, self._free)
        trained, averaged, tied = loaded[1]["names"]
        self._journal.restore(loaded[1])
        self._take(Names(tuple(trained), tuple(averaged), tied), settled=True)
        self.state = state

    def _take(self, names: Names, settled: bool) -> None:
        """Begin with these arrays as the trained ones."""
        self._names = names
        self._cargo, theta = Cargo.of(self._initial, names)
        self._transport = self._strategy.transport(
            self._grid, self._cargo, tuple(self._initial), self._patience, self._config,
            evaluate_config=self._evaluate_config, settled=settled,
        )  # fmt: skip
        self._transport.held_out = self._decided
        self.state = self._coordinator.start(theta, self._cargo.buffers, self._strategy.seen)

    @property
    def arrays(self) -> ArrayRecord:
        """The model as it is now."""
        return self._cargo.arrays(self.state.theta, self.state.buffers, tuple(self._initial))

    def alone(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """One round for a loop that is not ours, which may change the config, but not the model."""
        now = self.arrays.to_torch_state_dict()
        other = any(not torch.equal(one, now[name]) for name, one in arrays.to_torch_state_dict().items())
        if other and self._begun:  # the first round is that of a checkpoint, if there is one
            raise FipaError(
                f"round {self.state.round_number + 1}: configure_train was given other arrays than aggregate_train "
                "returned last: the model changes in FIPA's rounds only"
            )
        self._config = config
        self._transport.config, self._begun = dict(config), True
        self.round()
        self.close()

    def round(self) -> None:
        """One round. If clients say that their model is another than it seemed to be, it begins once more."""
        try:
            self.state, record = carry(self._coordinator.round(self.state), self._transport)
        except OtherNames as other:
            if self._transport.settled:
                raise FipaError(f"clients do not agree on what they train: {other}") from other
            names = other.names.chosen(self._strategy.params)
            counts = len(names.trained), len(names.averaged), len(names.tied)
            log(INFO, "clients train %d arrays, average %d and tie %d: the round starts again with these", *counts)
            self._take(names, settled=True)
            self.state, record = carry(self._coordinator.round(self.state), self._transport)
        self._transport.settled |= bool(record.clients)
        self._journal.keep(record, self.state)

    def close(self) -> None:
        """Write down what a round has come to, and stop if too many came to nothing."""
        strategy, settings = self._strategy, self._fixed | self._free
        strategy.checkpoints.save(
            self.state, self._journal.best, settings=settings, last=self._last, **self._journal.plain(),
            names=(list(self._names.trained), list(self._names.averaged), dict(self._names.tied)),
            shapes={name: list(tensor.shape) for name, tensor in self._initial.items()},
        )  # fmt: skip
        if strategy.output is not None:
            title = type(strategy).__name__
            self._journal.write_results(strategy.output, title, strategy.seed, self._last, settings)
        self._journal.check_progress(strategy.stop_after)

    def rounds(self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None) -> Result:
        """All rounds to the last, each with its evaluations."""
        journal, first = self._journal, self._coordinator.arm.after
        self._strategy.summary()
        if evaluate_fn and self.state.round_number == first:
            journal.note(CENTRAL, first, evaluate_fn(first, self.arrays))
        while self.state.round_number < self._last:
            self.round()
            k, arrays = self.state.round_number, self.arrays
            self._strategy.judge(k, arrays, self._transport, self._evaluate_config)
            if evaluate_fn:
                journal.note(CENTRAL, k, evaluate_fn(k, arrays))
            self.close()
        self._strategy.seen = self.state.seen
        numbers = {
            kind: {k: MetricRecord(values) for k, values in journal.metrics.get(kind, {}).items()}
            for kind in (TRAIN, EVALUATE, CENTRAL)
        }
        return Result(self.arrays, **numbers)
