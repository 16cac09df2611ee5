"""Who waits for the outcome of a send: a future whose callbacks stay off the I/O thread, or less."""

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
    """Is told what became of a send: once, by the I/O thread. Must not block."""

    def set_result(self, result: Any, /) -> None:
        """Take the result."""

    def set_exception(self, error: BaseException, /) -> None:
        """Take the reason why there is none."""


class KeyedResultSink(Generic[K]):
    """Puts `key` into a queue when its send has ended, with the result, or the error if it has failed.

    For callers with thousands of sends under way: it costs a tenth of a future.
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
    """Runs users' functions one after the other, on a thread that starts with the first of them.

    A function may wait, send, and even close the producer: the I/O thread goes on meanwhile. Nobody waits for a lock
    here: a thread may be interrupted anywhere, and what its signal's handler waits for is for the I/O thread to do.
    """

    def __init__(self, name: str = "pyrocket-callbacks") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()  # taken by who starts the thread, or ends all without one; nobody waits
        self._thread: threading.Thread | None = None  # once it runs
        self._is_ended = self._is_start_failure_logged = False

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have `function` called soon; once the thread has ended, here and now.

        Where the thread cannot be started, this logs it, and `function` waits for the next try, or `stop`.
        """
        self._calls.put(function)
        if self._is_ended:
            self._run_queued()
        elif self._thread is None:
            self._start()

    def _start(self) -> None:
        if not self._starting.acquire(blocking=False):
            return  # another one does it
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        except Exception as error:  # no more threads in this container, or the process ends
            if not self._is_start_failure_logged:
                log.error(
                    "the thread %s cannot be started, so callbacks wait for a later try reason=%s", self._name, error
                )
            self._is_start_failure_logged = True
        finally:
            self._starting.release()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        while (function := self._calls.get()) is not None:
            self.run_logged(function)
        self._finish()

    def _finish(self) -> None:
        self._is_ended = True  # whoever has not seen it has put before what is called here
        self._run_queued()

    def _run_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (function := self._calls.get_nowait()) is not None:
                    self.run_logged(function)

    def run_logged(self, function: Callable[[], object]) -> None:
        """Call `function` here; if it fails, that is logged."""
        try:
            function()
        except Exception:
            log.exception("a callback failed")
        except BaseException:  # SystemExit is no wish of a thread that belongs to all callbacks
            if not self.is_current:
                raise
            log.exception("a callback wants to exit, and cannot from there; the next one follows")

    def drain(self, timeout_s: float) -> None:
        """Wait until what was to be called so far has run, for up to `timeout_s`."""
        if self._thread is not None and not self.is_current:
            done = threading.Event()
            self.call_soon(done.set)
            done.wait(max(timeout_s, 0))

    def stop(self, timeout_s: float | None) -> None:
        """Run what waits, and end the thread; wait up to `timeout_s` for that, unless this is that thread.

        What waits for a thread that could not be started runs here.
        """
        self._calls.put(None)
        if self._thread is None and self._starting.acquire(blocking=False):  # for good
            self._finish()
        elif self._thread is not None and not self.is_current:
            self._thread.join(timeout_s)


