"""What a client's curvature must look like before a rule may use it."""

from __future__ import annotations

import math

from torch import Tensor

from fipa.aggregation.update import Curvature
from fipa.curvature.additive import AdditiveStatistics
from fipa.curvature.covariance import InputCovariance
from fipa.curvature.diagonal import DiagonalCurvature
from fipa.curvature.sketch import Sketch
from fipa.errors import UpdateError
from fipa.layout import Layout


def check_curvature(client: str, curvature: Curvature, layout: Layout | None, theta: Tensor) -> None:
    """Refuse other parameters, shapes or dtypes than theta's, NaN, and curvature that is not positive."""
    if curvature.layout != layout:
        assert layout is not None
        odd = sorted(set(curvature.layout.names) ^ set(layout.names))
        detail = f"differs in {odd[0]!r}" if odd else "has other shapes or another order"
        raise UpdateError(f"{client} sent a sketch of other parameters than the other clients: it {detail}")
    tensors = _tensors(curvature)
    p = theta.numel()
    if isinstance(curvature, Sketch):
        r = curvature.eigenvalues.numel()
        if curvature.eigenvectors.shape != (p, r) or curvature.eigenvalues.dim() != 1:
            raise UpdateError(
                f"{client} sent eigenvectors of shape {tuple(curvature.eigenvectors.shape)} with {r} eigenvalues, "
                f"expected ({p}, {r})"
            )
        if bool((curvature.eigenvalues < 0).any()):
            raise UpdateError(
                f"{client} sent the negative eigenvalue {float(curvature.eigenvalues.min()):.3g}: a Gauss-Newton "
                "matrix has none; use fipa.sketch, or clamp rounding errors with eigenvalues.clamp(min=0)"
            )
    for name, shape in _shapes(client, curvature, p).items():
        if tensors[name].shape != shape:
            raise UpdateError(f"{client} sent a {name} of shape {tuple(tensors[name].shape)}, expected {shape}")
    if isinstance(curvature, DiagonalCurvature | InputCovariance):
        for name, tensor in tensors.items():
            if bool(((tensor.diagonal() if tensor.dim() == 2 else tensor) < 0).any()):
                raise UpdateError(f"{client} sent a negative {name}: a curvature has no negative diagonal")
    for name, tensor in tensors.items():
        if tensor.dtype != theta.dtype or tensor.device != theta.device:
            raise UpdateError(
                f"{client} sent {name} of {tensor.dtype} on {tensor.device}, theta is {theta.dtype} on {theta.device}: "
                "convert the sketch with .to(...)"
            )
        # one pass and no copy: NaN and infinity survive a sum; only when it overflows must we look closer
        if not bool(tensor.sum().isfinite()) and not bool(tensor.isfinite().all()):
            raise UpdateError(f"{client} sent NaN or infinity in its {name}: leave this client out")


def _tensors(curvature: Curvature) -> dict[str, Tensor]:
    if isinstance(curvature, Sketch):
        return {"eigenvectors": curvature.eigenvectors, "eigenvalues": curvature.eigenvalues}
    if isinstance(curvature, DiagonalCurvature):
        return {"diagonal": curvature.values}
    if isinstance(curvature, AdditiveStatistics):
        return {"products": curvature.products, "response": curvature.response, "delta": curvature.delta}
    return {f"covariance of {name}": matrix for name, (_, matrix) in curvature.layers.items()}


def _shapes(client: str, curvature: Curvature, p: int) -> dict[str, tuple[int, ...]]:
    """What the tensors of a curvature must look like."""
    if isinstance(curvature, DiagonalCurvature):
        return {"diagonal": (p,)}
    if isinstance(curvature, AdditiveStatistics):
        return {"products": (p, curvature.products.shape[-1]), "response": (p,), "delta": (p,)}
    if not isinstance(curvature, InputCovariance):
        return {}
    shapes = dict(zip(curvature.layout.names, curvature.layout.shapes, strict=True))
    expected: dict[str, tuple[int, ...]] = {}
    for weight, (bias, _) in curvature.layers.items():
        for name in (weight, bias):
            if name is not None and name not in shapes:
                raise UpdateError(f"{client} sent a covariance of {name!r}, which is none of its parameters")
        side = math.prod(shapes[weight][1:]) + (bias is not None)
        expected[f"covariance of {weight}"] = (side, side)
    return expected
