"""Training some of a model's parameters: the same numbers as the whole problem with these alone in its layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federation.cases import data, run, stage
from fipa import FIPA, Client, FedAvg, Problem, Residual
from fipa.clients.descent import SGD
from fipa.curvature.sketch import SketchPlan
from fipa.data import Augment
from fipa.data.images import Images, Normalise
from fipa.federation.focus import focus
from fipa.problems.fitting import misfit
from fipa.problems.vision import Accuracy

NORMALISE = Normalise((0.5,), (0.25,))
PLAN = SketchPlan(rank=5, solver="exact")


class Backbone(nn.Module):
    """Counts the examples that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 6)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.linear(x.flatten(1)).tanh()


class Net(nn.Module):
    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.backbone, self.head, self.scaled = Backbone(), nn.Linear(6, 3), scaled
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng) / 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.backbone(x))
        return 2 * z if self.scaled else z


def images(n: int, seed: int) -> Images:
    rng = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (n, 1, 4, 4), generator=rng, dtype=torch.uint8)
    return Images(pixels, torch.randint(3, (n,), generator=rng))


def problem(
    seed: int = 0, *, params: Any = None, sizes: Sequence[int] = (7, 12), metric: Any = None, **model: Any
) -> Problem:
    clients = [
        Client((part.pixels, part.labels), "cross_entropy", transform=NORMALISE)
        for part in (images(n, m) for m, n in enumerate(sizes))
    ]
    return Problem(
        Net(**model), clients, metric or Accuracy(images(40, 9), NORMALISE), name="accuracy", goal="max",
        scale="linear", params=params,
    )  # fmt: skip


def rounds(factory: Callable[[int], Problem], **settings: Any) -> list[tuple[Tensor, float, float, dict[str, Any]]]:
    one = stage(FIPA(0.1), SGD(lr=0.3, epochs=2, batch=5), 3, PLAN)
    return [
        (state.theta, record["metric"], record["loss"], record["spectra"])
        for state, record in run(one, factory, **settings)
    ]


def check(found: list[Any], expected: list[Any]) -> None:
    """To rounding: parameters, metric, losses and the sketches' eigenvalues of every round."""
    assert len(found) == len(expected) == 3
    for (theta, metric, loss, spectra), (same, accuracy, value, reference) in zip(found, expected, strict=True):
        torch.testing.assert_close(theta, same, rtol=1e-5, atol=1e-6)
        assert metric == accuracy
        assert loss == pytest.approx(value, rel=1e-5)
        assert spectra.keys() == reference.keys()
        for client in reference:
            assert spectra[client] == pytest.approx(reference[client], rel=1e-4)
    assert found[-1][2] < found[0][2]  # something was learnt


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"group": 1}, {"group": 16}, {"centralised": True}])
def test_head_alone_is_the_whole_problem_with_the_heads_parameters(settings: dict[str, Any]) -> None:
    sizes = (8, 8)
    found = rounds(lambda seed: problem(sizes=sizes), params=("head.*",), **settings)
    check(found, rounds(lambda seed: problem(params="head.*", sizes=sizes), **settings))
    assert isinstance(focus(problem(), "head.*").model, nn.Linear)


@pytest.mark.long
@pytest.mark.parametrize(
    ("params", "model"),
    [
        ("head.weight", {}),  # not all of the head
        ("backbone.*", {}),  # not at the end
        (("head.*", "backbone.linear.bias"), {}),  # not one module
        ("head.*", {"scaled": True}),  # the model goes on after it
        ("*", {}),
    ],
)
def test_what_is_no_head_is_trained_through_the_model(params: Any, model: dict[str, Any]) -> None:
    whole = problem(**model)
    part = focus(whole, params)
    assert part.model is whole.model
    assert part.clients[0].transform is NORMALISE
    names = (params,) if isinstance(params, str) else params
    check(rounds(lambda seed: problem(**model), params=names), rounds(lambda seed: problem(params=params, **model)))


def test_the_rest_runs_once_for_each_client_and_test_image() -> None:
    """Not once for every local step: 2 epochs of 3 batches in each of 3 rounds."""
    made: list[Problem] = []

    def factory(seed: int) -> Problem:
        made.append(problem(sizes=(11, 12)))
        made[-1].model.backbone.seen.clear()
        return made[-1]

    run(stage(FedAvg(), SGD(lr=0.3, epochs=2, batch=5), 3), factory, params=("head.*",))
    seen = made[-1].model.backbone.seen
    assert seen[0] == 1  # to find the head
    assert sorted(seen[1:]) == [11, 12, 40]


def test_sketches_do_not_run_it_again() -> None:
    made: list[Problem] = []

    def factory(seed: int) -> Problem:
        made.append(problem(sizes=(11, 12)))
        return made[-1]

    run(stage(FIPA(0.1), SGD(lr=0.3, epochs=2, batch=5), 3, PLAN), factory, params=("head.*",))
    seen = made[-1].model.backbone.seen
    assert (seen.count(11), seen.count(12), seen.count(40), len(seen)) == (1, 1, 1, 4)


def test_large_clients_go_through_in_blocks() -> None:
    part = focus(problem(sizes=(501, 3)), "head.*")
    seen = part.clients[0].transform.model.backbone.seen
    seen.clear()
    features = part.clients[0].tensors[0]
    assert seen == [250, 250, 1]
    x = NORMALISE(images(501, 0).pixels)
    with torch.no_grad():
        torch.testing.assert_close(features, problem().model.backbone(x))


