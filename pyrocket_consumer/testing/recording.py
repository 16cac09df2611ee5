"""What a node was asked, and waiting for it: tests wait for an event, never for some time to pass."""

from __future__ import annotations

import linecache
import threading
import time
from collections import deque
from collections.abc import Callable
from inspect import iscoroutine
from pathlib import Path
from typing import NamedTuple

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.codes import request_name
from pyrocket_consumer.protocol.frame import RemotingCommand

STEP_S = 0.05


class Recorded(NamedTuple):
    """A request as a node received it. `at_s` is the node's monotonic clock, `client` the sender's address."""

    at_s: float
    command: RemotingCommand
    client: str


class Changes:
    """Tells waiting threads that something happened in the cluster."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._count = 0

    def notify(self) -> None:
        """Let every waiting thread look again."""
        with self.condition:
            self._count += 1
            self.condition.notify_all()

    def wait_until(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Return True as soon as `condition()` holds, False if it does not even when `timeout_s` seconds are over.

        It is called on the waiting thread with no lock held: after each change, at least every `STEP_S` seconds,
        because what is waited for may be done by somebody who tells nobody, and once more when the time is over.

        Raises:
            ConfigError: `condition` is no function, or one whose result would have to be awaited.
        """
        if not callable(condition):
            raise ConfigError(f"{condition!r} is not a condition; give a function, for example lambda: len(seen) == 3")
        if not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
            raise ConfigError(f"timeout_s={timeout_s!r} is not allowed; give 0 or more seconds")
        deadline = time.monotonic() + timeout_s
        while True:
            over = time.monotonic() >= deadline
            with self.condition:
                before = self._count
            held = condition()
            if iscoroutine(held):
                held.close()
                raise ConfigError(f"{condition!r} returns a coroutine; give a function that is not async")
            if held or over:
                return bool(held)
            with self.condition:
                if self._count == before:
                    self.condition.wait(max(0.0, min(STEP_S, deadline - time.monotonic())))


def describe(condition: Callable[[], object]) -> str:
    """Return where a condition is written and the line that begins it, for an error that says what did not happen."""
    code = getattr(condition, "__code__", None)
    if code is None:
        return repr(condition)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}: {line}"


class RequestLog:
    """The requests a node received, newest last; at most `limit` of each code are kept."""

    def __init__(self, changes: Changes, limit: int) -> None:
        self._changes = changes
        self._limit = limit
        self._requests: dict[int, deque[Recorded]] = {}

    def add(self, recorded: Recorded) -> None:
        code = recorded.command.code
        with self._changes.condition:
            recorded_of_code = self._requests.get(code)
            if recorded_of_code is None:
                recorded_of_code = self._requests[code] = deque(maxlen=self._limit)
            recorded_of_code.append(recorded)
        self._changes.notify()

    def forget(self) -> None:
        """Forget what was recorded so far."""
        with self._changes.condition:
            self._requests.clear()

    def requests(self, code: int | None = None) -> list[Recorded]:
        """Return what was recorded, of one code or of all, oldest first."""
        with self._changes.condition:
            if code is not None:
                return list(self._requests.get(code, ()))
            return sorted(
                (each for recorded_of_code in self._requests.values() for each in recorded_of_code),
                key=lambda each: each.at_s,
            )

    def wait_for(
        self, code: int, count: int, timeout_s: float, when: Callable[[RemotingCommand], bool] | None
    ) -> list[Recorded]:
        """Return the recorded requests of `code` (for which `when` holds) once there are `count` of them.

        Raises:
            TimeoutError: they did not come within `timeout_s`; the text says how many did.
        """
        found: list[Recorded] = []

        def enough() -> bool:
            nonlocal found
            found = [each for each in self.requests(code) if when is None or when(each.command)]
            return len(found) >= count

        if not self._changes.wait_until(enough, timeout_s):
            raise TimeoutError(f"{len(found)} of {count} {request_name(code)} requests came within {timeout_s:g} s")
        return found
