"""Waits of threads and coroutines for a flag or a result of another thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pyrocket_consumer.transport.io_thread import Latch, ThreadFuture


def test_a_waiter_on_a_loop_that_has_ended_disturbs_no_other():
    end = Latch()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(end.wait_async())
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    loop.close()  # the wait has not ended
    end.set()
    assert end.wait(0)


@pytest.mark.live
def test_waits_of_a_microsecond_end():
    """Their deadline passes while they begin to wait."""

    def wait():
        for step in range(8_000):
            Latch().wait(step % 50 * 1e-6)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_two_calls_of_set_wake_a_waiter_once():
    latch = Latch()
    thread = threading.Thread(target=latch.wait)
    thread.start()
    latch.set()
    latch.set()
    thread.join(30)
    assert not thread.is_alive()


def test_a_thread_future_returns_a_result_or_raises_an_error():
    outcome = ThreadFuture[int]()
    assert not outcome.wait(0)
    assert not outcome.wait(-1)
    threading.Timer(0.01, outcome.set_result, (7,)).start()
    assert outcome.wait(1e12)
    assert outcome.result() == 7
    failed = ThreadFuture[int]()
    failed.set_exception(KeyError("no"))
    assert failed.wait()
    with pytest.raises(KeyError, match="no"):
        failed.result()
