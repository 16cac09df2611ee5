"""The thread on which an offset store's blocking calls run."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from pyrocket_consumer.consumer.commits.serial_executor import SerialExecutor


def test_calls_run_one_after_the_other_on_one_thread():
    thread, order = SerialExecutor("pyrocket-store"), []
    futures = [thread.submit(lambda number: order.append(number) or threading.current_thread(), n) for n in range(20)]
    thread.shutdown()
    (worker,) = {future.result(30) for future in futures}
    assert order == list(range(20))
    assert (worker.name, worker.daemon) == ("pyrocket-store", True)
    worker.join(30)
    assert not worker.is_alive()


def test_what_a_call_raises_is_its_callers_and_the_next_one_runs():
    thread = SerialExecutor("pyrocket-store")
    failing, working = thread.submit(lambda: 1 // 0), thread.submit(int, "5")
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    assert working.result(30) == 5
    thread.shutdown()


def test_a_call_that_is_not_wanted_any_more_is_left_out():
    thread, goes_on, done = SerialExecutor("pyrocket-store"), threading.Event(), []
    running, unwanted = thread.submit(goes_on.wait, 30), thread.submit(done.append, 1)
    assert unwanted.cancel()
    goes_on.set()
    assert running.result(30)
    assert thread.submit(int, "7").result(30) == 7
    assert done == []
    thread.shutdown()


def test_nothing_of_a_call_is_kept_while_nothing_is_asked_for():
    class Store:
        def persist(self):
            return None

    thread, store = SerialExecutor("pyrocket-store"), Store()
    thread.submit(store.persist).result(30)
    thread.submit(int).result(30)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    thread.shutdown()


def test_one_that_was_never_used_has_no_thread():
    before = threading.active_count()
    SerialExecutor("pyrocket-store").shutdown()
    assert threading.active_count() == before
