r"""Contrastive losses that clients add to their own: MOON's, and FedRCL's two.

Similarities are cosines of pooled features, $s_{ij} = \langle z_i, z_j \rangle$. Of an anchor i, $P_i$ are the other
examples of its class and $N_i$ those of other classes. Where a sum has nothing to run over, as in a batch of one class,
it is 0, and so is its gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fipa.errors import FipaError


def directions_of(features: Tensor) -> Tensor:
    """Directions of features (n x d, or n x d x space, averaged over space): rows of length 1, or 0 if all is 0."""
    if features.dim() > 2:
        features = features.flatten(2).mean(2)
    # lengths do not matter, so the largest entry may be made 1 first: squares then neither overflow nor vanish
    largest = features.detach().abs().amax(1, keepdim=True)
    features = features / torch.where(largest > 0, largest, torch.inf)
    squares = features.square().sum(1, keepdim=True)
    return features * torch.where(largest > 0, squares, 1).rsqrt()


def moon(features: Tensor, broadcast: Tensor, previous: Tensor, temperature: float = 0.5) -> Tensor:
    r"""MOON's model-contrastive loss: near to the broadcast model's features, far from the client's previous model's.

    $$\frac1n \sum_i -\log \frac{e^{\cos(z_i, b_i) / T}}{e^{\cos(z_i, b_i) / T} + e^{\cos(z_i, p_i) / T}}$$

    Li et al. (CVPR 2021). Features of the three models for the same n examples.
    """
    _check_temperature(temperature)
    if not features.shape == broadcast.shape == previous.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (features, broadcast, previous))
        raise FipaError(f"moon: features of the three models must have one shape, got {shapes}")
    directions = directions_of(features)
    near = (directions * directions_of(broadcast)).sum(1)
    far = (directions * directions_of(previous)).sum(1)
    return _log1p_exp((far - near) / temperature).mean()


def relaxed_contrastive(
    features: Tensor, labels: Tensor, temperature: float = 0.05, kind: Literal["relaxed", "supervised"] = "relaxed"
) -> Tensor:
    r"""Draw examples of one class together, those of other classes apart; the first of FedRCL's two losses.

    $$\frac1n \sum_i \frac1{|P_i|} \sum_{j \in P_i}
    -\log \frac{e^{s_{ij} / T}}{e^{s_{ij} / T} + \sum_{k \in N_i} e^{s_{ik} / T}}$$

    Unlike in Khosla et al. (2020), the other positives are not in the denominator.

    Parameters
    ----------
    features, labels
        Of one level and batch: n x d, or n x d x space, and n.
    kind
        "supervised" takes all pairs. "relaxed" takes, per anchor, the hard ones only, as FedRCL's code does: the least
        similar of $P_i$ and the two most similar of $N_i$.
    """
    _check_temperature(temperature)
    similar = _similarities(features, labels)
    others, strangers = _pairs(labels)
    positives = torch.where(others, similar, torch.inf)
    negatives = torch.where(strangers, similar, -torch.inf)
    if kind == "relaxed":
        positives = positives.amin(1, keepdim=True)
        negatives = negatives.topk(min(2, len(labels)), dim=1).values
    elif kind != "supervised":
        raise FipaError(f'relaxed_contrastive: kind must be "relaxed" or "supervised", got {kind!r}')
    alone = negatives.isneginf().all(1, keepdim=True)
    counted = positives.isfinite() & ~alone
    rest = (torch.where(alone, 0, negatives) / temperature).logsumexp(1, keepdim=True)
    losses = torch.where(counted, _log1p_exp(rest - torch.where(counted, positives, 0) / temperature), 0)
    return (losses.sum(1) / counted.sum(1).clamp_min(1)).mean()


def divergence_penalty(
    features: Tensor,
    labels: Tensor,
    threshold: float = 0.7,
    temperature: float = 0.05,
    pairs: Literal["all", "least"] = "all",
) -> Tensor:
    r"""Keep a class from collapsing to a point; the second of FedRCL's two losses.

    $$\frac1n \sum_i -\log \frac{e^{1 / T}}{e^{1 / T} + \sum_{j \in P_i,\, s_{ij} > \lambda} e^{s_{ij} / T}}$$

    Parameters
    ----------
    features, labels
        Of one level and batch: n x d, or n x d x space, and n.
    threshold
        $\lambda$: pairs of a class that are no more similar than this are left alone.
    pairs
        "all" as written. "least" takes of $P_i$ only the least similar, as FedRCL's code does: no anchor is pushed
        before all of its class are too near.
    """
    _check_temperature(temperature)
    similar = _similarities(features, labels)
    others, _ = _pairs(labels)
    if pairs == "least":
        similar = torch.where(others, similar, torch.inf).amin(1, keepdim=True)
        others = similar.isfinite()
    elif pairs != "all":
        raise FipaError(f'divergence_penalty: pairs must be "all" or "least", got {pairs!r}')
    near = torch.where(others & (similar > threshold), (similar - 1) / temperature, -torch.inf)
    return torch.cat([torch.zeros_like(near[:, :1]), near], dim=1).logsumexp(1).mean()


def _similarities(features: Tensor, labels: Tensor) -> Tensor:
    if labels.shape != features.shape[:1]:
        raise FipaError(f"{len(features)} features need as many labels, got {tuple(labels.shape)}")
    directions = directions_of(features)
    return directions @ directions.T


def _pairs(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which are other examples of the same class, and which of another class (n x n each)."""
    same = labels[:, None] == labels
    return same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device), ~same


def _log1p_exp(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise FipaError(f"contrastive loss: temperature must be positive, got {temperature}")