class _Condition:
    """What `wait` and `as_completed` hold while they look at a future, and who waits there.

    It is no Condition, for the I/O thread must not wait until it is free: whoever holds it may have been interrupted,
    and wait for the I/O thread. What that has to tell here is told by the holder then, who looks when it is done.
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
        """Tell who waits that the future is done, unless somebody holds this, who does it then."""
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
    """A Future that its producer completes, through a `Promise`.

    Its callbacks run on the callback thread: the I/O thread, which completes it, runs no user code.

    The I/O thread waits for no lock here: a signal's handler may interrupt a user's thread anywhere, and wait for what
    the I/O thread has to tell. Who is to be told stands in one dictionary, and each step on it is one. A user's thread
    adds itself, and then looks whether the future is told; who tells it says so, and then looks who is there.

    It makes the condition of a Future only for `wait` and `as_completed`, which alone need it. `_state` is for those
    who hold it, and changes only under it.
    """

    _state = RUNNING  # a message handed over cannot be taken back
    _result: T | None = None
    _exception: BaseException | None = None
    _is_done = False

    def __init__(self, callbacks: CallbackThread) -> None:
        # Not that of Future. What stands in the class is set when it changes.
        self._callback_thread = callbacks
        self._observers: dict[object, Any] = {}  # outcomes and callbacks, in their order; and a condition by its name

    def set_result(self, result: T) -> None:
        """Raise InvalidStateError: what became of a message is its producer's to tell."""
        raise InvalidStateError(_ONLY_BY_PRODUCER)

    def set_exception(self, exception: BaseException | None) -> None:
        """Raise InvalidStateError, as `set_result` does."""
        raise InvalidStateError(_ONLY_BY_PRODUCER)

    def _resolve(self, result: T | None, error: BaseException | None) -> None:
        if self._is_done:
            raise InvalidStateError(f"it is told already: {self!r}")
        self._result, self._exception = result, error
        self._is_done = True
        observers = self._observers.copy()
        if not observers:
            return
        for each in observers:  # first those who are told by what cannot fail
            if isinstance(each, ThreadFuture):
                each.set_result(None)
        if (condition := observers.pop(_CONDITION, None)) is not None:
            condition.notify_waiters()
        if any(isinstance(each, partial) for each in observers):
            self._schedule_callbacks()

    @property
    def _condition(self) -> _Condition:  # type: ignore[override]  # no Condition, and no attribute
        condition: _Condition | None = self._observers.get(_CONDITION)
        if condition is None:
            made = _Condition(self)  # perhaps in vain: the first is everybody's
            condition = self._observers.setdefault(_CONDITION, made)
        if self._is_done:
            condition.notify_waiters()
        return condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]  # for those who hold the condition
        waiters: list[Any] = self._observers[_CONDITION].waiters
        return waiters

    def cancel(self) -> bool:
        """Return False: a message handed over cannot be taken back."""
        return False

    def cancelled(self) -> bool:
        """Return False, for it cannot be."""
        return False

    def running(self) -> bool:
        """Tell whether the result is not there yet."""
        return not self._is_done

    def done(self) -> bool:
        """Tell whether the result is there, or the reason why there is none."""
        return self._is_done

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise why there is none; TimeoutError when it is not there within `timeout` seconds."""
        if not self._is_done:
            self._wait(timeout)
        try:
            if self._exception is not None:
                raise self._exception
            return self._result  # type: ignore[return-value]
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback would hold it, and it the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why there is no result, or None; TimeoutError when that is not known within `timeout` seconds."""
        if not self._is_done:
            self._wait(timeout)
        return self._exception

    def _wait(self, timeout_s: float | None) -> None:
        """Wait as one who may be interrupted, which Future does not withstand; see `ThreadFuture`."""
        waiter: ThreadFuture[None] = ThreadFuture()
        self._observers[waiter] = None
        try:
            if not (self._is_done or waiter.wait(timeout_s) or self._is_done):
                raise TimeoutError
        finally:
            self._observers.pop(waiter, None)

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Have `fn(future)` called on the callback thread when the result is there.

        Raises:
            TypeError: `fn` cannot be called.
        """
        if not callable(fn):
            raise TypeError(f"fn={safe_repr(fn)} is not callable; pass a function of the future, not what it returns")
        call = partial(fn, self)
        self._observers[call] = None
        if self._is_done:
            self._schedule_callbacks()

    def _schedule_callbacks(self) -> None:
        try:
            self._callback_thread.call_soon(self._run_callbacks)
        except Exception:
            log.exception("the callbacks of a future cannot be handed on")

    def _run_callbacks(self) -> None:
        """Run the callbacks there are, in the order in which they were added, each once."""
        for call in self._observers.copy():
            if isinstance(call, partial) and self._observers.pop(call, call) is None:  # else another thread has it
                self._callback_thread.run_logged(call)


_ONLY_BY_PRODUCER = (
    "the producer tells what became of a message, and nobody else; for a future of your own make a Future"
)


class Promise(Generic[T]):
    """The producer's end of a SendFuture."""

    __slots__ = ("_future",)

    def __init__(self, future: SendFuture[T]) -> None:
        self._future = future

    def set_result(self, result: T) -> None:
        """Tell the result; the future is told once."""
        self._future._resolve(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Tell why there is none."""
        self._future._resolve(None, error)
