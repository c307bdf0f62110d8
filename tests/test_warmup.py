"""A warm-up that all arms of a seed start from: run once, resumed, taken from another run, and wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import IMAGES, numbers, results, write

from fipa.config.load import load, validate
from fipa.config.schema import dump
from fipa.errors import FipaError
from fipa.federation.engine import Federation
from fipa.federation.executor import Executor
from fipa.federation.parameters import load_theta
from fipa.federation.record import RoundRecord
from fipa.federation.storage import RunFolder
from fipa.results_files import collect
from fipa.runner import Run

pytestmark = pytest.mark.long  # whole experiments


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int, int, int]] = []
        self.rounds: list[tuple[str, int, int]] = []

    def begin(self, arm: str, seed: int, done: int, total: int, after: int = 0) -> None:
        self.begun.append((arm, seed, done, total, after))

    def round(self, arm: str, seed: int, record: RoundRecord) -> None:
        self.rounds.append((arm, seed, record.round))

    def end(self, arm: str, seed: int, status: str) -> None: ...


class Stop(BaseException):
    """Not an error that anything catches."""


def new(directory: Path, *changes: str, text: str = IMAGES) -> Run:
    directory.mkdir(exist_ok=True)
    run = Run.new(directory / "run", "e", "", load(str(write(directory, text)), list(changes))[1])
    run.start()
    return run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Listener]:
    """A run that nothing happened to."""
    run, listener = new(tmp_path_factory.mktemp("whole")), Listener()
    run.execute(listener)
    return run, listener


@pytest.fixture(scope="module")
def whole(done: tuple[Run, Listener]) -> Run:
    return done[0]


def test_warm_up_runs_once_per_seed_and_then_the_arms(done: tuple[Run, Listener]) -> None:
    assert done[1].begun == [
        (arm, seed, first, last, first)
        for seed in (0, 1)
        for arm, first, last in (("warm-up", 0, 3), ("A", 3, 5), ("B", 3, 5), ("C", 1, 3))
    ]
    assert [k for arm, seed, k in done[1].rounds if (arm, seed) == ("A", 1)] == [4, 5]


def plain(whole: Run, seed: int) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Five rounds of FedAvg without a warm-up."""
    experiment = load(str(whole.directory.parent / "e.toml"))[1]
    arm = replace(experiment.build(False)[0], after=0)
    arm = replace(arm, stages=(replace(arm.stages[0], rounds=5),))
    with Executor(experiment.factory()) as executor:
        federation = Federation(arm, seed, executor)
        return [(state.theta, record.plain()) for state, record in federation.rounds(federation.start())]


def test_arms_go_on_as_if_there_had_been_no_break(whole: Run) -> None:
    """With the same rule: the same clients, batches and metrics, after round 3 for A and after round 1 for C."""
    content = numbers(whole.directory)
    for seed in (0, 1):
        rounds = plain(whole, seed)
        metric = [record["metric"] for _, record in rounds]
        clients = [record["clients"] for _, record in rounds]
        warmup, a, b, c = (content["warmup"]["seeds"][str(seed)], *(content["arms"][n][str(seed)] for n in "ABC"))
        assert len({tuple(chosen) for chosen in clients}) > 1
        assert len(set(metric)) > 2
        assert warmup["metric"] + a["metric"] == metric
        assert warmup["clients"] + b["clients"] == warmup["clients"] + a["clients"] == clients
        assert [*metric[:1], *c["metric"]] == metric[:3]
        assert a["initial_metric"] == b["initial_metric"] == metric[2]
        assert c["initial_metric"] == metric[0]
        assert torch.equal(whole.folder("A", seed).load()[0].theta, rounds[4][0])
        assert torch.equal(whole.folder("C", seed).load()[0].theta, rounds[2][0])
        folder = whole.folder("warm-up", seed)
        assert [torch.equal(load_theta(folder.start(k)), rounds[k - 1][0]) for k in (1, 3)] == [True, True]
        assert not folder.start(2).exists()


