"""The unknown function of an equation, as its operators see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fipa.errors import FipaError
from fipa.pde.jet import Jet


class Field:
    """A model at points (n, d), with its derivatives; every quantity is a tensor (n).

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    >>> u = Field(lambda x: x[:, :1] ** 2 * x[:, 1:], x)  # x^2 y
    >>> u.value.tolist(), u.d(0).tolist(), u.dd(0).tolist(), u.laplacian.tolist()
    ([2.0, 45.0], [4.0, 30.0], [4.0, 10.0], [4.0, 10.0])

    Parameters
    ----------
    model
        Maps points (n, d) to (n, k): k functions, of which `u[j]` is the j-th and `u` itself the first.
    laplacian
        Carry the sum of the second derivatives only, which is cheaper in several dimensions.
    """

    def __init__(self, model: Callable[..., Any], x: Tensor, *, laplacian: bool = False) -> None:
        self.model, self.x = model, x
        self._laplacian = laplacian
        self._jet: Jet | None = None
        self._component = 0

    def __getitem__(self, component: int) -> Field:
        """Another function of the same model."""
        other = Field(self.model, self.x, laplacian=self._laplacian)
        other._jet, other._component = self.expanded, component
        return other

    @property
    def expanded(self) -> Jet:
        """All derivatives in one pass over the model."""
        if self._jet is None:
            jet = self.model(Jet.of(self.x, laplacian=self._laplacian))
            if not isinstance(jet, Jet):
                raise FipaError(f"the function returned a {type(jet).__name__} that does not vary with x")
            self._check(jet.value)
            self._jet = jet
        return self._jet

    @property
    def value(self) -> Tensor:
        """u, without the cost of derivatives where none have been asked for."""
        if self._jet is None:
            values = self.model(self.x)
            self._check(values)
            return values[:, self._component]
        return self._jet.value[:, self._component]

    def d(self, axis: int) -> Tensor:
        """First derivative along an axis."""
        self._check_axis(axis)
        return self.expanded.slopes[axis, :, self._component]

    def dd(self, axis: int) -> Tensor:
        """Second derivative along an axis."""
        self._check_axis(axis)
        if self._laplacian and self.x.shape[1] > 1:
            raise FipaError("this field carries the Laplacian only: leave out laplacian=True")
        return self.expanded.curvatures[axis, :, self._component]

    @property
    def laplacian(self) -> Tensor:
        """Sum of the second derivatives."""
        return self.expanded.curvatures[:, :, self._component].sum(dim=0)

    def _check_axis(self, axis: int) -> None:
        if not 0 <= axis < self.x.shape[1]:
            raise FipaError(f"there is no axis {axis}: the points have {self.x.shape[1]}, counted from 0")

    def _check(self, values: Any) -> None:
        n = len(self.x)
        if not isinstance(values, Tensor) or values.dim() != 2 or len(values) != n:
            got = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise FipaError(f"the model must return ({n}, k) at {n} points, got {got}")