def test_metrics_of_users_are_given_the_whole_model() -> None:
    x = NORMALISE(images(5, 3).pixels)

    def metric(model: nn.Module) -> Tensor:
        assert isinstance(model, Net)
        return model(x).square().sum()

    part = focus(problem(metric=metric), "head.*")
    twice = part.evaluate(2 * part.initial)
    assert twice == pytest.approx(4 * problem(metric=metric).evaluate(problem().initial), rel=1e-5)


def test_features_are_not_augmented() -> None:
    whole = problem()
    whole.clients = tuple(replace(client, augment=Augment(1)) for client in whole.clients)
    assert all(client.augment is None for client in focus(whole, "head.*").clients)
    assert all(client.augment is not None for client in focus(whole, "backbone.*").clients)


def test_name_goal_and_scale_stay() -> None:
    for params in ("head.*", "backbone.*"):
        part = focus(problem(), params)
        assert (part.name, part.goal, part.scale) == ("accuracy", "max", "linear")


@pytest.mark.long
def test_least_squares() -> None:
    """Residuals take the model as they like: there is no head to cut off."""

    def squares(params: Any = None) -> Problem:
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng, dtype=torch.float64))
        clients = [Residual(misfit, *data(0, m, 6)) for m in range(2)]
        return Problem(model, clients, lambda model: model[2].weight.square().sum(), params=params)

    found, expected = rounds(lambda seed: squares(), params=("2.*",)), rounds(lambda seed: squares("2.*"))
    assert isinstance(focus(squares(), "2.*").model, nn.Sequential)
    assert found[0][0].shape == (4,)
    for (theta, metric, *_), (same, value, *_) in zip(found, expected, strict=True):
        assert torch.equal(theta, same)
        assert metric == value


# --- adapters ---


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features, generator=torch.Generator().manual_seed(1)))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def adapted(seed: int) -> Problem:
    whole = problem()
    model = whole.model
    model.backbone.linear = Adapter(model.backbone.linear, 2)
    model.head.requires_grad_(False)
    return Problem(model, whole.clients, whole.metric, name="accuracy", goal="max", scale="linear")


def test_low_rank_adapters_are_all_that_is_trained_and_sent() -> None:
    whole = adapted(0)
    assert whole.layout.names == ("backbone.linear.lora_a", "backbone.linear.lora_b")
    assert whole.layout.numel == 2 * 16 + 6 * 2
    results = run(stage(FIPA(0.1), SGD(lr=0.1, epochs=2, batch=5), 3, PLAN), adapted)
    size = 4 * whole.layout.numel
    for _, record in results:
        assert record["ranks"] == [5, 5]
        assert record["downlink_bytes"] == 2 * size
        assert record["uplink_bytes"] < 2 * (8 + 8 * size)
    assert results[-1][1]["loss"] < results[0][1]["loss"]
    frozen = {k: v.clone() for k, v in whole.model.state_dict().items() if "lora" not in k}
    assert whole.evaluate(results[-1][0].theta) == results[-1][1]["metric"]
    assert all(torch.equal(whole.model.state_dict()[k], v) for k, v in frozen.items())


@pytest.mark.long
@pytest.mark.xdist_group("transformers")  # which take long to import
def test_low_rank_adapters_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # one that does not fit torch would break transformers, which can do without
        monkeypatch.setitem(sys.modules, "torchvision", None)
    import peft
    import transformers

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = transformers.BertConfig(
                vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                max_position_embeddings=8, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                attn_implementation="eager", initializer_range=0.7,
            )  # fmt: skip
            model = transformers.BertForSequenceClassification(config)
            self.model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query", "value"]))

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids).logits

    def tokens(seed: int) -> Problem:
        rng = torch.Generator().manual_seed(seed)
        clients = [(torch.randint(20, (6, 5), generator=rng), torch.randint(2, (6,), generator=rng)) for _ in range(2)]
        x, y = clients[0]
        return Problem(
            Classifier(), clients, lambda model: (model(x).argmax(dim=1) == y).float().mean(), loss="cross_entropy"
        )

    names = tokens(0).layout.names
    assert len(names) == 4
    assert all("lora_" in name for name in names)
    results = run(stage(FIPA(0.1), SGD(lr=0.5, steps=3), 2, SketchPlan(rank=3)), tokens, group=1)
    assert results[-1][1]["ranks"] == [3, 3]
    assert results[1][1]["loss"] < results[0][1]["loss"]


class TwoLayers(nn.Module):
    """A head of several layers, called as the test wants."""

    def __init__(self, **keywords: float) -> None:
        super().__init__()
        self.backbone, self.keywords = Backbone(), keywords
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x), **self.keywords)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.layers(x)


def with_model(model: nn.Module) -> Problem:
    whole = problem()
    return whole.like(model, whole.clients, whole.metric, None)


def test_a_head_of_several_layers() -> None:
    whole = with_model(TwoLayers())
    part = focus(whole, "head.*")
    assert isinstance(part.model, Head)
    assert part.layout.numel == sum(p.numel() for p in whole.model.head.parameters())


def test_a_head_that_takes_keywords_is_trained_through_the_model() -> None:
    whole = with_model(TwoLayers(scale=10.0))
    assert focus(whole, "head.*").model is whole.model


def test_looking_for_the_head_leaves_the_models_mode_alone() -> None:
    whole = with_model(TwoLayers())
    whole.model.train()
    part = focus(whole, "head.*")
    assert whole.model.training
    assert part.clients[0].tensors[0].shape[1] == 6
    assert whole.model.training
