"""A worker keeps what tasks ask for again, and closes what they have ceased to ask for."""

from __future__ import annotations

import os
import threading

import pytest

from pyrocket_consumer.spark.executor_cache import IDLE_S, discard, get_or_create
from tests.spark.conftest import NOT_BEGUN


class Line:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_what_is_asked_for_again_is_the_same():
    first = get_or_create(Line, "a", Line)
    assert get_or_create(Line, "a", Line) is first
    assert get_or_create(Line, "b", Line) is not first
    discard(Line, "a")
    assert get_or_create(Line, "a", Line) is not first


def test_what_nobody_asks_for_is_closed_at_the_next_question():
    now = [1000.0]
    old, used = (get_or_create(Line, name, Line, lambda: now[0]) for name in ("old", "used"))
    now[0] += IDLE_S / 2
    assert get_or_create(Line, "used", Line, lambda: now[0]) is used
    now[0] += IDLE_S / 2 + 1
    get_or_create(Line, "new", Line, lambda: now[0])
    assert old.closed.wait(30)
    assert not used.closed.is_set()
    assert get_or_create(Line, "used", Line, lambda: now[0]) is used
    assert get_or_create(Line, "old", Line, lambda: now[0]) is not old


@pytest.mark.live
def test_a_forked_worker_has_nothing_of_its_parent():
    mine = get_or_create(Line, "forked", Line)
    child = os.fork()
    if child == 0:
        os._exit(get_or_create(Line, "forked", Line) is mine)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get_or_create(Line, "forked", Line) is mine


runs = []


@pytest.mark.live
def test_what_spark_was_too_late_for_is_run_again(tmp_path):
    runs.append(tmp_path)
    assert len(runs) == 3, NOT_BEGUN
    assert len(set(runs)) == 3, "it begins with nothing"
