"""Gauss-Newton steps against dense solves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import fipa
from clients.cases import DOUBLE, client, layout_of, network, objectives
from clients.training import start
from fipa import Client, FipaError, Layout, Sketch
from fipa.clients.gauss_newton import GaussNewton
from fipa.clients.objective import StackedObjective


@pytest.mark.parametrize("settings", [{"damping": -1.0}, {"cutoff": -1e-9}])
def test_bad_settings_of_gauss_newton(settings: dict[str, float]) -> None:
    with pytest.raises(FipaError, match=next(iter(settings))):
        GaussNewton(**settings)


def linearised(one: Client) -> tuple[np.ndarray, np.ndarray]:
    """Rows A and right-hand side r with the loss 1/2 |A d + r|^2 to first order in the residuals."""
    model = network()
    layout = layout_of(model)

    def rows(flat: Tensor) -> Tensor:
        params = layout.unflatten(flat)
        parts = []
        for term in one.data:
            r = term.function(lambda x: torch.func.functional_call(model, params, (x,)), *term.inputs)
            r = r.reshape(len(r), -1)
            weight = torch.as_tensor(term.weight, dtype=DOUBLE)
            weight = weight[:, None] if weight.dim() == 1 else weight
            parts.append((r * (weight / len(r)).sqrt()).reshape(-1))
        return torch.cat(parts)

    return torch.func.jacrev(rows)(start()).numpy(), rows(start()).detach().numpy()


def step_of(rule: GaussNewton, one: Client, rank: int | None = None, floor: float = 0.0) -> tuple[np.ndarray, Sketch]:
    model = network()
    sketch = fipa.sketch(model, one.data, "least_squares", rank=rank)
    gradient = StackedObjective(objectives(model, [one])).gradients(start()[None])[0]
    return rule(sketch, gradient, floor).numpy(), sketch


@pytest.mark.parametrize("kind", ["plain", "terms"])
def test_undamped_step_is_the_least_squares_solution_of_minimum_norm(kind: str) -> None:
    """Fewer residuals (5, or 15 of rank below 13) than the 13 parameters."""
    one = client(kind, 1)
    A, r = linearised(one)
    expected = np.linalg.lstsq(A, -r, rcond=1e-7)[0]
    step, _ = step_of(GaussNewton(), one)
    np.testing.assert_allclose(step, expected, rtol=0, atol=1e-7 * np.linalg.norm(expected))


@pytest.mark.parametrize("damping", [1e-3, 0.5])
def test_damped_step_equals_the_dense_solve(damping: float) -> None:
    one = client("terms", 2)
    A, r = linearised(one)
    expected = -np.linalg.solve(A.T @ A + damping * np.eye(A.shape[1]), A.T @ r)
    step, _ = step_of(GaussNewton(damping), one)
    np.testing.assert_allclose(step, expected, rtol=0, atol=1e-9)


def test_step_stays_in_the_span_of_a_truncated_sketch() -> None:
    one = client("terms", 2)
    A, r = linearised(one)
    step, sketch = step_of(GaussNewton(0.1), one, rank=3)
    U = sketch.eigenvectors.numpy()
    expected = -U @ np.linalg.solve(U.T @ A.T @ A @ U + 0.1 * np.eye(3), U.T @ A.T @ r)
    np.testing.assert_allclose(step, expected, rtol=0, atol=1e-9)


def test_with_a_floor_the_step_is_the_dense_solve_with_the_sketch() -> None:
    one = client("terms", 2)
    A, r = linearised(one)
    step, sketch = step_of(GaussNewton(), one, rank=3, floor=0.1)
    H = (sketch.eigenvectors * sketch.eigenvalues) @ sketch.eigenvectors.T
    expected = -np.linalg.solve(H.numpy() + 0.1 * np.eye(A.shape[1]), A.T @ r)
    np.testing.assert_allclose(step, expected, rtol=0, atol=1e-9)


def test_a_floor_beside_a_damping_is_refused() -> None:
    with pytest.raises(
        FipaError, match=r"damping = 0.1, and a rule with floor = 0.2: the rule's floor is the clients'"
    ):
        step_of(GaussNewton(0.1), client("plain", 1), floor=0.2)


def test_cutoff_and_zero_eigenvalues_by_hand() -> None:
    """diag(4, 1, 0) and g = (8, 3, 5): the last never counts, the second not below half of the first."""
    sketch = Sketch(torch.eye(3, dtype=DOUBLE), torch.tensor([4.0, 1.0, 0.0], dtype=DOUBLE), Layout(("x",), ((3,),)))
    gradient = torch.tensor([8.0, 3.0, 5.0], dtype=DOUBLE)
    assert GaussNewton()(sketch, gradient).tolist() == [-2.0, -3.0, 0.0]
    assert GaussNewton(cutoff=0.5)(sketch, gradient).tolist() == [-2.0, 0.0, 0.0]
    assert GaussNewton(cutoff=0.2)(sketch, gradient).tolist() == [-2.0, -3.0, 0.0]
    assert GaussNewton(damping=4.0)(sketch, gradient).tolist() == pytest.approx([-1.0, -0.6, 0.0])
    nothing = Sketch(torch.zeros(3, 0, dtype=DOUBLE), torch.zeros(0, dtype=DOUBLE), sketch.layout)
    assert GaussNewton()(nothing, gradient).tolist() == [0.0, 0.0, 0.0]
    # with a floor of 2 what counts as zero is solved with the floor alone
    assert GaussNewton()(sketch, gradient, 2.0).tolist() == pytest.approx([-8 / 6, -1.0, -2.5])
    assert GaussNewton(cutoff=0.5)(sketch, gradient, 2.0).tolist() == pytest.approx([-8 / 6, -1.5, -2.5])
    assert GaussNewton()(nothing, gradient, 2.0).tolist() == [-4.0, -1.5, -2.5]
