"""The futures of `send_async` behave as standard futures, and their callbacks run on one thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import random
import signal
import sys
import threading
import time
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, Future, InvalidStateError

import pytest

from pyrocket_consumer.errors import SendError
from pyrocket_consumer.producer import OutgoingMessage, Producer, ProducerState
from pyrocket_consumer.producer import send_future as source
from pyrocket_consumer.producer.send_future import CallbackThread, SendFuture
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import Gate, answer, drop
from tests.producer.programs import in_a_thread
from tests.speed import cpu_at_most

SEND = RequestCode.SEND_MESSAGE_V2
RUN = asyncio.run


@pytest.fixture
def callbacks():
    thread = CallbackThread()
    yield thread
    thread.stop(10)


def test_the_future_of_a_message_in_flight_is_running(producer, gate):
    future = producer.send_async("orders", b"x")
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


def test_a_queued_message_cannot_be_withdrawn(embedded, producer, gate):
    future = producer.send_async("orders", b"x")
    assert not future.cancel()
    gate.open()
    assert future.result(30)
    assert not future.cancel()
    assert not future.cancelled()
    assert len(embedded.messages("orders")) == 1


def test_a_failed_message_raises_its_error_each_time(embedded, producer):
    embedded.broker("broker-a").on(SEND, answer(ResponseCode.MESSAGE_ILLEGAL, "no"), times=None)
    future = producer.send_async("orders", b"x")
    errors = []
    for _ in range(2):
        with pytest.raises(SendError) as caught:
            future.result(30)
        errors.append(caught.value)
    assert future.exception(0) is errors[0] is errors[1]


@pytest.mark.parametrize("until", [ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION])
def test_the_standard_wait_accepts_the_futures(producer, gate, until):
    futures = [producer.send_async("orders", b"%d" % number) for number in range(100)]
    done, pending = concurrent.futures.wait(futures, timeout=0.01, return_when=until)
    assert (len(done), len(pending)) == (0, 100)
    gate.open()
    done, pending = concurrent.futures.wait(futures, timeout=30, return_when=until)
    assert done and done | pending == set(futures)
    assert until == FIRST_COMPLETED or not pending


def test_as_completed_yields_each_future_once(producer):
    futures = [producer.send_async("orders", b"%d" % number) for number in range(3000)]
    random.shuffle(futures)
    completed = list(concurrent.futures.as_completed(futures, timeout=30))
    assert len(completed) == 3000
    assert set(completed) == set(futures)


async def test_a_coroutine_waits_for_the_futures(producer):
    futures = [producer.send_async("orders", b"%d" % number) for number in range(100)]
    results = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
    assert sorted(result.queue_offset for result in results) == sorted([*range(50), *range(50)])


def test_callbacks_run_in_order_on_one_thread(producer, gate):
    future, calls, ended = producer.send_async("orders", b"x"), [], threading.Event()

    def note(name):
        return lambda done: calls.append((name, done is future, done.done(), threading.current_thread().name))

    for name in ("first", "second"):
        future.add_done_callback(note(name))
    gate.open()
    future.result(30)
    future.add_done_callback(note("late"))
    future.add_done_callback(lambda done: ended.set())
    assert ended.wait(30)
    assert calls == [(name, True, True, "pyrocket-callbacks") for name in ("first", "second", "late")]


def test_a_callback_may_send_and_wait_and_one_may_fail(producer, caplog):
    results, ended = [], threading.Event()

    def fails(done):
        raise ValueError("of the callback")

    def sends(done):
        results.append(done.result(0))
        results.append(producer.send_async("orders", b"2").result(30))
        ended.set()

    future = producer.send_async("orders", b"1")
    for callback in (fails, sends):
        future.add_done_callback(callback)
    assert ended.wait(30)
    assert len({result.message_id for result in results}) == 2
    assert "a callback failed" in caplog.text


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_that_calls_exit_ends_no_others(producer, caplog, error):
    def leave(future):
        raise error

    seen = queue.SimpleQueue()
    producer.send_async("orders", b"x").add_done_callback(leave)
    for number in range(3):
        producer.send_async("orders", b"x").add_done_callback(lambda future, number=number: seen.put(number))
    assert sorted(seen.get(timeout=30) for _ in range(3)) == [0, 1, 2]  # brokers respond in any order
    producer.close()
    assert caplog.text.count("a callback called exit") == 1


def test_a_callback_added_after_close_still_runs(embedded):
    with Producer(name_server=embedded.name_server) as producer:
        future = producer.send_async("orders", b"x")
    seen = []
    future.add_done_callback(seen.append)
    assert seen == [future]


def test_a_callback_may_close_the_producer(embedded):
    producer = Producer(name_server=embedded.name_server)
    closed = threading.Event()

    def close(future):
        producer.close()
        closed.set()

    producer.send_async("orders", b"x").add_done_callback(close)
    assert closed.wait(30)
    assert producer.state is ProducerState.CLOSED


def test_a_future_is_resolved_once(callbacks):
    for resolve in (lambda outcome: outcome.set_result(1), lambda outcome: outcome.set_exception(ValueError())):
        future = SendFuture(callbacks)
        future.outcome.set_result(0)
        with pytest.raises(InvalidStateError):
            resolve(future.outcome)
        assert future.result(0) == 0


@pytest.mark.live
def test_no_waiter_misses_a_result_however_threads_interleave(callbacks):
    """A future is resolved while other threads start to wait for it, in every way."""
    count, called = 400, threading.Semaphore(0)
    for attempt in range(5):
        futures = [SendFuture(callbacks) for _ in range(count)]
        meeting = threading.Barrier(6)
        seen: dict[str, object] = {}

        def meet(what, work, meeting=meeting, seen=seen):
            meeting.wait(30)
            seen[what] = work()

        def resolve(futures=futures):
            for number, future in enumerate(futures):
                future.outcome.set_result(number)

        works = {
            "tell": resolve,
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
        assert set(seen) == set(works), f"round {attempt}"
        assert seen["result"] == sum(range(count))
        assert seen["wait"] == seen["as_completed"] == count
        assert all(called.acquire(timeout=30) for _ in range(count))
        assert not called.acquire(blocking=False)


# --- an error of the user, or a missing resource, affects no other message


@pytest.mark.parametrize("wrong", [None, 1, "print"])
def test_a_callback_that_is_not_callable_is_refused(producer, gate, wrong):
    future = producer.send_async("orders", b"x")
    with pytest.raises(TypeError, match=f"{wrong!r} is not callable; pass a function"):
        future.add_done_callback(wrong)
    gate.open()
    assert future.result(30)
    with pytest.raises(TypeError, match="is not callable"):
        future.add_done_callback(wrong)


@pytest.mark.parametrize("pin", [{}, {"sharding_key": "key"}], ids=["free", "key"])
def test_a_user_cannot_resolve_a_future(producer, gate, pin):
    futures = [producer.send_async("orders", b"%d" % number, **pin) for number in range(10)]
    for resolve in (lambda: futures[3].set_result(None), lambda: futures[3].set_exception(ValueError())):
        with pytest.raises(InvalidStateError, match="only the producer"):
            resolve()
    gate.open()
    producer.flush(30)
    assert len({future.result(0).message_id for future in futures}) == 10
    producer.close()


class Refuses:
    """A result sink that raises."""

    def set_result(self, result):
        raise ValueError("no results, please")

    def set_exception(self, error):
        raise ValueError("no errors, please")


@pytest.mark.parametrize("pin", [{}, {"sharding_key": "key"}], ids=["free", "key"])
@pytest.mark.parametrize("ends", ["answered", "given up", "closed"])
def test_a_failing_result_sink_harms_no_others(embedded, producing, caplog, pin, ends):
    held, timeout_s = Gate(), 1 if ends == "given up" else 30
    embedded.broker("broker-a").on(SEND, held if ends == "answered" else drop, times=None)
    producer, futures = producing(embedded, call_timeout_s=1), []
    for _ in range(5):
        producer.hand_over("orders", OutgoingMessage(b"x"), Refuses(), timeout_s=timeout_s, **pin)
        futures.append(producer.send_async("orders", b"x", timeout_s=timeout_s, **pin))
    if ends == "answered":
        threading.Timer(0.3, held.open).start()
    if ends == "closed":
        producer.close(0)
    else:
        producer.flush(20)
    assert [future.done() for future in futures] == [True] * 5
    assert {future.exception(0) is None for future in futures} == {ends == "answered"}
    assert "cannot be passed to its sink" in caplog.text
    assert "failed unexpectedly" not in caplog.text
    producer.close()


@pytest.fixture
def threads_are_scarce(monkeypatch):
    """Prevent callback threads from starting, until the returned event is set."""
    start, enough = threading.Thread.start, threading.Event()

    def scarcely(thread):
        if thread.name == "pyrocket-callbacks" and not enough.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarcely)
    return enough


def test_without_a_thread_results_arrive_and_callbacks_wait(embedded, producing, gate, threads_are_scarce, caplog):
    producer, called = producing(embedded), []
    future = producer.send_async("orders", b"x")
    for name in ("first", "second"):
        future.add_done_callback(lambda done, name=name: called.append(name))
    with in_a_thread(lambda: called.append(future.result(30).message_id)):
        threading.Timer(0.3, gate.open).start()
        producer.flush(20)
    assert called == [future.result(0).message_id]
    assert caplog.text.count("cannot be started") == 1
    threads_are_scarce.set()
    ended = threading.Event()
    future.add_done_callback(lambda done: ended.set())
    assert ended.wait(30)
    assert called[1:] == ["first", "second"]


def test_when_no_thread_could_be_started_callbacks_run_at_close(embedded, producing, threads_are_scarce):
    producer, called = producing(embedded), []
    future = producer.send_async("orders", b"x")
    future.add_done_callback(called.append)
    future.result(30)
    producer.close()
    assert called == [future]
    future.add_done_callback(called.append)
    assert called == [future, future]


@pytest.mark.live
def test_a_future_may_have_any_number_of_callbacks(callbacks):
    future, called = SendFuture(callbacks), []
    with cpu_at_most(3, clock=time.thread_time):  # each as fast as the first
        for number in range(100_000):
            future.add_done_callback(lambda done, number=number: called.append(number))
    future.outcome.set_result(0)
    callbacks.drain(60)
    assert called == list(range(100_000))


# --- a signal handler may run at any step, and wait for the message


def poll(future):
    with contextlib.suppress(TimeoutError):
        future.result(0.001)


STEPS = {
    "result": poll,
    "wait": lambda future: concurrent.futures.wait([future], 0.001),
    "look": lambda future: (future.done(), future.running(), repr(future)),
    "add": lambda future: future.add_done_callback(lambda done: None),
}


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
@pytest.mark.parametrize("act", STEPS.values(), ids=STEPS)
def test_a_signal_handler_may_wait_at_any_step(act):
    """The signal arrives at each step in turn, and another thread then resolves this future and others."""
    step, completed, late = 0, True, []

    def at_step(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != source.__file__ and frame.f_code.co_qualname != "Condition.__init__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signal.SIGUSR1)
        return at_step

    def handle(number, frame):
        nonlocal completed
        completed = True
        resolver.start()
        try:
            results = [future.result(3) for future in (other, interrupted)]
        except TimeoutError:
            results = []
        if results != [1, 1]:
            late.append(step)

    def resolve():
        for future in (interrupted, other):
            future.outcome.set_result(1)

    before, trace = signal.signal(signal.SIGUSR1, handle), sys.gettrace()
    try:
        left = 0
        sys.settrace(at_step)  # Python 3.12 traces the opcodes of a function from its second call on
        try:
            act(SendFuture(CallbackThread()))
        finally:
            sys.settrace(trace)
        while completed and len(late) < 3:
            step, completed = step + 1, False
            thread = CallbackThread()
            interrupted, other, called = SendFuture(thread), SendFuture(thread), []
            interrupted.add_done_callback(called.append)
            resolver = threading.Thread(target=resolve)
            left = step
            sys.settrace(at_step)
            try:
                act(interrupted)
            finally:
                sys.settrace(trace)
            if completed:
                resolver.join(10)
                thread.stop(10)
                assert called == [interrupted]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert late == []
    assert step > 5
