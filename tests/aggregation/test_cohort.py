"""What a round of clients is checked for: each error names the client and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fipa
from aggregation.strategies import DOUBLE, FAST, LAYOUT, generator, normal, one_parameter, orthonormal
from fipa import FIPA, FOOF, AdditiveFIPA, ClientUpdate, CompletedFIPA, DiagonalFisher, FedAvg, Layout, Sketch
from fipa.aggregation.cohort import gather
from fipa.errors import FipaError, LayoutError, UpdateError

P = 6
NAN, INF = float("nan"), float("inf")


def good(m: int, p: int = P, layout: Layout | None = None) -> ClientUpdate:
    rng = generator(m)
    values = torch.tensor([2.0, 1.0], dtype=DOUBLE)
    sketch = Sketch(orthonormal(p, 2, rng), values, layout or one_parameter(p))
    return ClientUpdate(normal(p, rng=rng), 10 + m, sketch, client_id=m)


def with_sketch(update: ClientUpdate, **changes: object) -> ClientUpdate:
    return replace(update, sketch=replace(update.sketch, **changes))


def poisoned(tensor: Tensor, value: float) -> Tensor:
    """A copy with one bad number, not at either end."""
    copy = tensor.clone()
    copy[(1,) * copy.dim()] = value
    return copy


Change = Callable[[ClientUpdate], ClientUpdate]

# What one client sends, and what the message must say after naming it.
BAD: dict[str, tuple[Change, str]] = {
    "no sketch": (lambda u: replace(u, sketch=None), r"no sketch, but FIPA needs a Sketch.*fipa\.sketch"),
    "diagonal": (
        lambda u: replace(u, sketch=fipa.DiagonalCurvature(torch.ones(P, dtype=DOUBLE), one_parameter(P))),
        r"a DiagonalCurvature, but FIPA needs a Sketch.*fipa\.sketch",
    ),
    "sketch of no known kind": (lambda u: replace(u, sketch=(u.sketch.eigenvectors,)), r"tuple.*fipa\.sketch"),
    "NaN in delta": (lambda u: replace(u, delta=poisoned(u.delta, NAN)), "NaN or infinity in its update.*leave"),
    "inf in delta": (lambda u: replace(u, delta=poisoned(u.delta, INF)), "NaN or infinity in its update.*leave"),
    "-inf in delta": (lambda u: replace(u, delta=poisoned(u.delta, -INF)), "NaN or infinity in its update.*leave"),
    "NaN in eigenvectors": (
        lambda u: with_sketch(u, eigenvectors=poisoned(u.sketch.eigenvectors, NAN)),
        "NaN or infinity in its eigenvectors.*leave",
    ),
    "inf in eigenvectors": (
        lambda u: with_sketch(u, eigenvectors=poisoned(u.sketch.eigenvectors, INF)),
        "NaN or infinity in its eigenvectors.*leave",
    ),
    "inf and -inf in eigenvectors": (
        lambda u: with_sketch(u, eigenvectors=torch.tensor([INF, -INF], dtype=DOUBLE).expand(P, 2)),
        "NaN or infinity in its eigenvectors.*leave",
    ),
    "NaN in eigenvalues": (
        lambda u: with_sketch(u, eigenvalues=poisoned(u.sketch.eigenvalues, NAN)),
        "NaN or infinity in its eigenvalues.*leave",
    ),
    "inf in eigenvalues": (
        lambda u: with_sketch(u, eigenvalues=poisoned(u.sketch.eigenvalues, INF)),
        "NaN or infinity in its eigenvalues.*leave",
    ),
    "negative eigenvalue": (
        lambda u: with_sketch(u, eigenvalues=poisoned(u.sketch.eigenvalues, -1e-3)),
        r"the negative eigenvalue -0.001.*clamp\(min=0\)",
    ),
    "short delta": (lambda u: replace(u, delta=u.delta[:-1]), "length 5, but there are 6"),
    "long delta": (lambda u: replace(u, delta=torch.zeros(P + 1, dtype=DOUBLE)), "length 7, but there are 6"),
    "short eigenvectors": (
        lambda u: with_sketch(u, eigenvectors=u.sketch.eigenvectors[:-1]),
        r"eigenvectors of shape \(5, 2\), expected \(6, 2\)",
    ),
    "too few eigenvalues": (
        lambda u: with_sketch(u, eigenvalues=u.sketch.eigenvalues[:1]),
        r"eigenvectors of shape \(6, 2\), expected \(6, 1\)",
    ),
    "transposed eigenvectors": (
        lambda u: with_sketch(u, eigenvectors=u.sketch.eigenvectors.T),
        r"eigenvectors of shape \(2, 6\), expected \(6, 2\)",
    ),
    "diagonal matrix of eigenvalues": (
        lambda u: with_sketch(u, eigenvalues=u.sketch.eigenvalues.diag()),
        "eigenvalues.*expected",
    ),
    "names of the sketch": (
        lambda u: with_sketch(u, layout=Layout(("weights",), ((P,),))),
        "sketch of other parameters.*'(theta|weights)'",
    ),
    "shapes of the sketch": (
        lambda u: with_sketch(u, layout=Layout(("theta",), ((2, 3),))),
        "sketch of other parameters.*shape",
    ),
    "length of the sketch": (
        lambda u: with_sketch(u, layout=one_parameter(5), eigenvectors=u.sketch.eigenvectors[:-1]),
        "sketch of other parameters.*shape",
    ),
    "dtype of delta": (lambda u: replace(u, delta=u.delta.float()), r"float32.*theta is torch.float64.*\.to\("),
    "dtype of the sketch": (
        lambda u: replace(u, sketch=u.sketch.to(torch.float32)),
        r"eigenvectors of torch.float32.*theta is torch.float64.*\.to\(",
    ),
    "integers in delta": (lambda u: replace(u, delta=u.delta.long()), r"int64.*theta is torch.float64.*\.to\("),
    "array in place of a tensor": (lambda u: replace(u, delta=u.delta.numpy()), "ndarray.*tensor"),
    "list in place of a tensor": (lambda u: replace(u, delta=u.delta.tolist()), "list.*tensor"),
    "no examples": (lambda u: replace(u, num_examples=0), "num_examples=0: .*positive integer; leave out"),
    "negative examples": (lambda u: replace(u, num_examples=-3), "num_examples=-3: .*positive integer; leave out"),
    "bool examples": (lambda u: replace(u, num_examples=True), "num_examples=True: .*positive integer"),
    "float examples": (lambda u: replace(u, num_examples=3.0), "num_examples=3.0: .*positive integer"),
    "no weight": (lambda u: replace(u, weight=0.0), r"weight=0\.0: .*positive number; leave out"),
    "negative weight": (lambda u: replace(u, weight=-0.5), r"weight=-0\.5: .*positive number; leave out"),
    "NaN weight": (lambda u: replace(u, weight=NAN), "weight=nan: .*positive number; leave out"),
    "infinite weight": (lambda u: replace(u, weight=INF), "weight=inf: .*positive number; leave out"),
    "NaN examples": (lambda u: replace(u, num_examples=NAN), "num_examples=nan: .*positive integer"),
}


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("case", BAD)
def test_bad_client_is_named(case: str, position: int) -> None:
    """At any place of the list, also the first, which must not be taken for the measure of all others."""
    change, message = BAD[case]
    updates = [good(0), good(1), good(2)]
    updates[position] = change(updates[position])
    with pytest.raises(UpdateError, match=message) as caught:
        fipa.aggregate(torch.zeros(P, dtype=DOUBLE), updates, FIPA())
    assert isinstance(caught.value, ValueError)
    if case in ("names of the sketch", "shapes of the sketch") and position == 0:
        # Against a flat theta nobody can tell which of two layouts is the odd one: either client will do.
        assert "client" in str(caught.value)
    else:
        assert f"client {position}" in str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_client_is_named_by_its_place(case: str) -> None:
    change, message = BAD[case]
    updates = [replace(u, client_id=None) for u in (good(0), change(good(1)))]
    with pytest.raises(UpdateError, match=f"client #1.*{message}"):
        fipa.aggregate(torch.zeros(P, dtype=DOUBLE), updates, FIPA())


def named(delta: Tensor) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in LAYOUT.unflatten(delta).items()}


def named_round() -> list[ClientUpdate]:
    return [replace(u, delta=named(u.delta)) for u in (good(m, 13, LAYOUT) for m in range(3))]


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: t for key, t in tensors.items() if key != name}


BAD_NAMED: dict[str, tuple[Change, str]] = {
    "missing name": (lambda u: replace(u, delta=without(u.delta, "scale")), "missing 'scale'.*fipa.parameters_of"),
    "unknown name": (
        lambda u: replace(u, delta={**u.delta, "bonus": torch.zeros(2, dtype=DOUBLE)}),
        "unexpected 'bonus'.*fipa.parameters_of",
    ),
    "shape": (
        lambda u: replace(u, delta={**u.delta, "scale": torch.zeros(2, 2, dtype=DOUBLE)}),
        r"'scale' has shape \(2, 2\), expected \(4,\)",
    ),
    "NaN": (
        lambda u: replace(u, delta={**u.delta, "scale": torch.full((4,), NAN, dtype=DOUBLE)}),
        "NaN or infinity in its update.*'scale'.*leave",
    ),
    "dtype": (
        lambda u: replace(u, delta={name: t.float() for name, t in u.delta.items()}),
        r"float32.*theta is torch.float64.*\.to\(",
    ),
    "not a tensor": (
        lambda u: replace(u, delta={**u.delta, "scale": [1.0, 2.0, 3.0, 4.0]}),
        "'scale'.*list|list.*'scale'",
    ),
}


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("case", BAD_NAMED)
@pytest.mark.parametrize("rule", [FedAvg(), FIPA()], ids=["FedAvg", "FIPA"])
def test_bad_named_update(rule: fipa.Rule, case: str, position: int) -> None:
    """With sketches (FIPA) and without (FedAvg), where theta is the only measure."""
    change, message = BAD_NAMED[case]
    updates = named_round()
    if isinstance(rule, FedAvg):
        updates = [replace(u, sketch=None) for u in updates]
    updates[position] = change(updates[position])
    if case == "missing name" and position == 0 and isinstance(rule, FedAvg):
        # The others then send a name too many: parameters that are not trained are no error in themselves.
        position, message = 1, "unexpected 'scale'.*fipa.parameters_of"
    with pytest.raises(UpdateError, match=message) as caught:
        fipa.aggregate(named(torch.zeros(13, dtype=DOUBLE)), updates, rule)
    assert f"client {position}" in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "needed", "maker"),
    [
        (FIPA(), "Sketch", "fipa.sketch"),
        (CompletedFIPA(), "Sketch", "fipa.sketch"),
        (DiagonalFisher(), "DiagonalCurvature", "fipa.diagonal_fisher"),
        (FOOF(), "InputCovariance", "fipa.input_covariance"),
        (AdditiveFIPA(), "AdditiveStatistics", "fipa.additive_statistics"),
    ],
)
def test_missing_and_wrong_curvature(rule: fipa.Rule, needed: str, maker: str) -> None:
    """The message names the function that makes what is missing."""
    theta, name = torch.zeros(P, dtype=DOUBLE), type(rule).__name__
    message = rf"but {name} needs a {needed}: .*{maker}\(\.\.\.\).*ClientUpdate\(\.\.\., sketch=\.\.\.\)"
    with pytest.raises(UpdateError, match=f"client 4 sent no sketch, {message}"):
        fipa.aggregate(theta, [replace(good(1), sketch=None, client_id=4)], rule)
    wrong: object = good(1).sketch
    if needed == "Sketch":
        wrong = fipa.DiagonalCurvature(torch.ones(P, dtype=DOUBLE), one_parameter(P))
    with pytest.raises(UpdateError, match=f"client 4 sent a {type(wrong).__name__}, {message}"):
        fipa.aggregate(theta, [replace(good(1), sketch=wrong, client_id=4)], rule)


# --- the list of updates ---


def test_no_clients() -> None:
    with pytest.raises(UpdateError, match=r"no client updates.*keep the model"):
        fipa.aggregate(torch.zeros(P), [], FedAvg())


def test_duplicate_ids() -> None:
    for ids in ((3, 1, 3), ("b", "a", "b")):
        updates = [replace(good(0), client_id=i) for i in ids]
        with pytest.raises(UpdateError, match=f"client id {ids[0]} occurs more than once.*one update per round"):
            fipa.aggregate(torch.zeros(P, dtype=DOUBLE), updates, FIPA())


@pytest.mark.parametrize("position", [0, 1])
def test_mixed_ids_and_none(position: int) -> None:
    updates = [good(0), good(1)]
    updates[position] = replace(updates[position], client_id=None)
    with pytest.raises(UpdateError, match=rf"update #{position} has no client_id.*all of them one, or none"):
        fipa.aggregate(torch.zeros(P, dtype=DOUBLE), updates, FIPA())


@pytest.mark.parametrize("entry", [torch.zeros(P), (torch.zeros(P), 10), {"delta": torch.zeros(P)}, None, "update"])
def test_entries_that_are_no_client_updates(entry: object) -> None:
    with pytest.raises(UpdateError, match=rf"update #1 is a {type(entry).__name__}: wrap it in fipa.ClientUpdate\("):
        fipa.aggregate(torch.zeros(P, dtype=DOUBLE), [good(0), entry], FedAvg())


def test_one_update_that_is_not_in_a_list() -> None:
    with pytest.raises(UpdateError, match="list"):
        fipa.aggregate(torch.zeros(P, dtype=DOUBLE), good(0), FedAvg())


# --- theta ---


@pytest.mark.parametrize("value", [NAN, INF])
def test_theta_that_is_not_finite(value: float) -> None:
    updates = named_round()
    theta = poisoned(torch.zeros(13, dtype=DOUBLE), value)
    for form in (theta, named(theta)):
        with pytest.raises(LayoutError, match="theta holds NaN or infinity: go back"):
            fipa.aggregate(form, updates, FIPA())


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        (torch.zeros(12, dtype=DOUBLE), "theta has 12 elements, but the clients updated 13"),
        (without(named(torch.zeros(13, dtype=DOUBLE)), "scale"), "theta has no parameter 'scale'"),
        ({**named(torch.zeros(13, dtype=DOUBLE)), "scale": torch.zeros(2, 2, dtype=DOUBLE)}, "theta.*'scale'"),
        (torch.zeros(13, dtype=torch.int64), "theta must hold floating point numbers, not torch.int64"),
        ([0.0] * 13, "theta.*list"),
        (torch.zeros(13, dtype=DOUBLE).numpy(), "theta.*ndarray"),
    ],
    ids=["length", "name", "shape", "integers", "list", "array"],
)
def test_theta_that_fits_no_client(theta: object, message: str) -> None:
    """Theta is what all clients disagree with, so theta is what the message speaks of."""
    with pytest.raises(FipaError, match=message):
        fipa.aggregate(theta, named_round(), FIPA())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_theta_of_two_dtypes(dtype: torch.dtype) -> None:
    """One vector cannot stand for both; to convert one in silence would change the model's dtype."""
    theta = {"weight": torch.zeros(2, dtype=DOUBLE), "bias": torch.zeros(2, dtype=dtype)}
    update = ClientUpdate({"weight": torch.ones(2, dtype=DOUBLE), "bias": torch.ones(2, dtype=dtype)}, 1)
    with pytest.raises(FipaError, match=r"bias|weight"):
        fipa.aggregate(theta, [update], FedAvg())


