"""The code that newcomers copy must run as printed."""

import copy
import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import fipa
from fipa.config.load import validate

ROOT = Path(__file__).parent.parent


def blocks(name, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def problem():
    """Two clients that see two classes of four each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    centres = 2 * torch.randn(4, 8)
    clients = []
    for classes in ((0, 1), (2, 3)):
        y = torch.tensor(classes).repeat(60)
        clients.append((centres[y] + 0.3 * torch.randn(120, 8), y))

    def train(model, x, y):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return model, clients, train


def test_readme_snippet_learns():
    (snippet,) = blocks("README.md")
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 11
    model, clients, train = problem()
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    before = nn.functional.cross_entropy(model(x), y).item()
    for _ in range(5):
        exec(snippet, {"model": model, "clients": clients, "train": train})
    assert nn.functional.cross_entropy(model(x), y).item() < 0.5 * before


def test_guide_snippets_run():
    head, buffers, residuals, additive, state, own, named, _ = blocks("docs/how-to/guide.md")
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 16))
    model.add_module("head", nn.Linear(16, 4))
    names: dict = {"fipa": fipa, "model": model, "data": torch.randn(30, 8)}
    exec(head, names)
    assert names["sketch"].layout.names == tuple(names["delta"]) == ("head.weight", "head.bias")

    _, clients, train = problem()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    names = {"fipa": fipa, "model": model, "clients": clients, "train": train}
    exec(buffers, names)
    mean = sum(b["1.running_mean"] for b in names["buffers"]) / 2
    assert torch.equal(model[1].running_mean, mean)
    assert mean.any()

    names = {}
    exec(residuals, names)
    assert names["sketch"].rank > 5
    assert names["loss"].item() > 0
    sketch = names["sketch"]

    model, clients, train = problem()
    names = {"fipa": fipa, "model": model, "clients": clients, "train": train}
    exec(additive, names)
    model.load_state_dict(names["result"].theta)
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    after = nn.functional.cross_entropy(model(x), y)
    model.load_state_dict(names["theta"])
    assert after < nn.functional.cross_entropy(model(x), y)

    delta = torch.ones(sketch.layout.numel, dtype=torch.float64)
    rounds = [[fipa.ClientUpdate(delta, 10, sketch)]] * 2
    names = {"fipa": fipa, "theta": torch.zeros_like(delta), "rounds": rounds}
    exec(state, names)
    assert set(names["state"]) == {"mean", "square"}

    names = {"fipa": fipa}
    exec(own, names)
    exec(named, names)
    updates = [fipa.ClientUpdate(torch.full((2,), float(v)), 1) for v in (1, 2, 90)]
    assert fipa.aggregate(torch.zeros(2), updates, names["coordinate_median"]).theta.tolist() == [2.0, 2.0]
    named_arm = {"rule": {"name": "trimmed-mean", "trim": 1}, "local": {"name": "sgd", "lr": 0.1, "steps": 1}}
    (arm,) = validate({"problem": {"name": "sine"}, "arms": [{"name": "A"} | named_arm]}).build(True)
    assert fipa.aggregate(torch.zeros(2), updates, arm.stages[0].rule).theta.tolist() == [2.0, 2.0]


@pytest.mark.long
def test_a_federation_round_by_round(capsys):
    names: dict = {}
    exec(blocks("docs/how-to/guide.md")[-1], names)
    metrics = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(metrics) == 10
    assert metrics[-1] < 0.1 * metrics[0]
    assert names["problem"](0).evaluate(names["state"].theta) == pytest.approx(metrics[-1], rel=1e-9)


def test_an_experiment_on_another_one_is_a_few_lines(tmp_path):
    load = pytest.importorskip("fipa.config.load").load
    (snippet,) = [block for block in blocks("docs/how-to/experiments.md", "toml") if block.startswith("base")]
    file = tmp_path / "mine.toml"
    file.write_text(snippet)
    _, mine = load(str(file))
    _, base = load("pde-bratu")
    assert mine.problem.points.interior == 50
    assert [arm.name for arm in mine.arms] == [arm.name for arm in base.arms]
    changed = [one.name for one, other in zip(mine.arms, base.arms, strict=True) if one != other]
    assert changed == ["FIPA controlled, low rank"]


@pytest.mark.long
def test_run_from_python(tmp_path, monkeypatch, capsys):
    (snippet,) = [block for block in blocks("docs/how-to/experiments.md") if "fipa.run(" in block]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    exec(snippet, names)
    assert names["error"].shape == (1, 10)
    assert names["error"][0, -1] < names["results"].metric("FedAvg")[0, -1]
    assert names["sent"] > 0
    assert names["theta"].shape == (31,)
    assert names["page"].resolve() == tmp_path / "runs" / "problem" / "report.html"
    assert "FIPA    10" in capsys.readouterr().out


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def links(text):
    """Targets within the repository: all but those with a scheme, and those in code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose)
    return [target for pair in found for target in pair if target and ":" not in target]


def anchors(text):
    """What headings are called in links, by GitHub's rule: words in lower case, hyphens for spaces, no other signs."""
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        numbered = [name, *(f"{name}-{i}" for i in range(1, len(found) + 1))]
        found.add(next(one for one in numbered if one not in found))  # equal headings are numbered
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_link_to_files_and_sections_that_exist(page):
    for target in links(page.read_text("utf-8")):
        name, _, section = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not section or section in anchors(file.read_text("utf-8")), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_wrapped(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "<", "!"))]
    assert long == []


def test_anchors_follow_githubs_rule():
    text = "# `fipa run`, 2nd\n## Same\n```\n# no heading\n```\n## Same\n### A [link](x.md) -- and more\n"
    assert anchors(text) == {"fipa-run-2nd", "same", "same-1", "a-link----and-more"}
    assert links('[a](b.md#c) `[d](e)` [f](https://g) <img src="h.svg">') == ["b.md#c", "h.svg"]


def test_flower_snippet_makes_a_strategy():
    snippet = blocks("docs/how-to/flower.md")[-1]
    names: dict = {}
    exec(snippet, names)
    assert names["strategy"].precision == "int8"
    assert [stage.rounds for stage in names["strategy"].arm(30).stages] == [10, 20]


def test_flower_apps_with_an_objective_learn(monkeypatch, capsys):
    """All of a client_app.py and of a server_app.py."""
    local = pytest.importorskip("fipa.flower.local")
    model, clients, _ = problem()
    task = types.ModuleType("my_task")
    task.Net, task.load_data = lambda: copy.deepcopy(model), lambda partition: clients[partition]
    monkeypatch.setitem(sys.modules, "my_task", task)
    on_node, on_server, _ = blocks("docs/how-to/flower.md")
    node: dict = {}
    server: dict = {}
    exec(on_node, node)
    exec(on_server, server)
    server["main"](local.LocalGrid(node["app"], 2), None)
    rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if re.match(r"\d+ [\d.e-]+ \d+ \d+ \d+$", line)
    ]
    assert [row[0] for row in rows] == [str(k) for k in range(1, 11)]
    assert float(rows[-1][1]) < 0.1 * float(rows[0][1])
    for _, _, trips, messages, sent in rows:
        assert int(messages) == 4 * int(trips) >= 8  # there and back, for two clients, and at least one trial
        assert int(sent) > 0


def test_the_page_about_the_paper_is_what_its_script_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/results"))
    paper = importlib.import_module("paper")
    assert (ROOT / "docs/paper.md").read_text("utf-8") == paper.text(), "run `python docs/results/paper.py`"
