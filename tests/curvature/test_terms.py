"""From losses and data to terms: factors of the loss Hessian, forms of the data, sampling, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fipa
from curvature.cases import CLASSES, ROUTES, dense, make, mlp, model_and_inputs, operator_of, oracle, randn
from fipa import FipaError, Residual, SketchError
from fipa.curvature.terms import terms_of

steady = settings(max_examples=60, deadline=None, derandomize=True)
logits = st.lists(st.floats(-800, 800), min_size=2, max_size=6).map(lambda z: torch.tensor([z], dtype=torch.float64))


def factor_of(model, x, loss="cross_entropy", **options):
    """B of all examples, at the outputs x of an identity model."""
    defaults = {"max_examples": None, "sampled_labels": None, "generator": torch.Generator().manual_seed(0)}
    (term,) = terms_of(model, x, loss, {"scale": torch.ones(1, dtype=x.dtype)}, **(defaults | options))
    return term.factor(x, term.extra)


class Outputs(nn.Module):
    """Outputs are the inputs, so that logits can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale


# --- factors -----------------------------------------------------------------------------------------------------


@steady
@given(logits)
def test_softmax_factor(z):
    B = factor_of(Outputs(), z)[0]
    p = z[0].softmax(0)
    assert B.shape == (len(p), len(p) - 1)
    torch.testing.assert_close(B @ B.T, torch.diag(p) - torch.outer(p, p), rtol=1e-12, atol=1e-15)


def test_softmax_factor_keeps_its_digits_for_confident_predictions():
    # p = (1 - 2e-13, 1e-13, 1e-13): S is of order 1e-13, and is computed to many digits of that
    tiny = 1e-13
    z = torch.tensor([[0.0, math.log(tiny), math.log(tiny)]], dtype=torch.float64)
    B = factor_of(Outputs(), z)[0]
    expected = tiny * torch.tensor([[2.0, -1, -1], [-1, 1, 0], [-1, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(B @ B.T, expected, rtol=1e-6, atol=1e-6 * tiny)


@steady
@given(st.integers(1, 5), st.integers(1, 4))
def test_mse_factor(examples, width):
    B = factor_of(Outputs(), torch.zeros(examples, width, dtype=torch.float64), "mse")
    expected = torch.eye(width, dtype=torch.float64).expand(examples, -1, -1) / examples
    torch.testing.assert_close(B @ B.transpose(1, 2), expected)


@steady
@given(logits, st.integers(1, 5), st.integers(0, 100))
def test_sampled_factor_is_a_one_hot_minus_the_mean(z, labels, seed):
    generator = torch.Generator().manual_seed(seed)
    B = factor_of(Outputs(), z, sampled_labels=labels, generator=generator)[0] * math.sqrt(labels)
    p = z[0].softmax(0)
    hot = B + p[:, None]
    torch.testing.assert_close(hot.round(), hot, rtol=0, atol=1e-12)
    torch.testing.assert_close(hot.sum(0), torch.ones(labels, dtype=torch.float64))
    drawn = hot.argmax(0)
    assert bool((p[drawn] > 0).all())


# --- sampled labels ----------------------------------------------------------------------------------------------


def sampled(seed, labels=1, route="rows", model=None, x=None):
    model = make(lambda: nn.Linear(2, 3)) if model is None else model
    x = randn(4, 2) if x is None else x
    return dense(operator_of(model, x, "cross_entropy", sampled_labels=labels, seed=seed, route=route))


def test_sampled_labels_are_unbiased():
    # every entry of the mean over 400 seeds within 6 standard errors: 81 entries x 2e-9, a false alarm below 1e-6
    exact = oracle(make(lambda: nn.Linear(2, 3)), randn(4, 2), "cross_entropy")
    draws = torch.stack([sampled(seed) for seed in range(400)])
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - exact).abs() <= 6 * error + 1e-12).all())
    assert float(error.max()) < 0.1 * float(exact.abs().max())  # the test has the power to see a bias


