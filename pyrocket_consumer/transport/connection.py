"""One connection to one server: it sends and receives frames, and matches responses to pending calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import cast

from pyrocket_consumer.errors import ConnectionLost, ProtocolError, RequestTimeout, RocketError
from pyrocket_consumer.protocol.codes import ResponseCode, request_name
from pyrocket_consumer.protocol.frame import (
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    ONEWAY_FLAG,
    FrameBuffer,
    RemotingCommand,
    encode_command,
    frame_error,
)
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.forks import close_in_children

log = logger("net")

OnResponse = Callable[["RemotingCommand | Exception"], "Callable[[], None] | None"]
"""Receives the response, or the error in its place. It may return a function, which the connection calls after it has
sent all requests that the responses of this wake-up cause. So decoding never delays the next pull."""

OnLateResponse = Callable[["RemotingCommand"], None]
OnRequest = Callable[["RemotingCommand", "Connection"], "Awaitable[RemotingCommand | None] | None"]
"""Receives a request of the server. Returns an awaitable of the response, None if the request is finished."""
OnLost = Callable[["Connection", str], None]
Sign = Callable[[RemotingCommand], None]

MAX_OVERDUE = 1024
"""How many late responses a connection waits for. If there are more, it forgets the oldest."""

MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""How many bytes of responses may wait for a server that does not read. Then it gets no more until it reads again."""

_MAX_COMMANDS_AT_ONCE = 256  # commands handled before other tasks may run
_MAX_FREE_UNREQUESTED = 32  # unrequested commands among them that cause no pause
_SWEEP_STEP_S = 0.05
_MAX_OPAQUE = 0x7FFFFFFF


