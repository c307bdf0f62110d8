"""A plain re-statement of the published scheme for fitting and PDEs; none of the authors' code is in it.

One process per client; each forms its dense p x p matrix, decomposes it in full, keeps the top eigenpairs and
then takes Adam steps one by one. The server adds up p x p matrices and solves a p x p least-squares problem.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.func import functional_call, jacrev

from fipa.federation.executor import ProblemFactory
from fipa.federation.problem import Problem


class PlainFederation:
    """Clients in processes of their own, which stay for all rounds."""

    def __init__(self, factory: ProblemFactory, seed: int, *, steps: int, rank: int, step: float) -> None:
        self.problem: Problem = factory(seed)
        self.theta = self.problem.theta()
        self._step = step
        context = multiprocessing.get_context("spawn")
        self._clients = []
        for client in range(len(self.problem.clients)):
            here, there = context.Pipe()
            process = context.Process(target=_client, args=(there, factory, seed, client, steps, rank), daemon=True)
            process.start()
            self._clients.append((process, here))
        for _, pipe in self._clients:
            pipe.recv()  # ready: start-up is not measured

    def round(self) -> float:
        """One round; returns the test metric."""
        for _, pipe in self._clients:
            pipe.send(self.theta.numpy())
        H = torch.zeros(len(self.theta), len(self.theta), dtype=self.theta.dtype)
        b = torch.zeros_like(self.theta)
        for _, pipe in self._clients:
            U, values, delta = (torch.from_numpy(array) for array in pipe.recv())
            own = (U * values) @ U.T
            H += own / len(self._clients)
            b += own @ delta / len(self._clients)
        d = torch.linalg.lstsq(H, b[:, None], rcond=1e-5, driver="gelsd").solution[:, 0]
        self.theta = self.theta + self._step * d
        return self.problem.evaluate(self.theta)

    def close(self) -> None:
        for process, pipe in self._clients:
            pipe.send(None)
            process.join()


def _client(pipe: Connection, factory: ProblemFactory, seed: int, client: int, steps: int, rank: int) -> None:
    torch.set_num_threads(1)
    problem = factory(seed)
    rows = _rows(problem, client)
    pipe.send("ready")
    while (theta := pipe.recv()) is not None:
        theta = torch.from_numpy(theta)
        J = jacrev(rows)(theta).detach()
        values, vectors = torch.linalg.eigh(J.T @ J)
        moved = theta.clone().requires_grad_()
        optimizer = torch.optim.Adam([moved], lr=1e-4)
        for _ in range(steps):
            optimizer.zero_grad()
            rows(moved).square().sum().backward()
            optimizer.step()
        delta = moved.detach() - theta
        pipe.send((vectors[:, -rank:].numpy(), values[-rank:].numpy(), delta.numpy()))


def _rows(problem: Problem, client: int) -> Callable[[Tensor], Tensor]:
    """The client's residuals with the weights of its loss, as a function of the flat parameters."""

    def rows(flat: Tensor) -> Tensor:
        params = problem.layout.unflatten(flat)

        def model(x: Tensor) -> Tensor:
            return functional_call(problem.model, params, (x,))

        terms = problem.clients[client].data
        return torch.cat([(term.weight / len(term.inputs[0])) ** 0.5 * term(model).reshape(-1) for term in terms])

    return rows