def test_many_sampled_labels_approach_the_exact_matrix():
    # relative error about 1 / sqrt(4 * 20000) = 0.4 %; 5 % is more than ten standard errors
    exact = oracle(make(lambda: nn.Linear(2, 3)), randn(4, 2), "cross_entropy")
    estimate = sampled(0, labels=20_000)
    assert float(torch.linalg.norm(estimate - exact)) < 0.05 * float(torch.linalg.norm(exact))


@pytest.mark.parametrize("labels", [1, 3])
def test_sampled_labels_depend_on_the_seed_alone(labels):
    model, x = model_and_inputs("mlp")

    def matrix(seed, route="rows"):
        options = {"sampled_labels": labels, "seed": seed, "params": "4.*"} | ROUTES[route]
        return dense(operator_of(model, x, "cross_entropy", **options))

    expected = matrix(seed=5)
    assert torch.equal(matrix(seed=5), expected)
    assert not torch.allclose(matrix(seed=6), expected)
    for route in ROUTES:
        torch.testing.assert_close(matrix(seed=5, route=route), expected, rtol=1e-10, atol=1e-12)


def test_sampled_labels_give_that_many_rows():
    model, x = model_and_inputs("mlp")
    assert operator_of(model, x, "cross_entropy", sampled_labels=4).rows == 4 * len(x)


# --- sub-sampling ------------------------------------------------------------------------------------------------


def example_matrices(model, x, loss):
    return [oracle(model, x[i : i + 1], loss) for i in range(len(x))]


def test_max_examples_is_a_mean_over_distinct_examples():
    model, x = model_and_inputs("mlp")
    singles = example_matrices(model, x, "mse")
    pairs = {(i, j): (singles[i] + singles[j]) / 2 for i in range(len(x)) for j in range(i)}
    drawn = set()
    for seed in range(30):
        H = dense(operator_of(model, x, "mse", max_examples=2, seed=seed))
        match = [pair for pair, mean in pairs.items() if torch.allclose(H, mean, rtol=1e-10, atol=1e-12)]
        assert len(match) == 1  # never the same example twice
        drawn.add(match[0])
    assert len(drawn) > 5  # of ten pairs: the seed decides


def test_max_examples_is_deterministic_and_counted():
    model, x = model_and_inputs("mlp")
    one, two = (fipa.sketch(model, x, "mse", rank=3, max_examples=2, seed=4) for _ in range(2))
    assert one.num_examples == 2
    assert torch.equal(one.eigenvectors, two.eigenvectors)
    assert torch.equal(one.eigenvalues, two.eigenvalues)


@pytest.mark.parametrize("most", [5, 6, 1000])
def test_max_examples_at_or_above_the_number_takes_all(most):
    model, x = model_and_inputs("mlp")
    assert torch.equal(dense(operator_of(model, x, "mse", max_examples=most)), dense(operator_of(model, x, "mse")))


def test_max_examples_reaches_over_batches_of_unequal_shape():
    model = make(lambda: nn.Sequential(nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(2, 3)))
    batches = [randn(3, 1, 4), randn(4, 1, 6, seed=2)]
    singles = [oracle(model, b[i : i + 1], "mse") for b in batches for i in range(len(b))]
    for seed in range(5):
        operator = operator_of(model, batches, "mse", max_examples=4, seed=seed)
        assert operator.rows == 4 * 3
        # the best non-negative combination of the single matrices must be a mean of four of them
        stacked = torch.stack(singles).flatten(1)
        weights = torch.linalg.lstsq(stacked.T, dense(operator).flatten()[:, None]).solution[:, 0]
        torch.testing.assert_close(weights @ stacked, dense(operator).flatten(), rtol=1e-8, atol=1e-10)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)


# --- forms of the data -------------------------------------------------------------------------------------------

X, Y = randn(7, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0])
FORMS = {
    "(x, y)": lambda: (X, Y),
    "list of x": lambda: [X[:4], X[4:]],
    "list of (x, y)": lambda: [(X[:4], Y[:4]), (X[4:], Y[4:])],
    "list of [x, y]": lambda: [[X[:4], Y[:4]], [X[4:], Y[4:]]],
    "tuple of (x, y)": lambda: ((X[:4], Y[:4]), (X[4:], Y[4:])),
    "generator": lambda: ((X[i : i + 3], Y[i : i + 3]) for i in range(0, 7, 3)),
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=3),
    "DataLoader of x": lambda: DataLoader(TensorDataset(X), batch_size=2),
    "with an empty batch": lambda: [X[:0], X],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_all_forms_of_the_data_give_the_same_sketch(form, loss):
    model = make(mlp)
    expected = fipa.sketch(model, X, loss, rank=4)
    result = fipa.sketch(model, FORMS[form](), loss, rank=4)
    assert result.num_examples == 7
    torch.testing.assert_close(result.eigenvalues, expected.eigenvalues, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.eigenvectors, expected.eigenvectors, rtol=0, atol=1e-10)