class Connection(asyncio.BufferedProtocol):
    """Calls and one-way requests to one server, and the requests that it sends. Confined to the I/O thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        on_request: OnRequest,
        on_lost: OnLost,
        sign: Sign | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.address = address
        self.closed = False
        self.is_damaged = False  # whether the server has sent something other than frames
        self.max_frame_bytes = max_frame_bytes
        self.received_bytes = 0  # shows whether the server has sent anything since an earlier check
        self._loop = loop
        self._on_request = on_request
        self._on_lost = on_lost
        self._sign = sign
        self._frames = FrameBuffer(max_frame_bytes, largest_request=MAX_REQUEST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._opaque = 0
        self._pending: dict[int, tuple[OnResponse, float, str, float, OnLateResponse | None]] = {}
        self._overdue: dict[int, OnLateResponse] = {}
        self._outgoing: list[bytes] = []
        self._flush_due = False
        self._sweep: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        self._unread_bytes = 0
        self._handling: set[asyncio.Task[None]] = set()
        self._reason = "closed by the server"
        self._is_socket_closed = False  # the socket is closed, too

    # --- requests

    def call(
        self, command: RemotingCommand, timeout_s: float, on_late: OnLateResponse | None = None
    ) -> asyncio.Future[RemotingCommand]:
        """Send a request. The result of the future is the response with any code.

        The future raises RequestTimeout after `timeout_s`, or ConnectionLost if the connection ends first. `on_late`
        receives a response that arrives after the timeout.
        """
        future: asyncio.Future[RemotingCommand] = self._loop.create_future()

        def on_response(response: RemotingCommand | Exception) -> None:
            if future.done():
                return
            if isinstance(response, Exception):
                future.set_exception(response)
            else:
                future.set_result(response)

        what = request_name(command.code)
        self.send(lambda opaque: self.encode(command, opaque), on_response, timeout_s, what, on_late)
        return future

    def call_many(
        self, commands: Collection[RemotingCommand], timeout_s: float
    ) -> asyncio.Future[list[RemotingCommand | Exception]]:
        """Send requests. The result of the future is the response to each in order, or the error in its place.

        This is `call` for each of them, but it wakes the waiting task only once.
        """
        future: asyncio.Future[list[RemotingCommand | Exception]] = self._loop.create_future()
        responses: dict[int, RemotingCommand | Exception] = {}

        def on_response(number: int, response: RemotingCommand | Exception) -> None:
            responses[number] = response
            if len(responses) == len(commands) and not future.done():
                future.set_result([responses[each] for each in range(len(responses))])

        for number, command in enumerate(commands):
            what = request_name(command.code)
            self.send(partial(self.encode, command), partial(on_response, number), timeout_s, what)
        if not commands:
            future.set_result([])
        return future

    def oneway(self, command: RemotingCommand) -> None:
        """Send a request without a response. The caller does not learn whether it arrived."""
        if self.closed:
            raise ConnectionLost(self.address, self._reason)
        command.flag |= ONEWAY_FLAG
        self._write(self.encode(command, self._next_opaque()))

    def send(
        self,
        encode: Callable[[int], bytes],
        on_response: OnResponse,
        timeout_s: float,
        what: str = "PULL_MESSAGE",
        on_late: OnLateResponse | None = None,
    ) -> None:
        """Send the frame that `encode(opaque)` returns, and call `on_response` exactly once. A fast variant of `call`.

        `on_late` receives a response that arrives after the timeout but must not be lost.
        """
        if self.closed:
            error = ConnectionLost(self.address, self._reason)
            self._loop.call_soon(on_response, error)
            return
        opaque = self._next_opaque()
        frame = encode(opaque)
        deadline = self._loop.time() + timeout_s
        self._pending[opaque] = (on_response, deadline, what, timeout_s, on_late)
        if self._sweep is None or self._sweep.when() > deadline + _SWEEP_STEP_S:
            self._sweep_at(deadline)
        self._write(frame)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a response."""
        return len(self._pending)

    async def drain(self) -> None:
        """Wait until the socket accepts more bytes."""
        while self._writable is not None and not self.closed:
            await asyncio.shield(self._writable)

    def close(self, reason: str) -> None:
        """Close the connection. Pending calls raise ConnectionLost."""
        if self._transport is not None and not self.closed:
            self._reason = reason
            self._flush()
            self._transport.close()
            self._end(ConnectionLost(self.address, reason))

    def abort(self) -> None:
        """Discard the bytes that a closed connection has not sent yet."""
        if self._transport is not None and not self._is_socket_closed:
            self._transport.abort()

    def _next_opaque(self) -> int:
        self._opaque = self._opaque + 1 if self._opaque < _MAX_OPAQUE else 1
        return self._opaque

    @property
    def is_signing(self) -> bool:
        """Whether requests are signed, so that a prepared frame cannot be sent."""
        return self._sign is not None

    def encode(self, command: RemotingCommand, opaque: int) -> bytes:
        """Return the frame of `command` with this opaque, and with a signature if requests are signed."""
        command.opaque = opaque
        if self._sign is not None and not command.is_response:
            self._sign(command)
        return encode_command(command, max_frame_bytes=self.max_frame_bytes)

    def _write(self, data: bytes) -> None:
        self._outgoing.append(data)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._outgoing[0] if len(self._outgoing) == 1 else b"".join(self._outgoing))
        self._outgoing.clear()
        if self._writable is None:
            self._unread_bytes = 0

    # --- deadlines: one timer per connection, not one per call

    def _sweep_at(self, when: float) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = self._loop.call_at(max(when, self._loop.time() + _SWEEP_STEP_S / 10), self._expire)

    def _expire(self) -> None:
        self._sweep = None
        now = self._loop.time()
        late = [opaque for opaque, (_, deadline, *_) in self._pending.items() if deadline <= now]
        for opaque in late:
            if (entry := self._pending.pop(opaque, None)) is None:  # an earlier callback has closed the connection
                break
            on_response, _, what, timeout_s, on_late = entry
            if on_late is not None:
                self._overdue[opaque] = on_late
                if len(self._overdue) > MAX_OVERDUE:
                    del self._overdue[next(iter(self._overdue))]
            self._notify(on_response, RequestTimeout(what, self.address, timeout_s))
        if self._pending:  # a callback may have sent a request with a new deadline
            self._sweep_at(max(min(entry[1] for entry in self._pending.values()), now + _SWEEP_STEP_S))

    def _handle_late(self, response: RemotingCommand) -> None:
        on_late = self._overdue.pop(response.opaque, None)
        if on_late is None:
            log.debug("connection=%s late response opaque=%d ignored", self.address, response.opaque)
        else:
            try:
                on_late(response)
            except Exception as error:
                self._report_exception(error, "a late response could not be handled")

    def _notify(self, on_response: OnResponse, response: RemotingCommand | Exception) -> None:
        try:
            rest = on_response(response)
            if rest is not None:
                rest()
        except Exception as error:
            self._report_exception(error, "a response could not be handled")

    def _report_exception(self, error: Exception, what: str) -> None:
        self._loop.call_exception_handler({"message": f"{what} (address={self.address})", "exception": error})

    def fileno(self) -> int:
        """Return the file descriptor of the socket, -1 if it is closed or not open yet."""
        connected = (
            None if self._transport is None or self._is_socket_closed else self._transport.get_extra_info("socket")
        )
        return -1 if connected is None else int(connected.fileno())

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        close_in_children(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        if self.closed:
            return
        self.received_bytes += nbytes
        self._process(nbytes)

    def _process(self, nbytes: int) -> bool:
        """Handle received commands, but limit their number, so that other tasks do not wait for long.

        Return whether commands are left and reading is paused.
        """
        began = self._loop.time()
        try:
            commands = self._frames.read_commands(nbytes, _MAX_COMMANDS_AT_ONCE)
        except ProtocolError as damage:
            error = frame_error(self.address, damage)
            log.error("connection=%s closed reason=%s", self.address, error)
            self.is_damaged = True
            self._reason = f"bad frame: {damage}"
            if self._transport is not None:
                self._transport.abort()
            self._end(error)
            return False
        afterwards: list[Callable[[], None]] = []
        unrequested = 0
        self._flush_due = True  # sends all writes of this wake-up together, below
        for command in commands:
            if command.flag & 1:
                entry = self._pending.pop(command.opaque, None)
                if entry is None:
                    unrequested += 1
                    self._handle_late(command)
                    continue
                try:
                    rest = entry[0](command)
                except Exception as error:
                    self._report_exception(error, "a response could not be handled")
                    continue
                if rest is not None:
                    afterwards.append(rest)
            else:
                unrequested += 1
                self._handle_request(command)
        self._flush()
        for rest in afterwards:
            try:
                rest()
            except Exception as error:
                self._report_exception(error, "a response could not be handled")
        if (
            self._transport is None
            or self.closed
            or (len(commands) < _MAX_COMMANDS_AT_ONCE and unrequested <= _MAX_FREE_UNREQUESTED)
        ):
            return False
        self._transport.pause_reading()
        # Unrequested commands take at most half of the thread's time, even if the server sends many.
        self._loop.call_later(
            self._loop.time() - began if unrequested > _MAX_FREE_UNREQUESTED else 0.0, self._resume_reading
        )
        return True

    def _resume_reading(self) -> None:
        if self._transport is not None and not self.closed and not self._process(0):
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._is_socket_closed = True
        if not self.closed:
            if error is not None:
                self._reason = str(error) or type(error).__name__
            self._end(ConnectionLost(self.address, self._reason))

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        self._unread_bytes = 0
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # --- requests of the server

    def respond(self, request: RemotingCommand, response: RemotingCommand) -> None:
        """Send the response to a request of the server, unless it was one-way or the server reads no responses."""
        if request.is_oneway or self.closed or self.is_backlogged:
            return
        try:
            frame = self.encode(response, request.opaque)
        except ProtocolError as error:  # too large; respond anyway, so that the server does not wait for its timeout
            frame = self.encode(request.make_response(ResponseCode.SYSTEM_ERROR, str(error)), request.opaque)
        self._unread_bytes += len(frame)
        self._write(frame)

    @property
    def is_backlogged(self) -> bool:
        """Whether more than `MAX_UNREAD_BYTES` of responses wait because the server does not read them."""
        return self._unread_bytes >= MAX_UNREAD_BYTES

    def _handle_request(self, command: RemotingCommand) -> None:
        handling = self._on_request(command, self)
        if handling is not None:
            task = self._loop.create_task(self._respond_when_handled(command, handling))
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)

    async def _respond_when_handled(
        self, command: RemotingCommand, handling: Awaitable[RemotingCommand | None]
    ) -> None:
        try:
            response = await handling
        except RocketError as error:
            response = command.make_response(ResponseCode.SYSTEM_ERROR, str(error))
        except Exception as error:
            self._report_exception(error, f"{request_name(command.code)} of the server could not be handled")
            response = command.make_response(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
        if response is not None:
            self.respond(command, response)

    def _end(self, error: Exception) -> None:
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self.resume_writing()
        waiting, self._pending = self._pending, {}
        self._overdue.clear()
        for on_response, *_ in waiting.values():
            self._notify(on_response, error)
        self._on_lost(self, self._reason)
