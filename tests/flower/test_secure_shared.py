"""A shared basis under masks, on a grid in this process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import fipa
from fipa.aggregation.shared import ClientMemory
from fipa.curvature.basis import basis_curvature
from fipa.errors import FipaError
from fipa.federation.basis import Basis
from fipa.federation.shared import SharedStep
from fipa.flower import SecureFIPA, client
from fipa.flower.local import LocalGrid
from fipa.flower.masked_transport import MaskedTransport, _Sum
from fipa.flower.secure.shared import (
    from_gradient,
    from_loss,
    from_matrix,
    gradients_length,
    signs_for,
    to_gradients,
    to_matrix,
)
from fipa.layout import Layout
from flower.cases import data, network, refusals, same, tensors

DOUBLE = torch.float64
M = 6


def model() -> nn.Module:
    return network().double()


def examples(partition: int) -> tuple[Tensor, Tensor]:
    x, y = data(partition)
    return x.double(), y


def objective(context: Context) -> Any:
    return model(), examples(int(context.node_config["partition-id"])), "cross_entropy"


def grid(delay: Any = lambda message, partition: 0, nodes: int = M) -> LocalGrid:
    return LocalGrid(client(ClientApp(), objective=objective), nodes, delay)


def initial() -> ArrayRecord:
    return ArrayRecord(model().state_dict())


def flat(record: ArrayRecord) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors(record).values()])


class Plain:
    """The same rounds with the clients' own numbers in one place, in double precision and without masks."""

    def __init__(self, seed: int, signs: int, damping: float, radius: float) -> None:
        self.seed, self.signs, self.damping, self.radius = seed, signs, damping, radius
        self.network = model()
        self.layout = Layout.of(dict(self.network.named_parameters()))
        self.basis = Basis.empty(self.layout.numel)
        self.k = 0

    @property
    def theta(self) -> Tensor:
        return self.layout.flatten({name: p.detach() for name, p in self.network.named_parameters()})

    def loss(self, m: int) -> Tensor:
        x, y = examples(m)
        return nn.functional.cross_entropy(self.network(x), y)

    def mean(self, clients: Any, values: Any) -> Any:
        weights = {m: len(examples(m)[1]) for m in clients}
        return sum(weights[m] * values[m] for m in clients) / sum(weights.values())

    def round(self, first: Any, second: Any) -> None:
        """Gradients of some clients, curvatures of others."""
        self.k += 1
        gradients = {}
        for m in first:
            found = torch.autograd.grad(self.loss(m), list(self.network.parameters()))
            gradients[m] = torch.cat([g.reshape(-1) for g in found])
        signs = {m: signs_for(self.seed, self.k, m, self.signs) for m in first}
        g = self.mean(first, gradients)
        directions = [self.mean(first, {m: signs[m][j] * gradients[m] for m in first}) for j in range(self.signs)]
        self.basis = self.basis.widened([g, *directions], torch.Generator().manual_seed(self.k), 200)
        Q = self.basis.columns.double()
        matrices = {m: basis_curvature(self.network, examples(m), basis=Q).matrix for m in second}
        theta = self.theta - Q @ self.solved(self.mean(second, matrices), Q.T @ g)
        for p, value in zip(self.network.parameters(), self.layout.unflatten(theta).values(), strict=True):
            p.data.copy_(value)

    def solved(self, S: Tensor, inside: Tensor) -> Tensor:
        """With the least damping that keeps it within the radius."""

        def at(shift: float) -> Tensor:
            return torch.linalg.solve(S + shift * torch.eye(len(S), dtype=DOUBLE), inside)

        low, high = self.damping, self.damping + 1e6
        if float(at(low).norm()) <= self.radius:
            return at(low)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if float(at(middle).norm()) > self.radius else (low, middle)
        return at(high)


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of new columns by the round alone: a digest of the gradients feels the last bit of the fixed point."""
    monkeypatch.setattr(SharedStep, "_generator", lambda self, _: torch.Generator().manual_seed(self.round.k))


@pytest.mark.usefixtures("rotations")
def test_equals_the_same_round_without_masks() -> None:
    settings = {"damping": 0.05, "radius": 0.5}
    strategy = SecureFIPA(
        fipa.SharedFIPA(**settings), local=fipa.FullGradient(), plan=fipa.BasisPlan(), control=False, seed=2, signs=2
    )
    result = strategy.start(grid(), initial(), 4)
    plain = Plain(2, 2, **settings)
    for _ in range(4):
        plain.round(range(M), range(M))
    torch.testing.assert_close(flat(result.arrays), plain.theta, atol=1e-6, rtol=1e-6)
    assert not same(result.arrays, initial())
    p, columns = 43, 12  # three in each round
    numbers = result.train_metrics_clientapp[4]
    assert numbers["uplink-bytes"] == M * 8 * (3 * p + 2 + columns * (columns + 1) // 2 + 1)
    assert numbers["examples"] == sum(len(examples(m)[1]) for m in range(M))
    assert numbers["trips"] == 2
    assert refusals(strategy) == []


@pytest.mark.usefixtures("rotations")
def test_a_client_that_leaves_between_the_trips() -> None:
    def gone(message: Message, partition: int) -> int | None:
        left = "curvatures" in str(message.content.config_records.get("fipa", ""))
        return None if partition == 5 and left else 0

    settings = {"damping": 0.05, "radius": 0.5}
    strategy = SecureFIPA(
        fipa.SharedFIPA(**settings), local=fipa.FullGradient(), plan=fipa.BasisPlan(), control=False, seed=2, signs=2,
        deadline=0.0, grace=0.0,
    )  # fmt: skip
    result = strategy.start(grid(gone), initial(), 3)
    plain = Plain(2, 2, **settings)
    for _ in range(3):
        plain.round(range(M), range(M - 1))
    torch.testing.assert_close(flat(result.arrays), plain.theta, atol=1e-6, rtol=1e-6)
    assert result.train_metrics_clientapp[3]["clients"] == M


@pytest.mark.usefixtures("rotations")
@pytest.mark.parametrize("phase", ["keys", "shares", "masked"])
def test_a_client_that_leaves_during_the_first_trip(phase: str) -> None:
    """It is asked no more in this round."""
    asked: list[str] = []

    def gone(message: Message, partition: int) -> int | None:
        said = message.content.config_records.get("secure", {})
        if partition == 5:
            asked.append(str(said.get("phase")))
        return None if partition == 5 and said.get("phase") == phase else 0

    settings = {"damping": 0.05, "radius": 0.5}
    strategy = SecureFIPA(
        fipa.SharedFIPA(**settings), local=fipa.FullGradient(), plan=fipa.BasisPlan(), control=False, seed=2, signs=2,
        deadline=0.0, grace=0.0,
    )  # fmt: skip
    result = strategy.start(grid(gone), initial(), 1)
    plain = Plain(2, 2, **settings)
    plain.round(range(M - 1), range(M - 1))
    torch.testing.assert_close(flat(result.arrays), plain.theta, atol=1e-6, rtol=1e-6)
    assert asked[-1] == phase
    assert asked.count("keys") == 1


def test_clients_judge_steps_by_their_mean_loss() -> None:
    strategy = SecureFIPA(local=fipa.FullGradient())
    assert strategy.arm(1).stages[0].control == fipa.TrustRegion()
    result = strategy.start(grid(), initial(), 6)
    rounds = [result.train_metrics_clientapp[k] for k in range(1, 7)]
    losses = [numbers["loss"] for numbers in rounds]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]
    for before, after in zip(strategy.records, strategy.records[1:], strict=False):
        assert before.loss_after == pytest.approx(after.loss, abs=1e-7)
    assert all(numbers["trips"] == 2 + numbers["trials"] for numbers in rounds)


def test_who_leaves_before_judging_counts_as_unchanged() -> None:
    def gone(message: Message, partition: int) -> int | None:
        return None if partition == 5 and '"losses"' in str(message.content.config_records.get("fipa", "")) else 0

    strategy = SecureFIPA(local=fipa.FullGradient(), deadline=0.0, grace=0.0)
    strategy.start(grid(gone), initial(), 1)
    (record,) = strategy.records
    assert record.accepted
    whole = SecureFIPA(local=fipa.FullGradient())
    whole.start(grid(), initial(), 1)
    assert record.loss_after is not None
    assert whole.records[0].loss_after is not None
    assert whole.records[0].loss == record.loss
    assert whole.records[0].loss_after != record.loss_after < record.loss


def test_the_server_sees_no_gradient_and_no_loss() -> None:
    class Watched(LocalGrid):
        def _answer(self, message: Message, node: int) -> Message:
            reply = super()._answer(message, node)
            if reply.has_content():
                seen.append(reply)
            return reply

    seen: list[Message] = []
    strategy = SecureFIPA(local=fipa.FullGradient())
    strategy.start(Watched(client(ClientApp(), objective=objective), M), initial(), 2)
    names = {name for reply in seen for name in reply.content}
    assert names == {"fipa", "secure", "masked"}
    assert {name for reply in seen for name in reply.content.config_records.get("fipa", {})} == {
        "partition",
        "objective",
        "evaluate",
    }
    vectors = [reply.content["masked"]["masked"].data for reply in seen if "masked" in reply.content]
    assert len(vectors) == M * sum(record.trips for record in strategy.records)
    words = np.concatenate([np.frombuffer(vector, "<u8") for vector in vectors]).view(np.int64)
    assert 0.9 < np.mean(np.abs(words.astype(float)) > 2.0**58) < 1.0  # as masks are: gradients are below 2^36


def test_a_client_that_lost_its_copy_of_the_basis_is_sent_it_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIPA_CACHE", str(tmp_path))

    def forgetful(message: Message, partition: int) -> int:
        if '"work"' in str(message.content.config_records.get("fipa", "")):
            for file in (tmp_path / "bases").glob(f"*-{partition}-*"):
                file.unlink()
        return 0

    lost = SecureFIPA(local=fipa.FullGradient()).start(grid(forgetful), initial(), 3)
    kept = SecureFIPA(local=fipa.FullGradient()).start(grid(), initial(), 3)
    assert same(lost.arrays, kept.arrays)
    assert lost.train_metrics_clientapp[3]["downlink-bytes"] > kept.train_metrics_clientapp[3]["downlink-bytes"]


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    def strategy() -> SecureFIPA:
        return SecureFIPA(local=fipa.FullGradient(), checkpoint=tmp_path / "state")

    nodes = grid()
    strategy().start(nodes, initial(), 2)
    resumed = strategy().start(nodes, initial(), 4)
    straight = SecureFIPA(local=fipa.FullGradient()).start(grid(), initial(), 4)
    assert same(resumed.arrays, straight.arrays)


def test_fewer_sums_than_clients() -> None:
    """Of four clients three must stay, so there are two sums, whatever was asked for."""
    strategy = SecureFIPA(local=fipa.FullGradient(), control=False, signs=10)
    result = strategy.start(grid(nodes=4), initial(), 1)
    assert result.train_metrics_clientapp[1]["uplink-bytes"] == 4 * 8 * (2 * 43 + 2 + 3 + 1)


def test_clients_refuse_as_many_sums_as_there_are_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: MaskedTransport, ask: Any, order: Any) -> Any:
        return plainly(self, replace(ask, question=replace(order, signs=3)), replace(order, signs=3))

    def plainly(self: MaskedTransport, ask: Any, order: Any) -> Any:
        return _Sum(self, ask, gradients_length(43, 3), 4).answers(lambda total: None)

    monkeypatch.setattr(MaskedTransport, "_gradients", greedy)
    strategy = SecureFIPA(local=fipa.FullGradient(), deadline=0.0, grace=0.0)
    result = strategy.start(grid(), initial(), 1, timeout=0.2)
    assert same(result.arrays, initial())
    assert all("asks for 4 sums of as few as 4 clients" in text for text in refusals(strategy)[:M])


def test_validation_on_the_server_judges_alone() -> None:
    def validate(arrays: ArrayRecord) -> float:
        calls.append(float(flat(arrays).norm()))
        return -len(calls)  # always better

    calls: list[float] = []
    strategy = SecureFIPA(local=fipa.FullGradient(), validate=validate)
    result = strategy.start(grid(), initial(), 1)
    assert calls
    assert result.train_metrics_clientapp[1]["trips"] >= 4
    assert not same(result.arrays, initial())


@pytest.mark.parametrize("local", [fipa.FullGradient(), fipa.FullGradient(augment=True)])
@pytest.mark.parametrize("control", [True, False, fipa.StepControl()])
def test_controls(local: Any, control: Any) -> None:
    rule = fipa.SharedFIPA(damping=0.1, weight_decay=0.01, columns=8)
    result = SecureFIPA(rule, local=local, control=control, signs=0).start(grid(nodes=4), initial(), 10)
    assert result.train_metrics_clientapp[10]["loss"] < 0.8 * result.train_metrics_clientapp[1]["loss"]


@pytest.mark.parametrize(
    ("rule", "settings", "words"),
    [
        (fipa.SharedFIPA(memory=ClientMemory(discount=0.9)), {}, "discount=0.9"),
        (fipa.SharedFIPA(memory=ClientMemory(forget=3)), {}, "forget=3"),
        (fipa.SharedFIPA(memory=ClientMemory(limit=3)), {}, "limit=3"),
        (fipa.SharedFIPA(parts=4), {}, "parts=4"),
        (fipa.SharedFIPA(bits=8), {}, "bits=8"),
        (fipa.SharedFIPA(), {"local": fipa.SGD(0.1, 1)}, "SGD"),
        (fipa.SharedFIPA(), {"local": None}, "local=None"),
        (None, {"signs": -1}, "signs=-1"),
        (None, {"local": None, "signs": 2}, "signs=2"),
        (None, {"warmup_rounds": 2}, "warmup_rounds"),
        (None, {"late": 0.5}, "late"),
        (None, {"seen": {0: (1, torch.zeros(43))}}, "seen"),
    ],
)
def test_what_has_no_meaning_under_masks(rule: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FipaError, match="SecureFIPA") as error:
        SecureFIPA(rule, **{"local": fipa.FullGradient()} | settings)
    assert words in str(error.value)


def test_vectors_and_back() -> None:
    update, signs = torch.randn(5, dtype=DOUBLE), signs_for(3, 1, 7, 2)
    one, two = from_gradient(update, 0.5, 4, signs), from_gradient(2 * update, 2.0, 12, -signs)
    means = to_gradients(one + two, 5, DOUBLE)
    torch.testing.assert_close(means.update, 1.75 * update)
    torch.testing.assert_close(means.directions[0], -1.25 * signs[0] * update)
    assert (means.loss, means.num_examples, len(means.directions)) == (1.625, 16, 2)
    matrix = torch.randn(3, 3, dtype=DOUBLE)
    matrix = matrix + matrix.T
    torch.testing.assert_close(to_matrix(from_matrix(matrix, 2) + from_matrix(3 * matrix, 2), 3, DOUBLE), 2 * matrix)
    assert from_loss(1.0, 0.5, 4) == -2.0
    assert from_loss(1.0, math.inf, 2) == from_loss(1.0, math.nan, 2) == 2000.0


def test_signs_differ_by_round_client_and_seed() -> None:
    drawn = [signs_for(*where, 64).tolist() for where in ((0, 1, 1), (0, 1, 2), (0, 2, 1), (1, 1, 1))]
    assert len({tuple(one) for one in drawn}) == 4
    assert signs_for(0, 1, 1, 64).tolist() == drawn[0]
