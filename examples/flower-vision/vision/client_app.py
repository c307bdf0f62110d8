"""Clients with a training loop of their own."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fipa.flower import client, reply
from vision.task import client_data, fit, model

app = client(ClientApp())


@app.train()
def train(message: Message, context: Context) -> Message:
    """Load, train, and reply: update and curvature."""
    config, settings = dict(context.run_config), message.content["config"]
    net = model(config)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    x, y = client_data(partition, config)
    lr = float(config["learning-rate"]) * settings["lr-scale"]
    loss = fit(net, x, y, lr, int(config["local-epochs"]), seed=1000 * settings["server-round"] + partition)
    return reply(message, context, net, (x, y), {"train_loss": loss})
