"""The I/O thread runs coroutines for other threads, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import CancelledError

import pytest

from pyrocket_consumer.errors import ClientClosed, RequestTimeout
from pyrocket_consumer.transport.io_thread import IoThread
from tests.for_each import for_each


@pytest.fixture
def io():
    thread = IoThread("pyrocket-test")
    thread.start()
    yield thread
    thread.stop()


async def give(value):
    await asyncio.sleep(0)
    return value, threading.current_thread().name


def test_coroutines_run_on_the_thread_and_return_their_result(io):
    assert io.run(give(5), 30) == (5, "pyrocket-test")
    assert not io.is_current

    async def wait():
        io.run(give(5), 30)

    with pytest.raises(RuntimeError, match="await it instead"):
        io.run(wait(), 30)


@for_each("error", [KeyError("x"), TimeoutError("of its own")])
def test_an_error_comes_back_as_it_is(io, error):
    async def fail():
        raise error

    with pytest.raises(type(error), match=str(error.args[0])):
        io.run(fail(), 30)


async def sleep(begun=None, ended=None):
    try:
        if begun is not None:
            begun.set()
        await asyncio.sleep(60)
    finally:
        if ended is not None:
            ended.set()


def test_work_past_its_deadline_is_cancelled(io):
    ended, began = threading.Event(), time.monotonic()
    with pytest.raises(RequestTimeout, match="sleep got no response from the I/O thread within 0.05 s"):
        io.run(sleep(ended=ended), 0.05)
    assert time.monotonic() - began < 20
    assert ended.wait(30)


def test_the_error_of_a_deadline_names_no_internals(io):
    async def _work_of_a_client():
        await asyncio.sleep(60)

    with pytest.raises(RequestTimeout, match="^work of a client got no response"):
        io.run(_work_of_a_client(), 0.01)


def test_stop_cancels_tasks_and_raises_in_waiting_callers(io):
    begun, ended, errors = threading.Event(), threading.Event(), []

    def wait():
        try:
            io.run(sleep(begun, ended), 60)
        except ClientClosed as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert begun.wait(30)
    io.stop()
    assert ended.is_set()
    waiter.join(30)
    assert len(errors) == 1


@pytest.mark.parametrize("started", [True, False])
def test_after_the_end_nothing_runs(started):
    thread = IoThread()
    if started:
        thread.start()
    for _ in range(2):
        thread.stop()
        with pytest.raises(ClientClosed):
            thread.run(give(5), 30)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_raises_system_exit_stops_no_other_task(io, error):
    surprises = []
    io.loop.set_exception_handler(lambda loop, context: surprises.append(context["exception"]))

    async def exits():
        raise error("from some callback")

    with pytest.raises(error):
        io.run(exits(), 30)
    assert io.run(give(5), 30)[0] == 5
    assert [type(each) for each in surprises] == [error]


def test_the_thread_calls_on_end_last():
    ended = threading.Event()
    thread = IoThread(on_end=ended.set)
    assert not thread.has_ended
    thread.start()
    assert not thread.has_ended
    assert thread.run(give(1), 30)[0] == 1
    assert not ended.is_set()
    thread.stop()
    assert ended.wait(30)
    assert thread.has_ended


def test_a_hanging_executor_thread_does_not_delay_the_end(io):
    """A name resolution may hang, because it runs on a thread of the loop's executor."""
    may_continue = threading.Event()

    async def begin():
        io.loop.run_in_executor(None, may_continue.wait, 60)

    io.run(begin(), 30)
    began = time.monotonic()
    io.stop(30)
    assert time.monotonic() - began < 20
    assert io.loop.is_closed()
    may_continue.set()


@pytest.mark.live
def test_threads_started_and_stopped_leave_nothing_behind():
    def held():
        return len(os.listdir("/dev/fd")), threading.active_count()

    before = held()
    for _ in range(50):
        thread = IoThread()
        thread.start()
        assert thread.run(give(1), 30)[0] == 1
        thread.stop()
    assert held() == before


@pytest.mark.parametrize("way", ["run", "submit"])
def test_calls_during_stop_are_refused(io, way):
    """A call submitted at the last moment, while running tasks are being cancelled, also ends without a timeout."""
    begun, ending, handed_over, reported = (threading.Event() for _ in range(4))

    async def hold():
        try:
            await sleep(begun)
        finally:
            ending.set()
            handed_over.wait(30)

    def submit():
        ending.wait(30)
        work = asyncio.sleep(3600)
        with pytest.raises((ClientClosed, CancelledError)):
            io.run(work, None) if way == "run" else io.submit(work).result()
        reported.set()

    asyncio.run_coroutine_threadsafe(hold(), io.loop)
    begun.wait(30)
    threads = [threading.Thread(target=work, daemon=True) for work in (submit, io.stop)]
    for thread in threads:
        thread.start()
    ending.wait(30)
    time.sleep(0.2)  # by now it was submitted; if it is later, it is refused, too
    handed_over.set()
    assert reported.wait(30)
    for thread in threads:
        thread.join(30)
    with pytest.raises(ClientClosed):
        io.submit(asyncio.sleep(0))
