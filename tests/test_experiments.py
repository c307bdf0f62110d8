"""What the shipped experiments promise, on one seed and as short as it can be; the rest is `fipa run`."""

from pathlib import Path

import pytest
import tiny

from fipa.config.load import load
from fipa.runner import Run

ROOT = Path(__file__).parent.parent


class Nobody:
    def begin(self, *_): ...
    def round(self, *_): ...
    def end(self, *_): ...


def curves(tmp_path, name, arms, *overrides):
    experiment = load(name, overrides)[1]
    chosen = tuple(arm for arm in experiment.arms if arm.name in arms)
    left = {key: None for key in ("control", "reference") if getattr(experiment, key) not in arms}
    run = Run.new(tmp_path, name, "", experiment.model_copy(update={"arms": chosen, **left}))
    run.start()
    return {arm: seeds["0"] for arm, seeds in run.execute(Nobody())["arms"].items()}


@pytest.mark.convergence
def test_controlled_fipa_reaches_1e_5(tmp_path):
    arm = "FIPA controlled, low rank"
    curve = curves(tmp_path, "fit-sin2", [arm], "rounds=16", "engine.group=1")[arm]
    assert curve["metric"][-1] <= 1e-5
    assert curve["loss"] == sorted(curve["loss"], reverse=True)  # it never lets the clients' loss rise


@pytest.mark.convergence
def test_exact_local_solves_follow_centralised_gauss_newton(tmp_path):
    arms = ["centralised GN", "FIPA, exact local solves"]
    both = curves(tmp_path, "fit-gauss-newton", arms, "arms.*.rounds=7", "engine.group=1")
    assert max(both["FIPA, exact local solves"]["gap"]) < 1e-6
    assert len(both["FIPA, exact local solves"]["gap"]) == 7


def test_demo_arms_spend_the_same_local_work():
    arms = {arm.name: arm for arm in load("demo")[1].arms}
    assert len(arms) == 5
    work = {(arm.rounds or 30) * arm.local.steps for arm in arms.values() if arm.local.name == "adam"}
    assert work == {6000}


@pytest.mark.long
def test_the_example_of_a_users_own_problem(tmp_path):
    out = tmp_path / "out"
    file = ROOT / "examples/own_problem.py"
    arm = "FIPA, Gauss-Newton clients"
    options = ["--arm", arm, "--rounds", 12, "--set", "engine.group=1"]
    done = tiny.fipa("run", file, "--out", out, "--json", *options, report=True)
    assert done.code == 0
    metric = tiny.results(out)["arms"][arm]["0"]["metric"]
    assert metric[-1] < 1e-3 * metric[0]
    assert (out / "report.html").exists()


@pytest.mark.long
def test_the_documented_toml_runs(tmp_path):
    page = (ROOT / "docs/how-to/experiments.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0]
    (tmp_path / "own_problem.py").write_text((ROOT / "examples/own_problem.py").read_text())
    (tmp_path / "mine.toml").write_text(text)
    options = ["--rounds", 12, *tiny.options(["defaults.local.steps=5", "engine.group=1"])]
    done = tiny.fipa("run", tmp_path / "mine.toml", "--out", tmp_path / "out", "--quiet", *options)
    assert done.code == 0
    clients = tiny.results(tmp_path / "out")["arms"]["warm-up, then FIPA"]["0"]["clients"]
    assert max(map(len, clients[:1])) <= 2


@pytest.mark.convergence
@pytest.mark.parametrize(
    ("name", "kind", "error", "settings"),
    [
        ("pde-bratu", "accelerated", 2e-4, ["rounds=13", "problem.points={interior=100, test=200}"]),
        ("poisson-2d", "accelerated", 2e-3, ["rounds=16", "problem.points={interior=100, boundary=20, test=200}"]),
        ("pde-inverse", "accelerated", 1e-3, ["rounds=9", "problem.noise=0"]),
        ("pde-fisher", "corrected", 2e-5, ["arms.*.rounds=22", "problem.points={interior=100, test=200}"]),
    ],
)
def test_fipa_solves_equations_at_a_low_rank(tmp_path, name, kind, error, settings):
    """One of each family: `problems/` holds every equation against sympy."""
    arm = f"FIPA {kind}, low rank"
    curve = curves(tmp_path, name, [arm], "engine.group=1", *settings)[arm]
    assert curve["metric"][-1] <= error
    assert curve["loss"] == sorted(curve["loss"], reverse=True)


@pytest.mark.convergence
def test_the_example_of_a_users_own_equation(tmp_path):
    out = tmp_path / "out"
    arm = "FIPA, Gauss-Newton clients"
    file = str(ROOT / "examples/own_pde.py")
    done = tiny.fipa(
        "run", file, "--arm", arm, "--out", str(out), "--json", "--rounds", "12", "--set", "engine.group=1"
    )
    assert done.code == 0
    metric = tiny.results(out)["arms"][arm]["0"]["metric"]
    assert metric[-1] < 0.02


@pytest.mark.convergence
def test_the_example_of_own_images(tmp_path):
    out, file = tmp_path / "out", str(ROOT / "examples/own_images.py")
    assert tiny.fipa("run", file, "--out", str(out), "--json", "--rounds", "4").code == 0
    assert min(run["0"]["metric"][-1] for run in tiny.results(out)["arms"].values()) > 60  # of four classes


@pytest.mark.convergence
def test_fipa_controlled_beats_fedavg_on_digits(tmp_path):
    """Accuracy that twenty unlike clients reach together, in the rounds of one seed."""
    arms = ["FedAvg", "FIPA controlled"]
    both = curves(tmp_path, "digits", arms, "seeds=[0]", "rounds=2", "warmup.rounds=3")
    fedavg, fipa = (both[arm]["metric"][-1] for arm in arms)
    assert fipa > fedavg + 10
    loss = both["FIPA controlled"]["loss"]
    assert loss == sorted(loss, reverse=True)
