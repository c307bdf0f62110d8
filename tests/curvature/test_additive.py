"""Additive statistics: products of the curvature with shared random vectors, and their sums."""

import gc
import weakref

import pytest
import torch
from torch import nn

from curvature.cases import HEADS, ROUTES, case, make, mlp, model_and_inputs, oracle, randn
from fipa import (
    AdditiveStatistics,
    Layout,
    LayoutError,
    SketchError,
    UpdateError,
    additive_statistics,
    parameters_of,
    random_test_matrix,
)
from fipa import pool as pool_statistics

P = 59  # parameters of the mlp
FIELDS = ("products", "response", "delta")


def omega(parameters, width, seed):
    """The shared matrix, by its definition."""
    drawn = torch.randn(parameters, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn / parameters**0.5


@pytest.mark.parametrize("route", ["auto", "rows", "streamed", "matrix_free"])
@pytest.mark.parametrize("name", ["mlp/cross_entropy", "cnn/mse", "tied/residual", "mlp/pde"])
def test_equals_dense_products(name, route):
    one, options = case(name), ROUTES.get(route, {"route": "auto"})
    delta = randn(one.parameters, seed=8)
    result = additive_statistics(
        one.model, one.data, one.loss, delta=delta, width=4, test_seed=11, num_examples=70, **options
    )
    torch.testing.assert_close(result.products, one.hessian @ omega(one.parameters, 4, 11), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.response, one.hessian @ delta, rtol=1e-10, atol=1e-12)
    assert torch.equal(result.delta, delta)
    assert (result.num_examples, result.test_seed, result.width) == (70, 11, 4)
    assert result.layout == Layout.of(parameters_of(one.model))


def test_linear_head():
    one = case("mlp/cross_entropy/head")
    delta = randn(one.parameters, seed=8)
    options = {"width": 3, "test_seed": 2, "num_examples": 5, "params": HEADS["mlp"], "route": "linear_head"}
    result = additive_statistics(one.model, one.data, delta=delta, **options)
    torch.testing.assert_close(result.products, one.hessian @ omega(15, 3, 2), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.response, one.hessian @ delta, rtol=1e-10, atol=1e-12)


def test_delta_by_name_or_flat():
    model, x = model_and_inputs("mlp")
    named = {name: randn(*t.shape, seed=4) for name, t in parameters_of(model).items()}
    options = {"width": 3, "test_seed": 0, "num_examples": 5}
    by_name = additive_statistics(model, x, delta=named, **options)
    flat = additive_statistics(model, x, delta=Layout.of(named).flatten(named), **options)
    for field in FIELDS:
        assert torch.equal(getattr(by_name, field), getattr(flat, field))


@pytest.mark.parametrize("route", ["rows", "matrix_free"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("named", [False, True])
def test_delta_goes_where_the_model_is(monkeypatch, named, dtype, route):
    """The meta device stands for a GPU: it refuses tensors of the CPU too, but has no numbers to be found finite."""
    monkeypatch.setattr("fipa.curvature.additive.check_finite", lambda products: None)
    model, x = (thing.float() for thing in model_and_inputs("mlp"))
    delta = {name: t.cpu() for name, t in parameters_of(model).items()} if named else torch.ones(P)
    result = additive_statistics(
        model.to("meta"), x.to("meta"), delta=delta, width=3, test_seed=0, num_examples=5, dtype=dtype, route=route
    )
    for tensor in result.tensors().values():
        assert tensor.device.type == "meta"
        assert tensor.dtype == (dtype or torch.float32)


def test_delta_of_another_dtype_is_refused_unless_one_is_asked_for():
    model, x = model_and_inputs("mlp")  # float64
    options = {"delta": torch.ones(P), "width": 3, "test_seed": 0, "num_examples": 5}
    with pytest.raises(LayoutError, match=r"torch.float32, the selected parameters 59 and torch.float64"):
        additive_statistics(model, x, **options)
    assert additive_statistics(model, x, dtype=torch.float64, **options).delta.dtype == torch.float64


def test_sampling_has_a_seed_of_its_own():
    model, x = model_and_inputs("mlp", examples=20)

    def products(sampling_seed):
        options = {"max_examples": 4, "sampled_labels": 1, "seed": sampling_seed}
        return additive_statistics(
            model, x, delta=torch.zeros(P).double(), width=3, test_seed=1, num_examples=20, **options
        ).products

    assert torch.equal(products(0), products(0))
    assert not torch.allclose(products(0), products(1))


# --- the shared matrix -------------------------------------------------------------------------------------------


def test_the_test_matrix_is_shared_by_seed():
    assert torch.equal(random_test_matrix(P, 4, 3), random_test_matrix(P, 4, 3))
    assert not torch.equal(random_test_matrix(P, 4, 3), random_test_matrix(P, 4, 4))
    double = random_test_matrix(P, 4, 3, torch.float64)
    assert torch.equal(double, omega(P, 4, 3))
    assert torch.equal(double.float(), random_test_matrix(P, 4, 3))  # float32 and float64 parties agree


def test_the_columns_of_the_test_matrix_have_norm_one():
    norms = random_test_matrix(10_000, 20, 0, torch.float64).norm(dim=0)
    assert float((norms - 1).abs().max()) < 0.05  # 7 standard deviations


# --- pooling -----------------------------------------------------------------------------------------------------

LAYOUT = Layout(("w",), ((6,),))


def statistics(client, num_examples=None, width=3, seed=1, layout=LAYOUT, dtype=torch.float64):
    draws = randn(layout.numel, width + 2, seed=client).to(dtype)
    parts = draws[:, :width], draws[:, width], draws[:, width + 1]
    return AdditiveStatistics(*parts, 10 * (client + 1) if num_examples is None else num_examples, seed, layout)


def weighted_mean(clients, field):
    total = sum(c.num_examples for c in clients)
    return sum(c.num_examples / total * getattr(c, field) for c in clients)


def assert_same(one, two):
    for field in FIELDS:
        torch.testing.assert_close(getattr(one, field), getattr(two, field), rtol=1e-12, atol=1e-14)
    assert (one.num_examples, one.test_seed, one.layout) == (two.num_examples, two.test_seed, two.layout)


def test_pool_is_the_weighted_mean():
    clients = [statistics(i) for i in range(5)]
    pooled = pool_statistics(clients)
    for field in FIELDS:
        torch.testing.assert_close(getattr(pooled, field), weighted_mean(clients, field), rtol=1e-12, atol=1e-14)
    assert pooled.num_examples == 10 + 20 + 30 + 40 + 50
    assert (pooled.test_seed, pooled.layout, pooled.width) == (1, LAYOUT, 3)


def test_pool_leaves_its_input_alone():
    clients, copies = ([statistics(i) for i in range(3)] for _ in range(2))
    pool_statistics(clients)
    for one, copy in zip(clients, copies, strict=True):
        for field in FIELDS:
            assert torch.equal(getattr(one, field), getattr(copy, field))


def test_pool_of_one_is_itself():
    assert_same(pool_statistics([statistics(2)]), statistics(2))


def test_pools_make_a_tree():
    clients = [statistics(i) for i in range(7)]
    left, right = pool_statistics(clients[:2]), pool_statistics(clients[2:6])
    assert_same(pool_statistics([pool_statistics([left, right]), clients[6]]), pool_statistics(clients))


def test_pool_takes_a_generator_and_holds_one_client_at_a_time():
    alive = []

    def stream():
        for i in range(6):
            one = statistics(i)
            alive.append(weakref.ref(one.products))
            yield one
            del one
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1

    assert_same(pool_statistics(stream()), pool_statistics([statistics(i) for i in range(6)]))


def test_pooled_clients_are_the_client_of_all_data():
    # mse is a mean over examples: H of the union is the weighted mean of the clients' H
    model, x = model_and_inputs("mlp", examples=9)
    delta = randn(P, seed=8)
    parts = [x[:2], x[2:5], x[5:]]
    clients = [
        additive_statistics(model, part, "mse", delta=delta, width=4, test_seed=3, num_examples=len(part))
        for part in parts
    ]
    whole = additive_statistics(model, x, "mse", delta=delta, width=4, test_seed=3, num_examples=9)
    assert_same(pool_statistics(clients), whole)
    torch.testing.assert_close(whole.response, oracle(model, x, "mse") @ delta, rtol=1e-10, atol=1e-12)


# --- what is refused ---------------------------------------------------------------------------------------------

OTHER = Layout(("v",), ((6,),))


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"seed": 2}, r"#2 used the test matrix \(seed 2, width 3\), others \(seed 1, width 3\)"),
        ({"width": 4}, r"#2 used the test matrix \(seed 1, width 4\)"),
        ({"layout": OTHER}, "#2 covers other parameters"),
        ({"dtype": torch.float32}, "#2 has dtype torch.float32, others torch.float64"),
        ({"num_examples": 0}, "#2 have 0 examples"),
        ({"num_examples": -5}, "#2 have -5 examples"),
    ],
    ids=str,
)
def test_statistics_that_do_not_fit_together(odd, message):
    with pytest.raises(UpdateError, match=message):
        pool_statistics([statistics(0), statistics(1), statistics(2, **odd)])


