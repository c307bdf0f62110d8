"""The clients' side of a round against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from federation.cases import DOUBLE, START, alike, lines, mean_loss, numbers
from fipa import ClientUpdate, Diverged, FipaError, Layout, Problem, RelativeThreshold, Residual, Sketch, sketch
from fipa.clients.descent import SGD, Adam
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.objective import Objective
from fipa.clients.scaffold import Scaffold
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.sketch import SketchPlan
from fipa.federation.adaptive import AdaptiveRank
from fipa.federation.messages import Order, Reply
from fipa.federation.site import Site
from fipa.problems.fitting import misfit
from fipa.randomness import seed_for

THETA = torch.tensor(START, dtype=DOUBLE)


def test_groups_hold_neighbours_of_one_form() -> None:
    site = Site(lines(0, sizes=(4, 4, 4, 5, 4, 4)), 0)
    assert site.groups(range(6), 16) == [(0, 1, 2), (3,), (4, 5)]
    assert site.groups(range(6), 2) == [(0, 1), (2,), (3,), (4, 5)]
    assert site.groups(range(6), 1) == [(i,) for i in range(6)]
    assert site.groups([0, 2, 5], 16) == [(0, 2, 5)]
    assert site.groups([], 16) == []


def test_only_clients_that_are_asked_are_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the latest stay so; those that come again give the same numbers."""
    made: list[int] = []

    def counted(model: nn.Module, layout: Layout, client: object, *more: object) -> Objective:
        made.append(problem.clients.index(client))
        return Objective(model, layout, client, *more)

    monkeypatch.setattr("fipa.clients.objective.LATEST", 2)
    problem = alike(0)
    monkeypatch.setattr("fipa.clients.objective.Objective", counted)
    site = Site(problem, 0)
    assert made == []
    theta = torch.tensor([0.3, 0.4], dtype=DOUBLE)
    first = site.gradients((0, 3), theta)
    assert made == [0, 3]
    assert site.groups([3, 0, 3], 16) == [(3, 0, 3)]
    assert made == [0, 3]
    site.gradients((1, 2), theta)
    assert site.groups([0, 3], 1) == [(0,), (3,)]
    assert made == [0, 3, 1, 2, 0, 3]
    assert torch.equal(site.gradients((0, 3), theta), first)


@pytest.mark.parametrize("clients", [(0, 1, 2, 3), (3, 1), (2,)])
def test_losses_and_gradients(clients: tuple[int, ...]) -> None:
    site, hand = Site(alike(0), 0), numbers(alike)
    theta = torch.tensor([0.3, 0.4], dtype=DOUBLE)
    assert site.losses(clients, theta) == pytest.approx([hand[m].loss(theta.numpy()) for m in clients])
    expected = np.stack([hand[m].gradient(theta.numpy()) for m in clients])
    np.testing.assert_allclose(site.gradients(clients, theta).numpy(), expected, rtol=1e-12)


def test_centralised_site_has_one_client_with_the_federations_loss() -> None:
    for factory in (lines, alike):
        site, hand = Site(factory(0), 0, centralised=True), numbers(factory)
        assert len(site.clients) == 1
        assert site.clients[0].num_examples == sum(c.n for c in hand)
        assert site.losses([0], THETA) == pytest.approx([mean_loss(hand, THETA.numpy())])


def test_work_with_sgd() -> None:
    """lr 0.1, scaled by 0.5, decayed by 0.8 for two rounds: 0.032."""
    site, hand = Site(alike(0), 0), numbers(alike)
    theta = torch.tensor([0.3, 0.4], dtype=DOUBLE)
    order = Order(3, theta, SGD(lr=0.1, steps=4, lr_decay=0.8), lr_scale=0.5)
    replies = site.work((1, 2), order)
    for reply, m in zip(replies, (1, 2), strict=True):
        assert reply.update.client_id == m
        assert reply.update.num_examples == m + 1
        assert reply.update.sketch is None
        assert reply.local_steps == 4
        assert reply.loss == pytest.approx(hand[m].loss(theta.numpy()))
        np.testing.assert_allclose(reply.update.delta.numpy(), hand[m].sgd(theta.numpy(), 0.032, 4), rtol=1e-10)


