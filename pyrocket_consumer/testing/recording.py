"""Recorded requests of a node, and waiting for them. Tests wait for an event, not for a period."""

from __future__ import annotations

import linecache
import threading
import time
from collections import deque
from collections.abc import Callable
from inspect import iscoroutine
from pathlib import Path
from typing import NamedTuple

from pyrocket_consumer.config import check_int, check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.codes import request_name
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing.config import LONGEST_S

STEP_S = 0.05


class Recorded(NamedTuple):
    """A request that a node received. `at_s` is the node's monotonic clock, `client` the sender's address."""

    at_s: float
    command: RemotingCommand
    client: str


class Changes:
    """Notifies waiting threads of changes in the cluster."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._count = 0

    def notify(self) -> None:
        """Let every waiting thread check its condition again."""
        with self.condition:
            self._count += 1
            self.condition.notify_all()

    def wait_until(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Wait until `condition()` is true, for at most `timeout_s` seconds. Return whether it is true.

        The waiting thread calls it without a lock after each change, and once more after the timeout. It also calls
        it every `STEP_S` seconds, because code outside the cluster may change the condition without a notification.

        Raises:
            ConfigError: `condition` is not a function, or is an async one.
        """
        if not callable(condition):
            raise ConfigError(f"{condition!r} is not a condition; give a function, for example lambda: len(seen) == 3")
        check_range("timeout_s", timeout_s, 0, LONGEST_S)
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
    """Return the file and the first line of a condition, for the error after a timeout."""
    code = getattr(condition, "__code__", None)
    if code is None:
        return repr(condition)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}: {line}"


class RequestLog:
    """The requests that a node received, newest last. Keeps at most `limit` requests of each code."""

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
        """Remove the requests recorded so far."""
        with self._changes.condition:
            self._requests.clear()

    def requests(self, code: int | None = None) -> list[Recorded]:
        """Return the recorded requests, of one code or of all, oldest first."""
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
        """Wait for `count` requests of `code` for which `when` is true, and return them.

        Raises:
            TimeoutError: fewer arrived within `timeout_s`; the text has their number.
        """
        check_int("count", count, 0, 2**31 - 1)
        if when is not None and not callable(when):
            raise ConfigError(f"when={when!r} is not a condition; give a function of the request")
        found: list[Recorded] = []

        def enough() -> bool:
            nonlocal found
            found = [each for each in self.requests(code) if when is None or when(each.command)]
            return len(found) >= count

        if not self._changes.wait_until(enough, timeout_s):
            raise TimeoutError(f"{len(found)} of {count} {request_name(code)} requests came within {timeout_s:g} s")
        return found
