"""The thread on which an offset store's blocking calls run."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from pyrocket_consumer.transport.io_thread import SerialExecutor


def test_calls_run_one_after_the_other_on_one_thread():
    thread, order = SerialExecutor("pyrocket-store"), []
    futures = [thread.submit(lambda number: order.append(number) or threading.current_thread(), n) for n in range(20)]
    thread.shutdown()
    (worker,) = {future.result(30) for future in futures}
    assert order == list(range(20))
    assert (worker.name, worker.daemon) == ("pyrocket-store", True)
    worker.join(30)
    assert not worker.is_alive()


def test_an_exception_reaches_its_caller_and_the_next_call_runs():
    thread = SerialExecutor("pyrocket-store")
    failing, working = thread.submit(lambda: 1 // 0), thread.submit(int, "5")
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    assert working.result(30) == 5
    thread.shutdown()


def test_a_cancelled_call_is_skipped():
    thread, may_continue, done = SerialExecutor("pyrocket-store"), threading.Event(), []
    running, unwanted = thread.submit(may_continue.wait, 30), thread.submit(done.append, 1)
    assert unwanted.cancel()
    may_continue.set()
    assert running.result(30)
    assert thread.submit(int, "7").result(30) == 7
    assert done == []
    thread.shutdown()


def test_an_idle_executor_keeps_no_object_of_a_call():
    class Store:
        def persist(self):
            return None

    thread, store = SerialExecutor("pyrocket-store"), Store()
    thread.submit(store.persist).result(30)
    thread.submit(int).result(30)
    collected = weakref.ref(store)
    del store
    gc.collect()
    assert collected() is None
    thread.shutdown()


def test_an_unused_executor_has_no_thread():
    before = threading.active_count()
    SerialExecutor("pyrocket-store").shutdown()
    assert threading.active_count() == before
