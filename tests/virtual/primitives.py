"""Locks and queues whose waiting is virtual."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.virtual.scheduler import Scheduler, SimulatedThread, current


class Lock:
    """What `threading.Lock()` gives inside a world. Whoever waited longest gets it next."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._is_locked = False
        self._waiting: deque[SimulatedThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and current() is self._world:
            self._world.step()
        if not self._is_locked:
            self._is_locked = True
            return True
        if not blocking or timeout == 0:
            return False
        world = self._world
        me = world.me()
        self._waiting.append(me)
        try:
            if world.wait(None if timeout < 0 else world.now + timeout):
                return True
        except BaseException:
            if me not in self._waiting:  # it is ours already
                self.release()
            raise
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
        return False

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        while self._waiting:
            thread = self._waiting.popleft()
            if thread.is_waiting:
                self._world.wake(thread)
                return  # it stays locked: it is theirs
        self._is_locked = False

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._is_locked = False
        self._waiting.clear()
