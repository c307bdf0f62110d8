"""Accuracies, runs in two stages, and the clients' classes."""

import json
import math

import numpy as np
import pytest
from rich.console import Console

from fipa import cli
from fipa.errors import FipaError
from fipa.report import data, image_figures, payload, scores, stages, statistics, tables, words
from fipa.report.figures import LAYOUTS, write_figures
from fipa.report.style import GREY, Style, arm_styles
from report import example

STYLE = Style("#000000", "solid")


def load(tmp_path, content, views=None):
    return data.load_results(example.write(tmp_path, content, views))


def accuracies(arms, **changes):
    return example.results(arms, metric=dict(example.ACCURACY), **changes)


def seeds(*metrics, **extra):
    return {str(k): example.record(metric, initial=40.0, **extra) for k, metric in enumerate(metrics)}


def figure(content, views=None):
    styles = arm_styles(list(content["arms"]), [content["control"]])
    return LAYOUTS[content["figure"]](content, views or {}, styles)


# gaps


def test_gaps_are_nan_and_the_end_of_a_diverged_seed_is_bad():
    rows = [[1.0, None, 3.0, None, 5.0], [2.0, None, 9.0, None], [None, None, 1.0]]
    table = statistics.measured(rows, [False, True, False], math.inf)
    expected = [
        [1, math.nan, 3, math.nan, 5],
        [2, math.nan, 9, math.nan, math.inf],
        [math.nan, math.nan, 1] + [math.nan] * 2,
    ]
    assert np.array_equal(table, expected, equal_nan=True)
    alone = statistics.measured([[None, None, 1.0, None]], [True], -math.inf)
    assert np.array_equal(alone, [[math.nan, math.nan, 1, -math.inf]], equal_nan=True)


def test_a_running_arm_may_end_in_a_gap(tmp_path):
    going = example.record([None, 45.0, None], initial=40.0, status="running")
    fresh = example.record([None, None], initial=40.0, status="running")
    loaded = load(tmp_path, accuracies({"A": {"0": going}, "B": {"0": fresh}}, control=None))
    first, second = data.summary(loaded)
    assert (first.status, first.final_median, first.best, first.diverged) == ("running", 45, 45, 0)
    assert (second.status, second.final_median) == ("running", 40)
    assert math.isnan(second.best)
    assert math.isnan(second.scores.mean.mean)
    assert "Still running" in words.describe(loaded, [first, second])


def test_the_measured_rounds_of_a_long_run_are_not_thinned_away(tmp_path):
    metric = [50.0 if k % 50 == 0 else None for k in range(1, 5001)]
    arm = payload.arm_payload(load(tmp_path, accuracies({"A": seeds(metric)})), "A", "A", STYLE)
    drawn = [r for r, value in zip(arm["rounds"], arm["metric"]["median"], strict=True) if value is not None]
    assert drawn == list(range(0, 5001, 50))
    assert len(arm["rounds"]) <= payload.POINTS


def test_lines_and_bands_go_on_over_gaps(tmp_path):
    content = accuracies({"A": seeds([None, 42.0, None, 44.0], [None, 43.0, None, 47.0])}, figure="generic")
    _, rounds, _ = figure(load(tmp_path, content)).axes
    (line,) = rounds.lines
    assert line.get_xydata().tolist() == [[0, 40], [2, 42.5], [4, 45.5]]
    assert len(rounds.collections[0].get_paths()) == 1


# numbers


def test_the_numbers_of_the_paper_by_hand(tmp_path):
    arms = {
        "FedAvg": seeds([40.0, 42.0, 44.0], [41.0, 41.0, 41.0]),
        "FIPA": seeds([50.0, 60.0, None, 55.0, 54.0, 53.0, 52.0], [50.0, 50.0, 50.0, 50.0, 50.0, 50.0, 53.5]),
    }
    control, arm = data.summary(load(tmp_path, accuracies(arms)))
    root = math.sqrt(2)
    assert control.scores.against_control is None
    assert (control.scores.best.mean, control.scores.best.std) == pytest.approx((42.5, 1.5 * root))
    assert (control.scores.mean.mean, control.scores.mean.seeds) == (pytest.approx(41.5), 2)
    assert arm.scores.best.mean == pytest.approx((60 + 53.5) / 2)
    assert arm.scores.mean.mean == pytest.approx((54 + 50.5) / 2)  # the first over the six that were measured
    assert arm.scores.tail.mean == pytest.approx((54.8 + 50.7) / 2)
    assert (arm.scores.last.mean, arm.scores.last.std) == pytest.approx((52.75, 0.75 * root))
    paired = arm.scores.against_control  # 54 - 42 and 50.5 - 41
    assert (paired.value, paired.low, paired.high, paired.wins) == pytest.approx((10.75, 9.5, 12, 2))
    assert paired.standard_error == pytest.approx(1.25)


