"""Names and shapes of a flat vector."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fipa import Layout, LayoutError, parameters_of

steady = settings(max_examples=60, deadline=None, derandomize=True)
shapes = st.dictionaries(
    st.text(min_size=1, max_size=8), st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5
)


def tensors(shapes):
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


LAYOUT = Layout(("weight", "bias"), ((2, 3), (2,)))


# --- vectors -----------------------------------------------------------------------------------------------------


@steady
@given(shapes)
def test_flatten_and_unflatten_are_inverse(shapes):
    named = tensors(shapes)
    layout = Layout.of(named)
    vector = layout.flatten(named)
    assert vector.shape == (layout.numel,) == (sum(math.prod(s) for s in shapes.values()),)
    back = layout.unflatten(vector)
    assert list(back) == list(named)
    assert all(torch.equal(back[name], named[name]) for name in named)
    assert torch.equal(layout.flatten(back), vector)


@steady
@given(shapes)
def test_slices_are_where_the_parameters_stand(shapes):
    named = tensors(shapes)
    layout = Layout.of(named)
    vector = layout.flatten(named)
    assert list(layout.slices) == list(layout.names)
    for name, where in layout.slices.items():
        assert torch.equal(vector[where], named[name].flatten())


@steady
@given(shapes)
def test_json_keeps_a_layout(shapes):
    layout = Layout.of(tensors(shapes))
    assert Layout.from_json(layout.to_json()) == layout


def test_order_is_the_layouts_not_the_mappings():
    named = {"bias": torch.ones(2), "weight": torch.zeros(2, 3)}
    assert LAYOUT.flatten(named).tolist() == [0.0] * 6 + [1.0] * 2


def test_rows_of_a_matrix_unflatten_along_the_last_axis():
    matrix = torch.randn(4, 8)
    pieces = LAYOUT.unflatten(matrix)
    assert pieces["weight"].shape == (4, 2, 3)
    assert torch.equal(pieces["bias"], matrix[:, 6:])


def test_unflatten_gives_views():
    vector = torch.zeros(8)
    LAYOUT.unflatten(vector)["bias"].fill_(1.0)
    assert vector.tolist() == [0.0] * 6 + [1.0] * 2


def test_flatten_is_detached():
    named = {"weight": torch.ones(2, 3, requires_grad=True), "bias": torch.ones(2)}
    assert not LAYOUT.flatten(named).requires_grad


def test_layouts_compare_by_value():
    same = Layout(("weight", "bias"), ((2, 3), (2,)))
    assert same == LAYOUT
    assert hash(same) == hash(LAYOUT)
    assert Layout(("bias", "weight"), ((2,), (2, 3))) != LAYOUT


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"weight": (2, 3)}, "missing 'bias'"),
        ({"weight": (2, 3), "bias": (2,), "scale": (1,)}, "unexpected 'scale'"),
        ({"weight": (2, 3), "scale": (1,)}, "missing 'bias', unexpected 'scale'"),
        ({"weight": (3, 2), "bias": (2,)}, r"'weight' has shape \(3, 2\), expected \(2, 3\)"),
        ({f"w{i}": (1,) for i in range(9)}, "and 3 more"),
    ],
)
def test_what_differs_is_named(named, message):
    with pytest.raises(LayoutError, match=message):
        LAYOUT.flatten({name: torch.zeros(shape) for name, shape in named.items()})


@pytest.mark.parametrize("length", [0, 7, 9])
def test_a_vector_of_another_length(length):
    with pytest.raises(LayoutError, match=f"length {length} cannot fill 8 parameters"):
        LAYOUT.unflatten(torch.zeros(length))


def test_a_number_is_no_vector():
    with pytest.raises(LayoutError):
        LAYOUT.unflatten(torch.tensor(1.0))


# --- parameters of a model ---------------------------------------------------------------------------------------


def model():
    one = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    one[0].requires_grad_(False)
    return one


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (None, ["1.weight", "1.bias", "2.weight", "2.bias"]),
        ("*", ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        ("0.bias", ["0.bias"]),
        (["2.bias", "0.*"], ["0.weight", "0.bias", "2.bias"]),
        (("*weight", "0.weight"), ["0.weight", "1.weight", "2.weight"]),
        ("[02].weight", ["0.weight", "2.weight"]),
    ],
    ids=str,
)
def test_selection_by_name_pattern_or_gradient(params, names):
    one = model()
    result = parameters_of(one, params)
    assert list(result) == names
    for name, tensor in result.items():
        assert torch.equal(tensor, one.get_parameter(name))


def test_patterns_may_come_from_a_generator():
    assert list(parameters_of(model(), (pattern for pattern in ["2.*", "0.bias"]))) == ["0.bias", "2.weight", "2.bias"]


def test_parameters_are_copies():
    one = model()
    for tensor in parameters_of(one, "*").values():
        assert not tensor.requires_grad
        tensor.add_(1.0)
    fresh = model()
    fresh.load_state_dict(one.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(parameters_of(one).values(), parameters_of(fresh).values(), strict=True)
    )
    assert one[1].weight[0].item() == 1.0  # as initialised: the copies took the change


def test_a_tied_weight_counts_once_under_its_first_name():
    one = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    one["b"].weight = one["a"].weight
    assert list(parameters_of(one)) == ["a.weight", "a.bias", "b.bias"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("head.*", r"'head\.\*' matches no parameter; there are '0\.weight'"),
        (["0.*", "head.*"], r"params='head\.\*' matches no parameter"),
        ("WEIGHT", "'WEIGHT' matches no parameter"),
        ("1.running_mean", "matches no parameter"),
    ],
)
def test_patterns_that_match_nothing(params, message):
    with pytest.raises(LayoutError, match=message):
        parameters_of(model(), params)


def test_models_with_nothing_to_take():
    with pytest.raises(LayoutError, match="Tanh has no parameters"):
        parameters_of(nn.Tanh())
    with pytest.raises(LayoutError, match="no parameter requires a gradient"):
        parameters_of(model().requires_grad_(False))


def test_an_empty_selection_says_so():
    with pytest.raises(LayoutError, match="params is empty"):
        parameters_of(model(), [])
