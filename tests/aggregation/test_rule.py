"""`aggregate`: forms of theta, diagnostics, and what holds for every rule."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fipa
from aggregation.strategies import (
    DOUBLE,
    FAST,
    LAYOUT,
    RULES,
    WRAPPERS,
    Round,
    dense_parts,
    generator,
    normal,
    random_round,
    sketch_rounds,
    tensors_in,
)
from fipa import (
    FIPA,
    FOOF,
    AdditiveFIPA,
    ClientUpdate,
    CompletedFIPA,
    DiagonalFisher,
    FedAvg,
    FedAvgM,
    Layout,
    LayoutError,
)
from fipa.aggregation.rule import Step, aggregator

EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def start() -> dict[str, Tensor]:
    """Parameters by name, in `LAYOUT`, that are not zero."""
    return {name: t.clone() for name, t in LAYOUT.unflatten(torch.linspace(-1, 1, 13, dtype=DOUBLE)).items()}


# --- forms of theta ---


@EVERY_RULE
@pytest.mark.parametrize("flat_deltas", [False, True])
def test_flat_and_named_theta_agree(rule: fipa.Rule, flat_deltas: bool) -> None:
    clients = random_round(rule, seed=1)
    updates = clients.with_deltas(clients.deltas).updates if flat_deltas else clients.updates
    theta = start()
    named = fipa.aggregate(theta, updates, rule).theta
    flat = fipa.aggregate(LAYOUT.flatten(theta), updates, rule).theta
    assert isinstance(named, dict)
    assert list(named) == list(theta)
    assert isinstance(flat, Tensor)
    assert flat.shape == (13,)
    assert torch.equal(LAYOUT.flatten(named), flat)
    assert {t.dtype for t in (flat, *named.values())} == {DOUBLE}
    assert not torch.equal(flat, LAYOUT.flatten(theta))
    # Tensors of their own, not views of one vector: they are saved, sent and changed one by one.
    assert len({t.untyped_storage().data_ptr() for t in named.values()}) == len(named)


def test_theta_of_any_shape_keeps_it() -> None:
    result = fipa.aggregate(torch.zeros(2, 3), [ClientUpdate(torch.arange(6.0).reshape(2, 3), 1)], FedAvg())
    assert torch.equal(result.theta, torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@EVERY_RULE
def test_dtype_of_theta_is_kept(rule: fipa.Rule, dtype: torch.dtype) -> None:
    def cast(thing: object) -> object:
        """A copy of nested dataclasses and mappings with all tensors in `dtype`."""
        if isinstance(thing, Tensor):
            return thing.to(dtype)
        if isinstance(thing, dict):
            return {key: cast(value) for key, value in thing.items()}
        if isinstance(thing, tuple):
            return tuple(cast(item) for item in thing)
        if isinstance(thing, fipa.AdditiveStatistics):
            return replace(thing, **{n: cast(getattr(thing, n)) for n in ("products", "response", "delta")})
        if isinstance(thing, fipa.Sketch):
            return thing.to(dtype)
        if isinstance(thing, fipa.DiagonalCurvature):
            return replace(thing, values=cast(thing.values))
        return replace(thing, layers=cast(thing.layers)) if isinstance(thing, fipa.InputCovariance) else thing

    clients = random_round(rule, seed=2)
    updates = [replace(u, delta=cast(u.delta), sketch=cast(u.sketch)) for u in clients.updates]
    exact = fipa.aggregate(start(), clients.updates, rule).theta
    result = fipa.aggregate(cast(start()), updates, rule)
    for name, tensor in result.theta.items():
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor.double(), exact[name], rtol=1e-3, atol=1e-3)
    assert {t.dtype for t in result.state.values()} <= {dtype}


def test_names_that_were_not_trained_pass_through() -> None:
    theta = {
        "frozen": torch.ones(2),
        "weight": torch.zeros(3),
        "running_mean": torch.full((2,), float("nan")),  # no business of the rule's
        "num_batches_tracked": torch.tensor(7),
    }
    result = fipa.aggregate(theta, [ClientUpdate({"weight": torch.ones(3)}, 1)], FedAvg()).theta
    assert list(result) == list(theta)
    assert result["weight"].tolist() == [1.0, 1.0, 1.0]
    assert all(result[name] is theta[name] for name in theta if name != "weight")


def test_parameter_without_dimensions() -> None:
    """A learnable temperature is a number."""
    theta = {"temperature": torch.tensor(2.0), "weight": torch.zeros(2)}
    update = ClientUpdate({"temperature": torch.tensor(0.5), "weight": torch.ones(2)}, 1)
    result = fipa.aggregate(theta, [update], FedAvg()).theta
    assert result["temperature"].shape == ()
    assert float(result["temperature"]) == 2.5


def test_parameters_in_another_order_than_theta() -> None:
    """Names decide, not places."""
    theta = {"a": torch.zeros(1), "b": torch.zeros(2)}
    updates = [
        ClientUpdate({"b": torch.ones(2), "a": 3 * torch.ones(1)}, 1),
        ClientUpdate({"a": torch.ones(1), "b": 3 * torch.ones(2)}, 1),
    ]
    result = fipa.aggregate(theta, updates, FedAvg()).theta
    assert (result["a"].tolist(), result["b"].tolist()) == ([2.0], [2.0, 2.0])


def test_parameters_that_require_gradients() -> None:
    model = nn.Linear(2, 1)
    delta = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    result = fipa.aggregate(dict(model.named_parameters()), [ClientUpdate(delta, 1)], FedAvg()).theta
    assert not any(t.requires_grad for t in result.values())
    assert torch.equal(result["weight"], model.weight.detach() + 1)


class Tied(nn.Module):
    """An embedding that is its own decoder, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.encoder(x)).tanh())


