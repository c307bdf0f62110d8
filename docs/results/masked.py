"""A shared basis under masks: `python docs/results/masked.py` writes masked.csv beside this file, and prints a table.

Digits, sixteen clients with unlike classes, all of which take part in 20 rounds from scratch. The server sees sums
only, with 0 to 7 sums with random signs; beside it the rule that sees single clients and remembers them. And what the
server could find out if it tried: the gradient of each client by least squares from all sums of the last rounds, as if
gradients stood still, compared with the true one.
"""

from __future__ import annotations

import copy
import logging
import statistics
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from tables import HERE, write
from torch import Tensor

import fipa
from fipa.data import BalancedDirichlet
from fipa.federation.site import Site
from fipa.flower import FIPA, SecureFIPA, client
from fipa.flower.local import LocalGrid
from fipa.flower.masked_transport import MaskedTransport
from fipa.flower.secure.shared import signs_for
from fipa.problems.vision import ConvNet, images

SEEDS, ROUNDS, CLIENTS = range(3), 20, 16
COLUMNS = ("arm", "signs", "seed", "round", "accuracy", "loss", "uplink_kib", "similarity")


def problem_of(seed: int) -> Any:
    """That of `fipa run digits`, with fewer clients."""
    return images(seed, model=ConvNet((4, 8), 16), clients=CLIENTS, partition=BalancedDirichlet(alpha=0.1))


class Curious:
    """Keeps the sums of all rounds, and guesses single gradients from them."""

    def __init__(self, seed: int, problem: Any) -> None:
        self.seed, self.site, self.sums, self.rows = seed, Site(problem, seed), list[Tensor](), list[Tensor]()
        self.weights = torch.tensor([one.num_examples for one in problem.clients]).double()
        self.weights /= self.weights.sum()
        self.similarity: dict[int, float] = {}

    def saw(self, k: int, theta: Tensor, reply: Any) -> None:
        """One more round: the best guess is made from as many of the last ones as give most."""
        signs = len(reply.directions)
        own = torch.stack([signs_for(self.seed, k, m, signs) for m in range(CLIENTS)], dim=1)
        self.rows += [self.weights, *(self.weights * own)]
        self.sums += [reply.update.delta.double(), *(one.double() for one in reply.directions)]
        true = torch.cat([-self.site.gradients((m,), theta, k) for m in range(CLIENTS)]).double()
        best = -1.0
        for rounds in range(1, k + 1):
            last = slice(len(self.rows) - rounds * (signs + 1), None)
            guess = torch.linalg.pinv(torch.stack(self.rows[last])) @ torch.stack(self.sums[last])
            best = max(best, float(torch.nn.functional.cosine_similarity(guess, true).mean()))
        self.similarity[k] = best


def run(strategy: FIPA, seed: int, name: str, signs: Any) -> list[dict[str, Any]]:
    """One strategy on one seed: a row for each round."""
    problem, curious = problem_of(seed), Curious(seed, problem_of(seed))

    def objective(context: Context) -> Any:
        return copy.deepcopy(problem.model), problem.clients[int(context.node_config["partition-id"])]

    def evaluate(k: int, arrays: ArrayRecord) -> MetricRecord:
        problem.model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": problem.evaluate(problem.theta())})

    plain = MaskedTransport._gradients

    def watched(self: MaskedTransport, ask: Any, order: Any) -> Any:
        answers = plain(self, ask, order)
        for reply in answers.values.values():
            curious.saw(ask.round_number, order.theta, reply)
        return answers

    MaskedTransport._gradients = watched  # type: ignore[method-assign]
    try:
        grid = LocalGrid(client(ClientApp(), objective=objective), CLIENTS)
        result = strategy.start(grid, ArrayRecord(problem.model.state_dict()), ROUNDS, evaluate_fn=evaluate)
    finally:
        MaskedTransport._gradients = plain  # type: ignore[method-assign]
    rows = []
    for k in range(1, ROUNDS + 1):
        numbers: Any = result.train_metrics_clientapp[k]
        told: Any = result.evaluate_metrics_serverapp[k]
        similarity = curious.similarity.get(k)
        rows.append(
            {"arm": name, "signs": signs, "seed": seed, "round": k, "accuracy": round(told["accuracy"], 2)}
            | {"loss": round(numbers["loss"], 4), "uplink_kib": round(numbers["uplink-bytes"] / CLIENTS / 1024, 1)}
            | {"similarity": "" if similarity is None else round(similarity, 3)}
        )
    return rows


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    local, plan = fipa.FullGradient(), fipa.BasisPlan()
    for seed in SEEDS:
        plain = FIPA(fipa.SharedFIPA(parts=1), local=local, plan=plan, fraction_evaluate=0.0, seed=seed)
        rows += run(plain, seed, "plain", "")
        for signs in (0, 1, 3, 7):
            rows += run(SecureFIPA(local=local, plan=plan, signs=signs, seed=seed), seed, "masked", signs)
    write(HERE / "masked.csv", COLUMNS, rows)
    print(
        "| arm | signs | accuracy after 10 | after 20 | loss | KiB per client and round | guess |\n" + "|---" * 7 + "|"
    )
    for name, signs in dict.fromkeys((row["arm"], row["signs"]) for row in rows):
        own = [row for row in rows if (row["arm"], row["signs"]) == (name, signs)]
        cells = [name, str(signs)]
        for k in (10, 20):
            values = [row["accuracy"] for row in own if row["round"] == k]
            cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
        cells.append(f"{statistics.mean(row['loss'] for row in own if row['round'] == ROUNDS):.3f}")
        cells.append(f"{statistics.mean(row['uplink_kib'] for row in own):.0f}")
        guesses = [row["similarity"] for row in own if row["round"] == ROUNDS and row["similarity"] != ""]
        cells.append(f"{statistics.mean(guesses):.2f}" if guesses else "")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