def test_a_diverged_seed_has_its_best_round_only():
    assert scores.of_rounds([3.0, 5.0], "max", -math.inf) == (5, -math.inf, -math.inf, -math.inf)
    assert scores.of_rounds([], "max", -math.inf).best == -math.inf
    assert scores.of_rounds([3.0, 5.0], "min").best == 3


def test_one_seed_has_no_deviation_and_a_log_scale_no_scores(tmp_path):
    loaded = load(tmp_path, accuracies({"FedAvg": seeds([50.0]), "FIPA": seeds([57.314])}))
    _, arm = data.summary(loaded)
    assert words.mean_and_deviation(loaded, arm.scores.mean) == "57.31"
    assert words.means_against_control(loaded, arm) == "+7.31, better in 1/1"
    assert data.summary(example.full(1, 3))[0].scores is None


def test_cells_of_the_table(tmp_path):
    loaded = load(tmp_path, example.images())
    rows = {s.arm: s for s in data.summary(loaded)}
    assert words.means_against_control(loaded, rows["FedAvg"]) == "-"
    cell = words.means_against_control(loaded, rows["FedFisher"])
    assert cell.endswith("better in 2/3; over the 2 finite pairs of 3")
    table = tables.final_table([(arm, loaded, s) for arm, s in rows.items()])
    texts = [text for row in table.rows for _, text in row]
    assert "1000\u00a0+\u00a015" in texts
    assert "last 5" in table.heads
    assert any("\u00a0±\u00a0" in text for text in texts)
    assert texts.count("diverged") == 3
    note = tables.table_note([loaded])
    assert "(FedAvg): arm - control of the means over rounds" in note
    assert "warm-up + own" in note


def test_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(cli, "out", Console(width=140))
    cli._print_table(example.images())
    heads, *rows = capsys.readouterr().out.splitlines()[1:]
    assert [h.strip() for h in heads.split("  ") if h] == [
        "arm", "rounds", "max", "mean", "last 5", "last", "seconds", "MiB up", "MiB down",
    ]  # fmt: skip
    assert rows[2].split()[:5] == ["FIPA", "1000", "+", "15", "58.28"]
    assert rows[2].split()[-2:] == ["15.00", "7.50"]
    monkeypatch.setattr(cli, "out", Console(width=90))
    cli._print_table(example.images())
    assert "down" not in capsys.readouterr().out  # no room
    found = cli._summary(example.images())["FIPA"]
    assert (found["after"], found["rounds"]) == (1000, 15)
    assert found["over_rounds"]["against_control"]["wins"] == 3
    assert cli._summary(example.full(1, 2))["FedAvg"].keys() == {"median", "min", "max", "status"}


# words


def test_accuracies_are_told_in_points(tmp_path):
    arms = {
        "FedAvg": seeds([56.0, 56.0], [55.0, 55.0]),
        "FIPA": seeds([56.5, 57.5], [56.1, 55.9]),
        "B": seeds([50.0, 56.65]),
    }
    text = words.describe(loaded := load(tmp_path, accuracies(arms)), data.summary(loaded))
    assert text.startswith("FIPA ends at 56.70 % [55.90, 57.50] after 2 rounds, the highest median test accuracy.")
    assert "Within 0.1 points of it: B." in text
    assert "It ends 1.20 points above the control FedAvg (mean, range +0.90 to +1.50, standard error 0.30);" in text
    assert "In the mean of all its rounds it is 1.00 points above the control (mean, range +1.00 to +1.00," in text
    assert "times" not in text