@pytest.mark.parametrize("rule", [FedAvg(), FIPA(), CompletedFIPA(damping=0.1)])
def test_tied_weights_change_under_all_names(rule: fipa.Rule) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    theta = model.state_dict()
    assert isinstance(theta, OrderedDict)
    trained = fipa.parameters_of(model)
    assert list(trained) == ["encoder.weight", "middle.weight", "middle.bias"]
    delta = {name: torch.ones_like(t) for name, t in trained.items()}
    sketch = fipa.sketch(model, normal(5, 3, rng=generator(0)), "mse", rank=None)
    before = model.encoder.weight.detach().clone()
    result = fipa.aggregate(theta, [ClientUpdate(delta, 5, sketch)], rule).theta
    assert list(result) == list(theta)
    assert torch.equal(result["encoder.weight"], result["decoder.weight"])
    assert not torch.equal(result["encoder.weight"], before)
    # Under the second name alone the old value would win, as load_state_dict writes both in order.
    model.load_state_dict(result)
    assert model.decoder.weight is model.encoder.weight
    assert torch.equal(model.encoder.weight, result["encoder.weight"])


@pytest.mark.parametrize("take", [copy.deepcopy, lambda state: state], ids=["copy", "live"])
def test_tied_weights_move_in_every_round(take: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    before = model.encoder.weight.detach().clone()
    theta = take(model.state_dict())
    update = ClientUpdate({name: torch.ones_like(t) for name, t in fipa.parameters_of(model).items()}, 5)
    for _ in range(2):
        theta = fipa.aggregate(theta, [update], FedAvg()).theta
        assert theta["encoder.weight"].data_ptr() == theta["decoder.weight"].data_ptr()
        assert theta["encoder.weight"].data_ptr() != model.encoder.weight.data_ptr()
    model.load_state_dict(theta)
    torch.testing.assert_close(model.encoder.weight.detach(), before + 2, rtol=0, atol=1e-12)
    assert model.decoder.weight is model.encoder.weight


def test_tied_weight_updated_under_two_names() -> None:
    model = Tied()
    delta = {name: torch.ones_like(t) for name, t in model.state_dict().items()}
    with pytest.raises(LayoutError, match=r"'encoder.weight' and 'decoder.weight' share memory.*one name only"):
        fipa.aggregate(model.state_dict(), [ClientUpdate(delta, 1)], FedAvg())


# --- purity ---


@EVERY_RULE
@pytest.mark.parametrize("flat", [False, True])
def test_inputs_are_not_modified(rule: fipa.Rule, flat: bool) -> None:
    clients = random_round(rule, seed=3)
    theta = LAYOUT.flatten(start()) if flat else start()
    state = fipa.aggregate(theta, clients.updates, rule).state
    given_tensors = tensors_in([theta, clients.updates, state])
    assert len(given_tensors) > 3
    copies = [t.clone() for t in given_tensors]
    result = fipa.aggregate(theta, clients.updates, rule, state)
    assert all(torch.equal(a, b) for a, b in zip(given_tensors, copies, strict=True))
    # Nor can they be through the result.
    old = {t.untyped_storage().data_ptr() for t in given_tensors}
    assert not old & {t.untyped_storage().data_ptr() for t in tensors_in([result.theta, result.state])}


@EVERY_RULE
def test_one_client_that_did_not_move(rule: fipa.Rule) -> None:
    clients = random_round(rule, seed=4, clients=1)
    zero = torch.zeros(13, dtype=DOUBLE)
    (update,) = clients.updates
    if isinstance(update.sketch, fipa.AdditiveStatistics):
        update = replace(update, sketch=replace(update.sketch, response=zero, delta=zero))
    result = fipa.aggregate(start(), [replace(update, delta=zero)], rule)
    assert torch.equal(LAYOUT.flatten(result.theta), LAYOUT.flatten(start()))
    assert result.diagnostics.step_length == 0
    assert result.diagnostics.cosine_with_fedavg == 0


# --- order ---


@EVERY_RULE
@pytest.mark.parametrize("ids", [(2, 10, 0, 7), ("b", "a", "10", "9"), (3, "3", "a", 1)], ids=str)
def test_order_of_arrival_changes_no_bit_when_clients_have_ids(rule: fipa.Rule, ids: Sequence[int | str]) -> None:
    clients = random_round(rule, seed=5, clients=4, ids=ids)
    reference = fipa.aggregate(start(), clients.updates, rule)
    for order in ((3, 2, 1, 0), (1, 3, 0, 2)):
        result = fipa.aggregate(start(), [clients.updates[i] for i in order], rule)
        assert all(torch.equal(result.theta[name], t) for name, t in reference.theta.items())
        assert all(torch.equal(result.state[name], t) for name, t in reference.state.items())
        assert result.diagnostics == reference.diagnostics


@EVERY_RULE
def test_order_of_arrival_changes_only_rounding_without_ids(rule: fipa.Rule) -> None:
    clients = random_round(rule, seed=6, clients=4)
    reference = fipa.aggregate(start(), clients.updates, rule)
    result = fipa.aggregate(start(), clients.updates[::-1], rule)
    for name, t in reference.theta.items():
        torch.testing.assert_close(result.theta[name], t, rtol=0, atol=1e-10)
    backwards = list(result.diagnostics.shares.values())[::-1]
    assert backwards == pytest.approx(list(reference.diagnostics.shares.values()), abs=1e-10)


# --- diagnostics ---


def dense_rank_and_condition(rule: fipa.Rule, clients: Round) -> tuple[float, float]:
    """By dense spectra; each rule's own idea of the matrix that it solves with."""
    if isinstance(rule, WRAPPERS):
        return dense_rank_and_condition(rule.inner, clients)
    if isinstance(rule, FedAvg):
        return clients.p, 1.0
    if isinstance(rule, FOOF):  # one layer of three outputs
        C = sum(w * u.sketch.layers["layer.weight"][1] for w, u in zip(clients.weights, clients.updates, strict=True))
        beta = rule.damping * C.diagonal().mean()
        values = torch.linalg.eigvalsh(C)
        condition = torch.linalg.cond(C + beta * torch.eye(3, dtype=DOUBLE), p=1)
        return 3 * float((values / (values + beta)).sum()), float(condition)
    values = torch.linalg.eigvalsh(clients.total).clamp(min=0)
    cutoff = getattr(rule, "cutoff", 0.0)
    if isinstance(rule, FIPA | CompletedFIPA):
        # the R x R matrix of the stacked sketches: as many eigenvalues as there are eigenvectors in all
        R = sum(u.sketch.rank for u in clients.updates)
        values = torch.cat([torch.zeros(R, dtype=DOUBLE), values])[-R:] if R else values[:0]
    if not len(values) or values[-1] <= 1e-12:
        return 0.0, 1.0
    if rule.damping:
        shifted = values + rule.damping
        return float((values / shifted).sum()), float(shifted[-1] / shifted[0])
    kept = values[values > max(cutoff, 1e-12) * values[-1]]
    return float(len(kept)), float(kept[-1] / kept[0])


def check_diagnostics(rule: fipa.Rule, clients: Round, names: Sequence[str]) -> None:
    theta = torch.zeros(clients.p, dtype=DOUBLE)
    result = fipa.aggregate(theta, clients.updates, rule)
    found, parts = result.diagnostics, dense_parts(rule, clients)
    d = sum(parts)
    rank, condition = dense_rank_and_condition(rule, clients)
    assert found.effective_rank == pytest.approx(rank, rel=1e-7, abs=1e-9)
    assert found.condition_number == pytest.approx(condition, rel=1e-6)
    if not isinstance(rule, WRAPPERS):  # what they do to the length is their own
        assert found.step_length == pytest.approx(float(d.norm()), rel=1e-8, abs=1e-10)
        cosine = d @ clients.mean / (d.norm() * clients.mean.norm()) if d.norm() > 0 else 0.0
        assert found.cosine_with_fedavg == pytest.approx(float(cosine), abs=1e-8)
    assert list(found.shares) == list(names)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    expected = [float(part @ d / d.square().sum()) for part in parts]
    assert list(found.shares.values()) == pytest.approx(expected, rel=1e-7, abs=1e-7)


@EVERY_RULE
@FAST
@given(seed=st.integers(0, 10**6), count=st.integers(1, 3))
def test_diagnostics_equal_dense_computation(rule: fipa.Rule, seed: int, count: int) -> None:
    clients = random_round(rule, seed, clients=count, ids=[5, 6, 7])
    assume(sum(dense_parts(rule, clients)).norm() > 0.1)  # shares of nothing mean nothing
    check_diagnostics(rule, clients, [5, 6, 7][:count])


def test_several_rules_on_the_same_updates_share_one_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    updates = []
    for client in range(2):
        U = torch.linalg.qr(torch.randn(5, 2, generator=rng, dtype=torch.float64)).Q
        sketch = fipa.Sketch(U, torch.tensor([2.0, 1.0], dtype=torch.float64), fipa.Layout(("x",), ((5,),)))
        updates.append(ClientUpdate(torch.randn(5, generator=rng, dtype=torch.float64), 1, sketch, client))
    theta = torch.zeros(5, dtype=torch.float64)
    alone = [fipa.aggregate(theta, updates, FIPA(damping)).theta for damping in (0.1, 0.4)]
    solved = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: solved.append(1) or eigh(matrix))
    apply = aggregator(theta, updates)
    for damping, expected in zip((0.1, 0.4), alone, strict=True):
        assert torch.equal(apply(FIPA(damping)).theta, expected)
    others = {update.client_id: -2 * update.delta for update in updates}
    torch.testing.assert_close(apply(FIPA(0.4), {}, others).theta, -2 * alone[1])
    assert len(solved) == 1


