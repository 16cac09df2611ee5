"""Who waits for the outcome of a send: a future whose callbacks stay off the I/O thread, or less."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from pyrocket_consumer.net.outcome import Outcome
from pyrocket_consumer.text import logger

log = logger("producer")

T = TypeVar("T")
K = TypeVar("K")


class Waiting(Protocol):
    """Is told what became of a send: once, by the I/O thread. Must not block."""

    def set_result(self, result: Any, /) -> None:
        """Take the result."""

    def set_exception(self, error: BaseException, /) -> None:
        """Take the reason why there is none."""


class Told(Generic[K]):
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

    A function may wait, send, and even close the producer: the I/O thread goes on meanwhile.
    """

    def __init__(self, name: str = "pyrocket-callbacks") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def call(self, function: Callable[[], object]) -> None:
        """Have `function` called soon; once the thread is stopped, here and now."""
        with self._lock:
            stopped = self._stopped
            if not stopped:
                self._calls.put(function)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        if stopped:
            _call(function)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                _call(function)
            except BaseException:  # SystemExit is no wish of a thread that belongs to all callbacks
                log.exception("a callback wants to exit, and cannot from there; the next one follows")

    def catch_up(self, timeout_s: float) -> None:
        """Wait until what was to be called so far has run, for up to `timeout_s`."""
        if self._thread is not None and not self.is_current:
            done = threading.Event()
            self.call(done.set)
            done.wait(max(timeout_s, 0))

    def stop(self, timeout_s: float | None) -> None:
        """Run what waits, and end the thread; wait up to `timeout_s` for that, unless this is that thread."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._calls.put(None)
            thread = self._thread
        if thread is not None and not self.is_current:
            thread.join(timeout_s)


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        log.exception("a callback failed")


class SendFuture(Future[T]):
    """A Future whose callbacks run on the callback thread: the I/O thread, which completes it, runs no user code.

    It makes the condition of a Future only for `wait` and `as_completed`, which alone need it: to make one takes longer
    than all the rest. Whoever made it before the future was told is told through it, as by any Future.
    """

    _state = RUNNING  # a message handed over cannot be taken back
    _result: T | None = None
    _exception: BaseException | None = None
    _made: threading.Condition | None = None
    _is_told = False
    _callbacks: tuple[Callable[[Future[T]], object], ...] = ()
    _waiting: tuple[Outcome[None], ...] = ()

    def __init__(self, callbacks: CallbackThread) -> None:
        # Not that of Future. What stands in the class is set when it changes.
        self._callback_thread = callbacks
        self._lock = threading.RLock()  # a leaf; a signal's handler may come in the middle, and ask for the result

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]  # an attribute of Future
        with self._lock:
            if self._made is None:
                self._waiters = []
                self._done_callbacks: list[Callable[[Future[T]], object]] = []
                self._made = threading.Condition()
            return self._made

    def set_result(self, result: T) -> None:
        """Take the result."""
        with self._lock:
            is_alone = self._made is None and self._state == RUNNING
            if is_alone:
                self._result = result
                self._state = FINISHED
                self._is_told = True
        if not is_alone:
            super().set_result(result)
        self._tell()

    def set_exception(self, exception: BaseException | None) -> None:
        """Take the reason why there is none."""
        with self._lock:
            is_alone = self._made is None and self._state == RUNNING
            if is_alone:
                self._exception = exception
                self._state = FINISHED
                self._is_told = True
        if not is_alone:
            super().set_exception(exception)
        self._tell()

    def _tell(self) -> None:
        if not self._is_told:
            with self._lock:
                self._is_told = True
        for function in self._callbacks:  # nobody adds to them any more
            self._callback_thread.call(partial(function, self))
        for told in self._waiting:
            told.set_result(None)
        self._callbacks = self._waiting = ()

    def cancel(self) -> bool:
        """Return False: a message handed over cannot be taken back."""
        return False

    def cancelled(self) -> bool:
        """Return False, for it cannot be."""
        return False

    def running(self) -> bool:
        """Tell whether the result is not there yet."""
        return self._state == RUNNING

    def done(self) -> bool:
        """Tell whether the result is there, or the reason why there is none."""
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise why there is none; TimeoutError when it is not there within `timeout` seconds."""
        self._wait(timeout)
        try:
            if self._exception is not None:
                raise self._exception
            return self._result  # type: ignore[return-value]
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback would hold it, and it the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why there is no result, or None; TimeoutError when that is not known within `timeout` seconds."""
        self._wait(timeout)
        return self._exception

    def _wait(self, timeout_s: float | None) -> None:
        """Wait as one who may be interrupted, which Future does not withstand; see `Outcome`."""
        if self._state == FINISHED:
            return
        told: Outcome[None] = Outcome()
        with self._lock:
            if self._is_told:
                return
            self._waiting += (told,)
        if not told.wait(timeout_s):
            with self._lock:
                self._waiting = tuple(each for each in self._waiting if each is not told)
            if self._state != FINISHED:
                raise TimeoutError

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Have `fn(future)` called on the callback thread when the result is there."""
        with self._lock:
            if not self._is_told:
                self._callbacks += (fn,)
                return
        self._callback_thread.call(partial(fn, self))
