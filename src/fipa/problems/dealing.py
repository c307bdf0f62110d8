"""Who gets which of a set's training examples."""

from __future__ import annotations

import torch
from torch import Tensor

from fipa.data import Indices, Partition
from fipa.errors import FipaError
from fipa.randomness import generator_for


def dealt(
    name: str, labels: Tensor, seed: int, clients: int, samples: int | None, partition: Partition, test: int | None
) -> list[Tensor]:
    """The places of each client's examples among all of a set; with `samples`, so many per client of some at random.

    `test` is the number of test examples that is wished for, checked here with the others.
    """
    if clients < 1 or (samples is not None and samples < 1) or (test is not None and test < 1):
        raise FipaError("problem: clients, samples and test_samples must be at least 1")
    if samples is None:
        return partition.split(labels, clients, generator_for(seed, "split"))
    if clients * samples > len(labels):
        raise FipaError(f"{clients} clients with {samples} samples each: {name} has only {len(labels)}")
    if isinstance(partition, Indices):
        raise FipaError("problem: samples draws at random before the split; partition indices cannot count on that")
    chosen = torch.randperm(len(labels), generator=generator_for(seed, "subset"))[: clients * samples]
    return [chosen[part] for part in partition.split(labels[chosen], clients, generator_for(seed, "split"))]
