"""The timer that stores offsets, at a store that does what the test wants."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pyrocket_consumer.consumer.commit_timer import CommitTimer
from pyrocket_consumer.consumer.tasks import Tasks
from pyrocket_consumer.model import EventKind, MessageQueue

HERE, THERE = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0)


class Member:
    """Stands for the member and its commits: one place may hang until it is let go."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tasks = Tasks(self.loop, lambda what, error: None)
        self.config = SimpleNamespace(commit_interval_s=5.0)
        self.lets_go = asyncio.Event()
        self.hangs: set[str] = set()
        self.stored: list[MessageQueue] = []
        self.told: list[tuple[float, EventKind, str]] = []

    def trouble(self, kind: EventKind, text: str, queue: MessageQueue | None = None) -> None:
        self.told.append((self.loop.time(), kind, text))

    def all(self) -> list[MessageQueue]:
        return [HERE, THERE]

    def places(self, queues: list[MessageQueue]) -> dict[str, list[MessageQueue]]:
        return {queue.broker_name: [queue] for queue in queues}

    def doubt(self) -> None:
        pass

    async def persist(self, queues: Any = ()) -> dict[MessageQueue, Exception]:
        if any(queue.broker_name in self.hangs for queue in queues):
            await self.lets_go.wait()
        self.stored += queues
        return {}


async def test_offsets_that_have_not_been_stored_for_long_are_told_and_delay_no_other_place():
    member = Member()
    member.hangs = {"b"}
    timer = asyncio.create_task(CommitTimer(member, member, member, member).run())  # type: ignore[arg-type]
    await asyncio.sleep(14)
    assert member.told == []
    await asyncio.sleep(7)
    ((at, kind, text),) = member.told[:1]
    assert (at, kind) == (15.0, EventKind.COMMIT_FAILED)
    assert "b has not stored offsets for 10 s" in text
    assert member.stored == [HERE] * 4
    member.lets_go.set()
    await asyncio.sleep(5)
    member.told.clear()
    await asyncio.sleep(50)
    assert member.told == [], "it stores again"
    assert member.stored.count(THERE) > 10
    timer.cancel()
