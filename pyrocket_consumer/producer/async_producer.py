"""Send messages from asyncio: a coroutine per message, and an event loop that is never blocked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

from pyrocket_consumer.cluster.client import NotCopied
from pyrocket_consumer.config import NameServers, ProducerConfig, ProducerOptions, check_range
from pyrocket_consumer.errors import ClientClosed, ConfigError, ConnectError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.producer.outgoing_message import OutgoingMessage, check_delivery
from pyrocket_consumer.producer.producer import (
    MAX_TIMEOUT_S,
    Producer,
    ProducerState,
    counting_stored,
    in_flight_limit_error,
)
from pyrocket_consumer.producer.send_request import SendRequest, SendResult
from pyrocket_consumer.transport.io_thread import SerialExecutor


class _LoopResults:
    """Passes results to an event loop. One wake-up of the loop takes all results that have arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop, producer: AsyncProducer) -> None:
        self._loop = loop
        self._producer = weakref.ref(producer)
        self._arrived: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_woken = False

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Resolve `future` soon. For the I/O thread."""
        self._arrived.append((future, result, error))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._arrived:
            _resolve(*self._arrived.popleft())
        if (producer := self._producer()) is not None:
            producer._submit_queued()


class _LoopSink:
    """Passes the result of one send from the I/O thread to the event loop."""

    __slots__ = ("_results", "future")

    def __init__(self, results: _LoopResults, future: asyncio.Future[Any]) -> None:
        self.future = future
        self._results = results

    def set_result(self, result: Any) -> None:
        self._results.put(self.future, result, None)

    def set_exception(self, error: BaseException) -> None:
        self._results.put(self.future, None, error)


class _Waiting(NamedTuple):
    """A message that waits for capacity, or for the start."""

    future: asyncio.Future[Any]
    timer: asyncio.TimerHandle
    deadline: float


class AsyncProducer(NotCopied):
    """`Producer` for asyncio: each send is a coroutine, and no call blocks the event loop.

    async with AsyncProducer(name_server="127.0.0.1:9876") as producer:
        sent = await producer.send("orders", b"...", tags="paid", keys=["o-1"])
        await asyncio.gather(*(producer.send("orders", body) for body in bodies))

    The producer sends messages in the order in which their coroutines start. In all else it behaves as `Producer`. It
    starts with the first message, or with `start()`, and belongs to the event loop that used it first.

    A `send` that is cancelled while it waits for free capacity (`max_in_flight_messages`) sends nothing. A message in
    flight cannot be withdrawn. If its `send` is cancelled, the broker may store it, and the result is dropped.
    """

    def __init__(
        self,
        group: str = "DEFAULT_PRODUCER",
        *,
        name_server: NameServers | None = None,
        config: ProducerConfig | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        """Check the options, which are those of `Producer`. It connects with the first message, or with `start()`.

        Args:
            group ("DEFAULT_PRODUCER"; 1–120 of a-zA-Z0-9_-%|): the producer group
            config (–; a ProducerConfig): all options in one, instead of single ones

        Raises:
            ConfigError: an option is unknown, its value is not allowed, or its package is not installed.
        """
        self._producer = Producer(group, name_server=name_server, config=config, **options)
        self.config = self._producer.config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Future[None] | None = None
        self._queued: dict[SendRequest, _Waiting] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        servers = ";".join(self.config.name_servers)
        return f"{type(self).__name__}(group={self.group!r}, state={self.state.value!r}, name_server={servers!r})"

    # --- life

    @property
    def state(self) -> ProducerState:
        """The state of the producer."""
        return ProducerState.CLOSED if self._is_closed else self._producer.state

    @property
    def group(self) -> str:
        """The producer group."""
        return self._producer.group

    async def start(self) -> None:
        """Connect to a name server; see `Producer.start`. A cancelled start closes the producer.

        Raises:
            ConnectError: no name server responds. The producer can be started again.
            ClientClosed: the producer is closed.
        """
        self._check_usable()
        try:
            await asyncio.shield(self._start())
        except asyncio.CancelledError:
            self._close_in_background()
            raise

    def _start(self) -> asyncio.Future[None]:
        if self._starting is None:
            self._starting = _run_in_thread(self._producer.start)
            self._starting.add_done_callback(self._on_started)
        return self._starting

    def _on_started(self, starting: asyncio.Future[None]) -> None:
        error = None if starting.cancelled() else starting.exception()
        if error is not None or starting.cancelled():
            self._starting = None
            self._fail_queued(error or ClientClosed("the producer was closed while it started"))
        else:
            self._submit_queued()

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every message passed so far has its result; see `Producer.flush`.

        Raises:
            RequestTimeout: some messages have no result within `timeout_s` (seconds, 0.001 to 3600). The producer still
                sends them.
        """
        if timeout_s is not None:
            check_range("timeout_s", timeout_s, 0.001, MAX_TIMEOUT_S)
        self._check_loop()
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        queued = [waiting.future for waiting in self._queued.values()]
        in_flight = await self._producer._begin_async_flush()
        if queued:
            await asyncio.wait(queued, timeout=timeout_s)
        await in_flight.wait_async(None if deadline is None else max(deadline - loop.time(), 0))
        if pending := in_flight.pending + sum(not future.done() for future in queued):
            what = f"a flush ({pending} of {in_flight.messages + len(queued)} sends are in flight)"
            raise RequestTimeout(what, "the brokers", timeout_s or 0)

    async def close(self, timeout_s: float | None = None) -> None:
        """Accept no more messages, wait until those passed so far have their results, and disconnect.

        It ends, because every message has a deadline. After `timeout_s` (seconds, 0 to 3600) the unfinished messages
        fail. A cancelled close fails them at once, and the producer closes in the background.
        """
        if timeout_s is not None:
            check_range("timeout_s", timeout_s, 0, MAX_TIMEOUT_S)
        self._check_loop()
        loop, self._is_closed = asyncio.get_running_loop(), True
        until = None if timeout_s is None else loop.time() + timeout_s
        try:
            if self._starting is not None:
                await asyncio.wait([self._starting], timeout=timeout_s)
            if queued := [waiting.future for waiting in self._queued.values()]:
                await asyncio.wait(queued, timeout=None if until is None else max(until - loop.time(), 0))
            self._fail_queued(ClientClosed("the producer was closed"))
            left_s = None if until is None else min(max(until - loop.time(), 0), MAX_TIMEOUT_S)
            await _run_in_thread(self._producer.close, left_s)
        except asyncio.CancelledError:
            self._close_in_background()
            raise

    def _close_in_background(self) -> None:
        self._is_closed = True
        self._fail_queued(ClientClosed("the producer was closed"))
        threading.Thread(target=self._producer.close, args=(0,), name="pyrocket-closing", daemon=True).start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # --- sending

    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Sequence[str] | str = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        flag: int = 0,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Store a message, and return its position; see `Producer.send`.

        A message that waits for others with its `queue` or `sharding_key` expires as in `Producer.send_async`, so that
        a burst may take longer than `timeout_s`. `asyncio.timeout` limits the call, not the message.

        Raises:
            ConfigError, RouteNotFound, SendError, ConnectError, ClientClosed: as for `Producer.send`.
        """
        message = OutgoingMessage(body, tags, keys, properties, flag)
        sink, more = self._make_sink(), check_delivery(delay_level, deliver_at)
        request = self._producer._make_request(topic, message, sink, queue, sharding_key, timeout_s, more)
        sent: SendResult = await self._send(request, sink)
        return sent

    async def send_oneway(
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Sequence[str] | str = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        flag: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message without waiting for a response; see `Producer.send_oneway`.

        Raises:
            ConfigError, RouteNotFound, SendError, ConnectError, ClientClosed: as for `send`. Nothing was sent.
        """
        message = OutgoingMessage(body, tags, keys, properties, flag)
        sink, more = self._make_sink(), check_delivery(delay_level, deliver_at)
        request = self._producer._make_request(topic, message, sink, queue, sharding_key, timeout_s, more)
        request.is_oneway = True
        await self._send(request, sink)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        timeout_s: float | None = None,
    ) -> list[SendResult]:
        """Store many messages with few requests, and return the position of each; see `Producer.send_batch`.

        Raises:
            SendError: `stored` is the number of messages, counted from the first, that are stored. In all else as
                `send`.
            ConfigError: as for `Producer.send_batch`. Nothing was sent.
        """
        parts = self._producer._batch_parts(topic, messages, queue, sharding_key)
        results: list[SendResult] = []
        for part in parts:
            sink = self._make_sink()
            request = self._producer._make_batch_request(topic, part, sink, queue, sharding_key, timeout_s)
            with counting_stored(topic, results):
                results += await self._send(request, sink)
        return results

    def _make_sink(self) -> _LoopSink:
        self._check_usable()
        assert self._loop is not None
        return _LoopSink(self._results, self._loop.create_future())

    async def _send(self, request: SendRequest, sink: _LoopSink) -> Any:
        """Submit a message in its order, as soon as it fits; return its result."""
        assert self._loop is not None
        request.is_blocking = False
        try:
            if self._queued or not self._submit(request, request.timeout_s):
                timer = self._loop.call_later(request.timeout_s, self._time_out, request)
                self._queued[request] = _Waiting(sink.future, timer, self._loop.time() + request.timeout_s)
                if self._producer.state is not ProducerState.RUNNING:
                    self._start()
            return await sink.future
        finally:
            if (waiting := self._queued.pop(request, None)) is not None:  # cancelled before it was sent
                waiting.timer.cancel()
                self._submit_queued()

    def _submit(self, request: SendRequest, left_s: float) -> bool:
        """Submit a message, with the rest of its timeout. Return False if it does not fit, or nothing is started."""
        return self._producer.state is ProducerState.RUNNING and self._producer._try_submit(request, left_s)

    def _submit_queued(self) -> None:
        """Submit the queued messages that fit."""
        assert self._loop is not None
        while self._queued:
            request, waiting = next(iter(self._queued.items()))
            error = None
            try:
                if not self._submit(request, waiting.deadline - self._loop.time()):
                    return
            except RocketError as refused:
                error = refused
            del self._queued[request]
            waiting.timer.cancel()  # from here on the deadline of the request counts
            if error is not None:
                _resolve(waiting.future, None, error)

    def _time_out(self, request: SendRequest) -> None:
        error: RocketError = in_flight_limit_error(request, self.config)
        if self._producer.state is ProducerState.CREATED:
            error = ConnectError(
                ";".join(self.config.name_servers), f"no response within {request.timeout_s:g} s; nothing was sent"
            )
        _resolve(self._queued.pop(request).future, None, error)
        self._submit_queued()  # the next one may be smaller, and fit

    def _fail_queued(self, error: BaseException) -> None:
        queued, self._queued = self._queued, {}
        for waiting in queued.values():
            waiting.timer.cancel()
            _resolve(waiting.future, None, error)

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._results = _LoopResults(loop, self)
        elif self._loop is not loop:
            raise ConfigError("this AsyncProducer was used on another event loop; make one on each")

    def _check_usable(self) -> None:
        self._check_loop()
        if self._is_closed:
            raise ClientClosed("the producer is closed; make a new one")


def _run_in_thread(work: Callable[..., None], *arguments: object) -> asyncio.Future[None]:
    """Run `work` in a new thread, because all threads of the loop's executor may be waiting for a send."""
    thread = SerialExecutor("pyrocket-life")
    done = asyncio.get_running_loop().run_in_executor(thread, work, *arguments)
    thread.shutdown()
    return done


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
