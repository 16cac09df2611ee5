"""A cache of connected objects in an executor's Python worker, because connections are costly and tasks are many."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

IDLE_S = 60.0
"""An object that no task has used for this time is closed at the next call of `get_or_create`."""

T = TypeVar("T")

_lock = threading.Lock()
_cache: dict[Hashable, Any] = {}
_used_at: dict[Hashable, float] = {}
_pid = os.getpid()


def get_or_create(
    kind: type[T], key: Hashable, make: Callable[[], T], clock: Callable[[], float] = time.monotonic
) -> T:
    """Return this process's `kind`, which has a `close`, for `key`; the first task that needs it makes it.

    A worker has one task at a time. Workers are forked from a daemon, and do not use the objects of their parent.
    Nothing is closed at the end of a worker: its threads are daemons. Spark ends a worker that is idle for a minute.
    """
    global _pid
    with _lock:
        if _pid != os.getpid():
            _cache.clear()
            _pid = os.getpid()
        now = _used_at[kind, key] = clock()
        for each in [each for each in _cache if now - _used_at[each] > IDLE_S]:
            threading.Thread(target=_cache.pop(each).close, name="pyrocket-close", daemon=True).start()
        found = _cache.get((kind, key))
        if not isinstance(found, kind):
            found = _cache[kind, key] = make()
        return found


def discard(kind: type[object], key: Hashable) -> None:
    """Drop a broken object, so that the next task makes a new one."""
    with _lock:
        _cache.pop((kind, key), None)


def close_all() -> None:
    """Close every cached object, for instance at the end of a notebook that has read without Spark."""
    with _lock:
        for each in _cache.values():
            each.close()
        _cache.clear()
