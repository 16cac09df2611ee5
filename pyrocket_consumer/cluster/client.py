"""One client: its life, its background tasks, and its calls to servers by their address."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import ssl
import sys
import warnings
from collections.abc import Awaitable, Callable, Collection, Container, Coroutine
from enum import Enum
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import (
    MOST_OF_A_REMARK,
    BrokerError,
    ClientClosed,
    ConnectError,
    FlowControl,
    PermissionDenied,
    RequestTimeout,
    RocketError,
)
from pyrocket_consumer.model import TopicRoute
from pyrocket_consumer.protocol.codes import ResponseCode, response_name
from pyrocket_consumer.protocol.command import Header, request
from pyrocket_consumer.protocol.frame import RemotingCommand, sign
from pyrocket_consumer.text import logger, truncate
from pyrocket_consumer.transport.connection import Connection, OnLateResponse, Sign
from pyrocket_consumer.transport.connections import MAYBE_PLAINTEXT, Addresses, Connections
from pyrocket_consumer.transport.io_thread import IoThread
from pyrocket_consumer.transport.polled_connection import PolledConnection, open_polled_connection

log = logger("cluster")

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0
_MAX_UNANSWERED = 2  # consecutive calls without a response, after which the connection is closed
LARGE_BODY_BYTES = 16 * 1024
"""Larger bodies are decoded on another thread, because they would block the I/O thread for several milliseconds."""

_ACL_REMARK = "AclException"  # ACL 1.0 refuses with SYSTEM_ERROR; only the remark shows the reason
_JITTER = 0.1  # of an interval, so that clients that start together do not send all later requests together


class ClusterState(Enum):
    """The states of a client. A closed one stays closed."""

    CREATED = "created"
    RUNNING = "running"
    CLOSED = "closed"


class ClusterEvents:
    """Calls to the user of a cluster. Override the methods that you need; they run on the I/O thread."""

    def route_changed(self, topic: str, route: TopicRoute) -> None:
        """Handle a route that is new or has changed."""

    def broker_lost(self, address: str, reason: str) -> None:
        """Handle the end of the connection to a broker."""

    def broker_reconnected(self, address: str) -> None:
        """Handle the first heartbeat on a new connection of a known broker.

        The broker may have lost locks, members, and commits of the last seconds.
        """

    def uses_broker(self, broker_name: str) -> bool:
        """Return whether a broker that no route names must stay reachable.

        A name server may lose a broker that is still up, and the last offsets of its queues must be stored there.
        """
        return False

    def address_refused(self, address: str, why: str) -> None:
        """Handle a broker's address that is not allowed. Without this method, it is logged."""
        log.warning("%s", why)

    def client_failed(self, error: BaseException) -> None:
        """Handle an unexpected error that ended a background task, or that one of these methods raised."""


