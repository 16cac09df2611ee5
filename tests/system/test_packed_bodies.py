"""A few bytes that hold many: what any producer can send takes no more memory than options say, and ends nothing."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import lz4.frame
import pytest
import zstandard

from pyrocket_consumer import ConsumerState, ProtocolError, PushConsumer
from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.model import dlq_topic
from pyrocket_consumer.wire.command import SendMessageHeader
from tests.consuming import QUICK, WAIT_S, Events, Seen, consuming, until

MIB = 1 << 20
ZLIB, LZ4, ZSTD = 0x301, 0x101, 0x201
PACKED = {ZLIB: zlib.compress, LZ4: lz4.frame.compress, ZSTD: zstandard.compress}
KINDS = pytest.mark.parametrize("kind", PACKED, ids=["zlib", "lz4", "zstd"])


def send(cluster, topic, *bodies, sys_flag=0, queue_id=0):
    """Send bodies as they are, to one queue, with any sysFlag: as a producer that is not ours can."""
    config = ClientConfig(name_server=cluster.name_server)
    with_cluster = Cluster(config, make_client_id(config))
    with_cluster.start()
    try:
        for body in bodies:
            header = SendMessageHeader(
                producer_group="stranger",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue_id,
                sys_flag=sys_flag,
                born_timestamp=0,
                flag=0,
                properties="",
                reconsume_times=0,
                unit_mode=False,
                max_reconsume_times=0,
                batch=False,
                broker_name="broker-a",
            )

            async def sent(header=header, body=body):
                await with_cluster.route(topic)
                await with_cluster.broker("broker-a").send(header, body)

            with_cluster.run(sent(), WAIT_S)
    finally:
        with_cluster.close()


@contextmanager
def traced() -> Iterator[list[int]]:
    """Yield a list that has the most bytes that Python held meanwhile, afterwards."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


