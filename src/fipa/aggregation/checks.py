"""What a client's curvature must look like before a rule may use it."""

from __future__ import annotations

from torch import Tensor

from fipa.curvature.summary import CurvatureSummary
from fipa.errors import UpdateError
from fipa.layout import Layout


def check_curvature(client: str, curvature: CurvatureSummary, layout: Layout | None, theta: Tensor) -> None:
    """Refuse other parameters, shapes or dtypes than theta's, NaN, and curvature that is not positive."""
    if curvature.layout != layout:
        assert layout is not None
        odd = sorted(set(curvature.layout.names) ^ set(layout.names))
        detail = f"differs in {odd[0]!r}" if odd else "has other shapes or another order"
        raise UpdateError(
            f"{client} sent a sketch of other parameters than the other clients: it {detail}; use the same params=..."
        )
    flaw = curvature.flaw(theta.numel())
    if flaw:
        raise UpdateError(f"{client} {flaw}")
    for name, tensor in curvature.tensors().items():
        if tensor.dtype != theta.dtype or tensor.device != theta.device:
            raise UpdateError(
                f"{client} sent {name} of {tensor.dtype} on {tensor.device}, theta is {theta.dtype} on {theta.device}: "
                "convert the sketch with .to(...)"
            )
        # one pass and no copy: NaN and infinity survive a sum; only when it overflows must we look closer
        if not bool(tensor.sum().isfinite()) and not bool(tensor.isfinite().all()):
            raise UpdateError(f"{client} sent NaN or infinity in its {name}: leave this client out")
