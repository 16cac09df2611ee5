"""SIGTERM in a program that joins consumers: it ends the program as Ctrl-C does, so that consumers are closed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from weakref import WeakKeyDictionary


class Terminated(SystemExit):
    """Raised in the main thread after SIGTERM, so that it cleans up as it does after Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def terminate() -> None:
    """Raise Terminated in the main thread."""
    raise Terminated


def terminate_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise Terminated out of an asyncio loop, between two of its callbacks."""
    try:
        loop.call_soon_threadsafe(terminate)
    except RuntimeError:  # it has ended
        terminate()


_watching: WeakKeyDictionary[object, Callable[[], None]] = WeakKeyDictionary()
_pid = 0


def watch_sigterm(consumer: object, notify: Callable[[], None]) -> None:
    """Call `notify` in the main thread on SIGTERM, until `unwatch_sigterm`. A later call replaces `notify`.

    Only the main thread can do this, and only if the program has no SIGTERM handler of its own.
    """
    global _pid
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_sigterm):
        _pid = os.getpid()
        _watching[consumer] = notify
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch_sigterm(consumer: object) -> None:
    """Forget `consumer`, because it is closed. Without a consumer, SIGTERM ends the process at once, as usual."""
    _watching.pop(consumer, None)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and not _watching and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if not _watching or os.getpid() != _pid:  # the last consumer was closed on another thread, or in a forked parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    for notify in list(_watching.values()):
        notify()
