"""Send from asyncio: no call blocks the loop, the order is kept, and cancelled calls are cleaned up."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time

import pytest

from pyrocket_consumer import (
    AsyncProducer,
    ClientClosed,
    ConfigError,
    ConnectError,
    MessageQueue,
    RequestTimeout,
    RouteNotFound,
    SendError,
)
from pyrocket_consumer.producer import OutgoingMessage, ProducerState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, answer, drop
from tests.interruptions import name_servers_held
from tests.producer.programs import producer_threads
from tests.real_brokers import wait_until

SEND = RequestCode.SEND_MESSAGE_V2

pytestmark = pytest.mark.timeout(120)
RUN = asyncio.run


def bodies(cluster):
    return [message.body for message in cluster.messages("orders")]


class LongestStop:
    """Measures the longest time for which the loop was blocked."""

    def __init__(self):
        self.seconds = 0.0

    async def __aenter__(self):
        self._task = asyncio.create_task(self._measure())
        return self

    async def _measure(self):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            self.seconds = max(self.seconds, time.monotonic() - before)

    async def __aexit__(self, *_):
        self._task.cancel()


async def test_the_result_has_the_position_of_the_stored_message(cluster, topic):
    cluster.create_topic(topic, queues=2)
    async with AsyncProducer(name_server=cluster.name_server) as producer:
        queue = MessageQueue(topic, "broker-a", 1)
        one = await producer.send(topic, b"one", tags="t", keys=["k"], properties={"a": "b"}, flag=3, queue=queue)
        batch = await producer.send_batch(topic, [b"two", OutgoingMessage(b"three", tags="u")], sharding_key="s")
        await producer.send_oneway(topic, b"four")
        await producer.flush()
    wait_until(lambda: len(cluster.messages(topic)) >= 4, "4 messages")
    stored = {message.body: message for message in cluster.messages(topic)}
    found = stored[b"one"]
    assert (found.tags, found.keys, found.property("a"), found.flag, found.queue) == ("t", ("k",), "b", 3, one.queue)
    assert (found.message_id, found.queue_offset) == (one.message_id, one.queue_offset)
    assert [stored[body].message_id for body in (b"two", b"three")] == [each.message_id for each in batch]


@pytest.mark.live
@pytest.mark.slow("there must be more than there is room for")
async def test_ten_thousand_sends_do_not_block_the_loop(embedded):
    """More messages than fit at a time. `Producer.send_async` would block the loop until they fit."""
    ids, stops = set(), []
    async with AsyncProducer(name_server=embedded.name_server, send_timeout_s=60) as producer:
        await producer.send("orders", b"first")
        while len(stops) < 8 and min(stops, default=2) >= 2:  # a busy machine may delay some attempts
            async with LongestStop() as stop:
                sends = [asyncio.create_task(producer.send("orders", b"%d" % each)) for each in range(10_000)]
                ids |= {result.message_id for result in await asyncio.gather(*sends)}
            stops.append(stop.seconds)
    assert len(ids) == len(embedded.messages("orders")) - 1 == 10_000 * len(stops)
    assert min(stops) < 2  # creating and starting 10,000 tasks blocks the loop for about 0.3 s


async def test_a_full_producer_does_not_block_the_loop(embedded, gate):
    async with AsyncProducer(name_server=embedded.name_server, max_in_flight_messages=2) as producer:
        first = [asyncio.create_task(producer.send("orders", b"x", timeout_s=60)) for _ in range(2)]
        async with LongestStop() as stop:
            outcomes = await asyncio.gather(*(producer.send("orders", b"x") for _ in range(3)), return_exceptions=True)
        gate.open()
        stored = await asyncio.gather(*first)
    assert [type(outcome) for outcome in outcomes] == [SendError] * 3
    assert all("no free capacity within 3 s" in str(outcome) for outcome in outcomes)
    assert len({result.message_id for result in stored}) == 2
    assert stop.seconds < 2  # it would be 3 s with `Producer.send_async`


async def test_a_submitted_message_does_not_expire_as_a_queued_one(embedded, gate, caplog):
    """It waits for capacity, then for the broker. Both together exceed the timeout of the wait for capacity."""
    async with AsyncProducer(name_server=embedded.name_server, max_in_flight_messages=20) as producer:
        sends = [producer.send("orders", b"x", timeout_s=timeout_s) for timeout_s in [1.0] * 20 + [1.2] * 20]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        gate.open()
    assert [type(outcome) for outcome in outcomes] == [SendError] * 40
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("started", [True, False], ids=["started", "by the first message"])
async def test_coroutines_with_one_key_are_stored_in_their_order(embedded, started):
    producer = AsyncProducer(name_server=embedded.name_server, max_in_flight_messages=7)
    if started:
        await producer.start()
    tasks = []
    for number in range(300):
        tasks.append(asyncio.create_task(producer.send("orders", b"%03d" % number, sharding_key="k")))
        if number % 40 == 0:
            await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    await producer.close()
    assert bodies(embedded) == [b"%03d" % number for number in range(300)]


async def test_a_message_cancelled_while_it_is_queued_is_not_sent(embedded, gate):
    async with AsyncProducer(name_server=embedded.name_server, max_in_flight_messages=1) as producer:
        under_way = asyncio.create_task(producer.send("orders", b"under way"))
        waits = asyncio.create_task(producer.send("orders", b"cancelled"))
        last = asyncio.create_task(producer.send("orders", b"last"))
        await asyncio.to_thread(embedded.broker("broker-a").wait_for, SEND)
        under_way.cancel()
        waits.cancel()
        assert await asyncio.gather(under_way, waits, return_exceptions=True) != []
        gate.open()
        await last
    assert sorted(bodies(embedded)) == [b"last", b"under way"]


async def test_errors_are_those_of_a_producer(embedded):
    async with AsyncProducer(name_server=embedded.name_server) as producer:
        for call in [
            producer.send("orders", "text"),
            producer.send("orders", b"x", timeout_s=-1),
            producer.send_batch("orders", b"x"),
            producer.send_oneway("orders", b""),
        ]:
            with pytest.raises(ConfigError):
                await call
        embedded.broker("broker-a").on(SEND, answer(13, "illegal"))
        with pytest.raises(SendError, match="illegal"):
            await producer.send("orders", b"x")
        for call in (producer.flush(0), producer.close(-1)):
            with pytest.raises(ConfigError, match="timeout_s"):
                await call
    for call in (producer.send("orders", b"x"), producer.start()):
        with pytest.raises(ClientClosed):
            await call
    assert producer.state is ProducerState.CLOSED
    with EmbeddedCluster(auto_create_topics=False) as cluster:
        async with AsyncProducer(name_server=cluster.name_server) as producer:
            with pytest.raises(RouteNotFound):
                await producer.send("nowhere", b"x")


async def test_an_unreachable_name_server_is_an_error_and_may_return(embedded):
    producer = AsyncProducer(name_server=embedded.name_server)
    embedded.stop_name_server()
    with pytest.raises(ConnectError):
        await producer.start()
    outcomes = await asyncio.gather(*(producer.send("orders", b"x") for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ConnectError] * 3
    embedded.start_name_server()
    await producer.send("orders", b"x")
    await producer.close()
    assert bodies(embedded) == [b"x"]


async def test_a_flush_waits_and_reports_unfinished_messages(embedded, gate):
    async with AsyncProducer(name_server=embedded.name_server, send_timeout_s=60) as producer:
        await producer.flush()
        sends = [asyncio.create_task(producer.send("orders", b"x")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestTimeout, match="3 of 3"):
            await producer.flush(0.2)
        gate.open()
        await producer.flush()
        assert all(send.done() for send in sends) or await asyncio.gather(*sends)


def test_it_belongs_to_one_loop(embedded):
    producer = AsyncProducer(name_server=embedded.name_server)

    async def send():
        await producer.send("orders", b"x")

    async def rest():
        await send()
        other = await asyncio.to_thread(lambda: asyncio.run(outcome(send())))
        await producer.close()
        return other

    async def outcome(call):
        try:
            await call
        except ConfigError as error:
            return str(error)

    assert "another event loop" in asyncio.run(rest())


@pytest.mark.parametrize("step", range(12))
def test_a_cancellation_at_any_step_leaves_nothing_behind(embedded, step):
    """After a cancelled start, send, flush or close, no thread or task remains, and the loop ends."""

    async def program():
        async with AsyncProducer(name_server=embedded.name_server) as producer:
            await producer.send("orders", b"x")
            await asyncio.gather(*(producer.send("orders", b"x") for _ in range(50)))
            await producer.flush()

    async def cancelled():
        task = asyncio.create_task(program())
        for _ in range(step * 3):
            await asyncio.sleep(0)
        await asyncio.sleep(step * 0.004)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    embedded.wait_until(lambda: not producer_threads())
    embedded.wait_until(lambda: not embedded.broker("broker-a").connections)


async def test_a_cancelled_close_fails_unfinished_messages(embedded):
    embedded.broker("broker-a").on(SEND, drop, times=None)
    producer = AsyncProducer(name_server=embedded.name_server, send_timeout_s=60)
    await producer.start()
    send = asyncio.create_task(producer.send("orders", b"x"))
    await asyncio.to_thread(embedded.broker("broker-a").wait_for, SEND)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises((SendError, ClientClosed), match="closed"):
        await asyncio.wait_for(send, 30)
    embedded.wait_until(lambda: not producer_threads())


def test_a_dropped_producer_warns_and_ends(embedded):
    async def program():
        await AsyncProducer(name_server=embedded.name_server).send("orders", b"x")

    with pytest.warns(ResourceWarning, match="unclosed"):
        asyncio.run(program())
    gc.collect()
    embedded.wait_until(lambda: not producer_threads())


async def test_it_needs_no_thread_of_the_executor_of_the_loop(embedded):
    """All threads of the executor wait for a send. The producer still starts and closes."""
    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
    producer = AsyncProducer(name_server=embedded.name_server)

    def send():
        sent = asyncio.run_coroutine_threadsafe(producer.send("orders", b"x"), loop).result(20)
        release.wait(20)
        return sent

    working = asyncio.ensure_future(asyncio.to_thread(send))
    while not bodies(embedded):
        await asyncio.sleep(0.01)
    await asyncio.wait_for(producer.close(), 15)
    release.set()
    assert (await working).attempts == 1


@pytest.mark.parametrize("first_ends", ["cancelled", "too late"])
async def test_queued_messages_continue_when_a_large_one_ends(embedded, gate, first_ends):
    options = {"max_in_flight_bytes": 1000, "compress_above_bytes": 100_000, "send_timeout_s": 60}
    async with AsyncProducer(name_server=embedded.name_server, **options) as producer:
        under_way = asyncio.create_task(producer.send("orders", b"a" * 900))
        await asyncio.sleep(0)
        timeout_s = 0.2 if first_ends == "too late" else 60
        large = asyncio.create_task(producer.send("orders", b"b" * 500, timeout_s=timeout_s))
        small = asyncio.create_task(producer.send("orders", b"c" * 50))
        await asyncio.sleep(0)
        if first_ends == "cancelled":
            large.cancel()
        await asyncio.wait([large])
        await asyncio.to_thread(gate.wait_held, 2)
        assert not under_way.done()
        gate.open()
        await asyncio.gather(under_way, small)
    assert large.cancelled() is (first_ends == "cancelled")
    assert sorted(len(body) for body in bodies(embedded)) == [50, 900]


async def test_a_flush_waits_for_messages_cancelled_in_flight(embedded, gate):
    async with AsyncProducer(name_server=embedded.name_server, send_timeout_s=60) as producer:
        send = asyncio.create_task(producer.send("orders", b"x"))
        await asyncio.to_thread(gate.wait_held, 1)
        send.cancel()
        await asyncio.wait([send])
        with pytest.raises(RequestTimeout, match="1 of 1"):
            await producer.flush(0.1)
        gate.open()
        await producer.flush()
        assert bodies(embedded) == [b"x"]


async def test_close_keeps_its_timeout_without_a_name_server(embedded):
    producer = AsyncProducer(name_server=embedded.name_server, call_timeout_s=60)
    with name_servers_held(embedded):
        with pytest.raises(ConnectError, match=r"no response within 0\.2 s; nothing was sent"):
            await producer.send("orders", b"x", timeout_s=0.2)
        await asyncio.wait_for(producer.close(timeout_s=0.1), 20)
    embedded.wait_until(lambda: not producer_threads())
    assert bodies(embedded) == []