def test_where_the_arms_start_is_told(tmp_path):
    text = words.describe(loaded := load(tmp_path, example.images(1)), data.summary(loaded))
    assert text.startswith(
        "All arms start from the model after 1000 rounds of a shared warm-up, at 41.36 %. FIPA ends at"
    )
    assert "after 15 rounds of refinement" in text
    assert "11.65 points above the control FedAvg; it is better in 1 of 1 common seed." in text
    text = words.describe(loaded := load(tmp_path, example.from_different_rounds()), data.summary(loaded))
    assert text.startswith("The arms start from rounds 100, 300 and 1000 of a shared warm-up.")
    assert "Worse than the control" not in text  # those that started elsewhere are not compared


# stages


def test_rounds_count_on_from_the_warm_up(tmp_path):
    arm = payload.arm_payload(load(tmp_path, example.images()), "FIPA", "FIPA", STYLE)
    assert (arm["rounds"][0], arm["rounds"][-1], arm["after"]) == (1000, 1015, 1000)
    assert arm["metric"]["median"][0] == 41.76
    assert (arm["seconds"][0], arm["uplink"][-1], arm["traffic"][-1]) == (0, 15, 22.5)
    start = example.refined(example.warm_up(1), 0, 50.0, damping=[0.1] * 14 + [0.2], accepted=[True] * 15)
    arm = payload.arm_payload(load(tmp_path, accuracies({"A": {"0": start}})), "A", "A", STYLE)
    assert arm["steering"]["rounds"] == list(range(1001, 1016))


def test_the_warm_up(tmp_path):
    found = stages.warm_up(load(tmp_path, example.images()))
    assert found.rounds.tolist() == list(range(0, 1001, 50))
    assert list(found.seeds) == ["0", "1", "2"]
    assert found.mean[-1] == pytest.approx((41.36 + 41.76 + 42.16) / 3)
    told = stages.warm_up_payload(load(tmp_path, example.from_different_rounds(1)))
    assert (told["starts"], told["seeds"], told["rounds"][:2]) == ([100, 300, 1000], {}, [0, 50])
    json.dumps(told, allow_nan=False)


def test_no_warm_up_and_one_that_has_only_begun(tmp_path):
    content = accuracies({"A": seeds([50.0])})
    assert stages.warm_up_payload(load(tmp_path, content)) is None
    empty = {"seeds": {"0": example.record([])}}
    assert "warmup" not in load(tmp_path, content | {"warmup": empty})
    unmeasured = {"seeds": {"0": example.record([None], initial=None, status="running")}}
    assert stages.warm_up(load(tmp_path, content | {"warmup": unmeasured})) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": []}, "'warmup' needs an object of seeds"),
        ({"warmup": {"seeds": {"3": {}}}}, "warm-up, seed 3: 'metric' is missing"),
        ({"arms": {"A": {"0": {"metric": [1], "after": -1}}}}, "'after' must be a number of rounds, not -1"),
    ],
)
def test_broken_stages_are_named(tmp_path, changes, message):
    with pytest.raises(FipaError, match=message):
        load(tmp_path, accuracies({"A": seeds([50.0])}) | changes)


def test_families_over_the_round_they_start_from(tmp_path):
    content = example.from_different_rounds()
    arm = content["arms"]["FIPA (from 300)"]
    found = stages.ablation(load(tmp_path, content))
    assert {name: [s.after for s in line] for name, line in found.items()} == {
        "FedAvg": [100, 300, 1000],
        "FIPA": [100, 300, 1000],
    }
    start = found["FIPA"][1]
    assert start.best.mean == pytest.approx(np.mean([max(r["metric"]) for r in arm.values()]))
    assert start.mean.mean == pytest.approx(np.mean([np.mean(r["metric"]) for r in arm.values()]))
    assert start.initial == pytest.approx(np.mean([r["initial_metric"] for r in arm.values()]))


# figures


