"""A running producer: the path of its messages to the I/O thread, its flushes, and its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from pyrocket_consumer.cluster import Cluster, local_ip
from pyrocket_consumer.config import ProducerConfig
from pyrocket_consumer.errors import ClientClosed, RequestTimeout, RocketError
from pyrocket_consumer.producer.send_dispatcher import SendDispatcher
from pyrocket_consumer.producer.send_future import CallbackThread
from pyrocket_consumer.producer.send_request import Flush, SendRequest
from pyrocket_consumer.protocol.ids import UniqueIds
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.io_thread import Latch

with contextlib.suppress(RuntimeError):  # the main thread has ended, and Python accepts no more executors
    import concurrent.futures.thread  # noqa: F401 - see _flush_at_exit

log = logger("producer")

CloseHook = Callable[[float], object]
"""Ends the other work of a kind of producer, within the given number of seconds."""

STEP_TIMEOUT_S = 5.0
"""The timeout of one step on the I/O thread, and of the end of the callback thread."""

_EXIT_GRACE_S = 1.0  # after the deadline, for the last sends to get their error


class InFlightQueue:
    """Passes requests from user threads to the I/O thread, and limits the unfinished ones.

    User threads call `put`. The I/O thread takes the requests with `take_all`, and calls `release` for each that has
    its result. The lock is for user threads only. The I/O thread must not wait for it, because a signal may have
    interrupted its holder, whose handler waits for the I/O thread. So each side has counters of its own.
    """

    def __init__(self, max_messages: int, max_bytes: int, wake: Callable[[], None]) -> None:
        """`wake` has the I/O thread call `take_all`."""
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._wake = wake
        self._is_woken = False
        self._lock = threading.RLock()
        self._put_messages = self._put_bytes = 0
        self._released_messages = self._released_bytes = 0
        self._queued: deque[SendRequest] = deque()
        self._freed = Latch()  # replaced when it is set and a thread waits for it again
        self._is_closed = self._is_ended = False

    @property
    def messages(self) -> int:
        """The number of messages in flight."""
        return self._put_messages - self._released_messages

    def put(self, request: SendRequest, timeout_s: float) -> bool:
        """Queue `request`, and wait up to `timeout_s` until it fits. Return False if it did not fit in time.

        Raises:
            ClientClosed: the producer is closed.
        """
        if self.try_put(request):
            return True
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._freed.is_set():
                    self._freed = Latch()
                freed = self._freed
            if self.try_put(request):
                return True
            if not freed.wait(deadline - time.monotonic()):
                return False

    def try_put(self, request: SendRequest) -> bool:
        """Queue `request` if it fits. A single message of any size fits, or it could never be sent.

        Raises:
            ClientClosed: the producer is closed.
        """
        size = len(request.body)
        try:
            with self._lock:
                if self._is_closed:
                    raise ClientClosed("the producer is closed; make a new one")
                messages = self._put_messages - self._released_messages
                if messages and (
                    messages >= self._max_messages or self._put_bytes - self._released_bytes + size > self._max_bytes
                ):
                    return False
                self._put_messages += 1
                self._put_bytes += size
                self._queued.append(request)
            if not self._is_woken:  # one wake-up takes all requests that are queued before the I/O thread runs
                self._is_woken = True
                self._wake()
        except BaseException:  # after Ctrl-C the request may be queued, and no later one would wake the I/O thread
            self._is_woken = True
            self._wake()
            raise
        if self._is_ended:
            self.end()
        return True

    def take_all(self) -> list[SendRequest]:
        """Return the requests queued since the last call."""
        self._is_woken = False
        return [self._queued.popleft() for _ in range(len(self._queued))]

    def release(self, request: SendRequest) -> None:
        """Free the capacity that `request` took, because it has its result."""
        self._released_messages += 1
        self._released_bytes += len(request.body)
        self._freed.set()

    def close(self) -> None:
        """Accept no more messages. Threads that wait in `put` get ClientClosed."""
        with self._lock:
            self._is_closed = True
        self._freed.set()

    def end(self) -> None:
        """Fail the requests that arrived too late for the I/O thread to take them."""
        self._is_ended = True
        while self._queued:
            try:
                request = self._queued.popleft()
            except IndexError:
                return
            request.sink.set_exception(ClientClosed("the producer is closed; make a new one"))


class Session:
    """A producer from its start to its close. It does not reference the producer, so that the producer can be freed."""

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        group: str,
        callback_thread: CallbackThread,
        close_hook: CloseHook,
    ) -> None:
        self.cluster = cluster
        self._config = config
        self._group = group
        self._callback_thread = callback_thread
        self._close_hook = close_hook
        self._leaving: asyncio.Task[None] | None = None
        self.pid = os.getpid()
        self.ids = new_ids(config)
        self.in_flight = InFlightQueue(config.max_in_flight_messages, config.max_in_flight_bytes, self._wake)
        self._dispatcher = SendDispatcher(cluster, config, group, self.in_flight.release)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile; then `InFlightQueue.end` fails the message
            self.cluster.loop.call_soon_threadsafe(self._dispatch_queued)

    def _dispatch_queued(self) -> None:
        for request in self.in_flight.take_all():
            self._dispatcher.dispatch(request)

    # --- flushes

    def begin_flush(self) -> Flush:
        """Start to count the results of the messages in flight.

        Raises:
            ClientClosed: the producer is closed, or belongs to the parent process.
            RequestTimeout: the I/O thread does not run.
        """
        return self.cluster.run(self.flush(), STEP_TIMEOUT_S)

    async def flush(self) -> Flush:
        """Do the same on the I/O thread."""
        self._dispatch_queued()
        return self._dispatcher.begin_flush()

    def begin_exit_flush(self) -> Callable[[], None]:
        """Count the messages in flight when the process exits. The result waits for them, and logs the lost ones."""
        deadline = time.monotonic() + self._config.send_timeout_s + _EXIT_GRACE_S
        try:
            flush = self.begin_flush()
        except ClientClosed:  # closed meanwhile, or this is a forked child, and the parent sends the messages
            return lambda: None
        except RequestTimeout as error:
            lost = self.in_flight.messages
            log.error("group=%s the process exits, and %d messages are lost reason=%s", self._config.group, lost, error)
            return lambda: None
        return lambda: self._end_exit_flush(flush, deadline)

    def _end_exit_flush(self, flush: Flush, deadline: float) -> None:
        flush.wait(deadline - time.monotonic())
        self._callback_thread.drain(deadline - time.monotonic())
        if not flush.messages:
            return
        all_sent = flush.sent == flush.messages
        counts = f"{flush.sent} are sent, {flush.failed} were not sent, {flush.pending} have no answer"
        log.log(
            logging.WARNING if all_sent else logging.ERROR,
            "group=%s the process exits and the producer was not closed: %d messages were in flight, %s; "
            "call flush() or close() before the exit%s",
            self._config.group,
            flush.messages,
            "all are sent now" if all_sent else counts,
            f" reason={flush.reason}" if flush.failed else "",
        )

    # --- the end

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until the messages in flight have their results, then disconnect; see `Producer.close`.

        Several threads may do this at once. Each waits for its own timeout, and the first one that ends disconnects.
        """
        self.in_flight.close()
        step_s = STEP_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            self._close_hook(step_s)
            with contextlib.suppress(RocketError):  # the I/O thread does not run, or another close has ended
                self.begin_flush().wait(timeout_s)
        finally:  # also after an interrupt
            self._disconnect(step_s)

    def _disconnect(self, step_s: float) -> None:
        try:
            self.cluster.run(self._leave(), STEP_TIMEOUT_S)
        except ClientClosed:
            pass  # another close has ended
        except RocketError as error:
            log.warning("group=%s closed without unregistering reason=%s", self._config.group, error)
        finally:
            _open_sessions.discard(self)
            self.cluster.close()
            self.in_flight.end()
            self._callback_thread.stop(step_s)

    async def _leave(self) -> None:
        """Fail the requests in flight, and leave the group."""
        self._dispatch_queued()
        if abandoned := self._dispatcher.abandon():
            log.error("group=%s closed with %d sends in flight", self._config.group, abandoned)
        if self._leaving is None:
            unregistering = self.cluster.membership.unregister(producer_group=self._group)
            self._leaving = self.cluster.loop.create_task(unregistering)
        await asyncio.shield(self._leaving)


