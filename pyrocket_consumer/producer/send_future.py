"""Result sinks of sends: a future whose callbacks run outside the I/O thread, and a cheaper one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import FINISHED, RUNNING
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from pyrocket_consumer.text import logger, safe_repr
from pyrocket_consumer.transport.io_thread import Latch, ThreadFuture

log = logger("producer")

T = TypeVar("T")
K = TypeVar("K")


class ResultSink(Protocol):
    """Receives the result of a send: once, from the I/O thread. It must not block."""

    def set_result(self, result: Any, /) -> None:
        """Receive the result."""

    def set_exception(self, error: BaseException, /) -> None:
        """Receive the error of a send that failed."""


class KeyedResultSink(Generic[K]):
    """Puts `key` into a queue when its send has ended, with the result or the error.

    It is for callers with thousands of sends in flight, because it costs a tenth of a future.
    """

    __slots__ = ("_done", "_key")

    def __init__(self, done: queue.SimpleQueue[tuple[K, Any]], key: K) -> None:
        self._done = done
        self._key = key

    def set_result(self, result: Any) -> None:
        self._done.put((self._key, result))

    def set_exception(self, error: BaseException) -> None:
        self._done.put((self._key, error))


class CallbackThread:
    """Runs functions of users one after the other, on a thread that starts with the first one.

    A function may wait, send, and even close the producer, because the I/O thread continues meanwhile. Threads that
    schedule functions wait for no lock. If two of them start a thread, only the one that gets `_claim` runs.
    """

    def __init__(self, name: str = "pyrocket-callbacks") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._claim = threading.Lock()
        self._thread: threading.Thread | None = None  # once it runs
        self._is_ended = self._is_start_failure_logged = False

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule `function` on the thread. After the thread has ended, call it here.

        If the thread cannot start, this logs an error, and `function` waits for the next call or for `stop`.
        """
        self._calls.put(function)
        if self._is_ended:
            self._run_queued()
        elif self._thread is None:
            self._start()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except Exception as error:  # the container allows no more threads, or the process exits
            if not self._is_start_failure_logged:
                log.error(
                    "the thread %s cannot be started, so callbacks wait for a later attempt reason=%s",
                    self._name,
                    error,
                )
            self._is_start_failure_logged = True

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs on this thread."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            while (function := self._calls.get()) is not None:
                self.run_logged(function)
        finally:
            self._is_ended = True  # a caller that read False has queued its function before the next line
            self._run_queued()

    def _run_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (function := self._calls.get_nowait()) is not None:
                    self.run_logged(function)

    def run_logged(self, function: Callable[[], object]) -> None:
        """Call `function` here, and log its exception."""
        try:
            function()
        except Exception:
            log.exception("a callback failed")
        except BaseException:  # SystemExit of one callback must not end the thread of all
            if not self.is_current:
                raise
            log.exception("a callback called exit, which ends only the callback; the next one follows")

    def drain(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until the functions scheduled so far have run."""
        if self._thread is not None and not self.is_current:
            done = Latch()
            self.call_soon(done.set)
            done.wait(timeout_s)

    def stop(self, timeout_s: float | None) -> None:
        """Run the scheduled functions, end the thread, and wait up to `timeout_s` for it, except on the thread itself.

        If the thread could not start, the functions run here.
        """
        self._calls.put(None)
        if self._thread is None:
            self._run()
        elif not self.is_current:
            self._thread.join(timeout_s)


class _Condition:
    """The lock, the state and the waiters that `wait` and `as_completed` of `concurrent.futures` use on a future.

    The state changes only under the lock. The I/O thread never waits for it, because a signal may have interrupted the
    thread that holds it. In that case the holder changes the state when it releases the lock.
    """

    def __init__(self, future: SendFuture[Any]) -> None:
        self._future = future
        self._lock = threading.RLock()
        self.state = RUNNING  # a queued message cannot be withdrawn
        self.waiters: list[Any] = []

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()
        if self._future.done():
            self.notify_waiters()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def notify_waiters(self) -> None:
        """Notify the waiters that the future is done. If another thread holds the lock, that thread does it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.state != FINISHED:
                self.state = FINISHED
                for waiter in self.waiters:
                    (waiter.add_result if self._future.exception() is None else waiter.add_exception)(self._future)
        finally:
            self._lock.release()


class SendFuture(Future[T]):
    """A Future of a send. The producer resolves its `outcome`, and no one else can.

    Its callbacks run on the callback thread, because the I/O thread, which resolves it, runs no user code.
    """

    def __init__(self, callbacks: CallbackThread) -> None:
        # Future.__init__ is not called: it makes a lock, which the I/O thread would have to wait for.
        self._callback_thread = callbacks
        self.outcome: ThreadFuture[T] = ThreadFuture()

    def __repr__(self) -> str:
        text, outcome = f"{type(self).__name__} at {id(self):#x} state=", self.outcome
        if not outcome.is_set():
            return f"<{text}running>"
        if outcome.error is not None:
            return f"<{text}finished raised {type(outcome.error).__name__}>"
        return f"<{text}finished returned {type(outcome.result()).__name__}>"

    def set_result(self, result: T) -> None:
        """Raise InvalidStateError, because only the producer resolves the future."""
        raise InvalidStateError(_ONLY_BY_PRODUCER)

    def set_exception(self, exception: BaseException | None) -> None:
        """Raise InvalidStateError, as `set_result` does."""
        raise InvalidStateError(_ONLY_BY_PRODUCER)

    @property
    def _condition(self) -> _Condition:  # type: ignore[override]  # neither a Condition nor an attribute
        condition: _Condition | None = self.__dict__.get("_standard_condition")
        if condition is None:  # another thread may be first; then this one is dropped
            condition = self.__dict__.setdefault("_standard_condition", _Condition(self))
            self.outcome.add_observer(condition.notify_waiters)
        return condition

    @property
    def _state(self) -> str:  # type: ignore[override]
        return self._condition.state

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return self._condition.waiters

    def cancel(self) -> bool:
        """Return False, because a queued message cannot be withdrawn."""
        return False

    def cancelled(self) -> bool:
        """Return False, because it cannot be cancelled."""
        return False

    def running(self) -> bool:
        """Return whether the future has no result yet."""
        return not self.outcome.is_set()

    def done(self) -> bool:
        """Return whether the future has a result or an error."""
        return self.outcome.is_set()

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error of the send. Raise TimeoutError after `timeout` seconds."""
        try:
            return self.outcome.result(timeout)
        finally:
            self = None  # type: ignore[assignment]  # break the cycle of error, traceback and future

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the send, or None if it succeeded. Raise TimeoutError after `timeout` seconds."""
        if not self.outcome.wait(timeout):
            raise TimeoutError
        return self.outcome.error

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Call `fn(future)` on the callback thread when the future has its result.

        Raises:
            TypeError: `fn` is not callable.
        """
        if not callable(fn):
            raise TypeError(f"fn={safe_repr(fn)} is not callable; pass a function of the future, not its return value")
        self.__dict__.setdefault("_callbacks", deque()).append(partial(fn, self))
        self.outcome.add_observer(self._schedule_callbacks)  # it is there once, however often it is added

    def _schedule_callbacks(self) -> None:
        self._callback_thread.call_soon(self._run_callbacks)

    def _run_callbacks(self) -> None:
        """Run the callbacks in the order in which they were added, each once."""
        callbacks: deque[Callable[[], object]] = self.__dict__["_callbacks"]
        with contextlib.suppress(IndexError):
            while True:
                call = callbacks.popleft()
                self._callback_thread.run_logged(call)


_ONLY_BY_PRODUCER = "only the producer sets the result of a send; make your own Future for other results"
