"""The code that newcomers copy must run as printed."""

import re
from pathlib import Path

import torch
from torch import nn

import fipa

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


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


def test_readme_snippet_learns(capsys):
    (snippet,) = blocks("README.md")
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 13
    model, clients, train = problem()
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    before = nn.functional.cross_entropy(model(x), y).item()
    for _ in range(5):
        exec(snippet, {"model": model, "clients": clients, "train": train})
    assert nn.functional.cross_entropy(model(x), y).item() < 0.5 * before
    assert "Diagnostics(effective_rank=" in capsys.readouterr().out


def test_guide_snippets_run():
    head, residuals, state = blocks("docs/guide.md")
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 16))
    model.add_module("head", nn.Linear(16, 4))
    names: dict = {"fipa": fipa, "model": model, "data": torch.randn(30, 8)}
    exec(head, names)
    assert names["sketch"].layout.names == tuple(names["delta"]) == ("head.weight", "head.bias")

    names = {}
    exec(residuals, names)
    assert names["sketch"].rank > 5
    assert float(names["loss"]) > 0

    delta = torch.ones(names["sketch"].layout.numel, dtype=torch.float64)
    rounds = [[fipa.ClientUpdate(delta, 10, names["sketch"])]] * 2
    names = {"fipa": fipa, "theta": torch.zeros_like(delta), "rounds": rounds}
    exec(state, names)
    assert set(names["state"]) == {"mean", "square"}


def test_docs_link_to_files_that_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\"]+)\"", page.read_text()):
            assert (page.parent / (target[0] or target[1])).exists(), f"{page.name}: {target}"
