"""`SecureFIPA`: additive FIPA where the server sees nothing but sums over its clients."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fipa.aggregation.additive import AdditiveFIPA
from fipa.errors import FipaError
from fipa.flower.masked_transport import MaskedTransport
from fipa.flower.strategy import FIPA
from fipa.flower.transport import Cargo, Patience


class SecureFIPA(FIPA):
    """Additive FIPA under pairwise masks, see `fipa.flower.secure` for what they hide and from whom.

    A round takes four messages per client instead of one: keys, shares of keys, the masked vector after training, and
    shares again to take off the masks of those who left. Clients need nothing but `fipa.flower.client` and `reply`.

    Parameters
    ----------
    rule
        `fipa.AdditiveFIPA(damping=0.5, step=0.25)` by default.
    threshold
        How many clients of a round must stay to its end, and how many would have to collude with the server to unmask
        one; more than half of them, by default just that.
    fraction_bits
        Bits after the point of the numbers in the sum.
    **settings
        As for `FIPA`, but for what needs single clients' numbers: a warm-up, late answers, compression, step control
        and local rules with a memory. There is no evaluation by clients: with `fraction_evaluate` they would send their
        own numbers, unmasked.
    """

    def __init__(
        self,
        rule: AdditiveFIPA | None = None,
        *,
        threshold: int | None = None,
        fraction_bits: int = 28,
        **settings: Any,
    ) -> None:
        rule = AdditiveFIPA(damping=0.5, step=0.25) if rule is None else rule
        names = ("warmup_rounds", "late", "precision", "quorum", "arm", "rank", "labels", "examples")
        barred = [n for n in names if settings.get(n)]
        if settings.get("validate") is None:
            barred += ["control"] if settings.get("control") else []
            settings["control"] = False
        local = settings.get("local")
        barred += ["local"] if local is not None and (local.remembers or local.tells) else []
        if barred or not isinstance(rule, AdditiveFIPA):
            what = f"{barred[0]}={settings[barred[0]]!r}" if barred else f"rule={rule!r}"
            raise FipaError(f"SecureFIPA takes no {what}: only sums are there (threshold is the quorum)")
        super().__init__(rule, **{"fraction_evaluate": 0.0} | settings)
        plan = self.arm(1).stages[-1].plan
        if plan is None or not plan.makes.is_sum:
            raise FipaError(f"SecureFIPA needs curvature that adds up, such as an AdditivePlan, got {plan!r}")
        self.threshold = threshold
        self.fraction_bits = fraction_bits

    def transport(
        self, grid: Grid, cargo: Cargo, names: tuple[str, ...], patience: Patience, config: ConfigRecord | None,
        **more: Any,
    ) -> MaskedTransport:  # fmt: skip
        """What carries the questions."""
        return MaskedTransport(
            grid, cargo, names, seed=self.seed, patience=patience, config=config, roster=self._roster,
            threshold=self.threshold, fraction_bits=self.fraction_bits, validate=self._validate, **more,
        )  # fmt: skip

    def settings(self) -> tuple[dict[str, str], dict[str, str]]:
        """What must not change between a checkpoint and its use, and what may."""
        fixed, free = super().settings()
        return fixed | {"fraction_bits": repr(self.fraction_bits)}, free
