"""The clients."""

from flwr.app import Context
from flwr.clientapp import ClientApp

from digits.task import Net, load_data
from fipa.flower import client


def objective(context: Context):
    """What the server may ask about: the model, this node's data, and the loss."""
    data = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    return Net(), data, "cross_entropy"


app = client(ClientApp(), objective=objective)
