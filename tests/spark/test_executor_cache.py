"""A worker keeps objects that tasks use again, and closes idle ones."""

from __future__ import annotations

import os
import threading

import pytest

from pyrocket_consumer.spark.executor_cache import IDLE_S, discard, get_or_create
from tests.spark.conftest import NOT_BEGUN


class Closable:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_second_call_returns_the_same_object():
    first = get_or_create(Closable, "a", Closable)
    assert get_or_create(Closable, "a", Closable) is first
    assert get_or_create(Closable, "b", Closable) is not first
    discard(Closable, "a")
    assert get_or_create(Closable, "a", Closable) is not first


def test_an_idle_object_is_closed_at_the_next_call():
    now = [1000.0]
    old, used = (get_or_create(Closable, name, Closable, lambda: now[0]) for name in ("old", "used"))
    now[0] += IDLE_S / 2
    assert get_or_create(Closable, "used", Closable, lambda: now[0]) is used
    now[0] += IDLE_S / 2 + 1
    get_or_create(Closable, "new", Closable, lambda: now[0])
    assert old.closed.wait(30)
    assert not used.closed.is_set()
    assert get_or_create(Closable, "used", Closable, lambda: now[0]) is used
    assert get_or_create(Closable, "old", Closable, lambda: now[0]) is not old


@pytest.mark.live
def test_a_forked_worker_does_not_use_objects_of_its_parent():
    mine = get_or_create(Closable, "forked", Closable)
    child = os.fork()
    if child == 0:
        os._exit(get_or_create(Closable, "forked", Closable) is mine)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get_or_create(Closable, "forked", Closable) is mine


runs = []


@pytest.mark.live
def test_a_test_that_spark_was_too_late_for_runs_again(tmp_path):
    runs.append(tmp_path)
    assert len(runs) == 3, NOT_BEGUN
    assert len(set(runs)) == 3, "it begins with nothing"
