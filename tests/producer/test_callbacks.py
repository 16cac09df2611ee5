"""The futures of `send_async`: to users they are futures like any others, and their callbacks run on one thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, Future, InvalidStateError

import pytest

from pyrocket_consumer.errors import SendError
from pyrocket_consumer.producer.callbacks import CallbackThread, SendFuture
from pyrocket_consumer.testing import Gate, answer
from pyrocket_consumer.wire.codes import RequestCode, ResponseCode

SEND = RequestCode.SEND_MESSAGE_V2

pytestmark = pytest.mark.cluster(brokers=1)


@pytest.fixture
def gate(embedded):
    """Sends wait here until it opens."""
    gate = Gate()
    embedded.broker("broker-a").on(SEND, gate, times=None)
    yield gate
    gate.open()


@pytest.fixture
def callbacks():
    thread = CallbackThread()
    yield thread
    thread.stop(10)


def test_a_message_on_its_way_is_a_running_future(embedded, producing, gate):
    future = producing(embedded).send_async("orders", b"x")
    assert isinstance(future, Future)
    assert (future.running(), future.done(), future.cancelled()) == (True, False, False)
    assert "state=running" in repr(future)
    for outcome in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            outcome(0.01)
    gate.open()
    assert future.result(30).queue_offset >= 0
    assert future.exception(30) is None
    assert (future.running(), future.done(), future.cancelled()) == (False, True, False)
    assert "state=finished" in repr(future)


def test_a_message_handed_over_cannot_be_taken_back(embedded, producing, gate):
    future = producing(embedded).send_async("orders", b"x")
    assert not future.cancel()
    gate.open()
    assert future.result(30)
    assert not future.cancel()
    assert not future.cancelled()
    assert len(embedded.messages("orders")) == 1


def test_a_failed_message_raises_its_error_each_time(embedded, producing):
    embedded.broker("broker-a").on(SEND, answer(ResponseCode.MESSAGE_ILLEGAL, "no"), times=None)
    future = producing(embedded).send_async("orders", b"x")
    errors = []
    for _ in range(2):
        with pytest.raises(SendError) as caught:
            future.result(30)
        errors.append(caught.value)
    assert future.exception(0) is errors[0] is errors[1]


@pytest.mark.parametrize("until", [ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION])
def test_the_standard_wait_takes_them(embedded, producing, gate, until):
    producer = producing(embedded)
    futures = [producer.send_async("orders", b"%d" % number) for number in range(100)]
    done, pending = concurrent.futures.wait(futures, timeout=0.01, return_when=until)
    assert (len(done), len(pending)) == (0, 100)
    gate.open()
    done, pending = concurrent.futures.wait(futures, timeout=30, return_when=until)
    assert done
    assert done | pending == set(futures)
    assert until == FIRST_COMPLETED or not pending


def test_as_completed_gives_each_of_them_once(embedded, producing):
    producer = producing(embedded)
    futures = [producer.send_async("orders", b"%d" % number) for number in range(3000)]
    random.shuffle(futures)
    came = list(concurrent.futures.as_completed(futures, timeout=30))
    assert len(came) == 3000
    assert set(came) == set(futures)


def test_a_coroutine_waits_for_them(embedded, producing):
    producer = producing(embedded)

    async def send() -> list[int]:
        futures = [producer.send_async("orders", b"%d" % number) for number in range(100)]
        results = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        return [result.queue_offset for result in results]

    assert sorted(asyncio.run(send())) == sorted([*range(50), *range(50)])


def test_callbacks_run_in_order_on_one_thread_whenever_they_were_added(embedded, producing, gate):
    future, calls, ended = producing(embedded).send_async("orders", b"x"), [], threading.Event()

    def note(name):
        return lambda done: calls.append((name, done is future, done.done(), threading.current_thread().name))

    future.add_done_callback(note("first"))
    future.add_done_callback(note("second"))
    gate.open()
    future.result(30)
    future.add_done_callback(note("late"))
    future.add_done_callback(lambda done: ended.set())
    assert ended.wait(30)
    assert calls == [(name, True, True, "pyrocket-callbacks") for name in ("first", "second", "late")]


def test_a_callback_may_send_and_wait_and_one_that_fails_is_told_in_the_log(embedded, producing, caplog):
    producer, results, ended = producing(embedded), [], threading.Event()

    def fails(done):
        raise ValueError("of the callback")

    def sends(done):
        results.append(done.result(0))
        results.append(producer.send_async("orders", b"2").result(30))
        ended.set()

    future = producer.send_async("orders", b"1")
    future.add_done_callback(fails)
    future.add_done_callback(sends)
    assert ended.wait(30)
    assert len({result.message_id for result in results}) == 2
    assert "a callback failed" in caplog.text


def test_a_future_is_told_once(callbacks):
    for tell in (lambda future: future.set_result(1), lambda future: future.set_exception(ValueError())):
        future = SendFuture(callbacks)
        future.set_result(0)
        with pytest.raises(InvalidStateError):
            tell(future)
        assert future.result(0) == 0


def test_however_threads_meet_nobody_waits_in_vain(callbacks):
    """A future is told while others begin to wait for it, in every way there is."""
    count, called = 400, threading.Semaphore(0)
    for turn in range(5):
        futures = [SendFuture(callbacks) for _ in range(count)]
        meeting = threading.Barrier(6)
        seen: dict[str, object] = {}

        def meet(what, work, meeting=meeting, seen=seen):
            meeting.wait(30)
            seen[what] = work()

        def tell(futures=futures):
            for number, future in enumerate(futures):
                future.set_result(number)

        works = {
            "tell": tell,
            "result": lambda futures=futures: sum(future.result(30) for future in futures),
            "wait": lambda futures=futures: len(concurrent.futures.wait(futures, 30).done),
            "as_completed": lambda futures=futures: len(list(concurrent.futures.as_completed(futures, 30))),
            "callbacks": lambda futures=futures: [
                future.add_done_callback(lambda done: called.release()) for future in reversed(futures)
            ],
            "look": lambda futures=futures: [future.done() or future.running() for future in futures],
        }
        threads = [threading.Thread(target=meet, args=work) for work in works.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert set(seen) == set(works), f"round {turn}"
        assert seen["result"] == sum(range(count))
        assert seen["wait"] == seen["as_completed"] == count
        assert all(called.acquire(timeout=30) for _ in range(count))
        assert not called.acquire(blocking=False)