def new_ids(config: ProducerConfig) -> UniqueIds:
    """Return a generator of message ids for this process. A forked child needs its own."""
    return UniqueIds((config.client_ip or local_ip()).strip("[]"), os.getpid())


# --- the end of the process

# No lock guards it, because a fork could leave a lock taken forever. Each access is one atomic operation of the set.
# Registering twice is harmless.
_open_sessions: set[Session] = set()
_is_registered = False


def flush_at_exit(session: Session) -> None:
    """Flush `session` when the process exits, in both stages of the exit, unless it is closed before.

    `threading` calls first, when the main thread has ended. Other threads still run then, and new threads can start.
    New connections need those threads to resolve host names. `threading` calls its hooks in reverse order, and the hook
    of `concurrent.futures` ends the resolver threads. That hook must be registered before this one, so the module is
    imported above. Children of multiprocessing reach only this stage on Python before 3.13.

    `atexit` calls when the other threads have ended, and flushes the messages that they sent meanwhile.
    """
    global _is_registered
    _open_sessions.add(session)
    if _is_registered:
        return
    _is_registered = True
    atexit.register(_flush_open)
    try:
        threading._register_atexit(_flush_open)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        pass  # the function is private to Python; or the main thread ended before the first producer started


def _flush_open() -> None:
    # Start all flushes before waiting for one.
    for wait_flushed in [each.begin_exit_flush() for each in _open_sessions.copy()]:
        wait_flushed()
