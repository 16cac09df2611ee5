"""Waiting for a consumer's end: by which thread, how long, and with signals meanwhile."""

import asyncio
import gc
import os
import signal
import threading
import time

import pytest

from pyrocket_consumer import AsyncPushConsumer, ClientClosed, ConsumerState, PushConsumer
from pyrocket_consumer.consumer.lifecycle import Terminated, terminate, unwatch_sigterm, watch_sigterm
from tests.consumer.lifecycle.programs import run
from tests.consumer.orders import GROUP
from tests.consumer.processes import Child
from tests.consuming import WAIT_S, Events

RUN = asyncio.run

BLOCKING = """
def tell_when_joined():
    wait_until(lambda: consumed(consumer.progress()) >= 20, consumer.progress)
    wait_until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
    tell(b"ready")

(way,) = rest
with PushConsumer(group, name_server=name_server, consume_from="first") as consumer:
    consumer.subscribe(topic, handle)
    threading.Thread(target=tell_when_joined, daemon=True).start()
    if way == "once":
        assert consumer.join() is False
    elif way == "until its end":
        while not consumer.join(0.2):
            pass
    elif way == "while it runs":
        while consumer.state.value == "running":
            consumer.join(0.2)
    elif way == "between two":
        consumer.join(0)
        time.sleep(60)
    elif way == "for ever":
        while True:
            consumer.join(0.2)
    print("joined", flush=True)
print("closed", flush=True)
"""

ON_A_LOOP = """
async def listen(message):
    handle(message)

async def tell_when_joined(consumer):
    while consumed(await consumer.progress()) < 20 or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        await asyncio.sleep(0.01)
    tell(b"ready")

async def main(way):
    async with AsyncPushConsumer(group, name_server=name_server, consume_from="first") as consumer:
        await consumer.subscribe(topic, listen)
        telling = asyncio.create_task(tell_when_joined(consumer))
        if way == "once":
            assert await consumer.join() is False
        elif way == "twice at once":
            async with AsyncPushConsumer(group + "-other", name_server=name_server) as other:
                await other.subscribe(topic, listen)
                assert await asyncio.gather(consumer.join(), other.join()) == [False, False]
        elif way == "between two":
            await consumer.join(0)
            await asyncio.sleep(60)
        elif way == "for ever":
            while True:
                await consumer.join(0.2)
        print("joined", flush=True)
    print("closed", flush=True)

asyncio.run(main(*rest))
"""

CLOSED = (0, ["joined", "closed"])
SIGTERM = (143, [])
CTRL_C = (-signal.SIGINT, [])


@pytest.mark.live
@pytest.mark.parametrize(
    ("program", "way", "number", "end"),
    [
        (BLOCKING, "once", signal.SIGINT, CLOSED),
        (BLOCKING, "once", signal.SIGTERM, CLOSED),
        *(
            (BLOCKING, way, signal.SIGTERM, SIGTERM)
            for way in ("until its end", "while it runs", "between two", "for ever")
        ),
        *((BLOCKING, way, signal.SIGINT, CTRL_C) for way in ("until its end", "while it runs", "for ever")),
        (ON_A_LOOP, "once", signal.SIGTERM, CLOSED),
        (ON_A_LOOP, "twice at once", signal.SIGTERM, CLOSED),
        (ON_A_LOOP, "between two", signal.SIGTERM, SIGTERM),
        (ON_A_LOOP, "for ever", signal.SIGTERM, SIGTERM),
        (ON_A_LOOP, "once", signal.SIGINT, CTRL_C),  # as in asyncio
    ],
    ids=lambda value: {BLOCKING: "blocking", ON_A_LOOP: "asyncio"}.get(value) if isinstance(value, str) else None,
)
def test_a_signal_ends_a_join_and_the_program_closes(orders, program, way, number, end):
    """A single join returns, and the program closes the consumer. A loop of joins ends with the process, closed,
    too."""
    orders.make(queues=2)
    orders.fill(20)
    child = run(orders.cluster, program, way)
    child.wait_for_line("ready")
    child.send(number)
    code = child.ended()
    assert sum(child.bodies.values()) == 20
    assert orders.committed == {0: 10, 1: 10}, "closed in order"
    assert orders.members == []
    assert (code, child.lines[child.lines.index("ready") + 1 :]) == end
    if end == CTRL_C:
        assert child.errors[-1] == "KeyboardInterrupt"
    elif (program, end) != (ON_A_LOOP, SIGTERM):
        assert child.errors == []