def two_deltas() -> tuple[Tensor, list[ClientUpdate], dict[int | str, Tensor]]:
    """Theta, updates, and other deltas for the same clients."""
    deltas = [normal(4, rng=generator(m)) for m in range(4)]
    updates = [ClientUpdate(delta, 3 + m, client_id=m) for m, delta in enumerate(deltas[:2])]
    return torch.zeros(4, dtype=DOUBLE), updates, dict(enumerate(deltas[2:]))


def weighted_by_weights(cohort: fipa.Cohort) -> list[float]:
    """What a rule may remember: no deltas, all the rest."""
    assert cohort.deltas == ()
    assert cohort.ids == (0, 1)
    assert cohort.num_examples == (3, 4)
    return [2 * w for w in cohort.weights]


def test_a_memory_is_made_once_and_without_deltas() -> None:
    theta, updates, others = two_deltas()
    found = []

    def rule(cohort: fipa.Cohort, state: object) -> Step:
        found.append(cohort.remember(weighted_by_weights))
        assert len(cohort.deltas) == 2
        return Step(cohort.mean_delta, 1.0, 1.0, [1.0, 1.0])

    apply = aggregator(theta, updates)
    apply(rule)
    apply(rule, deltas=others)
    assert found[0] == pytest.approx([6 / 7, 8 / 7])
    assert found[1] is found[0]


