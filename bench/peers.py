"""The same rounds by Flower's simulation and by pfl. Only imported in processes of their own."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
from dataclasses import asdict
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.rounds import BATCH, CLIENTS, DECAY, LR, Gate, Work, problem
from fipa.federation.problem import Problem

CASE = "FIPA_BENCH_CASE"  # in the environment, so that Flower's actors see it: work, and whether the layout is usual


@cache
def case() -> tuple[Work, bool]:
    """What this process measures."""
    work, usual = json.loads(os.environ[CASE])
    return Work(**work), usual


@cache
def shared() -> Problem:
    """Once per process, as a Flower app keeps its data set."""
    return problem(0, case()[0])


@cache
def data(client: int) -> tuple[Tensor, ...]:
    """What a client trains on: our engine's tensors, channels innermost, or torch's usual layout, which is slower."""
    x, y = shared().clients[client].tensors
    return (x.contiguous() if case()[1] else x), y


def flat(tensors: Any) -> Tensor:
    """Parameters as one vector, in the model's order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(message: Any, context: Any) -> Any:
    """A Flower client: the plain loop of its quickstart, with batches cut from tensors instead of a slower loader."""
    app = import_module("flwr.app")
    torch.set_num_threads(1)
    model = shared().model
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    x, y = data(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    for _ in range(case()[0].epochs):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    content = {
        "arrays": app.ArrayRecord(model.state_dict()),
        "metrics": app.MetricRecord({"num-examples": len(x)}),
    }
    return app.Message(content=app.RecordDict(content), reply_to=message)


def flower(gate: Gate, rounds: int, work: Work, usual: bool) -> None:
    """Two actors of one CPU. In this process: `flwr run` would ask for answers only every 3 seconds."""
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": tempfile.mkdtemp(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path(__file__).parent.parent),  # for the actors
        CASE: json.dumps([asdict(work), usual]),
    }
    app, strategies = import_module("flwr.app"), import_module("flwr.serverapp.strategy")
    server, client = import_module("flwr.serverapp").ServerApp(), import_module("flwr.clientapp").ClientApp()
    client.train()(train)

    def main(grid: Any, context: Any) -> None:
        strategy = strategies.FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS
        )
        configure = strategy.configure_train

        def configure_train(server_round: int, arrays: Any, *rest: Any) -> Any:
            gate(flat(arrays.to_torch_state_dict().values()))
            return configure(server_round, arrays, *rest)

        strategy.configure_train = configure_train
        result = strategy.start(grid, app.ArrayRecord(shared().model.state_dict()), num_rounds=rounds)
        gate(flat(result.arrays.to_torch_state_dict().values()), last=True)

    server.main()(main)
    import_module("flwr.simulation").run_simulation(
        server, client, num_supernodes=CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "log_to_driver": False, "include_dashboard": False},
        },
    )  # fmt: skip


class Turns:
    """A pfl callback."""

    def __init__(self, gate: Gate, rounds: int) -> None:
        self._gate = gate
        self._rounds = rounds
        self._nothing = import_module("pfl.metrics").Metrics

    def on_train_begin(self, *, model: Any) -> Any:
        self._gate(flat(model.pytorch_model.parameters()))
        return self._nothing()

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        self._gate(flat(model.pytorch_model.parameters()), last=central_iteration + 1 == self._rounds)
        return False, self._nothing()

    def on_train_end(self, *, model: Any) -> None: ...


def pfl(gate: Gate, rounds: int, work: Work, threads: int) -> None:
    """One process, which is how pfl runs on a CPU unless started by a distributed launcher."""
    os.environ[CASE] = json.dumps([asdict(work), False])
    torch.set_num_threads(threads)
    multiprocessing.current_process().name = "MainProcess"  # else pfl takes it for one that loads data
    asyncio.set_event_loop(asyncio.new_event_loop())
    pytorch = import_module("pfl.model.pytorch")  # first: it tells pfl which framework this is
    algorithm, sets = import_module("pfl.algorithm"), import_module("pfl.data")
    hyper, values = import_module("pfl.hyperparam"), import_module("pfl.metrics")
    network: Any = shared().model
    network.loss = lambda x, y: cross_entropy(network(x), y)
    network.metrics = lambda x, y: {"loss": values.Weighted(float(network.loss(x, y).detach()) * len(y), len(y))}
    model = pytorch.PyTorchModel(
        network, partial(torch.optim.SGD, weight_decay=DECAY), torch.optim.SGD(network.parameters(), 1.0)
    )
    users = [import_module("pfl.data.dataset").Dataset(data(client)) for client in range(CLIENTS)]
    sampler = import_module("pfl.data.sampling").get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    federated = sets.FederatedDataset(users.__getitem__, sampler)
    algorithm.FederatedAveraging().run(
        algorithm.NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=CLIENTS, val_cohort_size=0
        ),
        import_module("pfl.aggregate.simulate").SimulatedBackend(federated, federated),
        model,
        hyper.NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[Turns(gate, rounds)],
        send_metrics_to_platform=False,
    )
