"""The server: FIPA after a few rounds of FedAvg, evaluated on the test set."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fipa
from fipa.flower import FIPA, SecureFIPA
from vision.task import images, model, scaled

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and print the accuracy after each."""
    config = dict(context.run_config)
    shared = {
        "fraction_evaluate": 0.0, "min_available_nodes": int(config["clients"]), "deadline": float(config["deadline"]),
        "checkpoint": config["checkpoint"] or None,
    }  # fmt: skip
    after = {"warmup_rounds": int(config["warmup-rounds"]), "lr_scale": 0.1, "precision": config["precision"]}
    strategy = {
        "fipa": lambda: FIPA(fipa.CompletedFIPA(damping=0.5, step=0.5), **after, **shared),
        "fedavg": lambda: FIPA(fipa.FedAvg(), **after, **shared),
        "additive": lambda: FIPA(fipa.AdditiveFIPA(damping=0.5, step=0.5), **after, **shared),
        "secure": lambda: SecureFIPA(fipa.AdditiveFIPA(damping=0.5, step=0.5), **shared),
    }[str(config["strategy"])]()
    net = model(config)
    x, y = scaled(images(str(config["dataset"]), str(config["data"])).test)

    def evaluate(round_number: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            return MetricRecord({"accuracy": float((net(x).argmax(1) == y).float().mean())})

    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=int(config["rounds"]), evaluate_fn=evaluate)
    for k, metrics in result.evaluate_metrics_serverapp.items():
        print(f"round {k}: accuracy {100 * metrics['accuracy']:.1f} %")
