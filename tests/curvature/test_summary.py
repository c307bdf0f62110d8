"""What all kinds of curvature have in common, and kinds that users bring themselves."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import fipa
from curvature.cases import make, mlp, randn
from fipa import ClientUpdate, CurvatureSummary, Layout, Step, UpdateError
from fipa.curvature.summary import wrong_shape

LAYOUT = Layout(("a", "b"), ((2,), (3,)))


@dataclass(frozen=True, eq=False)
class Confidence(CurvatureSummary):
    """One number per client."""

    value: Tensor
    layout: Layout
    note: str = ""

    made_by = "confidence_of"

    def tensors(self):
        return {"value": self.value}

    def flaw(self, parameters):
        if bool((self.value < 0).any()):
            return f"has the negative confidence {float(self.value):g} in {parameters} parameters"
        return wrong_shape("value", self.value, ())


def by_confidence(cohort, state):
    """A rule of one's own."""
    values = [c.value for c in cohort.require(Confidence, "by_confidence")]
    parts = [v / sum(values) * d for v, d in zip(values, cohort.deltas, strict=True)]
    return Step(sum(parts), 1.0, 1.0, [float(p @ sum(parts)) for p in parts])


def confident(value, layout=LAYOUT, dtype=torch.float64):
    return Confidence(torch.as_tensor(value, dtype=dtype), layout)


def updates_of(*sketches):
    deltas = [torch.full((5,), float(i), dtype=torch.float64) for i in range(len(sketches))]
    return [ClientUpdate(d, 10, s, client_id=f"c{i}") for i, (d, s) in enumerate(zip(deltas, sketches, strict=True))]


def theta():
    return {"a": torch.zeros(2, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}


def test_a_curvature_and_a_rule_of_ones_own():
    result = fipa.aggregate(theta(), updates_of(confident(1.0), confident(3.0)), by_confidence)
    torch.testing.assert_close(result.theta["a"], torch.full((2,), 0.75, dtype=torch.float64))
    torch.testing.assert_close(result.theta["b"], torch.full((3,), 1.75, dtype=torch.float64))
    assert result.diagnostics.shares == {"c0": 0.0, "c1": 1.0}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (confident(-2.0), r"client 'c1' has the negative confidence -2 in 5 parameters"),
        (confident([1.0, 2.0]), r"client 'c1' sent value of shape \(2,\), expected \(\)"),
        (confident(float("nan")), r"client 'c1' sent NaN or infinity in its value"),
        (confident(1.0, dtype=torch.float32), r"client 'c1' sent value of torch.float32.*\.to\("),
        (confident(1.0, Layout(("a", "c"), ((2,), (3,)))), r"client 'c1' sent a sketch of other parameters"),
        (None, r"client 'c1' sent no sketch, but by_confidence needs a Confidence.*confidence_of\("),
    ],
)
def test_its_problems_are_raised_with_the_clients_name(bad, message):
    with pytest.raises(UpdateError, match=message):
        fipa.aggregate(theta(), updates_of(confident(1.0), bad), by_confidence)


def test_another_kind_than_the_rule_takes():
    with pytest.raises(UpdateError, match=r"client 'c0' sent a Confidence, but FIPA needs a Sketch.*fipa\.sketch\("):
        fipa.aggregate(theta(), updates_of(confident(1.0)), fipa.FIPA())


def kinds():
    model, x = make(mlp), randn(5, 3)
    delta = randn(59, seed=2)
    return {
        "Sketch": fipa.sketch(model, x, "mse", rank=4),
        "DiagonalCurvature": fipa.diagonal_fisher(model, x, "mse"),
        "InputCovariance": fipa.input_covariance(model, x),
        "BasisCurvature": fipa.basis_curvature(
            model, x, "mse", delta=delta, basis=torch.linalg.qr(randn(59, 4, seed=3)).Q
        ),
        "AdditiveStatistics": fipa.additive_statistics(
            model, x, "mse", delta=delta, width=6, test_seed=1, num_examples=5
        ),
        "Confidence": confident(1.0),
    }


SIZES = {
    "Sketch": 59 * 4 + 4,
    "DiagonalCurvature": 59,
    "BasisCurvature": 59 * 4 + 4 * 4 + 4,
    "InputCovariance": 4 * 4 + 6 * 6 + 5 * 5,
    "AdditiveStatistics": 59 * 6 + 59 + 59,
    "Confidence": 1,
}


@pytest.mark.parametrize("kind", SIZES)
def test_to_converts_every_tensor(kind):
    one = kinds()[kind]
    single = one.to(torch.float32)
    assert type(single) is type(one)
    assert single.layout == one.layout
    assert single.tensors().keys() == one.tensors().keys()
    for name, tensor in single.tensors().items():
        before = one.tensors()[name]
        assert (tensor.dtype, before.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(tensor.double(), before, rtol=1e-6, atol=1e-7)
    assert {t.dtype for t in single.to("cpu", torch.float64).tensors().values()} == {torch.float64}
    assert single.flaw(single.layout.numel) is None


@pytest.mark.parametrize("kind", SIZES)
def test_nbytes_counts_every_tensor(kind):
    one = kinds()[kind]
    assert one.nbytes == 8 * SIZES[kind]
    assert one.to(torch.float32).nbytes == 4 * SIZES[kind]
