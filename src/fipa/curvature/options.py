"""Options that all functions of curvature have in common."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from typing_extensions import TypedDict

from fipa.errors import instead_of
from fipa.layout import ParamSelection


class Options(TypedDict, total=False):
    """Keywords of `fipa.sketch`, `fipa.additive_statistics` and `fipa.diagonal_fisher`: what for, and on what.

    Attributes
    ----------
    params
        Which parameters vary: see `fipa.parameters_of`. The curvature covers exactly these.
    max_examples
        Sub-sample the examples, without replacement.
    sampled_labels
        Cross entropy only: draw this many labels per example from the model's predictions instead of summing over
        all classes: C - 1 times cheaper with one label. H is then an unbiased estimate; its eigenvalues are not.
    dtype, device
        Those of the computation and of the result; the parameters' own by default. The model is not moved.
    seed
        The seed of sub-sampling, sampled labels and start vectors; 0 by default.
    """

    params: ParamSelection
    max_examples: int | None
    sampled_labels: int | None
    dtype: torch.dtype | None
    device: torch.device | str | None
    seed: int


def check_options(given: Iterable[str]) -> None:
    """Refuse misspelt ones, as Python does with other keywords."""
    unknown = sorted(set(given) - set(Options.__annotations__))
    if unknown:
        instead = instead_of(unknown[0], Options.__annotations__)
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: {instead}")
