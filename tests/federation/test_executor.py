"""One process or two, one factory or another: the numbers are the same to the last bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from federation.cases import START, by_seed, comparable, data, linear, lines, stage
from fipa import FIPA, AdditiveFIPA, Diverged, FedAvg, FedAvgM, FipaError, Problem, Residual
from fipa.clients.descent import SGD, Adam
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.scaffold import Scaffold
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.sketch import SketchPlan
from fipa.federation import parcels
from fipa.federation.adaptive import AdaptiveRank, AdaptiveSteps
from fipa.federation.arm import Arm
from fipa.federation.control import StepControl
from fipa.federation.coordinator import State
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor, Scope
from fipa.federation.messages import Order, Reply
from fipa.federation.parameters import load_theta, save_theta
from fipa.federation.participation import Faults, Participation
from fipa.pde import Points
from fipa.problems.elliptic import elliptic
from fipa.problems.fitting import misfit, sine
from fipa.problems.vision import ConvNet, images
from fipa.spill import Shelf, in_file

FOUR = partial(sine, waves=2, samples=12, hidden=(4,), edges=(0.0, 0.3, 0.5, 0.8, 1.0), grid=16)
FRESH = partial(elliptic, points=Points(interior=12, boundary=4, test=16, fresh=True), hidden=(4,))
DIGITS = partial(images, dataset="digits", model=ConvNet((4, 8), 8), clients=4, samples=30, test_samples=50)
OF_DIGITS, OF_FRESH = 100, 200  # seeds
ALL = partial(by_seed, others={OF_DIGITS: DIGITS, OF_FRESH: FRESH}, usual=FOUR)
FULL = SketchPlan(rank=None)
SCOPE = Scope(0)
ARMS = {
    "adam, fipa, control": Arm(
        "a", (stage(FIPA(0.1), Adam(lr=0.01, epochs=1, batch=5), 3, FULL, control=StepControl()),), group=3
    ),
    "scaffold, momentum, batches": Arm(
        "a", (stage(FedAvgM(0.5), Scaffold(lr=0.1, epochs=1, batch=6), 3),), Participation("uniform", 3), group=2
    ),
    "adaptive": Arm(
        "a",
        (
            stage(
                FIPA(0.1), SGD(lr=0.1, steps=1), 2, FULL, adaptive_rank=AdaptiveRank(), adaptive_steps=AdaptiveSteps()
            ),
        ),
        group=1,
    ),
    "faults, gauss-newton": Arm(
        "a", (stage(FIPA(0.1), GaussNewton(), 4, FULL),), faults=Faults(drop=0.2, late=0.4, max_delay=2), group=1
    ),
    "additive": Arm("a", (stage(AdditiveFIPA(0.1), SGD(lr=0.1, steps=2), 2, AdditivePlan(width=8)),), group=1),
    "centralised": Arm("a", (stage(FedAvg(), GaussNewton(0.1), 2),), centralised=True),
    "points of each round": Arm("a", (stage(FIPA(0.1), GaussNewton(), 2, FULL, control=StepControl()),), group=1),
}


def rounds(executor: Executor, arm: Arm, seed: int = 0) -> list[tuple[State, dict[str, object]]]:
    federation = Federation(arm, seed, executor)
    return [(state, record.plain()) for state, record in federation.rounds(federation.start())]


@pytest.fixture(scope="module")
def two() -> Iterator[Executor]:
    with Executor(ALL, workers=2) as executor:
        yield executor


@pytest.mark.long
@pytest.mark.parametrize("name", ARMS)
def test_two_workers_compute_the_same_bits_as_one(name: str, two: Executor) -> None:
    seed = OF_FRESH if name == "points of each round" else 1
    with Executor(ALL) as one:
        expected = rounds(one, ARMS[name], seed)
    found = rounds(two, ARMS[name], seed)
    assert len(found) == ARMS[name].last
    for (state, record), (same, reference) in zip(found, expected, strict=True):
        assert torch.equal(state.theta, same.theta)
        assert comparable(record) == comparable(reference)
        assert state.shared.keys() == same.shared.keys()
        assert all(torch.equal(state.shared[key], same.shared[key]) for key in same.shared)
        assert state.memories.keys() == same.memories.keys()
        for client, memory in same.memories.items():
            assert all(torch.equal(state.memories[client][key], memory[key]) for key in memory)


def all_in_files(seed: int) -> Problem:
    """Also where workers answer."""
    parcels.LARGE = 1
    return ALL(seed)


@pytest.fixture
def filed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setattr(parcels, "LARGE", 1)
    with Executor(all_in_files, workers=2) as executor:
        yield executor


@pytest.mark.long
def test_much_travels_in_files_and_leaves_none(filed: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = ARMS["faults, gauss-newton"]
    with Executor(ALL) as one:
        expected = rounds(one, arm)
    discarded, discard = list[Path | None](), parcels.Parcel.discard
    monkeypatch.setattr(parcels.Parcel, "discard", lambda parcel: (discarded.append(parcel.file), discard(parcel)))
    found = rounds(filed, arm)
    assert torch.equal(found[-1][0].theta, expected[-1][0].theta)
    assert len(discarded) > 4
    assert None not in discarded
    assert not [file for folder in filed._folders for file in folder.iterdir()]


def test_without_a_folder_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, count in ((tmp_path, 2), (tmp_path / "missing", 1), (None, 1)):
        monkeypatch.setattr("fipa.federation.executor.folder_in_memory", lambda folder=folder: folder)
        with Executor(FOUR, workers=2) as executor:
            places = executor._places()
            assert [place.parent for place in places] == executor._folders
            assert len(places) == count
            assert (places[0].parent.parent == tmp_path) == (count == 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_errors_leave_no_files(filed: Executor) -> None:
    arm = Arm("a", (stage(FedAvg(), SGD(lr=1e200, steps=4), 1),), group=1)
    for _ in range(2):
        with pytest.raises(Diverged):
            rounds(filed, arm)
    assert len(rounds(filed, ARMS["centralised"])) == 2  # which comes after all that the others had begun
    assert not [file for folder in filed._folders for file in folder.iterdir()]


@pytest.mark.long
def test_errors_come_back_from_workers(two: Executor) -> None:
    arm = Arm("a", (stage(FedAvg(), SGD(lr=1e200, steps=4), 1),), group=1)
    with pytest.raises(Diverged, match="round 1: local training of client 0 ended"):
        rounds(two, arm)
    assert len(rounds(two, ARMS["centralised"])) == 2


@pytest.mark.long
def test_workers_change_from_seed_to_seed(two: Executor) -> None:
    """Only one problem is kept in each process, and it is the right one."""
    arm = ARMS["faults, gauss-newton"]
    with Executor(FOUR) as one:
        expected = {seed: rounds(one, arm, seed)[-1][0].theta for seed in (0, 1)}
    assert not torch.equal(expected[0], expected[1])
    for seed in (0, 1, 0):
        assert torch.equal(rounds(two, arm, seed)[-1][0].theta, expected[seed])


def test_answers_come_in_the_order_of_the_groups() -> None:
    with Executor(lines) as executor:
        order = Order(1, torch.tensor(START, dtype=torch.float64), SGD(lr=0.1, steps=1))
        groups = [(2,), (0,), (1,)]
        assert [r.update.client_id for r in executor.start("work", SCOPE, groups, order)()[0]] == [2, 0, 1]
        site = executor.site(SCOPE)
        losses, seconds = executor.start("losses", SCOPE, groups, order.theta)()
        assert losses == [site.losses((m,), order.theta)[0] for m in (2, 0, 1)]
        assert seconds > 0
        gradients, _ = executor.start("gradients", SCOPE, groups, order.theta)()
        assert torch.equal(torch.stack(gradients), torch.cat([site.gradients((m,), order.theta) for m in (2, 0, 1)]))


def test_sites_are_kept_by_seed_and_kind() -> None:
    with Executor(lines) as executor:
        site = executor.site(SCOPE)
        assert executor.site(Scope(0)) is site
        assert len(executor.site(Scope(0, centralised=True)).clients) == 1
        assert executor.site(Scope(1)).seed == 1
        assert not torch.equal(executor.site(Scope(1)).clients[0].data[0].inputs[0], site.clients[0].data[0].inputs[0])


def test_two_arms_on_one_problem_start_alike() -> None:
    """A user's factory may return the problem that it made before, whose model has been trained since."""
    problem = Problem(linear(), [Residual(misfit, *data(0, 0, 4))], lambda model: 0.0)
    with Executor(lambda seed: problem) as executor:
        for centralised in (False, True, False):
            federation = Federation(Arm("a", (stage(FedAvg(), rounds=2),), centralised=centralised), 0, executor)
            start = federation.start()
            assert start.theta.tolist() == list(START)
            list(federation.rounds(start))


