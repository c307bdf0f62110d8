"""`sketch` as a whole: its answer and its options."""

import math
import warnings

import pytest
import torch
from torch import nn

import fipa
from curvature.cases import (
    HEADS,
    ROUTES,
    LargestTensor,
    assert_unchanged,
    case,
    make,
    mlp,
    model_and_inputs,
    oracle,
    randn,
    selected,
    snapshot,
)
from fipa import LayoutError, RankWarning, RelativeThreshold, Residual, Sketch, SketchError, TraceShare, sketch
from fipa.curvature.explicit import ExplicitRows
from fipa.curvature.linear_head import LinearHead
from fipa.curvature.matrix_free import MatrixFree

X = randn(5, 3)
SOLVERS = ["auto", "exact", "subspace", "krylov"]


def quiet(*args, **options):
    """`sketch` where a rank above the support is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        return sketch(*args, **options)


def dense(one):
    return one.eigenvectors * one.eigenvalues @ one.eigenvectors.T


# --- the answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "name", ["mlp/cross_entropy", "cnn/mse", "tied/residual", "mlp/pde", "resnet/cross_entropy/head"]
)
def test_full_rank_is_the_whole_matrix(name, solver):
    one = case(name)
    result = sketch(one.model, one.data, one.loss, rank=None, params=one.params, solver=solver, iterations=20)
    torch.testing.assert_close(dense(result), one.hessian, rtol=0, atol=1e-9 * float(one.hessian.diagonal().max()))
    assert result.layout.names == tuple(selected(one.model, one.params))
    assert result.layout.numel == one.parameters
    assert result.loss == one.loss
    assert result.trace == pytest.approx(float(one.hessian.trace()), rel=1e-10)
    assert result.residual == pytest.approx(0, abs=1e-10)
    assert not result.eigenvectors.requires_grad


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_leading_eigenpairs(route, solver):
    one = case("mlp/cross_entropy/head")
    result = sketch(one.model, one.data, one.loss, rank=4, params=one.params, solver=solver, **ROUTES[route])
    true = torch.linalg.eigvalsh(one.hessian).flip(0)
    torch.testing.assert_close(result.eigenvalues, true[:4], rtol=1e-9, atol=0)
    U = result.eigenvectors
    torch.testing.assert_close(U.T @ U, torch.eye(4, dtype=U.dtype), rtol=0, atol=1e-9)
    torch.testing.assert_close(one.hessian @ U, U * result.eigenvalues, rtol=0, atol=1e-9)


@pytest.mark.parametrize("route", ["rows", "streamed", "linear_head"])
def test_residual_is_the_share_of_the_trace_left_out(route):
    one = case("mlp/mse/head")
    true = torch.linalg.eigvalsh(one.hessian).flip(0)
    result = sketch(one.model, one.data, one.loss, rank=4, params=one.params, **ROUTES[route])
    assert result.trace == pytest.approx(float(true.sum()), rel=1e-12)
    assert result.residual == pytest.approx(float(true[4:].sum() / true.sum()), rel=1e-9)
    assert result.truncate(1).residual == pytest.approx(float(true[1:].sum() / true.sum()), rel=1e-9)


def test_residual_of_an_estimated_trace_lies_between_0_and_1():
    # some estimates are below the sum of all eigenvalues: the residual is then 0, not negative
    one = case("mlp/mse")
    for seed in range(8):
        result = sketch(one.model, one.data, one.loss, rank=None, route="matrix_free", seed=seed)
        assert 0 <= result.residual <= 1
        assert result.trace == pytest.approx(float(one.hessian.trace()), rel=0.5)


def test_residual_is_unknown_without_a_trace():
    one = Sketch(torch.eye(3), torch.ones(3), fipa.Layout(("w",), ((3,),)))
    assert math.isnan(one.residual)


def test_num_examples_counts_all_terms():
    assert sketch(make(mlp), [X[:2], X[2:]], "mse", rank=1).num_examples == 5
    residuals = [Residual(lambda u, x: u(x), X), Residual(lambda u, x: u(x), X[:3])]
    assert sketch(make(mlp), residuals, "least_squares", rank=1).num_examples == 8


def test_labels_do_not_matter():
    model = make(mlp)
    one, two = (sketch(model, (X, y), rank=3) for y in (torch.zeros(5).long(), torch.ones(5).long()))
    assert torch.equal(one.eigenvectors, two.eigenvectors)


# --- routes and memory -------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch):
    """The kinds of operators that were made."""
    kinds = []
    for kind in (ExplicitRows, MatrixFree, LinearHead):

        def init(self, *args, _init=kind.__init__, _kind=kind, **options):
            _init(self, *args, **options)
            kinds.append(_kind)

        monkeypatch.setattr(kind, "__init__", init)
    return kinds


def test_auto_takes_the_head_then_rows_then_matrix_free(built):
    model, x = model_and_inputs("mlp")
    needed = 5 * 3 * 59 * 8  # rows x parameters x bytes
    sketch(model, x, "mse", rank=2, params=HEADS["mlp"])
    sketch(model, x, "mse", rank=2, memory_limit=needed)
    sketch(model, x, "mse", rank=2, memory_limit=needed - 1)
    assert built == [LinearHead, ExplicitRows, MatrixFree]


@pytest.mark.long
@pytest.mark.parametrize(
    ("route", "solver"),
    [
        ("auto", "auto"),
        ("rows", "subspace"),
        ("rows", "krylov"),
        ("matrix_free", "subspace"),
        ("matrix_free", "krylov"),
    ],
)
@pytest.mark.parametrize("wide", [True, False], ids=["more parameters", "more rows"])
def test_rows_beyond_the_limit_are_never_held(wide, route, solver):
    """Neither the rows nor a p x p matrix, unless the solver is asked by name to be exact."""
    if wide:
        model, x = make(lambda: nn.Sequential(nn.Linear(100, 190), nn.Tanh(), nn.Linear(190, 6))), randn(100, 100)
    else:
        model, x = make(lambda: nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 4))), randn(8000, 10)
    parameters = sum(p.numel() for p in model.parameters())
    rows_bytes = len(x) * model[-1].out_features * parameters * 8
    options = {"rank": 4, "oversampling": 2, "iterations": 1, "route": route, "solver": solver}
    with LargestTensor() as largest:
        assert sketch(model, x, "mse", memory_limit=rows_bytes // 4, **options).rank == 4
    assert largest.nbytes <= rows_bytes // 4


# --- rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("rank", "supported"), [(100, 15), (16, 15)])
def test_a_rank_above_the_support_is_clamped_with_a_warning(rank, supported, solver):
    # 5 examples x 3 outputs: 15 rows for 59 parameters
    with pytest.warns(RankWarning, match=rf"rank {rank} .* 5 examples of 59 parameters .*{supported}") as caught:
        result = sketch(make(mlp), X, "mse", rank=rank, solver=solver)
    assert result.rank == supported
    assert caught[0].filename == __file__  # the warning points at the caller's line


def test_clamped_at_the_number_of_parameters():
    with pytest.warns(RankWarning, match="rank 7 .* 50 examples of 4 parameters support only 4"):
        assert sketch(make(lambda: nn.Linear(3, 1)), randn(50, 3), "mse", rank=7).rank == 4


@pytest.mark.parametrize("solver", SOLVERS)
def test_clamped_at_the_support_of_repeated_examples(solver):
    with pytest.warns(RankWarning, match="support only 6"):
        assert sketch(make(mlp), X[:2].repeat(10, 1), "mse", rank=8, solver=solver).rank == 6


@pytest.mark.parametrize(
    "rank", [15, None, RelativeThreshold(0.0), TraceShare(1.0), TraceShare(1.0, max_rank=99)], ids=str
)
def test_all_that_the_data_support_comes_without_a_warning(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sketch(make(mlp), X, "mse", rank=rank).rank == 15


@pytest.mark.parametrize(("share", "max_rank"), [(0.5, None), (0.01, None), (1e-4, None), (0.01, 2), (0.9, 2)])
@pytest.mark.parametrize("route", ["rows", "matrix_free"])
def test_relative_threshold(share, max_rank, route):
    one = case("mlp/mse")
    true = torch.linalg.eigvalsh(one.hessian).flip(0)
    wanted = int((true >= share * true[0]).sum())
    result = sketch(one.model, one.data, "mse", rank=RelativeThreshold(share, max_rank), route=route)
    assert result.rank == min(wanted, max_rank or wanted)
    torch.testing.assert_close(result.eigenvalues, true[: result.rank], rtol=1e-9, atol=0)
    assert result.eigenvectors.shape == (59, result.rank)


@pytest.mark.parametrize(("share", "max_rank"), [(0.5, None), (0.9, None), (0.999, None), (0.999, 3), (0.5, 14)])
def test_trace_share(share, max_rank):
    one = case("mlp/mse")
    true = torch.linalg.eigvalsh(one.hessian).flip(0)
    wanted = 1 + int((true.cumsum(0) < share * true.sum()).sum())
    result = sketch(one.model, one.data, "mse", rank=TraceShare(share, max_rank))
    assert result.rank == min(wanted, max_rank or wanted)
    if max_rank is None:
        assert result.residual <= 1 - share


@pytest.mark.parametrize("rank", [3, None, RelativeThreshold(0.1), TraceShare(0.9)], ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("route", ["rows", "matrix_free", "linear_head"])
def test_no_curvature_is_a_sketch_of_rank_0(route, solver, rank):
    model = make(lambda: nn.Linear(3, 2, bias=False))
    result = quiet(model, torch.zeros(4, 3), "mse", rank=rank, route=route, solver=solver)
    assert result.rank == 0
    assert result.eigenvectors.shape == (6, 0)
    assert (result.trace, result.residual) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["mlp/cross_entropy", "cnn/mse", "mlp/pde"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_eigenvalues_descend_and_are_not_negative(name, solver):
    one = case(name)
    values = sketch(one.model, one.data, one.loss, rank=None, solver=solver).eigenvalues
    assert bool((values >= 0).all())
    assert bool((values.diff() <= 0).all())


@pytest.mark.parametrize("iterations", [0, 1, 2])
@pytest.mark.parametrize("solver", ["subspace", "krylov"])
def test_few_iterations_still_give_the_rank_asked_for(solver, iterations):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the data support it: no RankWarning
        result = sketch(make(mlp), X, "mse", rank=8, solver=solver, iterations=iterations, oversampling=0)
    assert result.rank == 8


# --- dtype, seed, selection --------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["rows", "streamed", "matrix_free"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_float32_model_in_float64(loss, route):
    model = make(mlp).float()
    before = snapshot(model)
    result = sketch(model, X.float(), loss, rank=None, dtype=torch.float64, **ROUTES[route])
    assert result.eigenvectors.dtype == result.eigenvalues.dtype == torch.float64
    assert_unchanged(model, before)
    assert next(model.parameters()).dtype == torch.float32
    expected = oracle(model.double(), X.float().double(), loss)  # the float32 values, exactly
    torch.testing.assert_close(dense(result), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("route", ["rows", "matrix_free"])
def test_buffers_and_frozen_layers_follow_the_dtype(route):
    model, x = model_and_inputs("normed")
    model[0].requires_grad_(False)
    expected = oracle(model, x, "mse")
    result = sketch(model.float(), x, "mse", rank=None, dtype=torch.float64, route=route)
    torch.testing.assert_close(dense(result), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model_dtype", "dtype"), [(torch.float64, torch.float32), (torch.float32, None)])
@pytest.mark.parametrize("solver", SOLVERS)
def test_float32(model_dtype, dtype, solver):
    model = make(mlp)
    expected = oracle(model, X, "mse")
    result = sketch(model.to(model_dtype), X, "mse", rank=5, dtype=dtype, solver=solver)
    U = result.eigenvectors
    assert U.dtype == result.eigenvalues.dtype == torch.float32
    torch.testing.assert_close(U.T @ U, torch.eye(5), rtol=0, atol=1e-4)
    true = torch.linalg.eigvalsh(expected).flip(0)[:5].float()
    torch.testing.assert_close(result.eigenvalues, true, rtol=1e-4, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("route", ROUTES)
def test_same_seed_same_bits(route, solver):
    model = make(mlp)
    options = {"rank": 3, "params": HEADS["mlp"], "sampled_labels": 2, "max_examples": 4, "solver": solver, "seed": 9}
    first = sketch(model, X, **options, **ROUTES[route])
    torch.manual_seed(123)  # the global generator has no say
    again = sketch(model, X, **options, **ROUTES[route])
    assert torch.equal(first.eigenvectors, again.eigenvectors)
    assert torch.equal(first.eigenvalues, again.eigenvalues)
    assert first.trace == again.trace
    other = sketch(model, X, **(options | {"seed": 10}), **ROUTES[route])
    assert not torch.equal(first.eigenvalues, other.eigenvalues)


@pytest.mark.parametrize("route", ["rows", "matrix_free"])
@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("0.*", ["0.weight", "0.bias"]),
        ("*bias", ["0.bias", "2.bias", "4.bias"]),
        (["2.weight", "0.bias"], ["0.bias", "2.weight"]),
        (("4.*", "0.weight"), ["0.weight", "4.weight", "4.bias"]),
        (None, ["2.weight", "2.bias", "4.weight", "4.bias"]),
    ],
    ids=str,
)
def test_the_sketch_covers_exactly_the_selected_parameters(params, names, route):
    model, x = model_and_inputs("frozen")  # the first layer is frozen, but can be named
    result = sketch(model, x, rank=None, params=params, route=route)
    assert list(result.layout.names) == names
    expected = oracle(model, x, "cross_entropy", list(params) if isinstance(params, tuple) else params)
    torch.testing.assert_close(dense(result), expected, rtol=0, atol=1e-9)


def test_a_hidden_layer_can_be_selected():
    # as wide as the output, and not: neither is the head
    model, x = model_and_inputs("mlp")
    for params in ("0.*", "2.*"):
        expected = oracle(model, x, "cross_entropy", params)
        torch.testing.assert_close(dense(sketch(model, x, rank=None, params=params)), expected, rtol=0, atol=1e-9)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"route": "columns"}, SketchError, "there is no route 'columns'.*matrix_free"),
        ({"solver": "lanczos"}, SketchError, "there is no solver 'lanczos'.*krylov"),
        ({"rank": 0}, SketchError, "rank.*0"),
        ({"rank": -2}, SketchError, "rank.*-2"),
        ({"rank": TraceShare(0.5, max_rank=0)}, SketchError, "rank.*0"),
        ({"rank": 2.5}, SketchError, "rank.*2.5"),
        ({"rank": "full"}, SketchError, "rank.*full"),
        ({"iterations": -1, "solver": "subspace"}, SketchError, "iterations.*-1"),
        ({"iterations": -1, "solver": "krylov"}, SketchError, "iterations.*-1"),
        ({"oversampling": -1, "solver": "subspace"}, SketchError, "oversampling.*-1"),
        ({"oversampling": -9, "solver": "krylov"}, SketchError, "oversampling.*-9"),
        ({"dtype": torch.int64}, SketchError, "floating"),
        ({"dtype": torch.bfloat16}, SketchError, "bfloat16.*float32"),
        ({"params": "body.*"}, LayoutError, r"'body\.\*' matches no parameter.*'0\.weight'"),
        ({"params": ["0.*", "nothing"]}, LayoutError, "'nothing' matches no parameter"),
        ({"params": []}, LayoutError, "params"),
    ],
    ids=str,
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message) as caught:
        sketch(make(mlp), X, "mse", **({"rank": 2} | options))
    assert isinstance(caught.value, ValueError)


def test_a_model_in_half_precision_is_told_to_name_a_dtype():
    with pytest.raises(SketchError, match=r"bfloat16.*dtype=torch\.float32"):
        sketch(make(mlp).bfloat16(), X, "mse", rank=2)
    assert sketch(make(mlp).bfloat16(), X, "mse", rank=2, dtype=torch.float32).rank == 2


def test_mixed_dtypes_are_refused_unless_one_is_named():
    model = make(mlp)
    model[0].float()
    with pytest.raises(SketchError, match="share one floating dtype"):
        sketch(model, X, "mse", rank=2)
    assert sketch(model, X, "mse", rank=2, dtype=torch.float64).rank == 2


def test_models_without_anything_to_vary_are_refused():
    with pytest.raises(LayoutError, match="Tanh has no parameters"):
        sketch(nn.Tanh(), X, "mse", rank=2)
    with pytest.raises(LayoutError, match=r"no parameter requires a gradient.*params"):
        sketch(make(mlp).requires_grad_(False), X, "mse", rank=2)


def test_integers_of_numpy_are_ranks():
    rank = torch.tensor(3).numpy()[()]
    assert sketch(make(mlp), X, "mse", rank=rank).rank == 3


# --- adaptive rank on problems too large for the exact solver -----------------------------------------------------


@pytest.fixture(scope="module")
def large():
    """More than 1024 rows and parameters, and its spectrum."""
    model = make(lambda: nn.Sequential(nn.Linear(10, 80), nn.Tanh(), nn.Linear(80, 3)))
    x = randn(350, 10) * torch.logspace(0, -2, 10, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = sketch(model, x, "mse", rank=None, solver="exact")
    assert 350 * 3 > 1024
    assert exact.layout.numel > 1024
    return model, x, exact


@pytest.mark.long
@pytest.mark.parametrize("route", ["rows", "matrix_free"])
@pytest.mark.parametrize(
    "rank", [TraceShare(0.9), TraceShare(0.999), RelativeThreshold(1e-3), RelativeThreshold(1e-5)], ids=repr
)
def test_adaptive_rank_without_a_maximum(large, rank, route):
    model, x, exact = large
    found = sketch(model, x, "mse", rank=rank, route=route)
    expected = rank.count(exact.eigenvalues, exact.trace)
    if route == "rows" or isinstance(rank, RelativeThreshold):
        assert abs(found.rank - expected) <= 1
    else:  # the trace is an estimate
        assert abs(found.rank - expected) <= max(1, 0.2 * expected)
    both = min(found.rank, expected)
    torch.testing.assert_close(found.eigenvalues[:both], exact.eigenvalues[:both], rtol=1e-2, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("rank", [TraceShare(0.9), RelativeThreshold(1e-3)], ids=repr)
def test_adaptive_rank_beyond_the_first_guess(large, rank, monkeypatch):
    # a first guess of 2 must be doubled until the rule is content
    model, x, exact = large
    monkeypatch.setattr("fipa.curvature.leading._FIRST_GUESS", 2)
    expected = rank.count(exact.eigenvalues, exact.trace)
    assert expected > 2
    assert abs(sketch(model, x, "mse", rank=rank).rank - expected) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_warning_names_the_dtype(dtype):
    with pytest.warns(RankWarning, match=rf"support only 15 in {dtype}"):
        sketch(make(mlp), X, "mse", rank=16, dtype=dtype)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("route", ["linear_head", "rows", "streamed", "matrix_free"])
@pytest.mark.parametrize("examples", [12, 60], ids=["wide", "tall"])
def test_float32_eigenvectors_are_orthonormal_on_an_ill_conditioned_spectrum(examples, route, solver):
    model = make(lambda: nn.Linear(20, 1, bias=False))
    x = randn(examples, 20) * torch.logspace(0, -3, 20, dtype=torch.float64)  # eigenvalues over 6 decades
    found = quiet(model, x, "mse", rank=12, dtype=torch.float32, solver=solver, **ROUTES[route])
    assert found.eigenvectors.dtype == torch.float32
    assert found.rank >= 8
    U = found.eigenvectors.double()
    assert float((U.T @ U - torch.eye(found.rank)).abs().max()) < 1e-5


# --- attention and recurrence -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 2, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def test_lstm():
    model, x = make(Recurrent), randn(4, 5, 3)
    whole = sketch(model, x, "mse", rank=None, route="matrix_free")
    torch.testing.assert_close(dense(whole), oracle(model, x, "mse"), rtol=0, atol=1e-10)
    with pytest.raises(SketchError, match=r'vmap.*try route="matrix_free"'):
        sketch(model, x, "mse", rank=2, route="rows")
