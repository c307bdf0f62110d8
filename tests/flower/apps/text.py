"""A text classifier of Hugging Face: a frozen model with LoRA, and a head that shares the weight of the embedding."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader

LR = 0.5


class Tied(nn.Module):
    """Says the words that stand for the classes: the decoder is the embedding."""

    def __init__(self, lora):
        import peft
        import transformers

        super().__init__()
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=8, attn_implementation="eager", initializer_range=0.5,
        )  # fmt: skip
        bert = transformers.BertForMaskedLM(config)
        self.body = peft.get_peft_model(bert, peft.LoraConfig(r=2, target_modules=["query", "value"])) if lora else bert

    def forward(self, input_ids, attention_mask, labels=None):
        output = self.body(input_ids=input_ids, attention_mask=attention_mask)
        output.logits = output.logits[:, 0, :3]
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits, labels)
        return output


def make():
    torch.manual_seed(0)
    return Tied(LORA)


LORA = True


def data(partition):
    g = torch.Generator().manual_seed(partition)
    labels = (torch.randint(2, (30,), generator=g) + partition) % 3
    words = torch.cat([5 + labels[:, None], torch.randint(8, 20, (30, 4), generator=g)], dim=1)
    rows = [
        {"input_ids": w, "attention_mask": torch.ones_like(w), "labels": y} for w, y in zip(words, labels, strict=True)
    ]
    return DataLoader(rows[:20], batch_size=5), DataLoader(rows[20:], batch_size=5)


def fit(model, trainloader, lr):
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=lr)
    model.train()
    for batch in trainloader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def judge(model, testloader):
    model.eval()
    return sum(model(**batch).loss.item() for batch in testloader) / len(testloader)


app = ClientApp()


def load(msg):
    model = make()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model


@app.train()
def train(msg: Message, context: Context):
    model = load(msg)
    trainloader, _ = data(context.node_config["partition-id"])
    loss = fit(model, trainloader, msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(trainloader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = load(msg)
    _, testloader = data(context.node_config["partition-id"])
    metrics = {"eval_loss": judge(model, testloader), "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


def server(grid):
    """All of a ServerApp's main function."""
    strategy = FedAvg()
    return strategy.start(
        grid=grid, initial_arrays=ArrayRecord(make().state_dict()), num_rounds=3, train_config=ConfigRecord({"lr": LR})
    )
