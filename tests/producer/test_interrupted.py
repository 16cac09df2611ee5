"""Producer calls that a signal interrupts, and signal handlers that call a producer."""

from __future__ import annotations

import os
import signal

import pytest

from pyrocket_consumer import ClientClosed, SendError
from pyrocket_consumer.producer import Producer, ProducerState
from tests.interruptions import name_servers_held, signal_once_held
from tests.producer.programs import in_a_thread, producer_threads, run_program

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers that interrupt"),
]

INTERRUPTED = """
import faulthandler, random, signal, sys, threading
from pyrocket_consumer import Producer
faulthandler.dump_traceback_later(60, exit=True)
producer = Producer(name_server=sys.argv[1], send_timeout_s=30)
producer.send("orders", b"first")
does = {
    "send": lambda: producer.send("orders", b"x"),
    "send_async": lambda: producer.send_async("orders", b"x"),
    "result": lambda: producer.send_async("orders", b"x").result(30),
    "flush": producer.flush,
}[sys.argv[2]]
rng = random.Random(1)
signal.signal(signal.SIGALRM, signal.default_int_handler)
for _ in range(400 if sys.argv[2] != "result" else 1000):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00002, 0.001))
        for _ in range(200):
            does()
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    other = threading.Thread(target=producer.send, args=("orders", b"other"))
    other.start()
    other.join()
producer.close()
print("closed")
"""


@pytest.mark.slow("a process that is interrupted many times")
@pytest.mark.parametrize("call", ["send", "send_async", "result", "flush"])
def test_a_call_may_be_interrupted_at_any_moment(embedded, call):
    done = run_program(INTERRUPTED, embedded.name_server, call, flags=("-W", "ignore"))
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.slow("interrupts a call many times")
def test_closing_may_be_interrupted(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=60)
    keyed = [producer.send_async("orders", b"x", sharding_key="k") for _ in range(3)]
    free = producer.send_async("orders", b"x")
    gate.wait_held(2)
    notified = []
    free.add_done_callback(notified.append)

    def interrupt_close() -> None:
        embedded.wait_until(lambda: producer.state is ProducerState.CLOSED)
        os.kill(os.getpid(), signal.SIGINT)

    with in_a_thread(interrupt_close), pytest.raises(KeyboardInterrupt):
        producer.close()
    gate.open()
    assert all(isinstance(future.exception(0), SendError) for future in [*keyed, free])
    assert notified == [free]


def test_a_signal_that_closes_once_more_returns_at_once(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=60)
    future = producer.send_async("orders", b"x")

    def close_again(number, frame):
        producer.close()
        gate.open()

    before = signal.signal(signal.SIGALRM, close_again)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        producer.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert future.result(0).attempts == 1


@pytest.mark.timeout(60)
def test_a_signal_that_closes_while_it_starts_ends_the_start(embedded):
    producer = Producer(name_server=embedded.name_server, call_timeout_s=30)
    with name_servers_held(embedded) as gate, signal_once_held(gate, producer.close), pytest.raises(ClientClosed):
        producer.start()
    assert producer.state is ProducerState.CLOSED
    embedded.wait_until(lambda: not producer_threads())


@pytest.mark.timeout(60)
def test_a_signal_that_sends_while_it_starts_leaves_one_producer(embedded):
    producer, sent = Producer(name_server=embedded.name_server, call_timeout_s=30), []
    with name_servers_held(embedded) as gate:

        def handle():
            gate.open()
            sent.append(producer.send("orders", b"handler"))

        with signal_once_held(gate, handle):
            producer.start()
    producer.send("orders", b"main")
    assert len(sent) == 1
    embedded.wait_until(lambda: len(producer_threads()) == 1)
    producer.close()
    embedded.wait_until(lambda: not producer_threads())


STEPPED = """
import faulthandler, gc, os, sys, time
from concurrent.futures import Future
from pyrocket_consumer import ClientClosed, Producer
from tests.stepping import at_each_moment, forget_unstarted_threads, interrupted_at

name_server, call, handled = sys.argv[1:]

def ctrl_c(producer):
    raise KeyboardInterrupt

HANDLERS = {
    "Ctrl-C": ctrl_c,
    "close": lambda producer: producer.close(),
    "flush": lambda producer: producer.flush(),
    "send_async": lambda producer: producer.send_async("orders", b"handler"),
}
CALLS = {
    "send_async": lambda producer: producer.send_async("orders", b"x"),
    "send": lambda producer: producer.send("orders", b"x"),
    "result": lambda producer: producer.send_async("orders", b"x").result(30),
    "callback": lambda producer: producer.send_async("orders", b"x").add_done_callback(lambda done: None),
    "flush": lambda producer: producer.flush(),
    "close": lambda producer: producer.close(),
    "start": lambda producer: producer.start(),
}

def interrupt(moment):
    producer, futures, was_there = Producer(name_server=name_server), [], False
    if call != "start":
        producer.start()

    def handle():
        nonlocal was_there
        was_there = True
        try:
            futures.append(HANDLERS[handled](producer))
        except ClientClosed:
            pass

    faulthandler.dump_traceback_later(20, exit=True)  # if a call hangs
    try:
        interrupted_at(moment, lambda: futures.append(CALLS[call](producer)), handle)
    except (ClientClosed, KeyboardInterrupt, RuntimeError):
        pass
    if producer.state.name != "CLOSED":
        producer.send("orders", b"afterwards")
    producer.close()
    assert all(future.done() for future in futures if isinstance(future, Future)), moment
    return was_there

moments = at_each_moment(interrupt, stride=7 if call == "start" else 1)
faulthandler.cancel_dump_traceback_later()
forget_unstarted_threads()
gc.collect()
deadline = time.monotonic() + 30
while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print(moments, threads)
"""


@pytest.mark.slow("interrupts a call at each moment")
@pytest.mark.parametrize("handled", ["Ctrl-C", "close", "flush", "send_async"])
@pytest.mark.parametrize("call", ["send_async", "send", "result", "callback", "flush", "close", "start"])
def test_a_signal_may_interrupt_a_call_at_any_moment(embedded, call, handled):
    """The handler and all calls end soon. Each message has a result, and no thread remains.

    It runs in a process of its own, because Ctrl-C in a finalizer confuses Python 3.11.
    """
    done = run_program(STEPPED, embedded.name_server, call, handled, flags=("-W", "ignore"))
    assert done.returncode == 0, done.stderr[-3000:]
    moments, threads = map(int, done.stdout.split())
    assert moments > 5
    assert threads == 1
