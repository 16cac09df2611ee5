"""Every public call of producers and admins in any order: from threads, callbacks and forks, with faulty brokers.

At every step a call ends in time, and raises only documented errors. At the end every message has its result, and
each acknowledged message is stored. Messages with a key are stored in order, and no thread or connection remains.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from pyrocket_consumer import (
    Admin,
    BrokerError,
    ClientClosed,
    ConfigError,
    ConnectError,
    ConnectionLost,
    MessageQueue,
    Producer,
    RequestTimeout,
    RocketError,
    RouteNotFound,
    SendError,
    SendResult,
)
from pyrocket_consumer.producer import OutgoingMessage
from pyrocket_consumer.testing import Exchange
from tests.consuming import until
from tests.random_calls import FAULTS, World, search

pytestmark = pytest.mark.search

TOPIC, GROUP, QUEUES = "orders", "app", 4

GRACE_S = 8.0
"""The extra seconds that a call may take on a busy machine."""

SEND_S = 3.0
"""The default of `send_timeout_s`."""

DRAINS_S = 40.0
"""The longest time for the messages in flight at one moment, because lanes may move slowly."""

SEND_RAISES = (RouteNotFound, SendError, ConnectError, ClientClosed)
ADMIN_RAISES = (BrokerError, ConnectError, ConnectionLost, RequestTimeout, ClientClosed, RouteNotFound, ConfigError)

PINS = ("none", "key", "queue")

WRONG: tuple[Callable[[Producer], object], ...] = (
    lambda producer: producer.send("", b"x"),
    lambda producer: producer.send("or ders", b"x"),
    lambda producer: producer.send(None, b"x"),  # type: ignore[arg-type]
    lambda producer: producer.send(TOPIC, "text"),  # type: ignore[arg-type]
    lambda producer: producer.send(TOPIC, None),  # type: ignore[arg-type]
    lambda producer: producer.send(TOPIC, bytes(5 << 20)),
    lambda producer: producer.send(TOPIC, b"x", timeout_s=0),
    lambda producer: producer.send(TOPIC, b"x", timeout_s=math.nan),
    lambda producer: producer.send(TOPIC, b"x", timeout_s="3"),  # type: ignore[arg-type]
    lambda producer: producer.send(TOPIC, b"x", queue=0),  # type: ignore[arg-type]
    lambda producer: producer.send(TOPIC, b"x", queue=MessageQueue("other", "broker-a", 0)),
    lambda producer: producer.send(TOPIC, b"x", queue=MessageQueue(TOPIC, "broker-a", 0), sharding_key="k"),
    lambda producer: producer.send(TOPIC, b"x", sharding_key=""),
    lambda producer: producer.send(TOPIC, b"x", sharding_key=7),  # type: ignore[arg-type]
    lambda producer: producer.send_async(TOPIC, b"x", delay_level=19),
    lambda producer: producer.send_async(TOPIC, b"x", deliver_at=12),  # type: ignore[arg-type]
    lambda producer: producer.send_async(TOPIC, b"x", tags=b"a"),  # type: ignore[arg-type]
    lambda producer: producer.send_async(TOPIC, b"x", keys=5),  # type: ignore[arg-type]
    lambda producer: producer.send_oneway(TOPIC, b"x", properties={1: "a"}),  # type: ignore[dict-item]
    lambda producer: producer.send_oneway(TOPIC, b"x", flag=1 << 40),
    lambda producer: producer.send_batch(TOPIC, b"x"),
    lambda producer: producer.send_batch(TOPIC, [1]),  # type: ignore[list-item]
    lambda producer: producer.send_batch(TOPIC, [OutgoingMessage(b"x", topic="other")]),
    lambda producer: producer.flush(timeout_s=0),
    lambda producer: producer.flush(timeout_s="soon"),  # type: ignore[arg-type]
    lambda producer: producer.close(timeout_s="soon"),  # type: ignore[arg-type]
    lambda producer: producer.close(timeout_s=-1),
)

WRONG_FOR_ADMINS: tuple[Callable[[Admin], object], ...] = (
    lambda admin: admin.create_topic(""),
    lambda admin: admin.create_topic("other", queues=0),
    lambda admin: admin.create_topic("other", perm="x"),
    lambda admin: admin.create_topic("other", order="no"),  # type: ignore[arg-type]
    lambda admin: admin.create_topic("other", brokers=5),  # type: ignore[arg-type]
    lambda admin: admin.delete_topic(None),  # type: ignore[arg-type]
    lambda admin: admin.topic_offsets(""),
    lambda admin: admin.create_group("a b"),
    lambda admin: admin.create_group("other", retry_max_times=math.nan),
    lambda admin: admin.create_group("other", no_such_setting=1),
    lambda admin: admin.delete_group(""),
    lambda admin: admin.lag(""),
    lambda admin: admin.lag(5),  # type: ignore[arg-type]
    lambda admin: admin.offsets(GROUP, ""),
    lambda admin: admin.plan_reset(GROUP, TOPIC, "nowhere"),
    lambda admin: admin.plan_reset(GROUP, TOPIC, "earliest", wait_s=-1),
)


class Call(NamedTuple):
    """A call of an admin, and its longest time."""

    run: Callable[[Admin], object]
    takes_s: float = 30.0


CALLS = {
    "create": Call(lambda admin: admin.create_topic("other", queues=3)),
    "create differently": Call(lambda admin: admin.create_topic("other", queues=5)),
    "create again": Call(lambda admin: admin.create_topic(TOPIC, queues=QUEUES)),
    "fewer queues": Call(lambda admin: admin.create_topic(TOPIC, queues=2)),
    "delete": Call(lambda admin: admin.delete_topic("other")),
    "list": Call(lambda admin: admin.topics(include_system=True)),
    "topic offsets": Call(lambda admin: admin.topic_offsets(TOPIC)),
    "create group": Call(lambda admin: admin.create_group(GROUP)),
    "delete group": Call(lambda admin: admin.delete_group(GROUP)),
    "list groups": Call(lambda admin: admin.groups()),
    "lag": Call(lambda admin: admin.lag(GROUP), 180.0),
    "offsets": Call(lambda admin: admin.offsets(GROUP, TOPIC), 180.0),
    "plan": Call(lambda admin: admin.plan_reset(GROUP, TOPIC, "latest", wait_s=1), 180.0),
    "reset": Call(lambda admin: admin.plan_reset(GROUP, TOPIC, "earliest", wait_s=1).execute(), 360.0),
    "forget": Call(lambda admin: admin.forget_reset(GROUP, TOPIC)),
}


def held(exchange: Exchange) -> None:
    """The request waits in the broker for a moment. It is dropped if its connection ends."""
    exchange.later(0.05, lambda: exchange.handle(exchange.answer) if exchange.connection.open else None)


class Given(NamedTuple):
    """A sent message; `lane` names the messages that it stays in order with."""

    number: int
    lane: tuple[object, ...] | None
    future: Future[SendResult]


class Program:
    """A program with a producer that all its threads use."""

    def __init__(self, name: int, world: AnyOrderOfSending) -> None:
        self.name, self.world = name, world
        self.producer = Producer(name_server=world.cluster.name_server)
        self.closed = False

    def pin(self, kind: str, thread: str = "main") -> tuple[dict[str, Any], tuple[object, ...] | None]:
        """Return the arguments that select a queue, and the name of the lane: one thread, one key."""
        if kind == "key":
            key = f"{thread}-{self.name}"
            return {"sharding_key": key}, (self.name, key)
        if kind == "queue" and thread == "main":
            queue = MessageQueue(TOPIC, "broker-a", 0)
            return {"queue": queue}, (self.name, queue)
        return {}, None

    def send_async(self, kind: str, thread: str = "main") -> Future[SendResult] | None:
        arguments, lane = self.pin(kind, thread)
        number = self.world.next_number()
        future = self.world.in_time(
            lambda: self.producer.send_async(TOPIC, b"%d" % number, **arguments), SEND_S, SEND_RAISES
        )
        if future is not None:
            self.world.given.append(Given(number, lane, future))
        return future

    def close(self, timeout_s: float | None) -> None:
        self.closed = True
        self.world.in_time(lambda: self.producer.close(timeout_s), DRAINS_S if timeout_s is None else timeout_s + 5)


class AnyOrderOfSending(World):
    """A broker, and programs that call producers and admins in any order."""

    faults: ClassVar = {**FAULTS, "held": held}

    @initialize(programs=st.integers(1, 2))
    def begin(self, programs: int) -> None:
        self.open_cluster(auto_create_topics=False)
        self.cluster.create_topic(TOPIC, queues=QUEUES)
        self.cluster.broker("broker-a").create_group(GROUP)
        self.cluster.broker("broker-a").commit(GROUP, TOPIC, dict.fromkeys(range(QUEUES), 0))
        self.programs = [Program(name, self) for name in range(programs)]
        self.admins = [Admin(name_server=self.cluster.name_server)]
        self.given: list[Given] = []
        self.results_read: list[tuple[int, SendResult]] = []  # by calls that wait for it
        self.defects: list[str] = []  # of other threads
        self._lock = threading.Lock()
        self._numbers = 0

    def next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def in_time(
        self, call: Callable[[], Any], takes_s: float, raises: tuple[type[Exception], ...] = (), what: str = ""
    ) -> Any:
        """Call a function, which must end in time and may raise only these errors. Return None if it raises."""
        began = time.monotonic()
        try:
            return call()
        except raises:
            return None
        except Exception as error:
            self.defects.append(f"{what} {error!r}")
            raise
        finally:
            if (took_s := time.monotonic() - began) > takes_s + GRACE_S:
                self.defects.append(f"{what or call} took {took_s:.1f} s of {takes_s:g}")

    def _program(self, which: int) -> Program:
        able = [program for program in self.programs if not program.closed] or self.programs
        return able[which % len(able)]

    # --- what producers do

    @rule()
    @precondition(lambda self: len(self.programs) < 4)
    def begin_another(self) -> None:
        self.programs.append(Program(len(self.programs), self))

    @rule(which=st.integers(0, 3))
    def start(self, which: int) -> None:
        program = self._program(which)
        was_closed = program.closed  # a callback may close it meanwhile
        started = self.in_time(lambda: program.producer.start() or True, 6, (ConnectError, ClientClosed), "start")
        assert not (started and was_closed), "a closed producer was started again"

    @rule(which=st.integers(0, 3), kind=st.sampled_from(PINS))
    def send(self, which: int, kind: str) -> None:
        program, number = self._program(which), self.next_number()
        arguments, lane = program.pin(kind)
        was_closed = program.closed
        result = self.in_time(
            lambda: program.producer.send(TOPIC, b"%d" % number, **arguments), SEND_S, SEND_RAISES, "send"
        )
        future: Future[SendResult] = Future()
        if result is not None:
            future.set_result(result)
            assert not was_closed
        else:
            future.set_exception(SendError(TOPIC, ()))
        self.given.append(Given(number, lane, future))

    @rule(which=st.integers(0, 3), kind=st.sampled_from(PINS), count=st.integers(1, 60))
    def send_many(self, which: int, kind: str, count: int) -> None:
        program = self._program(which)
        for _ in range(count):
            program.send_async(kind)

    @rule(which=st.integers(0, 3), kind=st.sampled_from(PINS))
    def send_oneway(self, which: int, kind: str) -> None:
        program = self._program(which)
        body, arguments = b"%d" % self.next_number(), program.pin(kind)[0]
        self.in_time(lambda: program.producer.send_oneway(TOPIC, body, **arguments), SEND_S, SEND_RAISES, "oneway")

    @rule(which=st.integers(0, 3), kind=st.sampled_from(PINS), count=st.integers(0, 20))
    def send_batch(self, which: int, kind: str, count: int) -> None:
        program = self._program(which)
        numbers, arguments = [self.next_number() for _ in range(count)], program.pin(kind)[0]
        results = self.in_time(
            lambda: program.producer.send_batch(TOPIC, [b"%d" % each for each in numbers], **arguments),
            SEND_S,
            SEND_RAISES,
            "batch",
        )
        if results is not None:
            self.results_read += zip(numbers, results, strict=True)

    @rule(which=st.integers(0, 3), timeout_s=st.sampled_from([None, 0.01, 0.5]))
    def flush(self, which: int, timeout_s: float | None) -> None:
        program = self._program(which)
        raises = (ClientClosed,) if timeout_s is None else (ClientClosed, RequestTimeout)
        self.in_time(lambda: program.producer.flush(timeout_s), timeout_s or DRAINS_S, raises, f"flush({timeout_s})")

    @rule(which=st.integers(0, 3), timeout_s=st.sampled_from([None, None, 0, 0.2]))
    def close(self, which: int, timeout_s: float | None) -> None:
        self._program(which).close(timeout_s)

    @rule(which=st.integers(0, 3), what=st.sampled_from(["send", "send_async", "flush", "close", "fail", "exit"]))
    def from_a_callback(self, which: int, what: str) -> None:
        """A callback of a message calls its producer."""
        program = self._program(which)

        def called(done: Future[SendResult]) -> None:
            if what == "fail":
                raise ValueError("on purpose")
            if what == "exit":
                raise SystemExit(3)
            if what == "send_async":
                program.send_async("key", "callback")
            elif what == "flush":
                self.in_time(program.producer.flush, DRAINS_S, (ClientClosed,), "flush in a callback")
            elif what == "close":
                program.close(None)
            else:
                self.in_time(lambda: program.producer.send(TOPIC, b"0"), SEND_S, SEND_RAISES, "send in a callback")

        future = program.send_async("none")
        if future is not None:
            future.add_done_callback(called)

    @rule(which=st.integers(0, 3), then=st.sampled_from(["nothing", "flush", "close"]), threads=st.integers(2, 4))
    def at_once(self, which: int, then: str, threads: int) -> None:
        """Several threads send with one producer, during another call."""
        program = self._program(which)

        def work(name: str) -> None:
            for _ in range(20):
                program.send_async("key", name)

        workers = [threading.Thread(target=work, args=(f"thread-{self.next_number()}",)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        if then == "flush":
            self.flush(which, None)
        elif then == "close":
            program.close(None)
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive(), "send_async does not return"

    @rule(which=st.integers(0, 3), what=st.sampled_from(WRONG))
    def wrong(self, which: int, what: Callable[[Producer], object]) -> None:
        """A wrong argument is reported at once, and has no effect."""
        program = self._program(which)
        before = program.producer.state
        ended = self.in_time(lambda: what(program.producer) or True, 1, (ConfigError, ClientClosed), "wrong argument")
        assert ended is None, "accepted"
        assert program.producer.state is before

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: hasattr(os, "fork"))
    def fork(self, which: int) -> None:
        """A child cannot use a producer that its parent has started, and its attempt has no effect."""
        producer = self._program(which).producer
        admin = self.admins[-1]
        child = os.fork()
        if not child:
            os._exit(_child(producer, admin, self.cluster.name_server))
        ended: list[int] = []
        until(lambda: _ended(child, ended), "the child ends", 60)
        assert ended == [0], CHILD.get(ended[0], ended)

    # --- what brokers do

    @rule(kill=st.booleans(), away_s=st.sampled_from([0, 0.2]))
    def restart(self, kill: bool, away_s: float) -> None:
        broker = self.cluster.brokers[0]
        if kill:
            broker.kill()
        else:
            broker.stop()
        time.sleep(away_s)
        broker.start()

    # --- what admins do

    @rule(what=st.sampled_from(sorted(CALLS)))
    def administer(self, what: str) -> None:
        self._administer(what)

    def _administer(self, what: str) -> None:
        call, admin = CALLS[what], self.admins[-1]

        def run() -> None:
            try:
                call.run(admin)
            except RocketError as error:
                if "another client changed it at the same time" not in str(error):
                    raise

        self.in_time(run, call.takes_s, ADMIN_RAISES, what)

    @rule(what=st.lists(st.sampled_from(sorted(CALLS)), min_size=2, max_size=4), closes=st.booleans())
    def administer_at_once(self, what: list[str], closes: bool) -> None:
        workers = [threading.Thread(target=self._administer, args=(each,)) for each in what]
        for worker in workers:
            worker.start()
        if closes:
            self.close_admin()
        for worker in workers:
            worker.join(400)
            assert not worker.is_alive(), f"one of {what} does not return"

    @rule(what=st.sampled_from(WRONG_FOR_ADMINS))
    def wrong_for_admin(self, what: Callable[[Admin], object]) -> None:
        admin = self.admins[-1]
        ended = self.in_time(lambda: what(admin) or True, 30, ADMIN_RAISES, "wrong argument of an admin")
        assert ended is None, "accepted"

    @rule()
    def close_admin(self) -> None:
        """Close it twice. Later calls are refused. Then use a new one."""
        admin = self.admins[-1]
        for _ in range(2):
            self.in_time(admin.close, 10, (), "close of an admin")
        try:
            admin.topics()
        except ClientClosed:
            pass
        else:
            raise AssertionError("a closed admin goes on")
        self.admins.append(Admin(name_server=self.cluster.name_server))

    # --- what must hold

    def finish(self) -> None:
        self.cluster.create_topic(TOPIC, queues=QUEUES)
        for program in self.programs:
            program.close(None)
        self._observe()

    def _observe(self) -> None:
        for number, _, future in self.given:
            assert future.done(), f"message {number} has no result after close()"
            error = future.exception(0)
            assert error is None or isinstance(error, SEND_RAISES), f"message {number}: {error!r}"
            if error is None:
                self.results_read.append((number, future.result(0)))
        stored = sorted(self.cluster.messages(TOPIC), key=lambda message: message.commit_log_offset)
        at = {(message.queue, message.queue_offset): message.body for message in stored}
        for number, result in self.results_read:
            assert at.get((result.queue, result.queue_offset)) == b"%d" % number, f"{number} is not at {result}"
        lane_of = {b"%d" % number: (lane, number) for number, lane, _ in self.given if lane is not None}
        orders: dict[object, list[int]] = defaultdict(list)
        for message in stored:
            if message.body in lane_of:
                lane, number = lane_of[message.body]
                orders[lane].append(number)
        for lane, order in orders.items():
            assert order == sorted(order), f"{lane}: {order}"

    def end(self) -> list[str]:
        for program in self.programs:
            program.producer.close(0)
        for admin in self.admins:
            admin.close()
        left = super().end()
        del self.programs, self.admins
        gc.collect()
        return left + self.defects


CHILD = {
    1: "something else was raised in the child",
    2: "the child could use what its parent has started",
    3: "a producer of the child's own could not send",
}


def _child(producer: Producer, admin: Admin, name_server: str) -> int:
    """Try everything in a child process. Return the wrong results by number."""
    try:
        for call in (producer.flush, lambda: producer.send(TOPIC, b"0", timeout_s=1), producer.close, admin.close):
            try:
                call()
            except (ClientClosed, SendError, ConnectError, RouteNotFound):
                pass
        return 0
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1


def _ended(child: int, codes: list[int]) -> bool:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        codes.append(os.waitstatus_to_exitcode(status))
    return bool(pid)


TestAnyOrderOfSending = AnyOrderOfSending.TestCase
TestAnyOrderOfSending.settings = search()