# --- what the rules get ---


@FAST
@given(ids=st.lists(st.integers(0, 100), min_size=1, max_size=6, unique=True), data=st.data())
def test_clients_are_sorted_by_id(ids: list[int], data: st.DataObject) -> None:
    """Numbers as numbers: client 10 comes after client 9."""
    theta = torch.zeros(P, dtype=DOUBLE)
    updates = [replace(good(i), client_id=i) for i in ids]
    cohort, _, _ = gather(theta, data.draw(st.permutations(updates)))
    expected = sorted(ids)
    assert cohort.num_examples == tuple(10 + i for i in expected)
    assert all(torch.equal(d, good(i).delta) for d, i in zip(cohort.deltas, expected, strict=True))
    assert sum(cohort.weights) == pytest.approx(1.0)
    assert [w * sum(cohort.num_examples) for w in cohort.weights] == pytest.approx(cohort.num_examples)


def test_clients_without_ids_keep_their_order() -> None:
    updates = [replace(good(m), client_id=None) for m in (2, 0, 1)]
    cohort, _, _ = gather(torch.zeros(P, dtype=DOUBLE), updates)
    assert cohort.clients == ("client #0", "client #1", "client #2")
    assert cohort.num_examples == (12, 10, 11)


def test_very_unequal_clients() -> None:
    """Weights of 1e-12 and nearly 1 are fine."""
    theta = torch.zeros(1, dtype=DOUBLE)
    updates = [ClientUpdate(torch.ones(1, dtype=DOUBLE), 10**12), ClientUpdate(torch.full((1,), 1e12, dtype=DOUBLE), 1)]
    assert float(fipa.aggregate(theta, updates, FedAvg()).theta) == pytest.approx(2.0)