def test_a_memory_from_deltas_is_not_taken_for_that_of_others() -> None:
    """A rule that remembers the mean of its deltas, by mistake: not faster, and not wrong."""
    theta, updates, others = two_deltas()

    def mistaken(cohort: fipa.Cohort, state: object) -> Step:
        return Step(cohort.remember(lambda _: cohort.mean_delta), 1.0, 1.0, [1.0, 1.0])

    def blind(cohort: fipa.Cohort, state: object) -> Step:
        return Step(cohort.remember(type(cohort).mean_delta.fget), 1.0, 1.0, [1.0, 1.0])

    apply = aggregator(theta, updates)
    for deltas in (None, others, None):
        assert torch.equal(apply(mistaken, deltas=deltas).theta, apply(FedAvg(), deltas=deltas).theta)
        with pytest.raises(IndexError):
            apply(blind, deltas=deltas)


@pytest.mark.parametrize("rule", [FIPA(), FIPA(damping=0.3), CompletedFIPA(), CompletedFIPA(damping=0.3)], ids=str)
@FAST
@given(clients=sketch_rounds())
def test_diagnostics_of_any_sketches(rule: fipa.Rule, clients: Round) -> None:
    assume(sum(dense_parts(rule, clients)).norm() > 0.1)
    check_diagnostics(rule, clients, list(range(len(clients.updates))))


