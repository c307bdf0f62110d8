"""What a linear head sees of a client's examples, for statistics of which a head can be made in closed form."""

from __future__ import annotations

from torch import Tensor, nn

from fipa.curvature.linear_head import LinearHead
from fipa.curvature.routes import curvature_of
from fipa.curvature.summary import Source
from fipa.errors import SketchError
from fipa.layout import Layout


def head_data(model: nn.Module, layout: Layout, client: Source, statistics: str) -> tuple[Tensor, Tensor]:
    """The inputs (n x d) of the linear layer whose parameters the layout names, and the labels (n)."""
    if client.loss != "cross_entropy":
        raise SketchError(f"{statistics} are of classes: they need the loss cross_entropy, not {client.loss}")
    head_shape(layout, statistics)
    x, labels = client.tensors
    try:
        with curvature_of(model, (x, labels), route="linear_head", params=layout.names) as (operator, _, _):
            assert isinstance(operator, LinearHead)
            return operator.features, labels
    except SketchError as error:
        raise SketchError(f"{statistics} are for a linear head alone: {error}") from error


def head_shape(layout: Layout, statistics: str) -> tuple[int, int, bool]:
    """Classes, inputs, and whether there is a bias; an error if the layout is not that of one linear layer."""
    shapes = [tuple(shape) for shape in layout.shapes]
    if len(shapes) not in (1, 2) or len(shapes[0]) != 2 or (len(shapes) == 2 and shapes[1] != shapes[0][:1]):
        raise SketchError(
            f"{statistics} are for a linear head alone, but {', '.join(layout.names[:4])} are trained: choose the "
            'weight and bias of the last layer, as in params = "head.*"'
        )
    return shapes[0][0], shapes[0][1], len(shapes) == 2