class Measure:
    """A listener that looks at the size of each body, as all calls at once do."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.changed = threading.Condition()

    def __call__(self, message):
        size = len(message.body)
        with self.changed:
            self.sizes.append(size)
            self.changed.notify_all()

    async def awaited(self, message):
        self(message)
        await asyncio.sleep(0.001)
        assert message.body

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sizes) >= count, WAIT_S), self.sizes


@KINDS
@pytest.mark.parametrize("how", ["calls", "awaited", "orderly", "lists"])
def test_bodies_unpacked_at_once_stay_within_the_bound(embedded, topic, group, kind, how):
    """Twenty messages of a few KB, 32 MiB each: one of them is unpacked at a time."""
    embedded.create_topic(topic, queues=1)
    bomb, count = PACKED[kind](bytes(32 * MIB)), 20
    send(embedded, topic, *[bomb] * count, sys_flag=kind)
    measure = Measure()
    everyone = threading.Barrier(4)
    options: dict[str, object] = {"max_cached_bytes": MIB}
    listener = measure.awaited if how == "awaited" else measure
    if how == "orderly":
        options["orderly"] = True
    if how == "lists":
        options["listener_batch_size"] = 8

        def listener(messages):
            assert sum(len(message.body) for message in messages) <= 32 * MIB
            for message in messages:
                measure(message)

    if how == "calls":

        def listener(message):
            measure(message)
            try:
                everyone.wait(0.05)  # were several calls under way, they would all hold their bodies here
            except threading.BrokenBarrierError:
                everyone.reset()

    with traced() as peak, consuming(embedded, topic, group, listener, **options):
        measure.wait(count)
    assert measure.sizes == [32 * MIB] * count
    assert peak[0] < 150 * MIB


def test_a_body_is_not_kept_once_its_listener_has_returned(embedded, topic, group):
    """The first message is not finished, so all others wait in the window, done."""
    embedded.create_topic(topic, queues=1)
    send(embedded, topic, b"first")
    send(embedded, topic, *[zlib.compress(bytes(8 * MIB))] * 30, sys_flag=ZLIB)
    measure, goes_on = Measure(), threading.Event()

    def listener(message):
        if message.body == b"first":
            goes_on.wait(WAIT_S)
        measure(message)

    with traced() as peak, consuming(embedded, topic, group, listener):
        measure.wait(30)
        goes_on.set()
        measure.wait(31)
    assert peak[0] < 200 * MIB


@pytest.mark.parametrize("orderly", [False, True])
@KINDS
def test_a_body_that_is_too_large_is_given_up_at_once_and_told(embedded, topic, group, kind, orderly):
    embedded.create_topic(topic, queues=1)
    send(embedded, topic, PACKED[kind](bytes(65 * MIB)), sys_flag=kind)
    send(embedded, topic, b"next")
    events, errors = Events(), []

    def judge(message):
        try:
            assert message.body == b"next"
        except ProtocolError as error:
            errors.append(error)
            raise ValueError("not what I want") from error

    seen = Seen(judge)
    with consuming(embedded, topic, group, seen, on_event=events, orderly=orderly) as (consumer, _):
        event = events.wait_for("message-too-large")
        assert "max_body_bytes=67108864" in event.text
        assert event.facts["offset"] == 0
        events.wait_for("message-given-up")
        seen.wait(lambda seen: len(seen.messages) == 2)
        until(lambda: embedded.committed(group, topic) == {0: 2}, "consumed")
        assert consumer.state is ConsumerState.RUNNING
    assert len(embedded.messages(dlq_topic(group))) == 1
    assert len(errors) == 1
    assert "holds more than 67108864" in str(errors[0])


def test_the_longest_body_is_an_option_and_holds_in_every_thread(embedded, topic, group):
    embedded.create_topic(topic, queues=1)
    send(embedded, topic, zlib.compress(bytes(1025)), zlib.compress(bytes(1024)), sys_flag=ZLIB)
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

    with consuming(embedded, topic, group, listener, max_body_bytes=1024):
        until(lambda: len(found) == 2, "read")
    assert found[1] == 1024
    assert "holds more than 1024" in found[0]


def test_others_are_consumed_beside_a_call_that_holds_a_large_body(embedded, topic, group):
    """What is not packed needs no room; what is and small waits for none as long as there is any."""
    embedded.create_topic(topic, queues=1)
    send(embedded, topic, zlib.compress(bytes(32 * MIB)), sys_flag=ZLIB)
    send(embedded, topic, b"plain")
    send(embedded, topic, zlib.compress(b"small"), sys_flag=ZLIB)
    goes_on, holds = threading.Event(), threading.Event()
    bodies = []

    def listener(message):
        if len(message.body) > MIB:
            holds.set()
            goes_on.wait(WAIT_S)
        else:
            holds.wait(WAIT_S)
            bodies.append(message.body)

    with consuming(embedded, topic, group, listener):
        until(lambda: sorted(bodies) == [b"plain", b"small"], "consumed")
        goes_on.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_consumer_closes_while_calls_wait_for_room(embedded, topic, group, is_async):
    embedded.create_topic(topic, queues=1)
    send(embedded, topic, *[zlib.compress(bytes(8 * MIB))] * 4, sys_flag=ZLIB)
    began, goes_on = threading.Event(), threading.Event()

    def listener(message):
        began.set()
        goes_on.wait(WAIT_S)

    async def awaited(message):
        began.set()
        while not goes_on.is_set():
            await asyncio.sleep(0.01)

    consumer = PushConsumer(
        group, name_server=embedded.name_server, **{**QUICK, "max_cached_bytes": MIB, "consume_threads": 3}
    )
    consumer.subscribe(topic, awaited if is_async else listener)
    consumer.start()
    assert began.wait(WAIT_S)
    threading.Timer(0.3, goes_on.set).start()
    consumer.close()
    assert embedded.committed(group, topic) == {0: 1}, "the others had not begun"
