"""docs/scaling.md: its tables are those that are computed, its sizes those that are sent, its code runs."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import fipa
from fipa.curvature.additive import AdditivePlan
from fipa.curvature.sketch import SketchPlan
from fipa.federation.messages import Order, Reply
from fipa.flower.answer import CURVATURE, UPDATE, encode
from fipa.flower.codec import nbytes
from fipa.flower.request import Request, settings_of
from fipa.flower.secure import SecureClient, SecureServer, flatten
from fipa.layout import Layout

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "scaling.md").read_text("utf-8")
arithmetic = runpy.run_path(str(DOCS / "results/scaling.py"))
P, RANK, WIDTH = 1500, 3, 6
LAYOUT = Layout(("w",), ((P,),))


def sketch():
    return fipa.Sketch(torch.linalg.qr(torch.randn(P, RANK)).Q, torch.rand(RANK), LAYOUT)


def statistics():
    return fipa.AdditiveStatistics(torch.randn(P, WIDTH), torch.randn(P), torch.randn(P), 10, 1, LAYOUT)


def test_page_has_the_tables():
    assert [name for name, table in arithmetic["tables"]().items() if table not in PAGE] == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_sizes_are_those_of_replies(precision):
    for summary, plan, expected in (
        (sketch(), SketchPlan(RANK), arithmetic["sketch_bytes"](P, RANK, precision)),
        (statistics(), AdditivePlan(WIDTH), arithmetic["additive_bytes"](P, WIDTH, precision)),
    ):
        settings = settings_of(Order(1, torch.zeros(P), plan=plan))
        request = Request("work", 1, 0, params=("w",), precision=precision, order=settings)
        content = encode(request, Reply(fipa.ClientUpdate(torch.randn(P), 10, summary)))
        assert nbytes(content[UPDATE], content[CURVATURE]) == expected


def test_sizes_are_those_of_masked_sums():
    vector = flatten(statistics())
    server = SecureServer(range(5), "run", 1, len(vector))
    clients = [SecureClient(k, "run", 1) for k in range(5)]
    sent = {"masked": 0, "other": 0}
    for phase in ("keys", "shares", "masked", "unmask"):
        for k, request in server.requests().items():
            reply = clients[k].reply(request, vector if phase == "masked" else None)
            server.receive(k, reply)
            if k == 0 and phase == "masked":
                sent["masked"] += reply["masked"].nbytes
            elif k == 0:
                lists = [value if isinstance(value, list) else [value] for value in reply.values()]
                sent["other"] += sum(len(v) for values in lists for v in values if isinstance(v, bytes))
    assert sent == {"masked": arithmetic["masked_bytes"](P, WIDTH), "other": arithmetic["share_bytes"](5)}


def test_error_of_a_sample():
    population = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    means = [population[torch.randperm(200, generator=generator)[:50]].mean() for _ in range(4000)]
    error = torch.stack(means).std() / population.std()
    assert float(error) == pytest.approx(arithmetic["sampling_error"](50, 200), rel=0.05)


def test_tree_gives_the_sum_of_all():
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(snippet, names)
    flat = fipa.pool(names["devices"])
    for name, tensor in names["total"].tensors().items():
        torch.testing.assert_close(tensor, flat.tensors()[name])
    assert names["total"].num_examples == flat.num_examples == sum(20 + k % 5 for k in range(100))
    assert set(names["result"].theta) == {"weight", "bias"}