def test_batches_of_one_shape_become_one_term():
    # one forward pass for all, rather than one per batch of a DataLoader
    options = {"max_examples": None, "sampled_labels": None, "generator": torch.Generator()}
    terms = terms_of(make(mlp), [(X[:4], Y[:4]), (X[4:], Y[4:])], "mse", dict(make(mlp).named_parameters()), **options)
    assert [term.examples for term in terms] == [7]


def test_data_are_cast_to_the_dtype_of_the_model():
    model = make(mlp)
    H = dense(operator_of(model, X.float(), "mse"))
    assert H.dtype == torch.float64
    torch.testing.assert_close(H, oracle(model, X.float().double(), "mse"), rtol=1e-10, atol=1e-12)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, *, left, right):
        return self.body(torch.cat([left, right], dim=1))


KEYWORD_FORMS = {
    "dict": lambda d: d,
    "(dict, y)": lambda d: (d, Y),
    "list of dicts": lambda d: [{k: t[:4] for k, t in d.items()}, {k: t[4:] for k, t in d.items()}],
    "list of (dict, y)": lambda d: [({k: t[i : i + 2] for k, t in d.items()}, Y[i : i + 2]) for i in range(0, 7, 2)],
    "keys in another order": lambda d: [
        {"left": d["left"][:4], "right": d["right"][:4]},
        {"right": d["right"][4:], "left": d["left"][4:]},
    ],
}


