"""Compressed bodies: whatever a producer sends, it takes no more memory than the options allow, and stops nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pyrocket_consumer import Admin, ConsumerState, ProtocolError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.message import BatchItem, StoredMessage, encode_batch, encode_message
from pyrocket_consumer.testing import rewrite
from tests.compression import COMPRESSED, LZ4, ZLIB, ZSTD, send
from tests.consumer.orders import GROUP, TOPIC
from tests.consuming import QUICK, WAIT_S, RecordingListener, until
from tests.speed import slowness

MIB = 1 << 20
KINDS = pytest.mark.parametrize("kind", COMPRESSED, ids=["zlib", "lz4", "zstd"])


@contextmanager
def traced() -> Iterator[list[int]]:
    """Yield a list that later has the peak of the bytes that Python held meanwhile."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


class Measure:
    """A listener that reads the size of each body, in all calls at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, message):
        self.sizes.append(len(message.body))

    async def awaited(self, message):
        self(message)
        await asyncio.sleep(0.001)
        assert message.body

    def wait(self, count):
        until(lambda: len(self.sizes) >= count, "measured")


@KINDS
@pytest.mark.parametrize("how", ["calls", "awaited", "orderly", "lists"])
def test_bodies_unpacked_at_once_stay_within_the_bound(orders, kind, how):
    """Twenty messages have a few KB that unpack to 2 MiB each. One of them is unpacked at a time."""
    bomb, count = COMPRESSED[kind](bytes(2 * MIB)), 20
    send(orders.cluster, TOPIC, *[bomb] * count, sys_flag=kind)
    measure = Measure()
    everyone = threading.Barrier(4)

    def calls(message):
        measure(message)
        try:
            everyone.wait(0.05)  # several calls at once would all hold their bodies here
        except threading.BrokenBarrierError:
            everyone.reset()

    def lists(messages):
        assert sum(len(message.body) for message in messages) <= 2 * MIB
        for message in messages:
            measure(message)

    listener = {"calls": calls, "awaited": measure.awaited, "orderly": measure, "lists": lists}[how]
    options = {"orderly": how == "orderly", "listener_batch_size": 8 if how == "lists" else 1}
    with traced() as peak, orders.consuming(listener, max_cached_bytes=MIB // 2, **options):
        measure.wait(count)
    assert measure.sizes == [2 * MIB] * count
    assert peak[0] < 12 * MIB


@pytest.mark.virtual  # in real time there is a body for each of twenty workers
def test_a_body_is_not_kept_once_its_listener_has_returned(orders):
    """The first message is unfinished, so all others stay in the window although they are done."""
    send(orders.cluster, TOPIC, b"first")
    send(orders.cluster, TOPIC, *[zlib.compress(bytes(MIB))] * 30, sys_flag=ZLIB)
    measure, may_continue = Measure(), threading.Event()

    def listener(message):
        if message.body == b"first":
            may_continue.wait(WAIT_S)
        measure(message)

    with traced() as peak, orders.consuming(listener):
        measure.wait(30)
        may_continue.set()
        measure.wait(31)
    assert peak[0] < 15 * MIB


LIMITS = {ZLIB: MIB, LZ4: MIB, ZSTD: 64 * MIB}  # the last is the default


@pytest.mark.parametrize("orderly", [False, True])
@KINDS
def test_a_body_that_is_too_large_is_given_up_at_once(orders, kind, orderly):
    limit = LIMITS[kind]
    send(orders.cluster, TOPIC, COMPRESSED[kind](bytes(limit + MIB)), sys_flag=kind)
    send(orders.cluster, TOPIC, b"next")
    errors = []

    def judge(message):
        try:
            assert message.body == b"next"
        except ProtocolError as error:
            errors.append(error)
            raise ValueError("wrong body") from error

    options = {} if kind == ZSTD else {"max_body_bytes": limit}
    with orders.consuming(RecordingListener(judge), orderly=orderly, **options) as (consumer, seen):
        event = orders.events.wait_for("message-too-large")
        assert f"max_body_bytes={limit}" in event.text
        assert event.facts["offset"] == 0
        orders.events.wait_for("message-given-up")
        seen.wait(lambda seen: len(seen.messages) == 2)
        orders.wait_committed(2)
        assert consumer.state is ConsumerState.RUNNING
    assert len(orders.dead) == 1
    (error,) = errors
    assert f"holds more than {limit}" in str(error)


def test_the_longest_body_is_an_option_and_holds_in_every_thread(orders):
    send(orders.cluster, TOPIC, zlib.compress(bytes(1025)), zlib.compress(bytes(1024)), sys_flag=ZLIB)
    found = {}

    def listener(message):
        def read():
            try:
                found[message.queue_offset] = len(message.body)
            except ProtocolError as error:
                found[message.queue_offset] = str(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    with orders.consuming(listener, max_body_bytes=1024):
        until(lambda: len(found) == 2, "read")
    assert found[1] == 1024
    assert "holds more than 1024" in found[0]


def test_a_call_that_holds_a_large_body_stops_no_other(orders):
    """An uncompressed body needs no memory, and a small compressed one does not wait while memory is free."""
    send(orders.cluster, TOPIC, zlib.compress(bytes(8 * MIB)), sys_flag=ZLIB)
    send(orders.cluster, TOPIC, b"plain")
    send(orders.cluster, TOPIC, zlib.compress(b"small"), sys_flag=ZLIB)
    may_continue, holds = threading.Event(), threading.Event()
    bodies = []

    def listener(message):
        if len(message.body) > MIB:
            holds.set()
            may_continue.wait(WAIT_S)
        else:
            holds.wait(WAIT_S)
            bodies.append(message.body)

    with orders.consuming(listener, max_cached_bytes=25 * MIB):
        until(lambda: sorted(bodies) == [b"plain", b"small"], "consumed")
        may_continue.set()


def waiting(is_async, may_continue, began=lambda message: None, ended=lambda message: None):
    """Return a listener whose calls wait until the test releases them."""

    def listener(message):
        began(message)
        may_continue.wait(WAIT_S)
        ended(message)

    async def awaited(message):
        began(message)
        while not may_continue.is_set():
            await asyncio.sleep(0.01)
        ended(message)

    return awaited if is_async else listener


def test_small_bodies_do_not_overtake_a_large_one_forever(orders):
    large, began, may_continue = zlib.compress(bytes(8 * MIB)), [], threading.Event()
    send(orders.cluster, TOPIC, large, large, sys_flag=ZLIB)
    with orders.consuming(waiting(False, may_continue, began.append), max_cached_bytes=10 * MIB):
        time.sleep(0.7)
        send(orders.cluster, TOPIC, zlib.compress(b"small"), sys_flag=ZLIB)
        time.sleep(0.3)
        assert len(began) == 1
        may_continue.set()
        orders.wait_committed(3)
    assert [message.queue_offset for message in began] == [0, 1, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_consumer_closes_while_calls_wait_for_memory(orders, is_async):
    send(orders.cluster, TOPIC, *[zlib.compress(bytes(MIB))] * 4, sys_flag=ZLIB)
    began, may_continue = threading.Event(), threading.Event()
    listener = waiting(is_async, may_continue, lambda message: began.set())
    with orders.consuming(listener, max_cached_bytes=MIB // 8, consume_threads=3):
        assert began.wait(WAIT_S)
        threading.Timer(0.3, may_continue.set).start()
    assert orders.committed == {0: 1}, "the others had not begun"


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_wait_for_memory_behind_calls_that_are_not_wanted(orders, is_async):
    """Queues whose messages wait for memory are reset meanwhile. The messages of the other queue are consumed."""
    orders.make(queues=12)
    packed = zlib.compress(bytes(MIB))
    for queue_id in range(12):
        send(orders.cluster, TOPIC, *[packed] * 5, sys_flag=ZLIB, queue_id=queue_id)
    may_continue, seen = threading.Event(), []
    ended = lambda message: seen.append((message.queue.queue_id, len(message.body)))  # noqa: E731
    listener = waiting(is_async, may_continue, ended=ended)
    with orders.consuming(listener, max_cached_bytes=MIB // 8, consume_threads=3) as (consumer, _):
        until(lambda: sum(each.unfinished for each in consumer.progress().values()) == 60, "waiting")
        unwanted = [queue for queue in consumer.progress() if queue.topic == TOPIC and queue.queue_id != 11]
        with Admin(name_server=orders.cluster.name_server) as admin:
            admin.plan_reset(GROUP, TOPIC, "last", unwanted).execute()
        may_continue.set()
        until(lambda: len([each for each in seen if each[0] == 11]) == 5, "consumed")


# --- inner batches

BATCH = 0xC0  # sysFlag: an inner batch, to be unpacked
ITEM = struct.pack(">IIIiIH", 22, 0, 0, 0, 0, 0)


class IoPauses:
    """The longest time that the I/O thread of a consumer was blocked."""

    def __init__(self, consumer):
        self._loop, self.longest_s, self._on = consumer._lifecycle.loop, 0.0, True
        self._loop.call_soon_threadsafe(self._tick, time.thread_time())

    def _tick(self, before):
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - before)
        if self._on:
            self._loop.call_soon(self._tick, now)

    def stop(self):
        self._on = False


def one_failed_message(orders, batch, sys_flag, orderly=False):
    """A batch that cannot be unpacked fails as one message, and later messages are consumed."""
    send(orders.cluster, TOPIC, batch, sys_flag=BATCH | sys_flag)
    send(orders.cluster, TOPIC, b"next")
    bodies = []
    with orders.consuming(lambda message: bodies.append(message.body), orderly=orderly):
        assert orders.events.wait_for("message-too-large", timeout_s=120).facts["offset"] == 0
        orders.wait_committed(2)
    assert bodies == [b"next"]


@pytest.mark.parametrize("kind", [0, ZSTD], ids=["plain", "zstd"])
@pytest.mark.parametrize("orderly", [False, True])
def test_a_batch_that_no_broker_could_count_is_one_message(orders, kind, orderly):
    batch = ITEM * 40_000
    one_failed_message(orders, COMPRESSED[kind](batch * 5) if kind else batch, kind, orderly)


@pytest.mark.live
@pytest.mark.slow("tracemalloc counts 33 000 messages")
def test_a_batch_that_no_broker_could_count_fills_no_memory(orders):
    """3.4 KB contain 610 000 messages."""
    with traced() as peak:
        one_failed_message(orders, COMPRESSED[ZSTD](ITEM * 610_000), ZSTD)
    assert peak[0] < 120 * MIB


@pytest.mark.live
@pytest.mark.slow("twenty thousand messages, as many as a broker takes at once")
@pytest.mark.parametrize("bits", [0, ZLIB], ids=["plain", "zlib"])
def test_a_large_batch_leaves_the_io_thread_alone(orders, broker, bits):
    """The batch is valid, and as large as a broker accepts."""
    bodies = [b"%d" % number for number in range(20_000)]
    whole, count = encode_batch(map(BatchItem, bodies)), len(bodies)
    send(orders.cluster, TOPIC, zlib.compress(whole) if bits else whole, sys_flag=BATCH | bits)

    def stretched(answer):
        """Respond as a broker that knows the number of messages in the batch."""
        ends = {"nextBeginOffset": str(count), "maxOffset": str(count)} if answer.body else {}
        return dataclasses.replace(answer, fields={**answer.fields, **ends})

    broker.on(RequestCode.PULL_MESSAGE, rewrite(stretched))
    seen = set()
    consumer = orders.consumer(lambda message: seen.add(message.body), **QUICK).start()
    gc.collect()
    gc.freeze()  # otherwise any thread that creates objects would also scan the objects of earlier tests
    pauses = IoPauses(consumer)
    try:
        until(lambda: len(seen) == count, "consumed")
    finally:
        pauses.stop()
        gc.unfreeze()
        consumer.close()
    assert seen == set(bodies)
    assert pauses.longest_s / slowness() < 0.1


def test_a_batch_that_is_damaged_is_one_failed_message(orders):
    send(orders.cluster, TOPIC, ITEM + b"\xff" * 40, sys_flag=BATCH)
    send(orders.cluster, TOPIC, ITEM * 20_000 + b"\xff" * 40, sys_flag=BATCH)
    send(orders.cluster, TOPIC, b"next")
    bodies, errors = [], []

    def listener(message):
        try:
            bodies.append(message.body)
        except ProtocolError as error:
            errors.append(str(error))

    with orders.consuming(listener):
        orders.wait_committed(3)
    assert bodies == [b"next"]
    assert len(errors) == 2
    assert all("batch item" in error for error in errors)


BATCH_BODY = encode_batch([BatchItem(bytes(200 * 1024))])
"""Too large for the I/O thread to unpack."""


def test_large_batches_and_messages_pulled_ahead_keep_their_order(orders):
    bodies = [b"%d" % number for number in range(20)]
    for body in bodies:
        send(orders.cluster, TOPIC, body)
        send(orders.cluster, TOPIC, BATCH_BODY, sys_flag=BATCH)
    with orders.consuming(orderly=True, pull_batch_size=1) as (_, seen):
        orders.wait_committed(40)
    assert [message.queue_offset for message in seen.messages] == list(range(40))


@pytest.mark.parametrize("deed", ["reset", "subscription"])
def test_a_large_batch_may_be_skipped_while_it_waits(orders, deed):
    """The batch waits for memory. Then a reset skips it, or a new subscription wants none of its tags."""
    may_continue = threading.Event()
    seen = RecordingListener(lambda message: may_continue.wait(WAIT_S) and None)
    send(orders.cluster, TOPIC, bytes(MIB // 8))
    send(orders.cluster, TOPIC, *[zlib.compress(BATCH_BODY)] * 2, sys_flag=BATCH | ZLIB)
    with orders.consuming(seen, max_cached_bytes=MIB // 8) as (consumer, _):
        seen.wait(lambda seen: seen.messages)
        time.sleep(1)
        consumer.reset_offsets(TOPIC, "latest") if deed == "reset" else consumer.subscribe(TOPIC, seen, "wanted")
        may_continue.set()
        orders.send(b"new", tags="wanted")
        orders.wait_committed(4)
    assert [message.queue_offset for message in seen.messages] == [0, 3]


def test_a_response_with_too_many_records_is_refused(orders, broker):
    send(orders.cluster, TOPIC, b"fine")

    def flood(answer):
        record = encode_message(StoredMessage(TOPIC, b""))
        return dataclasses.replace(answer, body=record * 60_000 if answer.body else b"")

    broker.on(RequestCode.PULL_MESSAGE, rewrite(flood), times=2)
    with orders.consuming() as (_, seen):
        seen.wait_for(1)
    assert seen.bodies == [b"fine"]
    assert "more than 1024 records" in "".join(event.text for event in orders.events.all)
