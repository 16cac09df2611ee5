"""Ends that threads and coroutines wait for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from pyrocket_consumer.consumer.end import End, Terminated, terminate, told_of_sigterm


def test_a_wait_ends_with_its_time():
    end = End()
    began = time.monotonic()
    assert end.wait(0.05) is False
    assert time.monotonic() - began >= 0.05
    assert end.wait(0) is False
    assert asyncio.run(end.awaited(0.05)) is False
    assert not end


def test_all_who_wait_are_told_and_those_who_come_later():
    end, told = End(), []
    waiters = [threading.Thread(target=lambda: told.append(end.wait(30))) for _ in range(20)]
    for waiter in waiters:
        waiter.start()

    async def wait():
        return await asyncio.gather(*(end.awaited(30) for _ in range(20)))

    threading.Timer(0.05, end.come).start()
    assert asyncio.run(wait()) == [True] * 20
    for waiter in waiters:
        waiter.join(30)
    assert told == [True] * 20
    assert end.wait() is True
    assert asyncio.run(end.awaited()) is True


def test_who_waits_on_a_loop_that_has_ended_disturbs_nobody():
    end = End()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(end.awaited())
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    loop.close()  # the wait has not come to its end
    end.come()
    assert end.wait(0)


@pytest.mark.live
def test_a_signal_handler_may_end_the_wait_of_the_main_thread():
    end, before = End(), signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: end.come())
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert end.wait(30)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_sigterm_handlers_nest_and_are_restored():
    told = []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with told_of_sigterm(lambda: told.append("outer")):
        with told_of_sigterm(lambda: told.append("inner")):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert told == ["outer", "inner", "outer"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(Terminated) as raised, told_of_sigterm(terminate):
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_change_no_handler():
    def wait():
        with told_of_sigterm(terminate):
            found.append(signal.getsignal(signal.SIGTERM))

    found = []
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(30)
    assert found == [signal.SIG_DFL]
