"""What an executor's Python worker keeps between tasks: connections are dear, tasks are many."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

IDLE_S = 60.0
"""What no task has asked for in this time is closed when the next task asks for something else."""


class Closable(Protocol):
    """What can be kept."""

    def close(self) -> None:
        """Disconnect."""


T = TypeVar("T", bound=Closable)

_lock = threading.Lock()
_cache: dict[Hashable, Closable] = {}
_used_at: dict[Hashable, float] = {}
_seen: set[str] = set()
_pid = os.getpid()


def get_or_create(
    kind: type[T], key: Hashable, make: Callable[[], T], clock: Callable[[], float] = time.monotonic
) -> T:
    """Return this process's `kind` for `key`, made by the first task that asks.

    A worker has one task at a time. Workers are forked from a daemon; what its parent kept is not ours. At the end
    nothing is closed: Spark ends a worker that has had no task for a minute, and its threads are daemons.
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


def discard(kind: type[Closable], key: Hashable) -> None:
    """Make the next task start afresh, after what is kept proved broken."""
    with _lock:
        _cache.pop((kind, key), None)


def close_all() -> None:
    """Disconnect everything, for instance at the end of a notebook that has read without Spark."""
    with _lock:
        for each in _cache.values():
            each.close()
        _cache.clear()
        _seen.clear()


def is_first_time(what: str) -> bool:
    """Tell whether no task of this process has asked about `what` before: of what is worth one line, not thousands."""
    with _lock:
        if what in _seen:
            return False
        _seen.add(what)
        return True