def test_numpy_counts_are_integers_too() -> None:
    update = fipa.ClientUpdate(torch.ones(2), np.int64(5))
    cohort, _, _ = gather(torch.zeros(2), [update])
    assert cohort.num_examples == (5,)
    assert type(cohort.num_examples[0]) is int


# --- weights in place of numbers of examples ---


def test_weights_replace_the_numbers_of_examples() -> None:
    """N = 10, 11 and 12; the second counts 0.25 x 11 as it comes two rounds late: 10, 2.75 and 12."""
    updates = [good(0), replace(good(1), weight=2.75), good(2)]
    cohort, _, _ = gather(torch.zeros(P, dtype=DOUBLE), updates)
    assert cohort.weights == pytest.approx((10 / 24.75, 2.75 / 24.75, 12 / 24.75))
    assert cohort.num_examples == (10, 11, 12)
    expected = sum(w * u.delta for w, u in zip((10, 2.75, 12), updates, strict=True)) / 24.75
    torch.testing.assert_close(cohort.mean_delta, expected)


def test_weights_follow_their_client_into_order() -> None:
    updates = [replace(good(m), weight=float(m + 1)) for m in (2, 0, 1)]
    cohort, _, _ = gather(torch.zeros(P, dtype=DOUBLE), updates)
    assert cohort.weights == pytest.approx((1 / 6, 2 / 6, 3 / 6))