def test_shares_by_hand() -> None:
    """The client that pulls back has a negative share."""
    updates = [ClientUpdate(torch.tensor([6.0]), 1), ClientUpdate(torch.tensor([-2.0]), 1)]
    shares = fipa.aggregate(torch.zeros(1), updates, FedAvg()).diagnostics.shares
    assert shares == pytest.approx({0: 1.5, 1: -0.5})


def test_shares_keep_clients_apart_whose_ids_print_alike() -> None:
    updates = [ClientUpdate(torch.ones(1), 1, client_id=1), ClientUpdate(torch.ones(1), 3, client_id="1")]
    shares = fipa.aggregate(torch.zeros(1), updates, FedAvg()).diagnostics.shares
    assert sorted(shares.values()) == pytest.approx([0.25, 0.75])


IDS = {
    "places": (None, None, None),
    "integers": (7, 3, 11),
    "strings": ("b", "c", "a"),
    "both": ("1", 1, "a"),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_shares_are_keyed_by_id_or_by_place(ids: Sequence[int | str | None]) -> None:
    updates = [ClientUpdate(torch.ones(2), n, client_id=i) for n, i in zip((1, 2, 5), ids, strict=True)]
    shares = fipa.aggregate(torch.zeros(2), updates, FedAvg()).diagnostics.shares
    keys = range(3) if ids[0] is None else ids
    assert shares == pytest.approx(dict(zip(keys, (0.125, 0.25, 0.625), strict=True)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_cosine_never_leaves_its_range(dtype: torch.dtype, sign: int) -> None:
    for seed in range(200):
        delta = normal(7, rng=generator(seed)).to(dtype)

        def rule(cohort: fipa.Cohort, state: object) -> Step:
            return Step(sign * 0.3 * cohort.mean_delta, 1.0, 1.0, [1.0])

        cosine = fipa.aggregate(torch.zeros(7, dtype=dtype), [ClientUpdate(delta, 3)], rule).diagnostics
        assert abs(cosine.cosine_with_fedavg) <= 1.0
        assert cosine.cosine_with_fedavg == pytest.approx(sign, abs=1e-6)


# --- rules that fail ---


def test_rule_that_overflows_is_named() -> None:
    update = ClientUpdate(torch.full((2,), 1e38), 1)
    with pytest.raises(fipa.UpdateError, match=r"FedAvg\(step=1000.0\) made NaN or infinity"):
        fipa.aggregate(torch.zeros(2), [update], FedAvg(step=1000.0))


@pytest.mark.parametrize(
    "rule", [FedAvg, FIPA, CompletedFIPA, AdditiveFIPA, DiagonalFisher, FOOF, FedAvgM, None, "FIPA"]
)
def test_class_or_name_in_place_of_a_rule(rule: object) -> None:
    """`rule=fipa.FIPA` without brackets is an easy slip."""
    with pytest.raises(fipa.FipaError, match=r"rule.*\(\)"):
        fipa.aggregate(torch.zeros(2), [ClientUpdate(torch.ones(2), 1)], rule)


def test_a_function_is_a_rule() -> None:
    def first_client_only(cohort: object, state: object) -> Step:
        delta = cohort.deltas[0]
        return Step(delta, 1.0, 1.0, [float(delta @ delta), 0.0])

    updates = [ClientUpdate(torch.ones(2), 1), ClientUpdate(torch.zeros(2), 1)]
    result = fipa.aggregate(torch.zeros(2), updates, first_client_only)
    assert result.theta.tolist() == [1.0, 1.0]
    assert result.diagnostics.shares == {0: 1.0, 1: 0.0}


# --- a whole federation ---


def blobs(counts: Sequence[int], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three classes of points in the plane, `counts` of each."""
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]], dtype=DOUBLE)
    y = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    return centres[y] + 0.5 * normal(len(y), 2, rng=rng), y


def curvature_of(rule: fipa.Rule, model: nn.Module, x: Tensor, delta: dict[str, Tensor], round_: int) -> object:
    rule = getattr(rule, "inner", rule)
    if isinstance(rule, WRAPPERS):
        return curvature_of(rule, model, x, delta, round_)
    makers: dict[type, Callable[[], object]] = {
        FedAvg: lambda: None,
        # Few eigenpairs: without damping these rules follow every eigenvalue, however small, and step far.
        FIPA: lambda: fipa.sketch(model, x, "cross_entropy", rank=6),
        CompletedFIPA: lambda: fipa.sketch(model, x, "cross_entropy", rank=6),
        DiagonalFisher: lambda: fipa.diagonal_fisher(model, x),
        FOOF: lambda: fipa.input_covariance(model, x),
        AdditiveFIPA: lambda: fipa.additive_statistics(
            model, x, delta=delta, width=12, test_seed=round_, num_examples=len(x)
        ),
    }
    return makers[type(rule)]()


@EVERY_RULE
def test_federated_training_lowers_the_loss(rule: fipa.Rule) -> None:
    """Two clients of unequal size and unlike labels, in the ten lines that a user would write."""
    torch.manual_seed(0)
    rng = generator(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    clients = [blobs((30, 5, 5), rng), blobs((0, 10, 10), rng)]
    everything = [torch.cat(parts) for parts in zip(*clients, strict=True)]

    @torch.no_grad()
    def loss() -> float:
        return float(nn.functional.cross_entropy(model(everything[0]), everything[1]))

    before, state = loss(), None
    for round_ in range(6):
        theta, updates = fipa.parameters_of(model), []
        for x, y in clients:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            delta = {name: p.detach() - theta[name] for name, p in model.named_parameters()}
            model.load_state_dict(theta)
            sketch = curvature_of(rule, model, x, delta, round_)
            updates.append(ClientUpdate(delta, len(x), sketch, client_id=len(updates)))
        result = fipa.aggregate(theta, updates, rule, state)
        model.load_state_dict(result.theta)
        state = result.state
    assert loss() < 0.9 * before


def test_layout_of_the_sketch_is_that_of_named_parameters() -> None:
    """A selection of parameters: sketch, update and result all speak of the head alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = normal(8, 2, rng=generator(1))
    sketch = fipa.sketch(model, x, params="2.*", rank=None)
    head = fipa.parameters_of(model, "2.*")
    assert sketch.layout == Layout.of(head)
    delta = {name: torch.ones_like(t) for name, t in head.items()}
    theta = {name: t.detach().clone() for name, t in model.state_dict().items()}
    result = fipa.aggregate(theta, [ClientUpdate(delta, 8, sketch)], CompletedFIPA()).theta
    torch.testing.assert_close(result["2.weight"], theta["2.weight"] + 1)
    assert torch.equal(result["0.weight"], theta["0.weight"])


def test_a_rule_that_returns_no_step_is_named() -> None:
    class Bad:
        def __call__(self, cohort, state):
            return cohort.mean_delta

    theta = {"w": torch.zeros(2)}
    with pytest.raises(fipa.FipaError, match=r"Bad returned a Tensor: a rule returns fipa.Step"):
        fipa.aggregate(theta, [fipa.ClientUpdate({"w": torch.ones(2)}, 1)], rule=Bad())
