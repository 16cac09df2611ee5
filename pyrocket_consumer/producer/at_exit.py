"""Flush producers that are still open when the process exits."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

with suppress(RuntimeError):  # the main thread has ended, and Python accepts no more executors
    import concurrent.futures.thread  # noqa: F401 - see _register


class Flushable(Protocol):
    """A producer session that is flushed when the process exits."""

    def begin_flush(self) -> Callable[[], None]:
        """Count the messages in flight. The result waits a few seconds for them, and logs the lost ones."""


# No lock guards it, because a fork could leave a lock taken forever. Each access is one atomic operation of the set.
# Registering twice is harmless.
_flushables: set[Flushable] = set()
_is_registered = False


def add(flushable: Flushable) -> None:
    """Flush `flushable` when the process exits, unless it is removed before."""
    global _is_registered
    _flushables.add(flushable)
    if not _is_registered:
        _is_registered = True
        _register()


def remove(flushable: Flushable) -> None:
    """Forget `flushable`, because it is closed."""
    _flushables.discard(flushable)


def _register() -> None:
    """Register `_flush` for both stages of the exit.

    `threading` calls first, when the main thread has ended. Other threads still run then, and new threads can start.
    New connections need those threads to resolve host names. `threading` calls its hooks in reverse order, and the hook
    of `concurrent.futures` ends the resolver threads. That hook must be registered before this one, so the module is
    imported above. Children of multiprocessing reach only this stage on Python before 3.13.

    `atexit` calls when the other threads have ended, and flushes the messages that they sent meanwhile.
    """
    atexit.register(_flush)
    try:
        threading._register_atexit(_flush)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        pass  # the function is private to Python; or the main thread ended before the first producer started


def _flush() -> None:
    for wait_flushed in [each.begin_flush() for each in _flushables.copy()]:  # start all flushes before waiting for one
        wait_flushed()
