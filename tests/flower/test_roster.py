"""Who is there, and messages with a deadline."""

from __future__ import annotations

import time
from time import sleep
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fipa.errors import FipaError
from fipa.flower.local import FIRST, LocalGrid
from fipa.flower.roster import Roster, collect, post
from fipa.flower.transport import Patience
from flower.cases import app


class Restarted(LocalGrid):
    """Node 0 was killed and started anew under another id, but still counts as there."""

    def __init__(self) -> None:
        super().__init__(app(), 2)
        self.ids = [FIRST, FIRST + 1]

    def get_node_ids(self) -> Any:
        return self.ids

    def _answer(self, message: Message, node: int) -> Message:
        return super()._answer(message, FIRST if node == 5 else node)


def test_the_first_of_two_nodes_with_one_partition_as_long_as_it_answers() -> None:
    grid, roster = Restarted(), Roster()
    assert roster.present(grid, 2) == {0: FIRST, 1: FIRST + 1}
    grid.ids = [5, FIRST, FIRST + 1]
    assert roster.present(grid, 2) == {0: FIRST, 1: FIRST + 1}
    roster.heard(FIRST, answered=False)
    assert roster.present(grid, 2) == {0: 5, 1: FIRST + 1}
    roster.heard(FIRST, answered=True)
    assert roster.present(grid, 2) == {0: FIRST, 1: FIRST + 1}
    grid.ids = [5, FIRST + 1]
    assert roster.present(grid, 2) == {0: 5, 1: FIRST + 1}
    assert roster.partition(FIRST + 1) == 1
    assert roster.partition(77) == -1


def test_a_silent_node_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fipa.flower.roster.PATIENCE", 0.5)
    pauses: list[float] = []
    monkeypatch.setattr("fipa.flower.roster.time.sleep", lambda seconds: pauses.append(seconds) or sleep(seconds))
    grid, roster = LocalGrid(app(), 3, lambda message, k: None if k == 2 else 0), Roster()
    begun = time.monotonic()
    assert list(roster.present(grid, 2)) == [0, 1]
    assert time.monotonic() - begun >= 0.5
    assert pauses
    pauses.clear()
    assert list(roster.present(grid, 2)) == [0, 1]
    assert not pauses


@pytest.mark.parametrize("partition", [-1, True, "0", 1.5])
def test_nodes_that_say_nonsense_are_left_out(partition: Any) -> None:
    class Odd(LocalGrid):
        def _answer(self, message: Message, node: int) -> Message:
            if node == FIRST:
                record = RecordDict({"fipa": ConfigRecord({"partition": partition})})
                return Message(record, reply_to=message)
            return super()._answer(message, node)

    assert list(Roster().present(Odd(app(), 3), 2)) == [1, 2]


def exchange(grid: LocalGrid, patience: Patience) -> tuple[list[Message], list[str]]:
    messages = [Message(RecordDict(), dst_node_id=FIRST + k, message_type="query.fipa_who") for k in range(3)]
    ids = post(grid, messages)
    return list(collect(grid, ids, patience)), ids


def test_an_exchange_ends_with_all_replies_with_enough_or_with_patience() -> None:
    replies, ids = exchange(LocalGrid(app(), 3), Patience(timeout=600))
    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
    silent = LocalGrid(app(), 3, lambda message, k: None if k == 2 else 0)
    assert len(exchange(silent, Patience(0.0, quorum=0.6, grace=0.0, timeout=600))[0]) == 2
    assert len(exchange(silent, Patience(0.0, quorum=1.0, grace=0.0, timeout=0.3))[0]) == 2


@pytest.mark.parametrize(("grace", "expected"), [(0.0, 2), (600.0, 3)])
def test_the_others_have_a_grace_when_the_quorum_is_there(grace: float, expected: int) -> None:
    """The third answers two looks later than the second, with which the quorum is met after the deadline."""
    grid = LocalGrid(app(), 3, lambda message, k: 2 * k)
    assert len(exchange(grid, Patience(0.0, quorum=0.6, grace=grace, timeout=600))[0]) == expected


@pytest.mark.parametrize(
    "settings", [{"quorum": 0.0}, {"quorum": 1.5}, {"deadline": -5}, {"grace": -1}, {"timeout": -1}]
)
def test_bad_patience(settings: dict[str, float]) -> None:
    with pytest.raises(FipaError, match=next(iter(settings))):
        Patience(**settings)
