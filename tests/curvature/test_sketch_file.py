"""The `Sketch` object: saving, loading, cutting, converting."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fipa
from curvature.cases import (
    case,
    make,
    mlp,
    randn,
)
from fipa import Sketch, SketchError, sketch

X = randn(5, 3)


@pytest.mark.parametrize("name", ["mlp/cross_entropy", "cnn/mse/head", "mlp/pde"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_save_and_load(name, dtype, tmp_path):
    one = case(name)
    saved = sketch(one.model, one.data, one.loss, rank=3, params=one.params).to(dtype)
    saved.save(tmp_path / "sketch.safetensors")
    loaded = Sketch.load(tmp_path / "sketch.safetensors")
    for field in ("eigenvectors", "eigenvalues"):
        assert getattr(loaded, field).dtype == dtype
        assert torch.equal(getattr(loaded, field), getattr(saved, field))
    for field in ("layout", "loss", "num_examples", "trace", "rank", "nbytes", "residual"):
        assert getattr(loaded, field) == getattr(saved, field)


def test_save_and_load_views_and_nothing(tmp_path):
    full = sketch(make(mlp), X, "mse", rank=6)
    no_curvature = sketch(make(lambda: nn.Linear(3, 2, bias=False)), X * 0, rank=None)
    for one in (full.truncate(2), full.truncate(0), no_curvature):
        one.save(str(tmp_path / "one"))
        loaded = Sketch.load(str(tmp_path / "one"))
        assert torch.equal(loaded.eigenvectors, one.eigenvectors)
        assert loaded.rank == one.rank
        assert loaded.trace == one.trace


def test_save_without_a_trace(tmp_path):
    Sketch(torch.eye(3), torch.ones(3), fipa.Layout(("w",), ((3,),))).save(tmp_path / "one")
    assert math.isnan(Sketch.load(tmp_path / "one").trace)


def test_files_that_are_no_sketch_are_refused(tmp_path):
    (tmp_path / "text").write_text("not a sketch")
    (tmp_path / "empty").write_bytes(b"")
    save_file({"eigenvectors": torch.eye(2)}, str(tmp_path / "no metadata"))
    save_file({"eigenvectors": torch.eye(2)}, str(tmp_path / "other format"), {"format": "pt"})
    tag = {"format": "fipa-sketch-1"}
    save_file({"eigenvectors": torch.eye(2)}, str(tmp_path / "no eigenvalues"), tag)
    save_file({"eigenvectors": torch.eye(2), "eigenvalues": torch.ones(2)}, str(tmp_path / "no layout"), tag)
    good = sketch(make(mlp), X, "mse", rank=6)
    good.save(tmp_path / "good")
    (tmp_path / "cut short").write_bytes((tmp_path / "good").read_bytes()[:-20])
    for path in sorted(tmp_path.iterdir()):
        if path.name != "good":
            with pytest.raises(SketchError, match=path.name):
                Sketch.load(path)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Sketch.load(tmp_path / "nothing")


def test_truncate():
    full = sketch(make(mlp), X, "mse", rank=6)
    two = full.truncate(2)
    assert torch.equal(two.eigenvectors, full.eigenvectors[:, :2])
    assert torch.equal(two.eigenvalues, full.eigenvalues[:2])
    assert (two.layout, two.loss, two.num_examples, two.trace) == (full.layout, "mse", 5, full.trace)
    assert two.residual > full.residual
    assert full.truncate(99).rank == 6


def test_truncate_refuses_a_negative_rank():
    with pytest.raises(SketchError, match=r"rank.*-1"):
        sketch(make(mlp), X, "mse", rank=3).truncate(-1)


def test_to_and_nbytes():
    one = sketch(make(mlp), X, "mse", rank=6)
    assert one.nbytes == (59 * 6 + 6) * 8
    half = one.to(torch.float32)
    assert half.nbytes == one.nbytes // 2
    assert half.eigenvectors.dtype == half.eigenvalues.dtype == torch.float32
    torch.testing.assert_close(half.eigenvectors.double(), one.eigenvectors, rtol=1e-6, atol=1e-7)
    assert (half.layout, half.trace, half.num_examples) == (one.layout, one.trace, one.num_examples)
