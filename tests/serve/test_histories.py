"""A file that another process writes."""

import os

from fipa.serve.histories import History, whole_history
from serve.example import DIVERGED, line


def rounds(history):
    return history.columns["metric"]


def test_it_grows_by_complete_lines(tmp_path):
    history = History(tmp_path / "history.jsonl")
    assert not history.refresh()  # there is none yet
    history.path.write_text(line(1))
    assert history.refresh()
    assert not history.refresh()
    whole = line(2)
    with history.path.open("a") as file:
        file.write(whole[:20])
    assert not history.refresh()
    assert rounds(history) == [51]
    with history.path.open("a") as file:
        file.write(whole[20:])
    assert history.refresh()
    assert rounds(history) == [51, 52]
    assert (history.initial, history.broken) == (10, "")


def test_one_that_is_cut_or_replaced_is_read_anew(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.path.write_text(line(1) + line(2) + line(3))
    assert history.refresh()
    part = tmp_path / "history.part"  # as a run that resumes cuts off what was written after its checkpoint
    part.write_text(line(1) + line(2, metric=70.0) + line(3, metric=71.0) + line(4))
    os.replace(part, history.path)
    assert history.refresh()
    assert rounds(history) == [51, 70, 71, 54]
    history.path.write_text(line(1))
    assert history.refresh()
    assert rounds(history) == [51]


def test_one_that_is_deleted_is_empty(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.path.write_text(line(1))
    assert history.refresh()
    history.path.unlink()
    assert history.refresh()
    assert len(history) == 0
    assert not history.refresh()


def test_damaged_lines_are_told_and_left_out(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.path.write_bytes(line(1).encode() + b'{"metric": \n[1, 2]\n\xff\xfe\n' + line(5).encode())
    assert history.refresh()
    assert rounds(history) == [51, 55]
    assert history.broken == "line 4 of history.jsonl is damaged"
    assert whole_history(history.path, 9)["metric"] == [51, 55]


def test_numbers_that_cannot_be_drawn_are_none(tmp_path):
    history = History(tmp_path / "history.jsonl")
    texts = ["NaN", "1e999", "1" + 400 * "0", "true"]
    history.path.write_text("".join(f'{{"metric": {text}}}\n' for text in texts))
    assert history.refresh()
    assert rounds(history) == [None] * 4
    assert history.broken == ""


def test_one_that_can_be_read_again_is_not_broken(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.path.mkdir()
    assert history.refresh()
    assert "cannot be read" in history.broken
    assert not history.refresh()  # nothing new
    history.path.rmdir()
    history.path.write_text(line(1))
    assert history.refresh()
    assert (rounds(history), history.broken) == ([51], "")


def test_the_end_of_an_arm_that_diverged(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.path.write_text(line(1) + DIVERGED)
    assert history.refresh()
    assert history.diverged
    assert rounds(history) == [51, None]
