"""A Flower grid in this process: every message goes straight to the ClientApp, one after the other.

For tests, for debugging an app, and for measuring rules without the cost of processes. Nothing is random or parallel.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SERVER, FIRST = 1, 100  # node ids
CRASHED = 2  # code of the error that stands for an exception in a ClientApp


class LocalGrid(Grid):
    """A number of nodes that run one app.

    Parameters
    ----------
    app
        What all nodes run.
    nodes
        Their number; node k holds partition k.
    delay
        How many pulls the reply to a message is late, by message and partition; None for never. For stragglers.
    run_config
        As an app's pyproject.toml or `flwr run --run-config` would give it.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int,
        delay: Callable[[Message, int], int | None] = lambda message, partition: 0,
        run_config: Mapping[str, bool | float | int | str] | None = None,
    ) -> None:
        self._app = app
        self._delay = delay
        run = secrets.randbits(62)  # nodes keep files by run
        self._contexts = {
            FIRST + k: Context(
                run, FIRST + k, {"partition-id": k, "num-partitions": nodes}, RecordDict(), dict(run_config or {})
            )
            for k in range(nodes)
        }
        self._waiting: dict[str, tuple[int, Message]] = {}  # pulls left, and the reply
        self._sent = 0
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run, 1, SERVER

    def set_run(self, run: Run) -> None:  # noqa: D102
        raise NotImplementedError("a grid in this process has no runs")

    @property
    def run(self) -> Run:  # noqa: D102
        raise NotImplementedError("a grid in this process has no runs")

    def create_message(self, *args: object, **kwargs: object) -> Message:  # noqa: D102
        raise NotImplementedError("make a flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:  # noqa: D102
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # noqa: D102
        ids = []
        for message in messages:
            self._sent += 1
            name = f"message-{self._sent}"
            message.metadata.__dict__["_message_id"] = name
            node = message.metadata.dst_node_id
            late = self._delay(message, node - FIRST)
            if late is not None:
                self._waiting[name] = late, self._answer(message, node)
            ids.append(name)
        return ids

    def _answer(self, message: Message, node: int) -> Message:
        try:
            return self._app(message, self._contexts[node])
        except Exception as error:  # as a SuperNode would
            return Message(Error(CRASHED, f"{type(error).__name__}: {error}"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # noqa: D102
        replies = []
        for name in message_ids:
            if name not in self._waiting:
                continue
            left, reply = self._waiting.pop(name)
            if left > 0:
                self._waiting[name] = left - 1, reply
            else:
                replies.append(reply)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send and pull once."""
        return self.pull_messages(list(self.push_messages(messages)))
