"""What an executor's Python worker keeps between tasks: connections are dear, tasks are many."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_kept: dict[Hashable, object] = {}
_pid = os.getpid()


def kept(kind: type[T], key: Hashable, make: Callable[[], T]) -> T:
    """Return this process's `kind` for `key`, made by the first task that asks.

    Workers are forked from a daemon; what its parent kept is not ours. Nothing here is closed: Spark ends a worker
    that has had no task for a minute, and its threads are daemons.
    """
    global _pid
    with _lock:
        if _pid != os.getpid():
            _kept.clear()
            _pid = os.getpid()
        found = _kept.get((kind, key))
        if not isinstance(found, kind):
            found = _kept[kind, key] = make()
        return found


def forget(kind: type[object], key: Hashable) -> None:
    """Make the next task start afresh, after what is kept proved broken."""
    with _lock:
        _kept.pop((kind, key), None)