@pytest.mark.live
def test_a_handler_of_the_program_is_kept(embedded):
    received, before = threading.Event(), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: received.set())
    try:
        with PushConsumer(GROUP, name_server=embedded.name_server) as consumer:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            assert consumer.join(1) is False
        assert received.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_join_returns_whether_the_consumer_has_ended(embedded):
    with PushConsumer(GROUP, name_server=embedded.name_server) as consumer:
        began = time.monotonic()
        assert consumer.join(0.05) is False
        assert time.monotonic() - began >= 0.05
        assert consumer.join(0) is False
        closer = threading.Timer(0.05, consumer.close)
        closer.start()
        assert consumer.join() is True
        assert consumer.join() is True
        closer.join()


def test_many_threads_join_and_all_see_the_end(embedded):
    ended = []
    with PushConsumer(GROUP, name_server=embedded.name_server) as consumer:
        waiters = [threading.Thread(target=lambda: ended.append(consumer.join(WAIT_S))) for _ in range(10)]
        for waiter in waiters:
            waiter.start()
    for waiter in waiters:
        waiter.join(WAIT_S)
    assert ended == [True] * 10


async def test_five_hundred_joins_on_a_loop_leave_nothing(embedded):
    async with AsyncPushConsumer(GROUP, name_server=embedded.name_server) as consumer:
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(500):
            assert await consumer.join(0) is False
        gc.collect()
        assert len(gc.get_objects()) - before < 1000
        waits = [asyncio.create_task(consumer.join()) for _ in range(10)]
        for wait in waits[:5]:
            await asyncio.sleep(0)
            wait.cancel()
        await asyncio.sleep(0)
    assert await asyncio.gather(*waits[5:]) == [True] * 5
    assert await consumer.join() is True


async def test_the_error_of_join_before_start_has_the_remedy(orders):
    consumer = orders.consumer()
    with pytest.raises(ClientClosed, match=r"call start\(\) before join"):
        consumer.join(1)
    consumer.close()
    assert consumer.join() is True
    assert consumer.state is ConsumerState.CLOSED
    with pytest.raises(ClientClosed, match=r"call start\(\) before join"):
        await AsyncPushConsumer(GROUP, name_server=orders.cluster.name_server).join(1)


def test_a_join_without_a_subscription_emits_one_event(orders):
    with orders.consumer() as consumer:
        for _ in range(3):
            consumer.join(0)
        assert "subscribe()" in orders.events.wait_for("nothing-subscribed").text
        consumer.join(0.1)
    assert len(orders.events.of("nothing-subscribed")) == 1
    events = Events()
    with orders.consumer(print, on_event=events) as consumer:
        consumer.join(0.1)
    assert events.of("nothing-subscribed") == []


@pytest.mark.live
@pytest.mark.slow("joins once for each instruction")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_at_any_step_of_a_join_close_works(number):
    """Also after a signal between two instructions while the wait begins or ends."""
    child = Child("-m", "tests.consumer.lifecycle.joining", str(int(number)))
    try:
        child.wait_for_line("through")
        assert child.ended() == 0
    finally:
        child.process.kill()
    assert len(child.lines) > 20


def test_sigterm_reaches_all_consumers_until_they_are_closed():
    called, first, second = [], Events(), Events()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    watch_sigterm(first, lambda: called.append("first"))
    watch_sigterm(second, lambda: called.append("second"))
    signal.raise_signal(signal.SIGTERM)
    unwatch_sigterm(second)
    signal.raise_signal(signal.SIGTERM)
    assert called == ["first", "second", "first"]
    watch_sigterm(first, terminate)
    with pytest.raises(Terminated) as raised:
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    unwatch_sigterm(first)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_change_no_handler():
    def wait():
        watch_sigterm(thread, terminate)
        found.append(signal.getsignal(signal.SIGTERM))

    found = []
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(30)
    assert found == [signal.SIG_DFL]