def test_curvature_is_taken_at_the_broadcast_model() -> None:
    """Also when the site's model holds other parameters, and after local training."""

    def cubic(u: nn.Module, x: Tensor) -> Tensor:
        return u(x)[:, 0] ** 3

    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=DOUBLE)
    problem = Problem(nn.Linear(2, 1, bias=False).double(), [Residual(cubic, x)], lambda model: 0.0)
    site = Site(problem, 0)
    problem.load(torch.tensor([9.0, 9.0], dtype=DOUBLE))
    J = 3 * (x @ THETA).square()[:, None] * x
    H = J.T @ J / 2
    (reply,) = site.work((0,), Order(1, THETA, SGD(lr=0.01, steps=2), plan=SketchPlan(rank=None)))
    sketch = reply.update.sketch
    torch.testing.assert_close(sketch.eigenvectors * sketch.eigenvalues @ sketch.eigenvectors.T, H)
    (reply,) = site.work((0,), Order(1, THETA, SGD(lr=0.01, steps=2), plan=AdditivePlan(width=3)))
    torch.testing.assert_close(reply.update.sketch.response, H @ reply.update.delta)
    assert reply.update.sketch.test_seed == seed_for(0, "test matrix", 1)


def test_gauss_newton_uses_the_sketch_that_is_sent_or_all_curvature() -> None:
    site, hand = Site(lines(0), 0), numbers()[2]
    gradient = hand.gradient(THETA.numpy())
    full = site.work((2,), Order(1, THETA, GaussNewton()))[0]
    np.testing.assert_allclose(full.update.delta.numpy(), -np.linalg.solve(hand.curvature, gradient), rtol=1e-9)
    assert full.update.sketch is None
    assert full.local_steps == 1
    one = site.work((2,), Order(1, THETA, GaussNewton(), plan=SketchPlan(rank=1)))[0]
    values, vectors = np.linalg.eigh(hand.curvature)
    u = vectors[:, 1]
    np.testing.assert_allclose(one.update.delta.numpy(), -u * (u @ gradient) / values[1], rtol=1e-9)
    assert one.update.sketch.rank == 1


def test_adaptive_rank_by_hand() -> None:
    """The threshold lies between the two eigenvalues' ratio and 1, or below it."""
    site, hand = Site(lines(0), 0), numbers()[2]
    values = np.linalg.eigvalsh(hand.curvature)
    ratio = values[0] / values[1]
    own = np.linalg.norm(hand.gradient(THETA.numpy()))
    for share, rank in ((0.9 * ratio, 2), (1.1 * ratio, 1)):
        adaptive = AdaptiveRank(constant=share * 2 * (own + 3.0))
        order = Order(2, THETA, SGD(lr=0.1, steps=1), plan=SketchPlan(), adaptive_rank=adaptive, gradient_norm=3.0)
        (reply,) = site.work((2,), order)
        assert reply.update.sketch.rank == rank
        assert reply.notes == ()


def test_batches_depend_on_seed_round_and_client_alone() -> None:
    def updates(seed: int, k: int, clients: tuple[int, ...]) -> list[Tensor]:
        site = Site(alike(0), seed)
        order = Order(k, THETA, Adam(lr=0.1, epochs=2, batch=1))
        return [reply.update.delta for reply in site.work(clients, order)]

    pair = updates(0, 1, (1, 2))
    for delta, other in zip(pair, updates(0, 1, (0, 1, 2))[1:], strict=True):
        torch.testing.assert_close(delta, other)
    assert not torch.allclose(pair[0], updates(1, 1, (1,))[0])
    assert not torch.allclose(pair[0], updates(0, 2, (1,))[0])


def test_scaffold_corrects_gradients_and_reports_the_change_of_its_variate() -> None:
    site, hand = Site(alike(0), 0), numbers(alike)
    own, server = torch.tensor([0.2, -0.1], dtype=DOUBLE), torch.tensor([0.05, 0.3], dtype=DOUBLE)
    order = Order(1, THETA, Scaffold(lr=0.1, steps=3), shared={"variate": server}, memories={1: {"variate": own}})
    replies = site.work((0, 1), order)
    for reply, m, c in zip(replies, (0, 1), (torch.zeros(2, dtype=DOUBLE), own), strict=True):
        delta = hand[m].sgd(THETA.numpy(), 0.1, 3, (server - c).numpy())
        np.testing.assert_allclose(reply.update.delta.numpy(), delta, rtol=1e-10)
        change = -server.numpy() - delta / 0.3
        np.testing.assert_allclose(reply.message["change"].numpy(), change, rtol=1e-10)
        np.testing.assert_allclose(reply.memory["variate"].numpy(), c.numpy() + change, rtol=1e-10)


@pytest.mark.parametrize("client", [0, 2])
def test_loss_that_is_not_finite(client: int) -> None:
    problem = alike(0)
    problem.clients[client].data[0].inputs[0][0, 0] = float("nan")
    with pytest.raises(Diverged, match=f"round 5: the loss of client {client} is nan"):
        Site(problem, 0).work((0, 1, 2, 3), Order(5, THETA, SGD(lr=0.1, steps=1)))


