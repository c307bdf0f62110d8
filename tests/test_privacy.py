"""The accountant: one Gaussian mechanism by hand, and what must grow with what."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import numpy as np
import pytest

from fipa.config.load import tomllib, validate
from fipa.errors import FipaError
from fipa.privacy import epsilon, noise_for

PRIVATE = ("fedavg", "additive-fipa", "shared-fipa")


def by_hand(z: float, rounds: int, delta: float) -> float:
    """Renyi divergence of order a: rounds x a / (2 z^2); to (epsilon, delta) by Balle et al. (2020), theorem 21."""
    a = np.linspace(1.001, 400, 400_000)
    return float(np.min(rounds * a / (2 * z**2) + np.log((a - 1) / a) - (math.log(delta) + np.log(a)) / (a - 1)))


@pytest.mark.parametrize(("z", "rounds", "delta"), [(1.0, 1, 1e-5), (4.0, 1, 1e-3), (4.0, 10, 1e-3), (0.3, 2, 1e-4)])
def test_full_participation_as_by_hand(z: float, rounds: int, delta: float) -> None:
    assert epsilon(z, 1.0, rounds, delta) == pytest.approx(by_hand(z, rounds, delta), rel=2e-3)


@pytest.mark.parametrize(("z", "delta"), [(1.0, 1e-5), (2.0, 1e-3)])
def test_never_below_the_truth(z: float, delta: float) -> None:
    """Of one Gaussian mechanism the exact curve is known (Balle and Wang, 2018)."""
    from scipy.stats import norm  # which takes a second to import

    e = epsilon(z, 1.0, 1, delta)
    exact = norm.cdf(1 / (2 * z) - e * z) - math.exp(e) * norm.cdf(-1 / (2 * z) - e * z)
    assert 0 < exact <= delta


@pytest.mark.long
def test_monotone() -> None:
    def rising(values: list[float]) -> bool:
        return all(a < b for a, b in pairwise(values))

    assert rising([epsilon(1.0, 0.1, rounds, 1e-3) for rounds in (1, 10, 100)])
    assert rising([epsilon(1.0, rate, 20, 1e-3) for rate in (0.01, 0.1, 1.0)])
    assert rising([epsilon(noise, 0.1, 20, 1e-3) for noise in (4.0, 1.0)])
    assert rising([epsilon(1.0, 0.1, 20, delta) for delta in (1e-2, 1e-5)])


def test_without_noise_nothing_is_promised() -> None:
    assert epsilon(0.0, 0.1, 20, 1e-3) == math.inf


@pytest.mark.long
def test_noise_for_keeps_the_target_closely() -> None:
    z = noise_for(0.5, 0.1, 50, 1e-3)
    assert 0.99 * 0.5 < epsilon(z, 0.1, 50, 1e-3) <= 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.0, 1, 1e-3), "rate=0.0"),
        ((1.0, 1.5, 1, 1e-3), "rate=1.5"),
        ((1.0, 1.0, 0, 1e-3), "rounds=0"),
        ((1.0, 1.0, 1, 0.0), "delta=0.0.*below 1 / number of clients"),
        ((-1.0, 1.0, 1, 1e-3), "=-1.0"),
        ((math.inf, 1.0, 1, 1e-3), "=inf"),
    ],
)
def test_bad_numbers(arguments: tuple[float, float, int, float], message: str) -> None:
    for function in (epsilon, noise_for):
        with pytest.raises(FipaError, match=message):
            function(*arguments)


def test_a_target_that_cannot_be_kept() -> None:
    with pytest.raises(FipaError, match="raise one of the two"):
        noise_for(1e-6, 1.0, 1, 1e-9)


def test_opacus_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(FipaError, match=r"pip install 'fipa\[privacy\]'"):
        epsilon(1.0, 1.0, 1, 1e-3)


@pytest.mark.parametrize("rule", [f'rule = {{ name = "private-{name}" }}' for name in PRIVATE])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("step_control = true", "no step_control"),
        ('local = { name = "scaffold", steps = 2 }', "no scaffold"),
        ('participation = { kind = "weighted", count = 2 }', "no weighted"),
        ("faults = { late = 0.5 }", "use_late = false"),
    ],
)
def test_experiments_refuse_what_goes_around_the_noise(rule: str, more: str, message: str) -> None:
    arm = {"name": "A", "local": {"name": "sgd", "steps": 2}} | tomllib.loads(f"{rule}\n{more}")
    with pytest.raises(FipaError, match=message):
        validate({"rounds": 6, "problem": {"name": "sine"}, "arms": [arm]})


def test_experiments_know_the_private_rule_in_a_shared_basis() -> None:
    arm = {"name": "A", "local": {"name": "gradient"}, "rule": {"name": "private-shared-fipa", "damping": 0.3}}
    content = {"rounds": 6, "problem": {"name": "sine"}, "arms": [arm]}
    (built,) = validate(content).build(True)
    assert built.stages[0].control is None
    for more, message in (
        ({"trust_region": True}, "no trust_region"),
        ({"local": {"name": "sgd", "steps": 1}}, "local=fipa.FullGradient"),
    ):
        with pytest.raises(FipaError, match=message):
            validate({**content, "arms": [arm | more]}).build(True)
