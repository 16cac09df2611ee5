"""The way of messages from user threads to the I/O thread, when user threads are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from pyrocket_consumer import SendError
from pyrocket_consumer.producer import Producer, ProducerState
from pyrocket_consumer.testing import Gate
from pyrocket_consumer.wire.codes import RequestCode

pytestmark = [
    pytest.mark.cluster(brokers=1),
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


@pytest.mark.live
@pytest.mark.parametrize("call", ["send", "send_async", "result", "flush"])
def test_a_call_may_be_interrupted_at_any_moment_and_the_producer_works_on(embedded, call):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, embedded.name_server, call],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.live
def test_closing_may_be_interrupted_and_what_was_on_its_way_is_told(embedded):
    gate = Gate()
    embedded.broker("broker-a").on(RequestCode.SEND_MESSAGE_V2, gate, times=None)
    producer = Producer(name_server=embedded.name_server, send_timeout_s=60)
    keyed = [producer.send_async("orders", b"x", sharding_key="k") for _ in range(3)]
    free = producer.send_async("orders", b"x")
    gate.wait_held(2)
    told = []
    free.add_done_callback(told.append)

    def interrupt_close() -> None:
        embedded.wait_until(lambda: producer.state is ProducerState.CLOSED)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt_close)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    interrupting.join()
    gate.open()
    assert all(isinstance(future.exception(0), SendError) for future in [*keyed, free])
    assert told == [free]