class Client:
    """The life of a client, and calls to the name servers and brokers of its cluster.

    Call `async` methods and `spawn` on the I/O thread. Call `start`, `close`, `run` and `submit` on all other threads.

    With `io` the client uses that loop, and neither starts nor stops it. Without, it starts its own I/O thread. It
    reads the time and opens sockets only through the loop, and takes random numbers only from `rng`.
    """

    def __init__(
        self, config: ClientConfig, client_id: str, *, io: IoThread | None = None, rng: random.Random | None = None
    ) -> None:
        self.config = config
        self.client_id = client_id
        self.state = ClusterState.CREATED
        self.events = ClusterEvents()
        """Gets every event. Replace it before the start, or on the I/O thread."""
        self.rng = rng or random.Random()
        self._owns_io = io is None
        self._io = io
        self._tls = tls_context(config.tls)
        self._pid: int | None = None
        self._connections: Connections | None = None
        self._addresses = Addresses(
            config.name_servers, config.brokers_allowed, lambda *facts: self.notify(self.events.address_refused, *facts)
        )
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._unanswered: dict[str, int] = {}

    # --- life

    def start(self, timeout_s: float | None = None) -> None:
        """Start, and return when a name server has responded, so that a wrong address fails here and not later.

        Raises:
            ConnectError: no name server responds; the text names every address and its reason. Nothing keeps running.
            ClientClosed: it was started before.
        """
        if self.state is not ClusterState.CREATED:
            raise ClientClosed(f"this client is {self.state.value} and starts only once; make a new one")
        servers = self.config.name_servers
        if timeout_s is None:
            timeout_s = len(servers) * (self.config.connect_timeout_s + self.config.call_timeout_s)
        self._pid = os.getpid()
        io = self._io = self._io or IoThread()
        try:
            if self._owns_io:
                io.start()
            io.run(self.start_on_loop(), timeout_s)
        except RequestTimeout as error:
            self.close()
            raise ConnectError(";".join(servers), f"no response within {timeout_s:g} s") from error
        except BaseException:
            self.close()
            raise

    async def start_on_loop(self) -> None:
        """Do the same as `start`, on an I/O loop that has no thread of its own."""
        if self.state is ClusterState.CLOSED:
            raise ClientClosed("this client was closed while it started")
        self._pid = os.getpid()
        self._connections = Connections(
            self.loop,
            connect_timeout_s=self.config.connect_timeout_s,
            resolve=self._addresses.resolve,
            on_request=self._handle_request,
            on_lost=self._connection_lost,
            tls=self._tls,
            sign=self._signer,
            max_frame_bytes=self.config.max_frame_bytes,
            rng=self.rng,
        )
        if self._owns_io:
            self.loop.set_exception_handler(self.handle_loop_exception)
        self.state = ClusterState.RUNNING

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Close every connection and cancel every background task. Pending calls raise an error.

        A second close does nothing. In a process forked after `start()` it has no effect, because the connections
        belong to the parent.
        """
        if self._io is not None:
            self._io.check_not_current()
        self.state = ClusterState.CLOSED  # before the next line, because another thread may be in `start`
        io = self._io
        if io is None or self._pid is None or self._forked() or (self._owns_io and io.prevent_start()):
            return
        try:
            io.run(self.close_on_loop(), timeout_s)
        except RequestTimeout as error:
            log.error("client_id=%s was not closed in time reason=%s", self.client_id, error)
        except ClientClosed:
            pass  # the I/O thread has ended
        if self._owns_io:
            io.stop(timeout_s)

    def warn_unclosed(self, owner: object, close: Callable[[], object] | None = None) -> None:
        """Warn that `owner`, which is about to be garbage-collected, was not closed, and close it in the background.

        For finalizers. `close` (default: the client's own) must not refer to `owner`. At the end of the process it
        does nothing, because the interpreter has already flushed producers and stops all threads.
        """
        if sys.is_finalizing() or self._forked():
            return
        if self.state is ClusterState.RUNNING and self._io is not None:
            self._io.run_in_background(close or self.close)
            warnings.warn(f"unclosed {owner!r}; call close(), or use `with`", ResourceWarning, 3, source=owner)

    async def close_on_loop(self) -> None:
        """Do the same as `close`, on an I/O loop that has no thread of its own."""
        self.state = ClusterState.CLOSED
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connections is not None:
            await self._connections.close()

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The I/O loop. Raises ClientClosed before `start()`."""
        if self._io is None:
            raise ClientClosed("this client is not started; call start() first")
        return self._io.loop

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run `coroutine` on the I/O thread, and return its result.

        Raises:
            RuntimeError: called on the I/O thread itself; await the coroutine there.
            RequestTimeout: not done within `timeout_s`.
            ClientClosed: the client is not running, was closed during the call, or belongs to the process from
                which this one was forked.
        """
        try:
            return self._usable_io(coroutine).run(coroutine, timeout_s)
        except RocketError as error:  # any error that a connection closed by close() caused
            if self.state is ClusterState.CLOSED and not isinstance(error, ClientClosed):
                raise ClientClosed("the client was closed while the call waited") from error
            raise

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the I/O thread for a caller on another asyncio loop, and return its result.

        Raises:
            ClientClosed: as for `run`.
        """
        return await self._usable_io(coroutine).run_async(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `coroutine` on the I/O thread and return at once; the future gets its result.

        Raises:
            ClientClosed: as for `run`.
        """
        return self._usable_io(coroutine).submit(coroutine)

    def _usable_io(self, coroutine: Coroutine[Any, Any, T]) -> IoThread:
        try:
            self.check_usable()
        except RocketError:
            coroutine.close()
            raise
        assert self._io is not None
        return self._io

    def check_usable(self) -> None:
        """Raise ClientClosed unless the client is running in this process."""
        if self._forked():
            raise ClientClosed(
                f"this client belongs to process {self._pid}, and this is process {os.getpid()}, forked from it; "
                "make a new one after the fork"
            )
        if self.state is not ClusterState.RUNNING:
            raise ClientClosed(f"this client is {self.state.value}, not running; make a new one and start it")

    def _forked(self) -> bool:
        return self._pid is not None and self._pid != os.getpid()

    # --- calls

    async def call(
        self,
        address: str,
        header: Header,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        accept: Container[int] = (0,),
        on_late: OnLateResponse | None = None,
    ) -> RemotingCommand:
        """Return the response of the server at `address`. `timeout_s` includes the time to connect, if necessary.

        `accept` contains the response codes that are not errors. `on_late` receives a response that arrives after the
        timeout.

        Raises:
            BrokerError: the response has another code. PermissionDenied and FlowControl are subclasses.
            ConnectError: there is no connection. The request was not sent.
            RequestTimeout, ConnectionLost: no response arrived. The server may have executed the request.
        """
        command = request(header, body)
        connection, timeout_s = await self._connect_within(address, timeout_s or self.config.call_timeout_s)
        call = connection.call if self._gets_heartbeats(address) else partial(self.call_or_close, connection)
        return check_response(await call(command, timeout_s, on_late), address, accept)

    async def read(
        self, address: str, header: Header, decode: Callable[[bytes], T], *, timeout_s: float | None = None
    ) -> T:
        """Return `decode(body)` of the response of the server at `address`.

        Raises:
            ProtocolError: the body cannot be decoded.
            BrokerError, ConnectError, RequestTimeout, ConnectionLost: as for `call`.
        """
        return await read_body(decode, (await self.call(address, header, timeout_s=timeout_s)).body)

    async def call_many(
        self, address: str, commands: Collection[RemotingCommand]
    ) -> list[RemotingCommand | RocketError]:
        """Send requests to the server at `address` all at once. Return the responses in the order of the requests.

        A failed request has the error that `call` would raise in place of its response. For thousands of small
        requests this takes less than half the time of one `call` each.

        Raises:
            ConnectError: there is no connection. No request was sent.
        """
        connection, timeout_s = await self._connect_within(address, self.config.call_timeout_s)
        responses = await connection.call_many(commands, timeout_s)
        if not self._gets_heartbeats(address):
            if not all(isinstance(response, RequestTimeout) for response in responses):
                self._unanswered.pop(address, None)
            elif responses:
                self._count_unanswered(connection, len(responses))
        return [_to_result(response, address) for response in responses]

    async def call_or_close(
        self, connection: Connection, command: RemotingCommand, timeout_s: float, on_late: OnLateResponse | None = None
    ) -> RemotingCommand:
        """Return the response. Close the connection if several calls in a row have no response.

        Only a new connection shows whether a silent peer still exists; TCP may keep the old one for 15 minutes. For
        a broker that receives heartbeats only these count, because a busy broker still responds to them.
        """
        try:
            response = await connection.call(command, timeout_s, on_late)
        except RequestTimeout:
            self._count_unanswered(connection, 1)
            raise
        self._unanswered.pop(connection.address, None)
        return response

    def _count_unanswered(self, connection: Connection, calls: int) -> None:
        address = connection.address
        self._unanswered[address] = self._unanswered.get(address, 0) + calls
        if self._unanswered[address] >= _MAX_UNANSWERED:
            connection.close(f"{_MAX_UNANSWERED} calls in a row got no response")

    # --- connections

    async def connection(self, address: str) -> Connection:
        """Return an open connection to `address`.

        Raises:
            ConnectError: no connection can be opened.
        """
        return await self.open_connections().get(address)

    def find_connection(self, address: str) -> Connection | None:
        """Return the open connection to `address`, None without one."""
        return self._connections.peek(address) if self._connections is not None else None

    def drop_connection(self, address: str, reason: str) -> None:
        """Close the connection to `address` and forget the address."""
        if self._connections is not None:
            self._connections.drop(address, reason)

    async def _connect_within(self, address: str, timeout_s: float) -> tuple[Connection, float]:
        """Return an open connection, and the rest of `timeout_s`."""
        connections = self.open_connections()
        if (connection := connections.peek(address)) is not None:
            return connection, timeout_s
        deadline = self.loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                connection = await connections.get(address)
        except TimeoutError as error:
            hint = f" ({MAYBE_PLAINTEXT})" if self._tls is not None else ""
            raise ConnectError(address, f"no connection within {timeout_s:g} s{hint}") from error
        return connection, max(deadline - self.loop.time(), 0.001)

    async def open_polled_connection(self, address: str) -> PolledConnection:
        """Return a new connection to `address`, which the caller uses in its own thread and must close.

        Raises:
            ConnectError: no connection can be opened.
        """
        return await open_polled_connection(
            self.loop,
            address,
            timeout_s=self.config.connect_timeout_s,
            resolve=self._addresses.resolve,
            tls=self._tls,
            sign=self._signer,
            max_frame_bytes=self.config.max_frame_bytes,
        )

    def open_connections(self) -> Connections:
        """Return the connections. Raises ClientClosed unless the client is running."""
        if self._connections is None or self.state is not ClusterState.RUNNING:
            raise ClientClosed(f"this client is {self.state.value}, not running; make a new one and start it")
        return self._connections

    @property
    def _signer(self) -> Sign | None:
        return self._sign if self.config.access_key is not None else None

    def _sign(self, command: RemotingCommand) -> None:
        config = self.config
        assert config.access_key is not None
        assert config.secret_key is not None
        command.fields = sign(command.fields, command.body, config.access_key, config.secret_key, config.security_token)

    # --- what a cluster adds

    def _gets_heartbeats(self, address: str) -> bool:
        """Return whether the server at `address` receives heartbeats."""
        raise NotImplementedError

    def _connection_lost(self, connection: Connection, reason: str) -> None:
        self._unanswered.pop(connection.address, None)

    def _handle_request(
        self, command: RemotingCommand, connection: Connection
    ) -> Awaitable[RemotingCommand | None] | None:
        """Handle a request of a server. Return an awaitable of the response, None if the request is finished."""
        raise NotImplementedError

    # --- background tasks and unexpected errors

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background until it ends or the client is closed. An error counts as a client failure."""
        task = self.loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._task_ended)
        return task

    def jittered(self, interval_s: float) -> float:
        """Return an interval near `interval_s`, at random."""
        return interval_s * (1 + _JITTER * (2 * self.rng.random() - 1))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report_failure(f"background task {task.get_name()!r} ended", error)

    def notify(self, event: Callable[..., None], *facts: object) -> None:
        """Call a method of `events`. An error that it raises counts as a client failure."""
        try:
            event(*facts)
        except Exception as error:
            self._report_failure(f"hook {event!r} raised", error)

    def handle_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception that nothing else handles: the exception handler of a loop that only this client uses.

        Network errors are logged at DEBUG, because the calls that they affect raise them. Others are client failures.
        """
        error = context.get("exception")
        if error is None or isinstance(error, (RocketError, OSError)):
            log.debug("loop: %s exception=%r", context.get("message"), error)
        else:
            self._report_failure(str(context.get("message")), error)

    def _report_failure(self, what: str, error: BaseException) -> None:
        log.error("client_id=%s failed: %s", self.client_id, what, exc_info=error)
        self.events.client_failed(error)


class NotCopied:
    """The base of clients. A copy would share the connections of the original, and close them."""

    def __reduce__(self) -> NoReturn:
        """Raise the error of `pickle`, `copy.copy` and `copy.deepcopy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because it has connections and threads of its own; "
            "create another one, in the process that uses it"
        )


def check_response(response: RemotingCommand, address: str, accept: Container[int] = (0,)) -> RemotingCommand:
    """Return `response` if its code is in `accept`.

    Raises:
        BrokerError: it has another code; PermissionDenied or FlowControl if that is the reason.
    """
    if response.code in accept:
        return response
    raise read_error(response, address)


def read_error(response: RemotingCommand, address: str) -> BrokerError:
    """Return the error for a response whose code is not accepted."""
    code, remark = response.code, response.remark or ""
    kind = BrokerError
    if code == ResponseCode.NO_PERMISSION or (code == ResponseCode.SYSTEM_ERROR and _ACL_REMARK in remark):
        kind = PermissionDenied
    elif code in (ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL):
        kind = FlowControl
    return kind(code, truncate(remark, MOST_OF_A_REMARK), address, response_name(code))


async def read_body(decode: Callable[[bytes], T], body: bytes) -> T:
    """Return `decode(body)`. A large body is decoded on another thread, so that it does not block the I/O thread.

    Raises:
        ProtocolError: the body cannot be decoded.
    """
    if len(body) <= LARGE_BODY_BYTES:
        return decode(body)
    return await asyncio.get_running_loop().run_in_executor(None, decode, body)


def _to_result(response: RemotingCommand | Exception, address: str) -> RemotingCommand | RocketError:
    if isinstance(response, RemotingCommand):
        return response if response.code == ResponseCode.SUCCESS else read_error(response, address)
    if isinstance(response, RocketError):
        return response
    raise response


def tls_context(tls: bool | ssl.SSLContext) -> ssl.SSLContext | None:
    """Return the context for connections to name servers and brokers, None for connections without TLS.

    True verifies certificate and host name against the system's authorities. By default brokers present a self-signed
    certificate, new at every start, which no client can verify. To accept any certificate from any peer:

        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        PushConsumer(group, tls=context)
    """
    if isinstance(tls, ssl.SSLContext):
        return tls
    return ssl.create_default_context() if tls else None
