"""Locks and queues that wait in virtual time."""

from __future__ import annotations

import _thread
import threading
from collections import deque
from typing import Any

from tests.virtual.scheduler import Scheduler, SimulatedThread, current

_real_lock = _thread.allocate_lock


class Lock:
    """The lock that `threading.Lock()` returns inside a world. The thread that waited longest gets it next.

    A module that is imported in a world keeps its locks: later they serve other worlds, and real threads.
    """

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._is_locked = False
        self._waiting: deque[SimulatedThread] = deque()
        self._outside = _real_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if timeout != -1 and (not blocking or timeout < 0):
            raise ValueError("a timeout is for a call that waits, and not negative")
        if timeout > threading.TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
        here = current()
        if here is not self._world and self._world.is_over:
            if here is None:
                return self._outside.acquire(blocking, timeout)
            self._world = here
        if blocking and here is self._world:
            self._world.step()
        if not self._is_locked:
            self._is_locked = True
            return True
        if not blocking or timeout == 0:
            if here is self._world:
                here.check_clock()
            return False
        world = self._world
        me = world.me()
        self._waiting.append(me)
        try:
            if world.wait(None if timeout < 0 else world.now + timeout):
                return True
        except BaseException:
            if me.was_woken:  # this thread holds it already
                self.release()
            raise
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
        return False

    def release(self) -> None:
        if self._world.is_over and self._outside.locked() and current() is None:
            return self._outside.release()
        if not self._is_locked:
            if self._world.is_ending:  # a condition could not acquire it again
                return None
            raise RuntimeError("release unlocked lock")
        while self._waiting:
            thread = self._waiting.popleft()
            if thread.is_waiting:
                self._world.wake(thread)
                return  # it stays locked, because that thread holds it now
        self._is_locked = False

    def locked(self) -> bool:
        return self._is_locked or self._outside.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._is_locked = False
        self._waiting.clear()
        self._outside = _real_lock()
