"""A second opinion: the GGN of curvlinops, an independent implementation.

Its mean-reduced losses are means over N (cross entropy) and over N x C without the factor 1/2 (mse), so that its mse
matrix is 2 / C of ours.
"""

import pytest
import torch
from torch import nn

from curvature.cases import CLASSES, ROUTES, dense, eye, model_and_inputs, operator_of

LOSSES = {"mse": (nn.MSELoss, CLASSES / 2), "cross_entropy": (nn.CrossEntropyLoss, 1.0)}


@pytest.mark.parametrize("route", ["rows", "streamed", "matrix_free"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "tied", "normed"])
@pytest.mark.xdist_group("curvlinops")  # so that one process imports it
def test_same_matrix(name, loss, route):
    from curvlinops import GGNLinearOperator

    model, x = model_and_inputs(name)
    criterion, factor = LOSSES[loss]
    y = torch.arange(len(x)) % CLASSES if loss == "cross_entropy" else torch.zeros(len(x), CLASSES).double()
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    theirs = GGNLinearOperator(model, criterion(), list(model.parameters()), batches, check_deterministic=False)
    expected = factor * (theirs @ eye(theirs.shape[1]))
    ours = dense(operator_of(model, batches, loss, **ROUTES[route]))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
