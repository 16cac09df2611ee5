"""Result sinks of sends: a future whose callbacks run outside the I/O thread, and cheaper ones."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import FINISHED, RUNNING
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from pyrocket_consumer.text import logger, safe_repr
from pyrocket_consumer.transport.thread_future import ThreadFuture

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

    A function may wait, send, and even close the producer, because the I/O thread continues meanwhile. No code here
    waits for a lock. A signal may interrupt a thread anywhere, and its handler may wait for the I/O thread.
    """

    def __init__(self, name: str = "pyrocket-callbacks") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()  # acquired, without waiting, to start the thread or to end without one
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
        if not self._starting.acquire(blocking=False):
            return  # another thread starts it
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        except Exception as error:  # the container allows no more threads, or the process exits
            if not self._is_start_failure_logged:
                log.error(
                    "the thread %s cannot be started, so callbacks wait for a later attempt reason=%s",
                    self._name,
                    error,
                )
            self._is_start_failure_logged = True
        finally:
            self._starting.release()

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs on this thread."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        while (function := self._calls.get()) is not None:
            self.run_logged(function)
        self._finish()

    def _finish(self) -> None:
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
            done = threading.Event()
            self.call_soon(done.set)
            done.wait(max(timeout_s, 0))

    def stop(self, timeout_s: float | None) -> None:
        """Run the scheduled functions, end the thread, and wait up to `timeout_s` for it, except on the thread itself.

        If the thread could not start, the functions run here.
        """
        self._calls.put(None)
        if self._thread is None and self._starting.acquire(blocking=False):  # and never releases it
            self._finish()
        elif self._thread is not None and not self.is_current:
            self._thread.join(timeout_s)


class _Condition:
    """The lock and the waiters that `wait` and `as_completed` of `concurrent.futures` use on a future.

    It replaces a Condition, because the I/O thread must not wait for its lock. A signal may have interrupted the thread
    that holds it, and the handler may wait for the I/O thread. In that case the holder notifies the waiters when it
    releases the lock.
    """

    def __init__(self, future: SendFuture[Any]) -> None:
        self._future = future
        self._lock = threading.RLock()
        self.waiters: list[Any] = []

    def acquire(self) -> bool:
        return self._lock.acquire()

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
            if self._future._state != FINISHED:
                self._future._state = FINISHED
                for waiter in self.waiters:
                    (waiter.add_result if self._future._exception is None else waiter.add_exception)(self._future)
        finally:
            self._lock.release()


_CONDITION = "condition"


class SendFuture(Future[T]):
    """A Future that its producer resolves through a `Promise`.

    Its callbacks run on the callback thread, because the I/O thread, which resolves it, runs no user code.

    The I/O thread waits for no lock here. A signal handler may interrupt a user thread anywhere, and wait for the I/O
    thread. All observers are in one dictionary, and each operation on it is atomic. A user thread adds its observer
    first, and then checks `_is_done`. The I/O thread sets `_is_done` first, and then reads the observers. So one of the
    two always sees the other.

    Only `wait` and `as_completed` need the condition of a Future, so it is made on demand. `_state` is for threads that
    hold it, and changes only under it.
    """

    _state = RUNNING  # a queued message cannot be withdrawn
    _result: T | None = None
    _exception: BaseException | None = None
    _is_done = False

    def __init__(self, callbacks: CallbackThread) -> None:
        # Future.__init__ is not called. The class attributes are the initial values.
        self._callback_thread = callbacks
        self._observers: dict[object, Any] = {}  # waiters and callbacks, in order; the condition under its name

    def set_result(self, result: T) -> None:
        """Raise InvalidStateError, because only the producer resolves the future."""
        raise InvalidStateError(_ONLY_BY_PRODUCER)

    def set_exception(self, exception: BaseException | None) -> None:
        """Raise InvalidStateError, as `set_result` does."""
        raise InvalidStateError(_ONLY_BY_PRODUCER)

    def _resolve(self, result: T | None, error: BaseException | None) -> None:
        if self._is_done:
            raise InvalidStateError(f"the future has a result already: {self!r}")
        self._result, self._exception = result, error
        self._is_done = True
        observers = self._observers.copy()
        if not observers:
            return
        for each in observers:  # first those whose notification cannot fail
            if isinstance(each, ThreadFuture):
                each.set_result(None)
        if (condition := observers.pop(_CONDITION, None)) is not None:
            condition.notify_waiters()
        if any(isinstance(each, partial) for each in observers):
            self._schedule_callbacks()

    @property
    def _condition(self) -> _Condition:  # type: ignore[override]  # neither a Condition nor an attribute
        condition: _Condition | None = self._observers.get(_CONDITION)
        if condition is None:
            made = _Condition(self)  # another thread may be first; then this one is dropped
            condition = self._observers.setdefault(_CONDITION, made)
        if self._is_done:
            condition.notify_waiters()
        return condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]  # for threads that hold the condition
        waiters: list[Any] = self._observers[_CONDITION].waiters
        return waiters

    def cancel(self) -> bool:
        """Return False, because a queued message cannot be withdrawn."""
        return False

    def cancelled(self) -> bool:
        """Return False, because it cannot be cancelled."""
        return False

    def running(self) -> bool:
        """Return whether the future has no result yet."""
        return not self._is_done

    def done(self) -> bool:
        """Return whether the future has a result or an error."""
        return self._is_done

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error of the send. Raise TimeoutError after `timeout` seconds."""
        if not self._is_done:
            self._wait(timeout)
        try:
            if self._exception is not None:
                raise self._exception
            return self._result  # type: ignore[return-value]
        finally:
            self = None  # type: ignore[assignment]  # break the cycle of error, traceback and future

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the send, or None if it succeeded. Raise TimeoutError after `timeout` seconds."""
        if not self._is_done:
            self._wait(timeout)
        return self._exception

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the result. A signal may interrupt the wait, which Future does not support; see `ThreadFuture`."""
        waiter: ThreadFuture[None] = ThreadFuture()
        self._observers[waiter] = None
        try:
            if not (self._is_done or waiter.wait(timeout_s) or self._is_done):
                raise TimeoutError
        finally:
            self._observers.pop(waiter, None)

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Call `fn(future)` on the callback thread when the future has its result.

        Raises:
            TypeError: `fn` is not callable.
        """
        if not callable(fn):
            raise TypeError(f"fn={safe_repr(fn)} is not callable; pass a function of the future, not its return value")
        call = partial(fn, self)
        self._observers[call] = None
        if self._is_done:
            self._schedule_callbacks()

    def _schedule_callbacks(self) -> None:
        try:
            self._callback_thread.call_soon(self._run_callbacks)
        except Exception:
            log.exception("the callbacks of a future cannot be scheduled")

    def _run_callbacks(self) -> None:
        """Run the callbacks in the order in which they were added, each once."""
        for call in self._observers.copy():
            # pop() returns `call` itself if another thread runs it.
            if isinstance(call, partial) and self._observers.pop(call, call) is None:
                self._callback_thread.run_logged(call)


_ONLY_BY_PRODUCER = "only the producer sets the result of a send; make your own Future for other results"


class Promise(Generic[T]):
    """The side of a SendFuture that the producer uses."""

    __slots__ = ("_future",)

    def __init__(self, future: SendFuture[T]) -> None:
        self._future = future

    def set_result(self, result: T) -> None:
        """Resolve the future with a result. A future is resolved once."""
        self._future._resolve(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Resolve the future with an error."""
        self._future._resolve(None, error)