def test_an_empty_pool():
    with pytest.raises(UpdateError, match="no statistics"):
        pool_statistics(iter(()))


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (torch.zeros(58).double(), "length 58.*59"),
        (torch.zeros(59), "float32.*float64"),
        ({"0.weight": torch.zeros(5, 3).double()}, "missing '0.bias'"),
        ({"w": torch.zeros(59).double()}, "unexpected 'w'"),
    ],
    ids=["short", "dtype", "missing", "unexpected"],
)
def test_a_delta_that_does_not_fit(delta, message):
    with pytest.raises(LayoutError, match=message):
        additive_statistics(make(mlp), randn(5, 3), delta=delta, width=3, test_seed=0, num_examples=5)


def test_a_delta_of_other_shapes():
    delta = {name: t.flip(0) if t.dim() == 1 else t.T for name, t in parameters_of(make(mlp)).items()}
    with pytest.raises(LayoutError, match=r"'0\.weight' has shape \(3, 5\), expected \(5, 3\)"):
        additive_statistics(make(mlp), randn(5, 3), delta=delta, width=3, test_seed=0, num_examples=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width.*0"),
        ({"width": -1}, "width.*-1"),
        ({"num_examples": 0}, "examples.*0|0 examples"),
        ({"loss": "hinge"}, "there is no loss"),
        ({"route": "columns"}, "there is no route"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    options = {"width": 3, "test_seed": 0, "num_examples": 5} | options
    with pytest.raises((SketchError, UpdateError), match=message):
        additive_statistics(make(mlp), randn(5, 3), delta=torch.zeros(P).double(), **options)


@pytest.mark.parametrize("build", [mlp, lambda: nn.Linear(3, 3)], ids=["mlp", "linear"])
def test_values_that_are_not_finite_are_refused(build):
    model, x = make(build), randn(5, 3)
    x[-1] = float("nan")
    delta = torch.zeros(sum(p.numel() for p in model.parameters())).double()
    with pytest.raises(SketchError, match="not finite"):
        additive_statistics(model, x, delta=delta, width=3, test_seed=0, num_examples=5)
