"""Mistakes that clients make, put in on purpose: the simulation must find each. They exist for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyrocket_consumer.consumer.assignments import Assignments
from pyrocket_consumer.consumer.commit import BrokerCommits
from pyrocket_consumer.consumer.process_queue import ProcessQueue, QueueState
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.wire.message import Message


def late_ack() -> None:
    """An acknowledgement that comes after a reset is stored all the same."""
    right = ProcessQueue.ack

    def ack(self: ProcessQueue, messages: Iterable[Message], elapsed_s: float = 0.0, units: int = 0) -> None:
        finished = list(messages)
        if self.state is QueueState.FENCED and finished:
            self._tell(self.queue, max(message.queue_offset for message in finished) + 1)
        right(self, finished, elapsed_s, units)

    ProcessQueue.ack = ack  # type: ignore[method-assign]


def commit_on_no_new_message() -> None:
    """An answer without messages moves the offset although messages are in flight."""
    right = ProcessQueue.put

    def put(self: ProcessQueue, messages: Sequence[Message], next_offset: int, size: int) -> bool:
        if not messages and self.state is QueueState.PULLING:
            self._tell(self.queue, next_offset)
        return right(self, messages, next_offset, size)

    ProcessQueue.put = put  # type: ignore[method-assign]


def drop_without_persist() -> None:
    """A queue that is given up is forgotten without its last offset being stored."""

    async def release(self: BrokerCommits, queue: MessageQueue) -> None:
        self.forget(queue)

    BrokerCommits.release = release  # type: ignore[method-assign]


def correction_without_store() -> None:
    """A correction is followed, but the new offset is not stored first."""

    async def store(self: Assignments, queue: MessageQueue, target: int, *rest: Any, **more: Any) -> None:
        self._commits.forget(queue)

    Assignments._store = store  # type: ignore[method-assign]


def unlock_before_commit() -> None:
    """An orderly queue is unlocked before its last offset is stored."""
    right = BrokerCommits.release

    async def release(self: BrokerCommits, queue: MessageQueue) -> None:
        await self._cluster.broker(queue.broker_name).unlock(self._group, [queue])
        await right(self, queue)

    BrokerCommits.release = release  # type: ignore[method-assign]


MISTAKES: dict[str, Callable[[], None]] = {
    mistake.__name__.replace("_", "-"): mistake
    for mistake in (late_ack, commit_on_no_new_message, drop_without_persist, correction_without_store,
                    unlock_before_commit)
}
