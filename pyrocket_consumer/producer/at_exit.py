"""The end of the process: what producers that nobody closed were given is still sent, for a moment."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

with suppress(RuntimeError):  # the main thread has ended, and Python takes no more executors
    import concurrent.futures.thread  # noqa: F401 - see _register


class Flushable(Protocol):
    """What runs until it is closed, or until the process ends."""

    def begin_flush(self) -> Callable[[], None]:
        """Count what is on its way; the callable waits until it is sent, for a few seconds, and tells what is lost."""


# Without a lock, which a fork could leave taken for ever: each access is one operation of the set, and being registered
# twice does no harm.
_flushables: set[Flushable] = set()
_is_registered = False


def add(flushable: Flushable) -> None:
    """Have `flushable` flushed when the process ends, unless it is removed before."""
    global _is_registered
    _flushables.add(flushable)
    if not _is_registered:
        _is_registered = True
        _register()


def remove(flushable: Flushable) -> None:
    """Forget `flushable`; it needs no flush any more."""
    _flushables.discard(flushable)


def _register() -> None:
    """Have both moments of an end told.

    `threading` comes first: when the main thread has ended, while the others run and threads can be started still, as
    new connections need them to resolve names. It calls in reverse order, and what `concurrent.futures` has it call
    ends those threads: that must be registered by now, so it is imported above. Children of multiprocessing on Python
    before 3.13 know this moment only. `atexit` comes when the other threads have ended, for what they sent meanwhile.
    """
    atexit.register(_flush)
    try:
        threading._register_atexit(_flush)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        pass  # no part of what Python promises; or the main thread has ended before the first producer was started


def _flush() -> None:
    for wait_flushed in [each.begin_flush() for each in _flushables.copy()]:  # they take their time together
        wait_flushed()