def test_update_that_is_not_finite() -> None:
    with pytest.raises(Diverged, match="round 5: local training of client 1 ended in NaN or infinity"):
        Site(lines(0), 0).work((1,), Order(5, THETA, SGD(lr=1e200, steps=4)))


def test_bytes_of_a_reply() -> None:
    """Loss 8; update 2 x 8; sketch (2 x 1 + 1) x 8; variate 2 x 8."""
    delta, layout = torch.zeros(2, dtype=DOUBLE), Layout(("weight",), ((1, 2),))
    sketch = Sketch(torch.zeros(2, 1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE), layout)
    assert Reply(ClientUpdate(delta, 1), 0.0, 1).nbytes == 24
    assert Reply(ClientUpdate(delta, 1, sketch), 0.0, 1).nbytes == 48
    assert Reply(ClientUpdate(delta, 1), 0.0, 1, message={"change": delta}, memory={"variate": delta}).nbytes == 40
    assert Reply(ClientUpdate(delta.float(), 1), 0.0, 1).nbytes == 16


def noisy(seed: int) -> Problem:
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(0.1, 0.7, parameter.numel()).reshape(parameter.shape))  # no two units alike
    x = torch.ones(3, 2, dtype=DOUBLE)
    return Problem(model, [Residual(misfit, x, x[:, 0])], lambda model: 0.0)


@pytest.mark.parametrize("steps", [3, 50])
def test_dropout_is_seeded_like_everything_else(steps: int) -> None:
    """Its noise must not come from torch's global generator, which differs between processes."""
    site = Site(noisy(0), 0, trace=True)
    order = Order(1, site.initial, SGD(lr=0.1, steps=steps))
    torch.manual_seed(1)
    first = site.work((0,), order)[0].update.delta
    torch.manual_seed(2)
    assert torch.equal(site.work((0,), order)[0].update.delta, first)
    again = site.work((0,), Order(2, site.initial, SGD(lr=0.1, steps=steps)))[0].update.delta
    assert not torch.equal(again, first)


def test_losses_are_taken_in_evaluation_mode() -> None:
    """Also by a site whose model has never been anything but in training."""
    problem = noisy(0)
    problem.model.train()
    site = Site(problem, 0)
    (loss,) = site.losses((0,), site.initial)
    x = torch.ones(3, 2, dtype=DOUBLE)
    expected = 0.5 * misfit(problem.model.eval(), x, x[:, 0]).square().mean().item()
    assert loss == pytest.approx(expected)
    problem.model.train()
    expected_gradient = torch.func.grad(lambda t: site._objective(0).loss(t, site._objective(0).terms))
    gradient = site.gradients((0,), site.initial)[0]
    assert not problem.model.training
    torch.testing.assert_close(gradient, expected_gradient(site.initial))


def test_clients_with_the_same_data_draw_other_batches() -> None:
    twins = [Residual(misfit, *alike(0).clients[0].data[0].inputs)] * 2
    problem = Problem(alike(0).model, twins, lambda model: 0.0)
    one, other = Site(problem, 0).work((0, 1), Order(1, THETA, SGD(lr=0.1, steps=1, batch=1)))
    assert not torch.allclose(one.update.delta, other.update.delta)


def test_sketches_are_seeded_by_round_and_client() -> None:
    """Labels that a sketch draws: as `fipa.sketch` does with that seed."""
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    labels = torch.zeros(6, dtype=torch.long)
    model = nn.Linear(2, 3, bias=False).double()
    problem = Problem(model, [(x, labels)] * 2, lambda model: 0.0, loss="cross_entropy")
    site = Site(problem, 4)
    plan = SketchPlan(rank=6, sampled_labels=1, max_examples=3)
    spectra = []
    for k in (1, 2):
        for reply in site.work((0, 1), Order(k, site.initial, SGD(lr=0.1, steps=1), plan=plan)):
            seed = seed_for(4, "sketch", k, reply.update.client_id)
            rank = RelativeThreshold(0.0, max_rank=6)
            expected = sketch(model, (x, labels), rank=rank, sampled_labels=1, max_examples=3, seed=seed)
            torch.testing.assert_close(reply.update.sketch.eigenvalues, expected.eigenvalues)
            spectra.append(tuple(expected.eigenvalues.tolist()))
    assert len(set(spectra)) == 4


def test_dropout_side_by_side_is_refused_whatever_was_computed_before() -> None:
    """A gradient that was traced in evaluation mode must not stand in for one in training mode."""
    one = noisy(0)
    problem = Problem(one.model, [one.clients[0], one.clients[0]], lambda model: 0.0)
    site = Site(problem, 0)
    site.gradients((0, 1), site.initial)
    with pytest.raises(FipaError, match=r"engine\.group = 1"):
        site.work((0, 1), Order(1, site.initial, SGD(lr=0.1, steps=1)))