def test_results_of_warm_up_and_arms(whole: Run) -> None:
    content = results(whole.directory)
    assert list(content["arms"]) == ["A", "B", "C"]
    warmup = content["warmup"]
    assert (warmup["name"], warmup["rounds"], list(warmup["seeds"])) == ("warm-up", 3, ["0", "1"])
    assert {seed: (curves["status"], curves["after"], len(curves["metric"])) for seed, curves in
            warmup["seeds"].items()} == dict.fromkeys(("0", "1"), ("finished", 0, 3))  # fmt: skip
    for arm, after in (("A", 3), ("B", 3), ("C", 1)):
        for curves in content["arms"][arm].values():
            assert (curves["status"], curves["after"]) == ("finished", after)
            assert len(curves["metric"]) == len(curves["uplink_bytes"]) == 2
    assert content["arms"]["B"]["0"]["ranks"] == [[4, 4], [4, 4]]
    assert set(content["arms"]["B"]["0"]["spectra"]) == {"4", "5"}
    assert content["arms"]["B"]["0"]["downlink_bytes"] == [2 * 4 * 80] * 2  # the last layer, to two clients
    assert "warmup" not in numbers_without_warmup(whole)


def numbers_without_warmup(whole: Run) -> dict[str, Any]:
    experiment = whole.experiment.model_copy(update={"warmup": None, "arms": ()})
    return collect(replace(whole, experiment=experiment), experiment.factory()(0))


def test_head_alone_leaves_the_rest_of_the_model_as_the_warm_up_left_it(whole: Run) -> None:
    """The warm-up's parameters with the arm's last layer in place of its own have the arm's accuracy."""
    problem = whole.experiment.factory()(0)
    theta, head = load_theta(whole.folder("warm-up", 0).start(3)), whole.folder("B", 0).load()[0].theta
    assert head.shape == (80,)
    assert not torch.equal(theta[-80:], head)
    curves = results(whole.directory)["arms"]["B"]["0"]
    assert problem.evaluate(theta) == curves["initial_metric"]
    assert problem.evaluate(torch.cat([theta[:-80], head])) == curves["metric"][-1]


@pytest.mark.parametrize(("arm", "k"), [("warm-up", 1), ("warm-up", 3), ("B", 5)])
def test_stopped_anywhere_and_resumed_to_the_same_bits(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str, k: int
) -> None:
    """While a round of seed 0 is being saved."""
    run = replace(whole, directory=tmp_path / "run")
    run.start()
    save, place = RunFolder.save, run.folder(arm, 0).path

    def torn(self: RunFolder, state: Any, record: Any, *more: Any) -> None:
        if self.path == place and state.round_number == k:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.history.open("a") as history:
                history.write('{"round": ')
            raise Stop
        save(self, state, record, *more)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", torn)
        with pytest.raises(Stop):
            run.execute(Listener())
    assert "1" not in results(tmp_path / "run")["arms"]["A"]
    listener = Listener()
    Run.open(tmp_path / "run").execute(listener)
    assert (arm, 0, k) == listener.rounds[0]
    assert numbers(tmp_path / "run") == numbers(whole.directory)


# --- a warm-up from another run ---


def test_an_adopted_warm_up_is_not_run_again(whole: Run, tmp_path: Path) -> None:
    run, listener = new(tmp_path, "seeds=[1]"), Listener()
    run.adopt(whole.directory)
    run.execute(listener)
    assert {arm for arm, _, _ in listener.rounds} == {"A", "B", "C"}
    assert ("warm-up", 1, 3, 3, 0) in listener.begun
    found, expected = numbers(run.directory), numbers(whole.directory)
    assert found["warmup"]["seeds"]["1"] == expected["warmup"]["seeds"]["1"]
    for arm in "ABC":
        assert found["arms"][arm]["1"] == expected["arms"][arm]["1"]


def test_arms_and_workers_may_differ_from_the_run_with_the_warm_up(whole: Run, tmp_path: Path) -> None:
    run = new(tmp_path, "arms.A.local.lr=0.5", "rounds=1", "engine.workers=2")
    run.adopt(whole.directory)
    for seed in (0, 1):
        ours, theirs = (one.folder("warm-up", seed).start(3).read_bytes() for one in (run, whole))
        assert ours == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("problem.samples=19", r"another \[problem\] than this run: its warm-up would not be the same"),
        ("warmup.local.lr=0.1", r"another \[warmup\] than this run"),
        ("warmup.rounds=4", r"another \[warmup\] than this run"),
        ("engine.group=2", r"another \[engine\] than this run"),
        ("engine.threads=2", r"another \[engine\] than this run"),
        ("seeds=[1, 2]", "has no warm-up of seed 2"),
        ("arms.C.start=2", "has no parameters after round 2"),
    ],
)
def test_warm_ups_that_do_not_fit_are_refused(whole: Run, tmp_path: Path, change: str, message: str) -> None:
    run = new(tmp_path, change)
    with pytest.raises(FipaError, match=message):
        run.adopt(whole.directory)


