"""FedVARP (Jhunjhunwala et al., UAI 2022): averaging that makes up for the clients that are not there."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fipa.aggregation.cohort import Cohort
from fipa.aggregation.rule import Step, check_not_negative
from fipa.aggregation.server_optimizers import buffer
from fipa.errors import UpdateError

UPDATE, EXAMPLES = "update.", "examples."  # names in the state: these, and the client's id as Python writes it


@dataclass(frozen=True)
class FedVARP:
    r"""$d = \gamma \big[ \sum_m w_m (\Delta\theta_m - y_m) + \bar y \big]$, $y_i$ the last update of client i, or 0.

    $\bar y$ is the mean of the remembered updates over all clients of the federation, in a round or not. It takes the
    place of those that are absent, so a round's choice of clients adds less noise. Clients weigh by their examples:
    $\bar y = \sum_i n_i y_i / (\bar n P)$ with $\bar n$ the mean number of examples of the clients seen so far and P
    the `population` that `aggregate` is told, else the number of clients seen so far. If all clients take part in all
    rounds, this is FedAvg.

    The server keeps one update for each client that it has seen. Clients need ids.

    Parameters
    ----------
    step
        $\gamma$, the server's step.

    Examples
    --------
    >>> from fipa import ClientUpdate, aggregate
    >>> one, two = (ClientUpdate(torch.full((2,), x), 10, client_id=i) for i, x in enumerate((1.0, 3.0)))
    >>> first = aggregate(torch.zeros(2), [one, two], FedVARP())
    >>> aggregate(torch.zeros(2), [one], FedVARP(), first.state).theta  # client 1 is away, and not forgotten
    tensor([2., 2.])
    """

    step: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(self, step=self.step)

    def __call__(self, cohort: Cohort, state: Mapping[str, Tensor]) -> Step:  # noqa: D102
        if not cohort.identified:
            raise UpdateError(
                f"{cohort.clients[0]} has no id, but FedVARP remembers each client's last update: pass "
                "ClientUpdate(..., client_id=...), the same in every round"
            )
        like = cohort.deltas[0]
        ids = [_plain(i) for i in cohort.ids]
        seen = [ast.literal_eval(name.removeprefix(UPDATE)) for name in state if name.startswith(UPDATE)]
        examples = {i: int(state[f"{EXAMPLES}{i!r}"]) for i in seen}
        examples |= dict(zip(ids, cohort.num_examples, strict=True))
        clients = sorted(examples, key=lambda i: (isinstance(i, str), i))  # sums must not depend on who came first
        before = {i: buffer(state, f"{UPDATE}{i!r}", like, 0.0) for i in clients}
        population = len(clients) if cohort.population is None else cohort.population
        if population < len(clients):
            raise UpdateError(
                f"population={population}, but FedVARP has seen {len(clients)} clients: count all of them, or start "
                "with state=None when the federation changes"
            )
        scale = len(clients) / (sum(examples.values()) * population)
        mean = torch.zeros_like(like)
        for i in clients:
            mean.add_(before[i], alpha=examples[i] * scale)
        d = mean.clone()
        for i, weight, delta in zip(ids, cohort.weights, cohort.deltas, strict=True):
            d.add_(delta - before[i], alpha=weight)
        now = dict(zip(ids, cohort.deltas, strict=True))
        after = {f"{UPDATE}{i!r}": now[i].clone() if i in now else before[i] for i in clients}
        after |= {f"{EXAMPLES}{i!r}": torch.tensor(examples[i]) for i in clients}
        # the weights sum to 1, so client m's own part is w_m (D_m - y_m + mean)
        projections = [w * float((now[i] - before[i] + mean) @ d) for i, w in zip(ids, cohort.weights, strict=True)]
        return Step(self.step * d, float(d.numel()), 1.0, projections, after)


def _plain(client: int | str) -> int | str:
    """Without numpy's kinds of numbers, which Python writes in other ways."""
    return str(client) if isinstance(client, str) else int(client)
