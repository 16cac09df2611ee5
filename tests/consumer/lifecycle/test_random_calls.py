"""Every public call in any order, from outside and from listeners, cancelled at any moment, with faulty brokers.

Afterwards all messages of held queues are consumed, no commit skips a message, and every queue is committed to its end.
Each close ends within its time, and no thread or connection is left.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from pyrocket_consumer import AsyncPushConsumer, ConsumerState, Message, MessageQueue, PushConsumer, RocketError
from pyrocket_consumer.testing import delay
from tests.consuming import WAIT_S, until
from tests.random_calls import World, search
from tests.simulation.history import Consumed, History

pytestmark = pytest.mark.search

TOPIC, GROUP, QUEUES = "orders", "app", 3

CLOSE_TAKES_S = 10.0
"""How much longer than its timeout a close may take, by its documentation, and because the machine may be busy."""

CALLS = ("pause", "resume", "progress", "subscribe", "unsubscribe", "earliest", "latest", "back", "back", "join")

INSIDE = ("pause", "resume", "progress", "earliest", "unsubscribe", "close", "fail", "exit", "cancel", "linger")

moments = st.sampled_from([0.0, 0.0005, 0.001, 0.002, 0.004, 0.01, 0.03, 0.1, 0.6, 1.5])
"""When a caller stops waiting, in seconds."""


class Loop:
    """An asyncio program's loop, on a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], cancelled_after_s: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(self._run(work, cancelled_after_s), self.loop).result(120)

    async def _run(self, work: Coroutine[Any, Any, Any], cancelled_after_s: float | None) -> Any:
        task = asyncio.ensure_future(work)
        if cancelled_after_s is not None:
            await asyncio.wait([task], timeout=cancelled_after_s)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return None
        return await task

    def end(self) -> list[str]:
        """End the loop; return the tasks that are left."""

        async def left() -> list[str]:
            await asyncio.sleep(0)
            return [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

        try:
            return asyncio.run_coroutine_threadsafe(left(), self.loop).result(WAIT_S)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(WAIT_S)
            self.loop.close()


class Program:
    """A program with one consumer, blocking or of asyncio."""

    def __init__(self, name: str, world: AnyOrder, loop: Loop | None) -> None:
        self.name, self.world, self.loop = name, world, loop
        options = {"name_server": world.cluster.name_server, **world.options}
        make = PushConsumer if loop is None else AsyncPushConsumer
        self.consumer: Any = make(GROUP, **options)
        if loop is None:
            self.consumer.subscribe(TOPIC, self.handle)
        else:
            self.call(self.consumer.subscribe, TOPIC, self.handle_async)
        self.closed = False

    def call(self, call: Callable[..., Any], *arguments: Any, cancelled_after_s: float | None = None) -> Any:
        """Call a method, and stop waiting for it. Any error except a RocketError is a defect."""
        try:
            if self.loop is None:
                return call(*arguments)
            return self.loop.run(call(*arguments), cancelled_after_s)
        except RocketError:
            return None

    @property
    def is_running(self) -> bool:
        return not self.closed and self.consumer.state is ConsumerState.RUNNING

    def does(self, what: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a call of the consumer by a short name, and its arguments."""
        consumer = self.consumer
        if what in ("earliest", "latest"):
            return consumer.reset_offsets, (TOPIC, what)
        if what == "back":
            return consumer.reset_offsets, (TOPIC, {MessageQueue(TOPIC, "broker-a", 0): 0})
        if what == "subscribe":
            return consumer.subscribe, (TOPIC, self.handle if self.loop is None else self.handle_async)
        return getattr(consumer, what), {"unsubscribe": (TOPIC,), "join": (0.01,)}.get(what, ())

    def close(self, timeout_s: float | None, cancelled_after_s: float | None = None) -> None:
        self.closed = True
        began = time.monotonic()
        self.call(self.consumer.close, timeout_s, cancelled_after_s=cancelled_after_s)
        took_s, allowed_s = time.monotonic() - began, (20.0 if timeout_s is None else timeout_s) + CLOSE_TAKES_S
        assert took_s < allowed_s + 5.0, f"close({timeout_s}) took {took_s:.1f} s"

    # --- the listeners

    def handle(self, message: Message) -> None:
        begun, what = time.monotonic(), self.world.next_inside()
        if what == "linger":
            time.sleep(0.1)
        elif what is not None:
            self.acts("fail" if what == "cancel" else what)
        self.world.consumed(self.name, message, begun)

    async def handle_async(self, message: Message) -> None:
        begun, what = time.monotonic(), self.world.next_inside()
        if what == "linger":
            await asyncio.sleep(0.1)
        elif what == "cancel":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        elif what is not None:
            await self.acts(what)
        self.world.consumed(self.name, message, begun)

    def acts(self, what: str) -> Any:
        """Fail, or call the consumer from its listener."""
        if what == "exit":
            raise SystemExit(3)
        if what == "fail":
            raise ValueError("on purpose")
        self.closed = self.closed or what == "close"
        call, arguments = self.does(what)
        return call(*arguments)


class AnyOrder(World):
    """A world with one group, whose members make random calls."""

    @initialize(
        consume_from=st.sampled_from(["last", "last", "first"]),
        orderly=st.booleans(),
        broker_takes_s=st.sampled_from([0, 0.02]),
        members=st.lists(st.booleans(), min_size=1, max_size=2),
    )
    def begin(self, consume_from: str, orderly: bool, broker_takes_s: float, members: list[bool]) -> None:
        self.options = {"consume_from": consume_from, "orderly": orderly}
        self.open_cluster(delay_scale=0.01, long_poll_tick_s=0.1)
        self.cluster.create_topic(TOPIC, queues=QUEUES)
        self.history = History(self.cluster, GROUP, TOPIC)
        self.programs: list[Program] = []
        self.loop = Loop()
        self.inside: deque[str] = deque()
        self.sent = 0
        self.owed_from: int | None = 0 if consume_from == "first" else None
        self.skips_messages = False  # a member has reset to "latest"
        if broker_takes_s:
            self.cluster.brokers[0].on(None, delay(broker_takes_s), times=None)
        for is_async in members:
            self.start(is_async=is_async)

    def next_inside(self) -> str | None:
        try:
            return self.inside.popleft()
        except IndexError:
            return None

    def consumed(self, who: str, message: Message, begun: float) -> None:
        position = (message.queue, message.queue_offset)
        self.history.consumed.append(Consumed(time.monotonic(), begun, who, message.body, position, True))

    def running(self) -> list[Program]:
        return [program for program in self.programs if program.is_running]

    # --- actions

    @rule(is_async=st.booleans(), cancelled_after_s=st.none() | moments)
    @precondition(lambda self: len(self.programs) < 5)
    def start(self, is_async: bool, cancelled_after_s: float | None = None) -> None:
        program = Program(str(len(self.programs)), self, self.loop if is_async else None)
        self.programs.append(program)
        program.call(program.consumer.start, cancelled_after_s=cancelled_after_s)
        progress = program.call(*program.does("progress")[:1]) if program.is_running else None
        if self.owed_from is None and len([queue for queue in progress or () if queue.topic == TOPIC]) == QUEUES:
            self.owed_from = self.sent

    @rule(count=st.integers(1, 60))
    def send(self, count: int) -> None:
        first = self.sent
        self.sent += count
        self.cluster.send(TOPIC, lambda number: b"%d" % (first + number), count=count)

    @rule(which=st.integers(0, 4), what=st.sampled_from(CALLS), cancelled_after_s=st.none() | moments)
    def call(self, which: int, what: str, cancelled_after_s: float | None) -> None:
        if program := self._chosen(which):
            call, arguments = program.does(what)
            if what == "latest":
                self.skips_messages = True
            program.call(call, *arguments, cancelled_after_s=cancelled_after_s)
            if what == "latest" and self.owed_from is not None:
                time.sleep(0 if cancelled_after_s is None else 0.1)  # it may finish a moment later
                self.owed_from = self.sent

    def _chosen(self, which: int) -> Program | None:
        able = self.running() or self.programs
        return able[which % len(able)] if able else None

    @rule(what=st.lists(st.sampled_from(INSIDE), min_size=1, max_size=4))
    def from_inside(self, what: list[str]) -> None:
        """The listeners of the next messages make these calls."""
        self.inside.extend(what)

    @rule(which=st.integers(0, 4), timeout_s=st.sampled_from([None, 0, 0.2]), cancelled_after_s=st.none() | moments)
    def close(self, which: int, timeout_s: float | None, cancelled_after_s: float | None) -> None:
        if program := self._chosen(which):
            program.close(timeout_s, cancelled_after_s)

    # --- invariants

    def finish(self) -> None:
        self._drain()
        for program in self.programs:
            program.close(None)
        self._observe()

    def _drain(self) -> None:
        """Without faults, the running members consume everything; if none runs, start one."""
        self.inside.clear()
        for program in self.programs:
            assert program.consumer.state is not ConsumerState.FAILED, program.name
        for program in self.running():
            program.call(program.does("subscribe")[0], *program.does("subscribe")[1])
            program.call(program.consumer.resume)
        if not self.running():
            last = Program("last", self, None)
            self.programs.append(last)
            last.consumer.start()
        owed = {b"%d" % number for number in range(self.sent if self.owed_from is None else self.owed_from, self.sent)}
        until(lambda: owed <= {each.body for each in list(self.history.consumed)}, "all messages are consumed", 60)
        until(lambda: self._edges() == self._ends(), "every queue is consumed to its end", 60)

    def _ends(self) -> dict[int, int]:
        return {number: self.cluster.brokers[0].max_offset(TOPIC, number) for number in range(QUEUES)}

    def _edges(self) -> dict[int, int]:
        """Return the progress of the members that hold the queues."""
        held = [each for program in self.running() for each in (program.call(program.consumer.progress) or {}).items()]
        return {queue.queue_id: progress.committed for queue, progress in held if queue.topic == TOPIC}

    def _observe(self) -> None:
        if not self.skips_messages:
            self.history.check_no_message_is_skipped()
        self.history.check_group_is_empty()
        ends, committed = self._ends(), self.cluster.committed(GROUP, TOPIC)
        assert all(committed.get(number, 0) == end for number, end in ends.items()), (committed, ends)

    def end(self) -> list[str]:
        for program in self.programs:
            program.call(program.consumer.close, 0)
        return self.loop.end() + super().end()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = search()
