"""`SecureFIPA`: FIPA where the server sees nothing but sums over its clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fipa.aggregation.additive import AdditiveFIPA
from fipa.aggregation.private_shared import PrivateSharedFIPA
from fipa.aggregation.rule import Rule
from fipa.aggregation.shared import ClientMemory, SharedFIPA
from fipa.clients.gradient import FullGradient
from fipa.clients.rule import LocalRule
from fipa.errors import FipaError
from fipa.flower.masked_transport import MaskedTransport
from fipa.flower.settings import whole
from fipa.flower.strategy import FIPA
from fipa.flower.transport import Cargo, Patience

SIGNS = 3  # sums with random signs, where there are enough clients for them


class SecureFIPA(FIPA):
    """Additive FIPA, or FIPA in a shared basis, under pairwise masks: see `fipa.flower.secure` for what they hide.

    A sum takes four messages per client instead of one: keys, shares of keys, the masked vector, and shares again to
    take off the masks of those who left. A round of additive FIPA is one sum. In a shared basis it is two, the
    gradients and then the curvatures, and one more of a single number for each step that the clients judge. Clients
    need nothing but `fipa.flower.client`, with an objective for a shared basis, or `reply`.

    Parameters
    ----------
    rule
        `fipa.AdditiveFIPA(damping=0.5, step=0.25)` by default; with `local=fipa.FullGradient()` `fipa.SharedFIPA()`.
    threshold
        How many clients of a round must stay to its end, and how many would have to collude with the server to unmask
        one; more than half of them, by default just that.
    fraction_bits
        Bits after the point of the numbers in the sum.
    signs
        In a shared basis: how many sums of the gradients with random signs widen it, besides their mean; 3 by default,
        and always fewer than `threshold` less one. As many sums as clients would give each of them away.
    **settings
        As for `FIPA`, but for what needs single clients' numbers: a warm-up, late answers, compression, a memory of
        clients, local rules with a memory, and with additive FIPA step control. There is no evaluation by clients: with
        `fraction_evaluate` they would send their own numbers, unmasked.
    """

    def __init__(
        self,
        rule: AdditiveFIPA | SharedFIPA | None = None,
        *,
        threshold: int | None = None,
        fraction_bits: int = 28,
        signs: int | None = None,
        **settings: Any,
    ) -> None:
        local = settings.get("local")
        if rule is None:
            rule = SharedFIPA() if isinstance(local, FullGradient) else AdditiveFIPA(damping=0.5, step=0.25)
        shared = isinstance(rule, SharedFIPA) and not isinstance(rule, PrivateSharedFIPA)
        names = ("warmup_rounds", "late", "precision", "quorum", "arm", "rank", "labels", "examples", "seen")
        barred = [n for n in names if settings.get(n)]
        if settings.get("validate") is None and not shared:
            barred += ["control"] if settings.get("control") else []
            settings["control"] = False
        barred += ["local"] if local is not None and (local.remembers or local.tells) else []
        if barred or not (shared or isinstance(rule, AdditiveFIPA)):
            what = f"{barred[0]}={settings[barred[0]]!r}" if barred else f"rule={rule!r}"
            raise FipaError(f"SecureFIPA takes no {what}: only sums are there (threshold is the quorum)")
        if signs is not None and not (shared and whole(signs, 0)):
            raise FipaError(f"SecureFIPA(signs={signs!r}): a whole number of at least 0, and for a shared basis only")
        super().__init__(_summed(rule, local), **{"fraction_evaluate": 0.0} | settings)
        plan = self.arm(1).stages[-1].plan
        if not shared and (plan is None or not plan.makes.is_sum):
            raise FipaError(f"SecureFIPA needs curvature that adds up, such as an AdditivePlan, got {plan!r}")
        self.threshold = threshold
        self.fraction_bits = fraction_bits
        self.signs = SIGNS if signs is None else signs

    def transport(
        self, grid: Grid, cargo: Cargo, names: tuple[str, ...], patience: Patience, config: ConfigRecord | None,
        **more: Any,
    ) -> MaskedTransport:  # fmt: skip
        """The transport that carries the server's questions."""
        return MaskedTransport(
            grid, cargo, names, seed=self.seed, patience=patience, config=config, roster=self._roster,
            threshold=self.threshold, fraction_bits=self.fraction_bits, signs=self.signs, validate=self._validate,
            **more,
        )  # fmt: skip

    def settings(self) -> tuple[dict[str, str], dict[str, str]]:
        """What must not change between a checkpoint and its use, and what may."""
        fixed, free = super().settings()
        return fixed | {"fraction_bits": repr(self.fraction_bits)}, free | {"signs": repr(self.signs)}


def _summed(rule: AdditiveFIPA | SharedFIPA, local: LocalRule | None) -> Rule:
    """The rule as it is under masks: in a shared basis with numbers as they are, and without a memory."""
    if not isinstance(rule, SharedFIPA):
        return rule
    if not isinstance(local, FullGradient):
        raise FipaError(
            f"SecureFIPA(SharedFIPA(...), local={local!r}): in a shared basis clients send gradients under masks, not "
            "what they trained: give local=fipa.FullGradient(), or take AdditiveFIPA"
        )
    if rule.memory != ClientMemory():
        raise FipaError(
            f"SecureFIPA takes no SharedFIPA(memory={rule.memory!r}): nobody sees a single client to remember it"
        )
    if rule.parts or rule.bits == 8:
        name = "parts" if rule.parts else "bits"
        raise FipaError(
            f"SecureFIPA takes no SharedFIPA({name}={getattr(rule, name)}): a masked number has 8 bytes, and each part "
            "of a gradient would be one more sum"
        )
    return replace(rule, parts=0, bits=32)