def test_threads_are_set_on_entry_and_set_back() -> None:
    before = torch.get_num_threads()
    executor = Executor(lines, threads=before + 1)
    assert torch.get_num_threads() == before
    with executor:
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# --- images, and evaluation while workers are busy ---

TRAINED = Arm("a", (stage(FIPA(0.1), SGD(lr=0.1, epochs=1, batch=8), 2, SketchPlan(rank=5)),), group=1)
HEAD = Arm("a", (stage(FedAvg(), SGD(lr=0.1, epochs=1, batch=8), 2),), group=1, params=("9.*",))


@pytest.mark.long
def test_two_workers_train_an_image_classifier_to_the_same_bits(two: Executor) -> None:
    with Executor(DIGITS) as one:
        expected = rounds(one, TRAINED, OF_DIGITS)
    found = rounds(two, TRAINED, OF_DIGITS)
    head = rounds(two, HEAD, OF_DIGITS)
    for (state, record), (same, reference) in zip(found, expected, strict=True):
        assert torch.equal(state.theta, same.theta)
        assert comparable(record) == comparable(reference)
        assert 0 <= record["metric"] <= 100
    assert found[-1][1]["loss"] < found[0][1]["loss"]
    with Executor(DIGITS) as one:
        for (state, record), (same, reference) in zip(head, rounds(one, HEAD, OF_DIGITS), strict=True):
            assert state.theta.numel() == 8 * 10
            assert torch.equal(state.theta, same.theta)
            assert comparable(record) == comparable(reference)


