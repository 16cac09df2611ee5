"""A node's listening socket, which decodes and encodes commands, applies faults and records requests.

Tests wait for a recorded request or a change, not for a period.
"""

from __future__ import annotations

import asyncio
import linecache
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from inspect import iscoroutine
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from pyrocket_consumer.config import check_int, check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.codes import request_name
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing.config import LONGEST_S
from pyrocket_consumer.testing.faults import Exchange, Faults, apply_fault
from pyrocket_consumer.testing.node import Clock, Connection, Node, Timer
from pyrocket_consumer.transport.forks import close_in_children

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


class Server:
    """Serves `node` on one port of the loopback, from open() to close(); may be opened again.

    A bound socket reserves the port while the server is closed. The kernel then refuses connections, gives the port to
    no other process, and never picks it as the source port of a connection to itself. On a simulated loop the server
    reserves no port and uses `port` directly.
    """

    node: Node

    def __init__(
        self,
        clock: Clock,
        changes: Changes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        simulated: bool = False,
        tls: ssl.SSLContext | None = None,
        idle_timeout_s: float = 120.0,
        record_limit: int = 10_000,
        side_by_side_s: float = 0.0,
        seed: int = 0,
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self.faults = Faults()
        self.log = RequestLog(changes, record_limit)
        self.connections: dict[Connection, None] = {}  # ordered, so that a seed repeats a simulated run
        self.clock = clock
        self.changes = changes
        self.on_failure = on_failure
        self.recording = record_limit > 0
        self._tls = tls
        self.side_by_side_s = side_by_side_s
        self._seed = seed
        self._accepted = count()
        self._idle_timeout_s = idle_timeout_s
        self._idle_check = Timer(clock, lambda: max(idle_timeout_s / 8, 0.05), self._close_idle)
        self._opening = asyncio.Lock()
        self._listener: asyncio.Server | None = None
        self.host, self.port = host, port
        self._reserved: socket.socket | None = None
        if not simulated:
            self._reserved = self._bound()
            self.port = self._reserved.getsockname()[1]

    def _bound(self) -> socket.socket:
        bound = socket.socket()
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self.host, self.port))
        except OSError:
            bound.close()
            raise
        close_in_children(bound)  # because their copies would keep listening after this server stops
        return bound

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    async def open(self) -> None:
        """Listen."""
        async with self._opening:
            if self._listener is None:
                endpoint: dict[str, Any] = {"host": self.host, "port": self.port}
                if self._reserved is not None:
                    endpoint = {"sock": self._bound()}
                self._listener = await self.clock.loop.create_server(
                    lambda: Connection(self), **endpoint, ssl=self._tls, backlog=512
                )
                self._idle_check.start()

    def stop_accepting(self) -> None:
        """Leave new connections in the backlog, because asyncio leaks sockets accepted just before the end."""
        for listening in self._listener.sockets if self._listener is not None else ():
            with suppress(NotImplementedError):  # loops of Windows
                self.clock.loop.remove_reader(listening)

    def close(self, abrupt: bool = False) -> None:
        """Stop listening and end every connection, as a process does after SIGTERM.

        With `abrupt`, reset them, as a killed process does.
        """
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._idle_check.stop()
        for connection in list(self.connections):
            connection.close(abrupt)

    def release_port(self) -> None:
        """Close the server and release its port."""
        self.close()
        if self._reserved is not None:
            self._reserved.close()

    def abort_rest(self) -> bool:
        """Reset the connections that are still open, and return whether there are any."""
        for connection in list(self.connections):
            connection.close(True)
        return bool(self.connections)

    def _close_idle(self) -> None:
        oldest = self.clock.monotonic_s() - self._idle_timeout_s
        for connection in list(self.connections):
            if connection.last_active_s < oldest:
                connection.close(False)

    # --- called by the connections

    def connected(self, connection: Connection) -> None:
        close_in_children(connection)  # because their copies would keep it open
        self.connections[connection] = None
        if not self.is_open:  # it was accepted just before the listener closed
            connection.close(True)
        self.changes.notify()

    def random_for_connection(self) -> random.Random:
        """Return the random generator of the next connection."""
        return random.Random(f"{self._seed} {next(self._accepted)}")

    def received(self, connection: Connection, command: RemotingCommand) -> None:
        if command.is_response:
            connection.resolve(command.opaque, command)
            self.changes.notify()
            return
        at_s = self.clock.monotonic_s()
        try:
            fault = self.faults.take(command)
            if fault is not None:
                apply_fault(fault, Exchange(self, connection, command))
        except Exception as error:  # raised by the test's fault or condition; closing the cluster raises it again
            self.on_failure(self.address, error)
            connection.close(True)
        else:
            if fault is None:
                self.handle(connection, command)
        if self.recording:
            self.log.add(Recorded(at_s, command, connection.address))
        else:
            self.changes.notify()

    def handle(self, connection: Connection, command: RemotingCommand) -> None:
        try:
            answer = self.node.handle(command, connection)
        except Exception as error:  # a defect of the node: respond with it now, and raise it when the cluster closes
            self.on_failure(self.address, error)
            answer = command.make_response(1, f"{type(error).__name__}: {error}")
        if answer is not None:
            connection.respond(command, answer)