@pytest.mark.parametrize("form", KEYWORD_FORMS)
@pytest.mark.parametrize("route", ["rows", "matrix_free"])
def test_dict_inputs_are_keywords(form, route):
    inputs = {"right": X[:, 1:], "left": X[:, :1]}
    H = dense(operator_of(make(ByKeyword), KEYWORD_FORMS[form](inputs), "cross_entropy", route=route))
    torch.testing.assert_close(H, oracle(make(mlp), X, "cross_entropy"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("route", ["rows", "streamed", "matrix_free", "tight", "linear_head"])
def test_batches_of_unequal_shape_are_kept_apart(route):
    model = make(lambda: nn.Sequential(nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(2, 3)))
    batches = [randn(3, 1, 4), randn(4, 1, 6, seed=2), randn(2, 1, 4, seed=3)]
    operator = operator_of(model, [(x, None) for x in batches], "cross_entropy", **ROUTES[route])
    torch.testing.assert_close(dense(operator), oracle(model, batches, "cross_entropy"), rtol=1e-10, atol=1e-12)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, tokens):
        return self.out(torch.tanh(self.embedding(tokens)).mean(dim=1))


@pytest.mark.parametrize("route", ["rows", "streamed", "matrix_free", "tight"])
def test_integer_inputs_stay_integers(route):
    model, tokens = make(Words), torch.arange(20).reshape(5, 4) % 7
    expected = oracle(model, tokens, "cross_entropy")
    H = dense(operator_of(model.float(), tokens, "cross_entropy", dtype=torch.float64, **ROUTES[route]))
    torch.testing.assert_close(H, expected, rtol=1e-5, atol=1e-6)


def test_a_vector_of_outputs_counts_as_one_output_per_example():
    column = make(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    vector = nn.Sequential(column, nn.Flatten(0))
    H = dense(operator_of(vector, X, "mse", route="matrix_free"))
    torch.testing.assert_close(H, oracle(column, X, "mse"), rtol=1e-10, atol=1e-12)


# --- residuals ---------------------------------------------------------------------------------------------------


def test_residual_loss_is_half_the_weighted_mean_of_squares():
    model = make(mlp)
    weight = torch.linspace(0, 1, 7, dtype=torch.float64)
    residual = Residual(lambda u, x: u(x) - 1, X, weight=weight)
    rows = model(X) - 1
    by_hand = sum(0.5 * float(weight[i]) * float(rows[i].detach().square().sum()) for i in range(7)) / 7
    assert residual.loss(model).item() == pytest.approx(by_hand, rel=1e-12)
    torch.testing.assert_close(residual(model), rows)


def test_a_linear_residual_has_the_hessian_of_its_loss():
    # for residuals that are linear in the parameters, Gauss-Newton is Newton
    model = make(lambda: nn.Linear(3, 2))
    residuals = [
        Residual(lambda u, x: u(x) - 1, X, weight=torch.arange(7.0)),
        Residual(lambda u, x: u(x)[:, 0] * 3, X[:2], weight=0.5),
    ]

    def loss(weight, bias):
        call = lambda x: nn.functional.linear(x, weight, bias)  # noqa: E731
        return sum(residual.loss(call) for residual in residuals)

    blocks = torch.autograd.functional.hessian(loss, (model.weight.detach(), model.bias.detach()))
    hessian = torch.cat([torch.cat([b.reshape(m, -1) for b in row], 1) for m, row in zip((6, 2), blocks, strict=True)])
    torch.testing.assert_close(dense(operator_of(model, residuals, "least_squares")), hessian, rtol=1e-10, atol=1e-12)


def test_one_residual_needs_no_list():
    model, residual = make(mlp), Residual(lambda u, x: u(x), X)
    alone, listed = (dense(operator_of(model, data, "least_squares")) for data in (residual, [residual]))
    assert torch.equal(alone, listed)
    torch.testing.assert_close(alone, oracle(model, X, "mse"), rtol=1e-10, atol=1e-12)


# --- what is refused ---------------------------------------------------------------------------------------------


def fails(message, data=X, loss="mse", model=None, **options):
    """`sketch` raises a FipaError, which is a ValueError, with this message."""
    with pytest.raises(FipaError, match=message) as caught:
        fipa.sketch(make(mlp) if model is None else model, data, loss, **({"rank": 2} | options))
    assert isinstance(caught.value, ValueError)


BAD_DATA = {
    "empty list": ([], "empty"),
    "empty iterator": (iter(()), "empty"),
    "no examples": (X[:0], "no examples"),
    "batches without examples": ([(X[:0],), (X[:0],)], "no examples"),
    "none": (None, "NoneType"),
    "number": (3, "int"),
    "text": ("data", "str"),
    "texts": (["a", "b"], "str"),
    "empty dict": ({}, "first axis"),
    "unequal lengths": ({"left": X, "right": X[:2]}, "first axis"),
    "dict of lists": ({"left": [1.0]}, "tensors"),
    "0-d": (torch.tensor(1.0), "first axis"),
    "residual": (Residual(lambda u, x: u(x), X), "Residual"),
    "list of x and y": ([X, Y], r"tuple \(x, y\)"),
    "list of x and integer labels": ([X, torch.zeros(len(X), dtype=torch.long)], r"tuple \(x, y\)"),
    "two inputs and y": (((X, X), Y), r"tuple \(x, y\).*dict"),
    "list of inputs and y": ([[X, X], Y], r"tuple \(x, y\).*dict"),
    "dataset": (TensorDataset(X, Y), r"TensorDataset.*DataLoader"),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data(kind):
    data, message = BAD_DATA[kind]
    fails(message, data=data)


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_two_tensors_of_unequal_length_in_a_list_are_batches(form, loss):
    if form is tuple:
        data, expected = (X, Y[:3]), X  # labels are not used: a tuple is always inputs and labels
    else:
        data, expected = [X[:5], X[5:]], [X[:5], X[5:]]
    model = make(mlp)
    H = dense(operator_of(model, data, loss))
    torch.testing.assert_close(H, oracle(model, expected, loss), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "there is no loss 'hinge'.*mse"),
        ({"max_examples": 0}, "max_examples.*0"),
        ({"max_examples": -3}, "max_examples.*-3"),
        ({"sampled_labels": 1}, "sampled_labels.*cross_entropy"),
        ({"sampled_labels": 0, "loss": "cross_entropy"}, "sampled_labels"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    fails(message, **options)


class Returns(nn.Module):
    """A model whose outputs have a form of the test's choice."""

    def __init__(self, form) -> None:
        super().__init__()
        self.body = mlp()
        self.form = form

    def forward(self, x):
        return self.form(self.body(x))


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda z: (z, z), "tuple.*tensor"),
        (lambda z: {"logits": z}, "dict.*tensor"),
        (lambda z: None, "NoneType.*tensor"),
        (lambda z: z[:, :, None], r"3, 1\).*expected \(examples, outputs\)"),
        (lambda z: z.sum(), r"\(\).*expected \(examples, outputs\)"),
        (lambda z: z.T, "expected"),
    ],
    ids=["tuple", "dict", "none", "3-D", "scalar", "transposed"],
)
def test_bad_outputs(form, message, loss):
    fails(message, model=make(lambda: Returns(form)), loss=loss)


def test_cross_entropy_needs_two_outputs():
    fails("two outputs", model=make(lambda: nn.Linear(3, 1)), loss="cross_entropy")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, "Residual"),
        ((X, Y), "Residual"),
        ([], "Residual"),
        (None, "Residual"),
        ([Residual(lambda u, x: u(x), X), X], "Residual"),
        (Residual(lambda u, x: u(x)[:, :, None], X), r"\(7, 3, 1\)"),
        (Residual(lambda u, x: u(x)[:2], X), r"\(2, 3\)"),
        (Residual(lambda u, x: u(x).sum(), X), r"\(\)"),
        (Residual(lambda u, x: [u(x)], X), "list"),
        (Residual(lambda u, x: 1.0, X), "float"),
        (Residual(lambda u, x: u(x), X, weight=torch.ones(5)), r"weights of shape.*\(7, 3\)"),
        (Residual(lambda u, x: u(x), X, weight=torch.ones(7, 2)), r"weights of shape \(7, 2\)"),
        (Residual(lambda u, x: u(x), X, weight=torch.ones(7, 3, 1)), "weights of shape"),
    ],
    ids=[
        *("tensor", "pair", "empty", "none", "mixed", "3-D", "short", "scalar", "list", "float"),
        *("weight n", "weight k", "weight 3-D"),
    ],
)
def test_bad_residuals(data, message):
    fails(message, data=data, loss="least_squares")