@pytest.mark.long
def test_evaluation_during_the_next_round_changes_no_record(two: Executor) -> None:
    arm = Arm("a", (stage(FIPA(0.1), Adam(lr=0.01, epochs=1), 4, FULL, control=StepControl()),), group=1)
    federation = Federation(arm, 0, two)
    together = list(federation.rounds(federation.start()))
    state = federation.start()
    for after, record in together:
        state, alone = federation.round(state)
        assert torch.equal(after.theta, state.theta)
        assert comparable(record.plain()) == comparable(alone.plain())
    assert len(together) == 4


@pytest.mark.long
def test_workers_begin_before_the_last_model_is_evaluated(two: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    start, evaluate = Executor.start, Problem.evaluate
    monkeypatch.setattr(
        Executor, "start", lambda self, method, scope, groups, *what, **more: (
            told.append(("start", what[0].round_number)) if method == "work" else None,
            start(self, method, scope, groups, *what, **more))[1]
    )  # fmt: skip
    monkeypatch.setattr(Problem, "evaluate", lambda self, theta: (told.append("evaluate"), evaluate(self, theta))[1])
    federation = Federation(Arm("a", (stage(FedAvg(), rounds=3),), average=0), 0, two)
    for _, record in federation.rounds(federation.start()):
        told.append(("seen", record.round))
    assert told == [
        ("start", 1), ("start", 2), "evaluate", ("seen", 1), ("start", 3), "evaluate", ("seen", 2), "evaluate",
        ("seen", 3),
    ]  # fmt: skip


# --- where arms start, and what they train ---


def test_arms_start_at_parameters_in_a_file(tmp_path: Path) -> None:
    save_theta(tmp_path / "theta.safetensors", torch.tensor([2.0, 3.0], dtype=torch.float64))
    plain = Arm("a", (stage(FedAvg(), rounds=2),))
    arm = replace(plain, start=str(tmp_path / "theta.safetensors"), after=5)
    assert (plain.last, arm.last) == (2, 7)
    with Executor(lines) as executor:
        federation = Federation(arm, 0, executor)
        assert federation.start().theta.tolist() == [2.0, 3.0]
        assert [record["round"] for _, record in rounds(executor, arm)] == [6, 7]
        assert Federation(plain, 0, executor).start().theta.tolist() == list(START)


@pytest.mark.long
def test_an_arm_after_a_warm_up_is_the_rest_of_one_that_has_both(tmp_path: Path) -> None:
    """The same clients, batches and sketches in rounds 3 and 4, and learning rates that have decayed as long."""
    local = SGD(lr=0.1, epochs=1, batch=5, lr_decay=0.5)
    first, second = stage(FedAvg(), local, 2), stage(FIPA(0.1), local, 2, SketchPlan(rank=4))
    some = Participation("uniform", 2)
    with Executor(FOUR) as executor:
        whole = rounds(executor, Arm("a", (first, second), some, average=0, group=1))
        warm = rounds(executor, Arm("a", (first,), some, average=0, group=1))
        save_theta(tmp_path / "theta.safetensors", warm[-1][0].theta)
        start = str(tmp_path / "theta.safetensors")
        rest = rounds(executor, Arm("a", (second,), some, after=2, start=start, average=0, group=1))
    assert len({tuple(record["clients"]) for _, record in whole}) > 1
    for (state, record), (same, reference) in zip(warm + rest, whole, strict=True):
        assert torch.equal(state.theta, same.theta)
        assert comparable(record) == comparable(reference)


def test_parameters_in_a_file_are_kept_to_the_bit(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        theta = torch.randn(7, dtype=dtype, generator=torch.Generator().manual_seed(0))
        save_theta(tmp_path / "theta.safetensors", theta)
        assert torch.equal(load_theta(tmp_path / "theta.safetensors"), theta)
    assert [path.name for path in tmp_path.iterdir()] == ["theta.safetensors"]
    with pytest.raises(FipaError, match=r"absent\.safetensors is missing: it holds the parameters that a warm-up"):
        load_theta(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("name", ["scaffold, momentum, batches", "additive", "faults, gauss-newton"])
def test_updates_in_files_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for sketches beyond the limit, whose steps are found by iteration: close, and in any number of processes."""
    monkeypatch.setattr("fipa.spill.SMALLEST", 1)
    kept: list[bool] = []
    monkeypatch.setattr("fipa.federation.local.Shelf.keep", _noted(kept))
    with Executor(FOUR) as one:
        expected, files = (rounds(one, replace(ARMS[name], memory_limit=limit)) for limit in (2**30, 0))
    assert set(kept) == {False, True}
    for (state, record), (other, its) in zip(expected, files, strict=True):
        if name == "faults, gauss-newton":
            torch.testing.assert_close(other.theta, state.theta, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(other.theta, state.theta)
            assert comparable(its) == comparable(record)


def _noted(kept: list[bool]) -> Callable[[Shelf, Reply], Reply]:
    keep = Shelf.keep

    def noted(shelf: Shelf, reply: Reply) -> Reply:
        found = keep(shelf, reply)
        kept.append(in_file(found.update.delta))
        return found

    return noted


def test_a_step_that_memory_did_not_suffice_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fipa.aggregation.krylov._room", lambda *_: (4, 4))
    arm = Arm("a", (stage(FIPA(1e-4), SGD(lr=0.1, steps=2), 1, FULL),), memory_limit=0)
    with Executor(FOUR) as one:
        ((_, record),) = rounds(one, arm)
    (told,) = [happened["text"] for happened in record["events"]]
    assert re.fullmatch(r"the step may be off by \S+ of its length: raise the damping, or memory_limit", told)
