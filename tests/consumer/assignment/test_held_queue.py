"""The states of a queue, and the steps that a member may begin in each of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.assignment.held_queue import HeldQueue, QueueParts, QueueState
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts
from pyrocket_consumer.consumer.window.process_queue import Limits, ProcessQueue
from pyrocket_consumer.errors import OffsetStoreError, RequestTimeout
from pyrocket_consumer.model import MessageQueue
from tests.for_each import for_each

QUEUE, START, TARGET = MessageQueue("orders", "a", 0), 5, 2


class Member(Commits):
    """A fake member: its commits, listener calls, logs and pulls. The test opens its gates."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        config = ConsumerConfig(group="app", name_server="a:1", orderly=True)
        self.parent = MemberContext(config, SimpleNamespace(loop=loop, client_id="me"))  # type: ignore[arg-type]
        self.parent.subscriptions["orders"] = object()  # type: ignore[assignment]
        self.failures: list[BaseException] = []
        self.parent.member.unexpected_error = lambda what, error: self.failures.append(error)  # type: ignore[method-assign]
        self.stored: list[int] = []
        self.store_gate, self.log_gate = asyncio.Event(), asyncio.Event()
        self.calls = 0
        self.is_store_closed = False
        self.pulled_from: list[int] = []
        calls = SimpleNamespace(running=lambda window: self.calls, forget=id, resume_calls=id)
        parts: Any = QueueParts(self.parent, self, calls, None, Counts(), self, self.open)  # type: ignore[arg-type]
        self.queue = HeldQueue(QUEUE, parts)
        self.open_gates()

    def open_gates(self) -> None:
        self.store_gate.set()
        self.log_gate.set()
        self.calls = 0

    # start offsets, and checks of the log

    async def find(self, record: Any, is_new: bool) -> tuple[int, str]:
        await self.store_gate.wait()
        record.claim = SimpleNamespace(reset_epoch=0)
        return START, "stored"

    async def may_begin(self, claim: Any, checks: Any) -> bool:
        return True

    async def is_same_log(self, claim: Any) -> bool:
        await self.log_gate.wait()
        return True

    # commits

    async def start_offset(self, record: Any) -> int | None:
        raise NotImplementedError

    async def overwrite(self, record: Any, offset: int) -> None:
        if self.parent.closing and self.is_store_closed:
            raise OffsetStoreError("the offset store is not open")
        record.offset = offset
        await self.persist([record])
        if not self.store_gate.is_set():
            raise RequestTimeout("the commit", "broker 'a'", 3)

    async def apply_resets(self, resets: Any) -> None:
        raise NotImplementedError

    async def retry_resets(self, records: Any) -> None:
        raise NotImplementedError

    async def persist(self, records: Any, *, until: float | None = None) -> dict[Any, Any]:
        if self.store_gate.is_set():
            self.stored += [record.current() for record in records if self.stored[-1:] != [record.current()]]
        return {}

    async def close(self, *, until: float | None = None) -> None:
        raise NotImplementedError

    # pulls

    def open(self, held: HeldQueue, offset: int, lease: Any) -> tuple[ProcessQueue, Any]:
        pulls = SimpleNamespace(pulls=0, pull_time_s=0.0, pulled=0, moves=0, stop=lambda: None)
        pulls.pull = lambda: self.pulled_from.append(offset)
        return ProcessQueue(QUEUE, offset, Limits(), lease=lease), pulls

    # steps

    def begin(self) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.queue.begin(is_new=False, is_ours=lambda: True))

    async def reach(self, state: QueueState) -> None:
        """Bring the queue into a state, in which it stays until the gates open."""
        if state is QueueState.FREE:
            return
        if state is QueueState.STARTING:
            self.store_gate.clear()
        self.begin()
        await asyncio.sleep(0.01)
        if state is QueueState.CHECKING:
            self.log_gate.clear()
            self.queue.recheck_log()
        elif state is QueueState.MOVING:
            self.store_gate.clear()
            self.move_task = asyncio.ensure_future(self.queue.move(START + 1, "earlier"))
        elif state is QueueState.ENDING:
            self.calls = 1
            self.end_task = asyncio.ensure_future(self.queue.end("earlier"))
        await asyncio.sleep(0.01)
        assert self.queue.state is state


def move(member: Member) -> Any:
    return member.queue.move(TARGET, "reset")


def end(member: Member) -> Any:
    return member.queue.end("revoked")


async def lose_lock(member: Member) -> None:
    if member.queue.window is not None:
        await member.queue.lose_lock(member.queue.window)


async def lose_claim(member: Member) -> None:
    member.queue.lose_claim("another member has it")


async def recheck(member: Member) -> None:
    member.queue.recheck_log()


