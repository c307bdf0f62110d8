r"""What noise is worth: $(\varepsilon, \delta)$ of many rounds of a private rule, by opacus' Renyi accountant.

Both functions take clients, not examples, as what is protected, and assume Poisson sampling: in every round each client
takes part with probability `rate`, independently of the others and unknown to who looks at the models. A fixed number
of clients drawn at random (`participation = { kind = "uniform", count = ... }`, `rate` = count / clients) is close to
that, but not the same, and these numbers are then an approximation. With full participation the rate is 1, nothing is
gained by sampling, and they hold as they are.
"""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

from fipa.errors import FipaError


def epsilon(noise: float, rate: float, rounds: int, delta: float) -> float:
    r"""$\varepsilon$ after `rounds` releases with noise multiplier `noise`; infinite without noise.

    Parameters
    ----------
    noise
        z, the rule's `noise`.
    rate
        Chance of a client to take part in a round; 1 with full participation.
    rounds
        Releases in all: the server's steps.
    delta
        Chance that the promise fails; well below 1 / number of clients.

    Examples
    --------
    >>> round(epsilon(noise=4.0, rate=1.0, rounds=10, delta=1e-3), 2)
    2.66
    """
    _check(rate, rounds, delta)
    if not 0 <= noise < math.inf:
        raise FipaError(f"epsilon(noise={noise}): must be a finite number, not negative")
    if noise == 0:
        return math.inf
    accountants = _opacus()
    accountant = accountants.RDPAccountant()
    accountant.history = [(noise, rate, rounds)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orders at the end of their range: the bound holds for any of them
        return max(0.0, float(accountant.get_epsilon(delta=delta, alphas=_orders(accountants))))


def noise_for(target_epsilon: float, rate: float, rounds: int, delta: float) -> float:
    r"""The noise multiplier, to a thousandth of $\varepsilon$, that keeps `rounds` releases within `target_epsilon`.

    Examples
    --------
    >>> z = noise_for(2.0, rate=1.0, rounds=10, delta=1e-3)
    >>> 1.99 < epsilon(z, 1.0, 10, 1e-3) <= 2.0
    True
    """
    _check(rate, rounds, delta)
    if not 0 < target_epsilon < math.inf:
        raise FipaError(f"noise_for(target_epsilon={target_epsilon}): must be a positive, finite number")
    accountants = _opacus()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = accountants.utils.get_noise_multiplier(
                target_epsilon=target_epsilon, target_delta=delta, sample_rate=rate, steps=rounds, accountant="rdp",
                epsilon_tolerance=1e-3 * target_epsilon, alphas=_orders(accountants),
            )  # fmt: skip
        except ValueError:
            raise FipaError(
                f"noise_for(target_epsilon={target_epsilon}): no noise is known to keep that with delta={delta}: "
                "raise one of the two"
            ) from None
    return float(found)


def _orders(accountants: Any) -> list[float]:
    """Renyi orders: opacus' own, with more at both ends, for very much and very little noise."""
    few = [1.01, 1.02, 1.04, 1.06, 1.08]
    return [*few, *accountants.RDPAccountant.DEFAULT_ALPHAS, 64, 80, 96, 128, 192, 256, 384, 512]


def _check(rate: float, rounds: int, delta: float) -> None:
    if not 0 < rate <= 1:
        raise FipaError(f"rate={rate}: must be above 0, and 1 at most (all clients in every round)")
    if rounds < 1:
        raise FipaError(f"rounds={rounds}: must be at least 1")
    if not 0 < delta < 1:
        raise FipaError(f"delta={delta}: must be between 0 and 1, and well below 1 / number of clients")


def _opacus() -> Any:
    try:
        return importlib.import_module("opacus.accountants")
    except ImportError:
        raise FipaError("privacy accounting needs opacus: pip install 'fipa[privacy]'") from None
