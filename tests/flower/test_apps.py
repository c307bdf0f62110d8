"""Apps in the manner of users', turned into FIPA apps by at most ten changed lines, on a grid in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import ndiff
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fipa.errors import FipaError
from fipa.flower.local import LocalGrid
from flower.cases import tensors

APPS = Path(__file__).parent / "apps"
MORE = {  # what the last line takes beside the loader
    "quickstart": "", "batchnorm": "", "text": "", "regression": ', loss="mse"',
    "lightning": ", forward=lambda model, batch: model(batch[0], batch[1])",
}  # fmt: skip


def plain(name: str) -> str:
    return (APPS / f"{name}.py").read_text("utf-8")


def turned(name: str) -> str:
    """The same app with FIPA."""
    changes = {
        "from flwr.serverapp.strategy import FedAvg\n": "from fipa.flower import FIPA, client, reply\n",
        "app = ClientApp()\n": "app = client(ClientApp())\n",
        '    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})\n'
        "    return Message(content=content, reply_to=msg)\n": (
            f"    return reply(msg, context, model, trainloader, metrics{MORE[name]})\n"
        ),
        "    strategy = FedAvg()\n": "    strategy = FIPA(**SETTINGS)\n",
    }
    text = plain(name)
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def module(source: str, settings: Mapping[str, Any] | None = None, **names: Any) -> ModuleType:
    made = ModuleType("app_of_a_user")
    made.__dict__["SETTINGS"] = dict(settings or {})
    exec(compile(source, "app_of_a_user.py", "exec"), made.__dict__)
    made.__dict__.update(names)
    return made


@pytest.mark.parametrize("name", MORE)
def test_ten_changed_lines(name: str) -> None:
    lines = ndiff(plain(name).splitlines(), turned(name).splitlines())
    assert sum(line.startswith(("+ ", "- ")) for line in lines) <= 10


@pytest.mark.parametrize("name", ["quickstart", "batchnorm", "regression", "lightning"])
def test_the_app_learns_and_nothing_is_refused(name: str) -> None:
    before = module(plain(name))
    begin = before.server(LocalGrid(before.app, 3))  # as it is, with Flower's own FedAvg
    assert begin.evaluate_metrics_clientapp[3]["eval_loss"] > 0
    app = module(turned(name))
    result = app.server(LocalGrid(app.app, 3))
    train = result.train_metrics_clientapp
    assert sum(train[k]["refused"] for k in train) == 0
    assert all(train[k]["clients"] == 3 for k in train)
    assert train[3]["loss-after"] < train[1]["loss"]
    assert all(train[k]["loss-after"] <= train[k]["loss"] for k in train)
    assert result.evaluate_metrics_clientapp[3]["eval_loss"] == pytest.approx(train[3]["loss-after"], rel=1e-5)


def test_buffers_by_any_name_are_averaged_if_training_changes_them() -> None:
    app = module(turned("batchnorm"))
    before, after = tensors_of(app.make()), tensors(app.server(LocalGrid(app.app, 3)).arrays)
    assert not torch.equal(after["0.magnitude"], before["0.magnitude"])
    assert not torch.equal(after["2.running_mean"], before["2.running_mean"])
    assert torch.equal(after["0.table"], before["0.table"])


@pytest.mark.long
@pytest.mark.xdist_group("transformers")  # which take long to import
@pytest.mark.parametrize("lora", [True, False])
def test_text_with_adapters_or_tied_weights(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # one that does not fit torch would break transformers, which can do without
        monkeypatch.setitem(sys.modules, "torchvision", None)
    pytest.importorskip("peft")
    app = module(turned("text"), LORA=lora)
    before, after = tensors_of(app.make()), tensors(app.server(LocalGrid(app.app, 2)).arrays)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if lora:
        assert changed
        assert all("lora_" in name for name in changed)
    else:
        ends = "embeddings.word_embeddings.weight", "predictions.decoder.weight"
        one, other = (next(name for name in before if name.endswith(end)) for end in ends)
        assert torch.equal(after[one], after[other])
        assert {one, other} <= changed


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_what_all_clients_say_ends_the_run() -> None:
    """An app that trains on what has no batches: the error has the clients' own words."""
    app = module(turned("quickstart").replace("model, trainloader, metrics", "model, 5, metrics"), {"stop_after": 2})
    with pytest.raises(FipaError, match=r"2 rounds in a row were of no use(.|\n)*client 1: .*a int has no batches"):
        app.server(LocalGrid(app.app, 2))