@FAST
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4), scale=st.floats(1e-3, 1e3))
def test_only_the_ratio_of_weights_counts(weights: list[float], scale: float) -> None:
    """Also in rules that weight curvature; weights equal to the numbers of examples change nothing."""
    theta = torch.zeros(P, dtype=DOUBLE)
    one, other = ([replace(good(m), weight=factor * w) for m, w in enumerate(weights)] for factor in (1.0, scale))
    for rule in (FedAvg(), FIPA(damping=0.1)):
        torch.testing.assert_close(fipa.aggregate(theta, one, rule).theta, fipa.aggregate(theta, other, rule).theta)
    plain = [good(m) for m in range(len(weights))]
    same = [replace(u, weight=float(u.num_examples)) for u in plain]
    assert gather(theta, same)[0].weights == gather(theta, plain)[0].weights


def test_weights_enter_fipa_as_examples_do() -> None:
    """Weights 3 and 1 are 30 and 10 examples."""
    theta = torch.zeros(P, dtype=DOUBLE)
    weighted = [replace(good(0), weight=3.0), replace(good(1), weight=1.0)]
    counted = [replace(good(0), num_examples=30), replace(good(1), num_examples=10)]
    for rule in (FIPA(damping=0.2), CompletedFIPA(), FedAvg()):
        one, other = (fipa.aggregate(theta, updates, rule).theta for updates in (weighted, counted))
        torch.testing.assert_close(one, other)


def test_other_weights_are_those_of_a_cohort_that_has_them() -> None:
    """Also where a rule has been applied before: what it remembers has weights in it."""
    updates = [good(m) for m in range(3)]
    rule = FIPA(damping=0.1)
    cohort, _, _ = gather(torch.zeros(P, dtype=DOUBLE), updates)
    first = rule(cohort, {}).change
    changed = rule(cohort.with_weights([1, 0, 3]), {}).change
    expected = [replace(update, weight=w) for update, w in zip(updates, (1.0, 1e-12, 3.0), strict=True)]
    fresh, _, _ = gather(torch.zeros(P, dtype=DOUBLE), expected)
    torch.testing.assert_close(changed, rule(fresh, {}).change, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(first, changed)
    for weights in ([1, 1], [1, -1, 3], [0, 0, 0], [1, NAN, 1]):
        with pytest.raises(UpdateError, match="3 clients need one each"):
            cohort.with_weights(weights)