def test_the_figure_of_a_refinement():
    drawn = figure(example.images())
    uplink, refined, warm = drawn.axes
    assert (uplink.get_xscale(), refined.get_xscale()) == ("log", "linear")
    assert uplink.get_xlabel() == "uplink of all clients, MiB, log scale\nsince the start of refinement"
    sent = {line.get_label(): line for line in uplink.lines}["FIPA"].get_xydata()
    assert (sent[0][0], sent[-1][0], len(sent)) == (1, 15, 15)  # without the start
    assert [len(warm.lines), warm.get_xlim()[1] > 1000] == [4, True]
    lines = {line.get_label(): line for line in refined.lines}
    assert lines["FIPA"].get_xydata()[0].tolist() == [1000, 41.76]
    assert max(lines["FIPA"].get_xdata()) == 1015
    assert lines["FedAvg"].get_color() == GREY
    (legend,) = drawn.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["FIPA", "FIPA, 200 eigenpairs", "FedFisher\n(diverged 1/3)", "FedProx", "FedAvg"]
    assert len(figure(example.images(1)).axes[2].lines) == 1
    alone = example.images() | {"warmup": None}
    assert len(figure(alone).axes) == 2
    for arm in alone["arms"].values():
        for record in arm.values():
            record["uplink_bytes"] = []
    assert [axes.get_xlabel() for axes in figure(alone).axes] == ["communication round"]


def test_the_figure_of_an_ablation():
    best, mean = figure(example.from_different_rounds()).axes
    for axes in (best, mean):
        lines = {c.get_label(): c[0] for c in axes.containers}
        assert list(lines) == ["FedAvg", "FIPA"]
        assert lines["FIPA"].get_xdata().tolist() == [100, 300, 1000]
        assert lines["FedAvg"].get_color() == GREY
    assert best.get_title() == "highest of the arm's rounds"
    diverged = example.images(1) | {"figure": "ablation"}
    assert [len(c[0].get_xdata()) for c in figure(diverged).axes[1].containers] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("kind", "ends"), [("refine", ["", "-partition"]), ("generic", ["", "-warm-up", "-partition"])]
)
@pytest.mark.long
def test_files(tmp_path, kind, ends):
    run = example.write(tmp_path, example.images(2) | {"figure": kind}, example.shares())
    names = [path.name for path in write_figures(run, tmp_path / "figures")]
    assert names == [f"cifar10{end}.{suffix}" for end in ends for suffix in ("png", "svg")]


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (10, 10), (100, 10), (100, 200)])
def test_the_figure_of_the_partition(clients, classes):
    view = example.shares(clients, classes)["shares"]
    totals, cells, bar = image_figures.partition(view).axes
    assert len(totals.patches) == clients
    assert cells.images[0].get_array().shape == (classes, clients)
    assert bool(cells.texts) == (max(clients, classes) <= 20)
    labels = [label.get_text() for label in cells.get_yticklabels()]
    assert ("class 0" in labels) == (classes <= 30)
    assert bar.get_ylabel() == "examples of the class"


def test_the_partition_of_100_clients_on_the_page(tmp_path):
    example.write(tmp_path, example.images(1), example.shares(100, 10))
    view = data.load_views(tmp_path)["shares"]
    told = stages.shares_payload(view)
    assert np.shape(told["counts"]) == (10, 100)
    assert told["totals"] == [sum(row) for row in view["counts"]]
    assert (told["numbered"], told["named"]) == (False, True)
    assert told["note"].startswith("100 clients with ")


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"classes": ["a"]}, "shares lacks counts"),
        ({"counts": [[1, 2], [3]], "classes": ["a", "b"]}, "not a table of numbers"),
        ({"counts": [[1, 2]], "classes": ["a"]}, "clients x 1 classes"),
    ],
)
def test_broken_shares_are_named(tmp_path, shares, message):
    example.write(tmp_path, example.images(1), {"shares": shares})
    with pytest.raises(FipaError, match=message):
        data.load_views(tmp_path)


def test_shares_without_names_or_clients(tmp_path):
    example.write(tmp_path, example.images(1), {"shares": {"counts": [[1, 2]]}})
    assert data.load_views(tmp_path)["shares"]["classes"] == ["0", "1"]
    example.write(tmp_path, example.images(1), {"shares": {"counts": [], "classes": ["a"]}})
    assert data.load_views(tmp_path) == {}