F, C = QueueState.FREE, QueueState.CONSUMING
STEPS: dict[tuple[QueueState, Callable[[Member], Any]], tuple[QueueState, list[int], Any]] = {
    (F, move): (F, [], False),
    (F, end): (F, [], None),
    (F, lose_lock): (F, [], None),
    (F, lose_claim): (F, [], None),
    (F, recheck): (F, [], None),
    (QueueState.STARTING, move): (C, [TARGET], True),
    (QueueState.STARTING, end): (C, [], None),
    (QueueState.STARTING, lose_lock): (C, [], None),
    (QueueState.STARTING, lose_claim): (C, [], None),
    (QueueState.STARTING, recheck): (C, [], None),
    (C, move): (C, [TARGET], True),
    (C, end): (F, [START], None),
    (C, lose_lock): (F, [], None),
    (C, lose_claim): (F, [], None),
    (C, recheck): (C, [], None),
    (QueueState.CHECKING, move): (C, [TARGET], True),
    (QueueState.CHECKING, end): (F, [START], None),
    (QueueState.CHECKING, lose_lock): (F, [], None),
    (QueueState.CHECKING, lose_claim): (F, [], None),
    (QueueState.CHECKING, recheck): (C, [], None),
    (QueueState.MOVING, move): (C, [START + 1, TARGET], True),
    (QueueState.MOVING, end): (F, [START + 1], None),
    (QueueState.MOVING, lose_lock): (C, [START + 1], None),  # the lock of an earlier window
    (QueueState.MOVING, lose_claim): (C, [START + 1], None),
    (QueueState.MOVING, recheck): (C, [START + 1], None),
    (QueueState.ENDING, move): (F, [START, TARGET], True),
    (QueueState.ENDING, end): (F, [START], None),
    (QueueState.ENDING, lose_lock): (F, [START], None),
    (QueueState.ENDING, lose_claim): (F, [START], None),
    (QueueState.ENDING, recheck): (F, [START], None),
}
"""State and step -> the state after all steps, the stored offsets, and the result of the step."""


@pytest.mark.parametrize(("state", "step"), STEPS, ids=[f"{state.value}-{step.__name__}" for state, step in STEPS])
async def test_each_step_in_each_state(state, step):
    member = Member()
    await member.reach(state)
    expected, stored, result = STEPS[state, step]
    stepping = asyncio.ensure_future(step(member))
    await asyncio.sleep(0.05)
    member.open_gates()
    assert await stepping is result
    await asyncio.sleep(5)
    queue = member.queue
    assert (queue.state, member.stored) == (expected, stored)
    assert (queue.window is None) == (expected is QueueState.FREE), "an ended queue keeps no messages in memory"
    if expected is C:
        assert queue.commit.current() == member.pulled_from[-1] == (stored or [START])[-1]
        assert queue.window is not None
        assert queue.window.may_consume()
    else:
        assert queue.commit.current() is None


async def begin(member: Member) -> None:
    await member.begin()


async def member_closes(member: Member) -> None:
    member.parent.closing = True
    await asyncio.sleep(0)


ALL_STEPS = [begin, move, end, lose_lock, lose_claim, recheck, member_closes]


@for_each("second", ALL_STEPS)
@pytest.mark.parametrize("first", ALL_STEPS)
@pytest.mark.parametrize("state", QueueState)
async def test_steps_that_meet(state, first, second):
    """The third step begins together with the responses that the others wait for."""
    for third, wait_s in itertools.product([begin, end], [0.0, 30.0]):
        member = Member()
        await member.reach(state)
        running = []
        for step in (first, second):
            running.append(asyncio.ensure_future(step(member)))
            await asyncio.sleep(wait_s)
        running.append(asyncio.ensure_future(third(member)))
        member.open_gates()
        await asyncio.gather(*running)
        await asyncio.sleep(40)
        queue, names = member.queue, (third.__name__, wait_s)
        assert member.failures == [], names
        if member.parent.closing:
            continue
        assert queue.state in (F, C), names
        assert (queue.window is None) == (queue.state is F), names
        assert queue.state is F or queue.window.may_consume(), names


@pytest.mark.parametrize("lost", [False, True], ids=["still held", "lost meanwhile"])
async def test_a_queue_that_is_wanted_again_while_its_call_runs_begins_soon(lost):
    member = Member()
    await member.reach(QueueState.ENDING)
    assert await member.begin() is False, "the rebalance tries again"
    if lost:
        await lose_lock(member)
        assert await member.begin() is True
        member.open_gates()
        await member.end_task
        assert member.queue.state is C, "the end of the former window does not end this one"
        assert member.queue.window.may_consume()


async def test_a_reset_that_finds_the_store_closed_is_not_acknowledged():
    member = Member()
    await member.reach(C)
    await member_closes(member)
    member.is_store_closed = True
    assert await move(member) is False


async def test_late_acknowledgements_change_nothing_after_a_step():
    member = Member()
    await member.reach(C)
    former = member.queue.window
    assert former is not None
    assert await member.queue.move(TARGET, "reset")
    former.ack([])
    assert not former.put([], 100, 0)
    assert member.queue.commit.current() == TARGET


async def test_a_queue_that_is_not_held_cannot_be_fenced():
    with pytest.raises(AssertionError, match="cannot move"):
        Member().queue.fence_for_move()