def test_a_run_cannot_take_its_own(whole: Run) -> None:
    with pytest.raises(FipaError, match="is the run itself"):
        whole.adopt(whole.directory)


def test_no_warm_up_is_run_where_nobody_starts_from_it(tmp_path: Path) -> None:
    run, listener = new(tmp_path, "arms.*.start=0", "seeds=[0]"), Listener()
    run.execute(listener)
    assert {arm for arm, _, _ in listener.rounds} == {"A", "B", "C"}
    assert "warmup" not in numbers(run.directory)


def test_a_warm_up_goes_as_far_as_arms_start_from_it(whole: Run, tmp_path: Path) -> None:
    run, listener = new(tmp_path, "warmup.rounds=50", "arms.*.start=3", "seeds=[0]"), Listener()
    run.execute(listener)
    assert listener.begun[0] == ("warm-up", 0, 0, 3, 0)
    assert [r for arm, _, r in listener.rounds if arm == "warm-up"] == [1, 2, 3]
    ours, theirs = (numbers(one.directory)["arms"] for one in (run, whole))
    assert [ours[arm]["0"] for arm in ("A", "B")] == [theirs[arm]["0"] for arm in ("A", "B")]


def test_an_unfinished_warm_up_is_refused(tmp_path: Path) -> None:
    first = new(tmp_path / "first")
    with pytest.raises(FipaError, match="has no warm-up of seed 0"):
        new(tmp_path / "second").adopt(first.directory)


def test_runs_without_a_warm_up_have_none_to_give_or_to_take(whole: Run, tmp_path: Path) -> None:
    start, end = IMAGES.index("[warmup]"), IMAGES.index("[[arms]]")
    text = (IMAGES[:start] + IMAGES[end:]).replace("start = 1\n", "")
    without = new(tmp_path / "without", text=text)
    with pytest.raises(FipaError, match="e has no warm-up that could be taken from"):
        without.adopt(whole.directory)
    with pytest.raises(FipaError, match=r"another \[warmup\]"):
        new(tmp_path / "with").adopt(without.directory)


# --- divergence ---


def test_a_diverged_warm_up_stops_the_run(tmp_path: Path) -> None:
    run = new(tmp_path, "warmup.local.lr=1e30", "seeds=[0]")
    for again in (run, Run.open(run.directory)):
        with pytest.raises(FipaError, match=r"the warm-up diverged on seed 0, see .*: choose a smaller lr"):
            again.execute(Listener())
    content = results(run.directory)
    assert content["warmup"]["seeds"]["0"]["status"] == "diverged"
    assert content["arms"] == {"A": {}, "B": {}, "C": {}}


# --- settings ---


def test_written_down_and_read_again(whole: Run) -> None:
    content = dump(whole.experiment)
    assert validate(content) == whole.experiment
    assert content["warmup"]["rounds"] == 3
    assert content["warmup"]["local"]["lr"] == 0.2  # of [defaults]
    arms = whole.experiment.build(False)
    assert [(arm.after, arm.last, arm.params) for arm in arms] == [(3, 5, None), (3, 5, ("9.*",)), (1, 3, None)]
    assert whole.experiment.build_warmup(False).last == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("arms.C.start=4", "the warm-up has only 3 rounds"),
        ("warmup.start=1", "start is for arms, not for the warm-up"),
        ("warmup.params='9.*'", "params is for arms, not for the warm-up"),
        ("warmup.name='A'", "an arm is called 'A', too"),
        ("warmup.rounds=0", "greater than or equal to 1"),
        ("arms.A.evaluate_every=0", "greater than or equal to 1"),
    ],
)
def test_wrong_settings(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(FipaError, match=message):
        load(str(write(tmp_path, IMAGES)), [change])


def test_a_start_needs_a_warm_up(tmp_path: Path) -> None:
    text = IMAGES[: IMAGES.index("[warmup]")] + IMAGES[IMAGES.index("[[arms]]") :]
    with pytest.raises(FipaError, match=r"there is no \[warmup\] to start from"):
        load(str(write(tmp_path, text)))


def test_parameters_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FipaError, match="matches no parameter"):
        new(tmp_path, "arms.B.params='head.*'")
