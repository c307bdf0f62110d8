"""The server."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fipa
from digits.task import Net, accuracy
from fipa.flower import FIPA

app = ServerApp()


def evaluate(round_number: int, arrays: ArrayRecord) -> MetricRecord:
    """Test accuracy on the server."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(net)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and print the accuracy after each."""
    config = context.run_config
    settings = {"fraction_evaluate": 0.0, "min_available_nodes": int(config["nodes"])}
    if config["strategy"] == "fedavg":
        strategy = FIPA(fipa.FedAvg(), local=fipa.SGD(lr=0.05, epochs=2, batch=16), **settings)
    else:
        strategy = FIPA(**settings)  # all clients have an objective: FIPA in a shared basis
    torch.manual_seed(0)
    start = ArrayRecord(Net().state_dict())
    result = strategy.start(grid, start, num_rounds=int(config["rounds"]), evaluate_fn=evaluate)
    for k, metrics in result.evaluate_metrics_serverapp.items():
        print(f"round {k}: accuracy {metrics['accuracy']:.1f} %")
    up, down = (sum(getattr(one, f"{way}link_bytes") for one in strategy.records) for way in ("up", "down"))
    print(f"sent by all clients {up / 1024:.0f} KiB, sent to them {down / 1024:.0f} KiB")
