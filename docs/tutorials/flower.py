# %% [markdown]
# # Your Flower app, from FedAvg to FIPA
#
# This page takes a plain Flower app with FedAvg, gives its clients an *objective* and changes the strategy to
# `fipa.flower.FIPA()`. The same app then runs in one process, in Flower's simulation and on a real SuperLink, with the
# same numbers. You need `pip install 'fipa[flower]' 'flwr[simulation]'`.
#
# The title of each block is the file that it belongs to. The app is the folder `digits`. `compare.py` is a script next
# to it, shown in several blocks. [The whole app](../../examples/flower-digits) is among the examples.
#
# ## Model, data and training
#
# Nothing in this file knows about federated learning. The images come with fipa. Each client has few classes.

# %% [file] examples/flower-digits/digits/task.py

# %% [markdown]
# ## Before: Flower's FedAvg
#
# A client that trains, and Flower's own strategy. `LocalGrid` runs an app in this process, without Ray or a SuperLink:
# it is made for trying things out.

# %% compare.py
import logging

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from digits.task import Net, accuracy, load_data, train
from fipa.flower.local import LocalGrid

logging.getLogger("flwr").setLevel(logging.ERROR)  # no progress on this page
app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train(net, x, y)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


def evaluate(round_number, arrays):
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(net)})


def first_model():
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())


strategy = FedAvg(fraction_evaluate=0.0)
result = strategy.start(LocalGrid(app, 4), first_model(), num_rounds=10, evaluate_fn=evaluate)
before = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
print("FedAvg by round:", [round(value) for value in before])

# %% [markdown]
# ## After: an objective instead of a training function
#
# A client with an objective says what it has: a model, data and a loss. How to use them is the server's choice. This is
# all of the new `client_app.py`:

# %% [file] examples/flower-digits/digits/client_app.py

# %% [markdown]
# The strategy is one line. If all clients have an objective, `FIPA()` is [FIPA in a shared
# basis](../shared-basis.md): clients send gradients and a small matrix instead of models, and the server remembers what
# each of them said. There is no learning rate to choose.

# %% compare.py
from digits import client_app
from fipa.flower import FIPA

strategy = FIPA(fraction_evaluate=0.0)
result = strategy.start(LocalGrid(client_app.app, 4), first_model(), num_rounds=10, evaluate_fn=evaluate)
after = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
print("FIPA by round:  ", [round(value) for value in after])

# %% compare.py
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(before, marker=".", label="FedAvg")
axes.plot(after, marker=".", label="FIPA()")
axes.set(xlabel="round", ylabel="test accuracy, %")
axes.legend()

# %% [markdown]
# FIPA starts more slowly, because its basis is still small, and then passes FedAvg. Every round tells what it cost:

# %% compare.py
for k in (1, 5, 10):
    seen = result.train_metrics_clientapp[k]
    print(f"round {k:2}: loss {seen['loss']:.2f}, trips {seen['trips']:.0f}, ", end="")
    print(f"up {seen['uplink-bytes'] / 1024:.0f} KiB, down {seen['downlink-bytes'] / 1024:.0f} KiB")
up, down = (sum(getattr(one, f"{way}link_bytes") for one in strategy.records) / 1024 for way in ("up", "down"))
size = 4 * sum(p.numel() for p in Net().parameters()) / 1024
print(f"FIPA: {up:.0f} KiB up, {down:.0f} KiB down; FedAvg: {10 * 4 * size:.0f} KiB each way")

# %% [markdown]
# This network has only 666 parameters, so the small matrices weigh more than the gradients. With 8,748 parameters and
# ten clients the uplink is 1.45 times FedAvg's, and with 5 of 100 clients per round it is below FedAvg's:
# [measured](../vision.md#a-shared-basis).
#
# ## In Flower's simulation
#
# Two more files make this a Flower app: the server, and a `pyproject.toml` that names both parts.

# %% [file] examples/flower-digits/digits/server_app.py

# %% [file] examples/flower-digits/pyproject.toml

# %% [markdown]
# Run it in the folder of `pyproject.toml`:

# %% [shell]
# $ export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
# $ flwr run . local --stream --federation-config 'num-supernodes=4 client-resources-num-cpus=1'

# %% [markdown]
# The log ends with the accuracies from above.
#
# ## On a real SuperLink
#
# Start a SuperLink and two SuperNodes, each in its own terminal or on its own machine. `--insecure` is for a first try
# on one machine; `fipa deploy-demo` does the same with TLS and keys for the nodes.

# %% [shell]
# $ flower-superlink --insecure --host 127.0.0.1 --port 8731 --disable-runtime-dependency-installation
# $ flower-supernode --insecure --superlink 127.0.0.1:8731 --port 9741 --node-config 'partition-id=0 num-partitions=2'
# $ flower-supernode --insecure --superlink 127.0.0.1:8731 --port 9742 --node-config 'partition-id=1 num-partitions=2'

# %% [markdown]
# Name the SuperLink in Flower's configuration:
#
# ```toml title="~/.flwr/config.toml"
# [superlink.mine]
# address = "127.0.0.1:8731"
# insecure = true
# ```
#
# Then submit the app. A SuperNode starts a process for every message, which takes a few seconds, so try two rounds
# first:

# %% [shell]
# $ flwr run . mine --stream --run-config 'nodes=2 rounds=2'

# %% [markdown]
# The same two rounds in one process:

# %% compare.py
from digits import server_app

config = {"strategy": "fipa", "nodes": 2, "rounds": 2}
server_app.app(LocalGrid(client_app.app, 2, run_config=config), Context(1, 1, {}, RecordDict(), config))

# %% [markdown]
# The log on the SuperLink ends with the same lines. Rounds survive the death of nodes and, with
# `FIPA(checkpoint="state/run.pt")`, that of the server.
#
# ## Where to go from here
#
# - Your app must train by itself? [Ten changed lines](../how-to/flower.md#apps-that-train-by-themselves).
# - Deadlines, quorum, late answers, compression: [the strategy](../how-to/flower.md#the-strategy).
# - The server must not see single clients: [ten hospitals](hospitals.md).