def test_a_named_residual_is_named_in_its_error():
    def interior(u, x):
        return u(x).sum()

    fails("interior must return", data=Residual(interior, X), loss="least_squares")


@pytest.mark.parametrize("options", [{"max_examples": 2}, {"sampled_labels": 1}], ids=str)
def test_residuals_are_not_sampled(options):
    fails("do not apply", data=Residual(lambda u, x: u(x), X), loss="least_squares", **options)


@pytest.mark.parametrize(
    ("inputs", "weight", "message"),
    [
        ((), 1.0, "at least one input"),
        ((X, X[:2]), 1.0, "first axis"),
        ((X[:0],), 1.0, "first axis"),
        ((torch.tensor(1.0),), 1.0, "first axis"),
        ((X,), -1.0, "negative"),
        ((X,), torch.tensor([1.0, -1e-9, 1, 1, 1, 1, 1]), "negative"),
    ],
    ids=["none", "unequal", "empty", "0-d", "negative", "one negative"],
)
def test_residual_refuses_bad_arguments(inputs, weight, message):
    with pytest.raises(SketchError, match=message):
        Residual(lambda u, x: u(x), *inputs, weight=weight)


@pytest.mark.parametrize("route", ["auto", "rows", "matrix_free", "linear_head"])
@pytest.mark.parametrize("solver", ["exact", "subspace", "krylov"])
@pytest.mark.parametrize("where", ["all examples", "last example", "parameters"])
def test_values_that_are_not_finite(where, route, solver):
    model, x = make(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))), X.clone()
    if where == "parameters":
        with torch.no_grad():
            model[0].weight[0] = math.nan
    else:
        x[slice(None) if where == "all examples" else -1] = math.nan
    fails("not finite|NaN", data=x, model=model, route=route, solver=solver, params="2.*")
