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
    curve = curves(tmp_path, "fit-sin2", [arm], f"arms.{arm}.rounds=40", "rounds=40")[arm]
    assert curve["metric"][-1] <= 1e-5
    assert curve["loss"] == sorted(curve["loss"], reverse=True)  # it never lets the clients' loss rise


@pytest.mark.convergence
def test_exact_local_solves_follow_centralised_gauss_newton(tmp_path):
    arms = ["centralised GN", "FIPA, exact local solves"]
    both = curves(tmp_path, "fit-gauss-newton", arms, "arms.*.rounds=20")
    assert max(both["FIPA, exact local solves"]["gap"]) < 1e-6
    assert len(both["FIPA, exact local solves"]["gap"]) == 20


def test_demo_arms_spend_the_same_local_work():
    arms = {arm.name: arm for arm in load("demo")[1].arms}
    assert len(arms) == 5
    work = {(arm.rounds or 30) * arm.local.steps for arm in arms.values() if arm.local.name == "adam"}
    assert work == {6000}


@pytest.mark.long
def test_the_example_of_a_users_own_problem(tmp_path):
    out = tmp_path / "out"
    file = ROOT / "examples/own_problem.py"
    done = tiny.fipa("run", file, "--out", out, "--json", "--rounds", 15, report=True)
    assert done.code == 0
    metric = tiny.results(out)["arms"]["FIPA, Gauss-Newton clients"]["0"]["metric"]
    assert metric[-1] < 1e-3 * metric[0]
    assert (out / "report.html").exists()


@pytest.mark.long
def test_the_documented_toml_runs(tmp_path):
    page = (ROOT / "docs/how-to/experiments.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0]
    (tmp_path / "own_problem.py").write_text((ROOT / "examples/own_problem.py").read_text())
    (tmp_path / "mine.toml").write_text(text)
    done = tiny.fipa("run", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out"), "--quiet", "--rounds", "12")
    assert done.code == 0
    clients = tiny.results(tmp_path / "out")["arms"]["warm-up, then FIPA"]["0"]["clients"]
    assert max(map(len, clients[:1])) <= 2


@pytest.mark.convergence
@pytest.mark.parametrize(
    ("name", "error", "settings"),
    [
        ("pde-bratu", 1e-4, ["rounds=20"]),
        ("poisson-2d", 1e-3, ["rounds=25", "problem.points={interior=300, boundary=40, test=500}"]),
        ("pde-inverse", 1e-3, ["rounds=15", "problem.noise=0"]),
    ],
)
def test_accelerated_fipa_solves_equations(tmp_path, name, error, settings):
    """One of each family: `problems/` holds every equation against sympy."""
    arm = "FIPA accelerated, low rank"
    curve = curves(tmp_path, name, [arm], *settings)[arm]
    assert curve["metric"][-1] <= error
    assert curve["loss"] == sorted(curve["loss"], reverse=True)


@pytest.mark.convergence
def test_corrected_fipa_solves_an_equation_to_seven_digits(tmp_path):
    """What single-site solvers reach, from two clients at a low rank."""
    arm = "FIPA corrected, low rank"
    curve = curves(tmp_path, "pde-fisher", [arm])[arm]
    assert curve["metric"][-1] <= 1e-7
    assert curve["loss"] == sorted(curve["loss"], reverse=True)


@pytest.mark.convergence
def test_the_example_of_a_users_own_equation(tmp_path):
    out = tmp_path / "out"
    arm = "FIPA, Gauss-Newton clients"
    file = str(ROOT / "examples/own_pde.py")
    done = tiny.fipa("run", file, "--arm", arm, "--out", str(out), "--json", "--rounds", "12")
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
    both = curves(tmp_path, "digits", arms, "seeds=[0]", "rounds=5", "warmup.rounds=5")
    fedavg, fipa = (both[arm]["metric"][-1] for arm in arms)
    assert fipa > fedavg + 5
    loss = both["FIPA controlled"]["loss"]
    assert loss == sorted(loss, reverse=True)
