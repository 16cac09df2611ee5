"""The thread that owns every socket and timer of one client, and waits of other threads for events and results.

A signal handler runs between any two steps of the main thread, and may raise there. The locks of `threading.Event` and
`concurrent.futures.Future` are held for several steps. A handler can then wait forever for the thread that it has
interrupted, and Ctrl-C can leave the lock taken. So here each waiter has a plain lock of its own, which is released in
one step. The thread that sets the event, usually the I/O thread, never waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from pyrocket_consumer.errors import ClientClosed, RequestTimeout

P = ParamSpec("P")
T = TypeVar("T")

_SIGNAL_CHECK_S = 1.0
"""How long a wait sleeps at most. Python handles a signal that arrives just before a sleep only after that sleep."""
_RESOLVED = "the future has a result already"


class Latch:
    """A flag that is set once, by any thread or signal handler, and that any thread or coroutine can wait for."""

    _is_set = False

    def __init__(self) -> None:
        self._observers: dict[Callable[[], object], None] = {}

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and call all observers."""
        self._is_set = True
        if self._observers:
            self._notify()

    def add_observer(self, notify: Callable[[], object]) -> None:
        """Call `notify` once when the flag is set, or now if it is set already. It must not block or raise."""
        self._observers[notify] = None
        if self._is_set:  # checked after the observer was added, so that it is called by `set` or here
            self._notify()

    def _notify(self) -> None:
        for notify in list(self._observers):
            if self._observers.pop(notify, notify) is None:  # otherwise another thread calls it
                notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for at most `timeout_s`; None waits without limit. Return whether the flag is set."""
        if self._is_set:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wake = threading.Lock()
        wake.acquire()
        self.add_observer(wake.release)
        try:
            while not self._is_set:
                left_s = _SIGNAL_CHECK_S if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    break
                wake.acquire(timeout=min(left_s, _SIGNAL_CHECK_S))
        finally:
            self._observers.pop(wake.release, None)
        return self._is_set

    async def wait_async(self, timeout_s: float | None = None) -> bool:
        """Do the same as `wait`, on an asyncio loop."""
        loop, is_set_event = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(is_set_event.set)
            except RuntimeError:
                pass  # the loop and its waiting task have ended

        self.add_observer(notify)
        try:
            if not self._is_set:
                async with asyncio.timeout(timeout_s):
                    await is_set_event.wait()
        except TimeoutError:
            pass
        finally:
            self._observers.pop(notify, None)
        return self._is_set


class ThreadFuture(Latch, Generic[T]):
    """The result or error of another thread's work."""

    _result: T | None = None
    _error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Set the result. A future has one result or error; a second one raises InvalidStateError."""
        if self._is_set:
            raise concurrent.futures.InvalidStateError(_RESOLVED)
        self._result = result
        self._is_set = True  # as `set` does
        if self._observers:
            self._notify()

    def set_exception(self, error: BaseException) -> None:
        """Set the error in place of a result."""
        if self._is_set:
            raise concurrent.futures.InvalidStateError(_RESOLVED)
        self._error = error
        self.set()

    @property
    def error(self) -> BaseException | None:
        """The error, or None if there is a result, or nothing yet."""
        return self._error

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result, and return it, or raise the error. Raise TimeoutError after `timeout_s` seconds."""
        if not (self._is_set or self.wait(timeout_s)):
            raise TimeoutError
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]
        finally:
            self = None  # type: ignore[assignment]  # the error's traceback refers to this frame, which would create a cycle


class IoThread:
    """One asyncio loop on one daemon thread. Sockets, timers and their callbacks are confined to it.

    A signal may interrupt `start` at any moment, so that no caller knows whether the thread will run. Therefore the
    thread and `prevent_start` compete for `_claim`, and only the winner uses the loop.
    """

    def __init__(self, name: str = "pyrocket-io", on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called on the thread as its last step, or by `prevent_start`."""
        self._on_end = on_end
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._claim = threading.Lock()
        self._not_started: dict[Coroutine[Any, Any, Any], Callable[[], object]] = {}
        """Coroutines that may not have started yet, each with a function that reports that it never will."""

    def start(self) -> None:
        """Start the thread; once only."""
        self._thread.start()

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # stopped before it began
        asyncio.set_event_loop(self.loop)
        try:
            while not self._run_until_stopped():
                pass
        finally:
            self._end_tasks()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self._end_tasks()  # tasks that started during the first call
            self._end()

    def _end(self) -> None:
        self.loop.close()  # threads of its executor end on their own, also one that hangs in a name resolution
        for coroutine in list(self._not_started):
            self._reject(coroutine)
        self._on_end()

    def _end_tasks(self) -> None:
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _reject(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Raise in the caller that waits for `coroutine`, because it will not start."""
        reject = self._not_started.pop(coroutine, None)
        if reject is not None:
            coroutine.close()
            reject()

    def _run_until_stopped(self) -> bool:
        """Run the loop until `stop`. Return False if a task raised SystemExit or KeyboardInterrupt."""
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            self.loop.call_exception_handler({"message": "work on the I/O thread wants to exit", "exception": error})
            return False
        return True

    def prevent_start(self) -> bool:
        """Have the thread never run. Return False if it runs already, or has ended."""
        if not self._claim.acquire(blocking=False):
            return False
        self._end()
        return True

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the loop, cancel its tasks, and wait up to `timeout_s` for the thread."""
        if not self.prevent_start():
            self.call_soon(self.loop.stop)
            if self._thread.is_alive() and not self.is_current:
                self._thread.join(timeout_s)

    def run_in_background(self, function: Callable[[], object]) -> None:
        """Call `function` on a new thread. This takes no lock and does not block, so finalizers may use it."""
        thread = threading.Thread(target=function, name="pyrocket-closing", daemon=True)
        self.call_soon(thread.start)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, or never runs. It has not while it begins."""
        return self.loop.is_closed()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def check_not_current(self) -> None:
        """Raise RuntimeError if the caller runs on this thread."""
        if self.is_current:
            raise RuntimeError("a blocking call on the I/O thread would stop all network work; await it instead")

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> IoCall[T]:
        """Start `coroutine` on the I/O thread. The result is a ClientClosed if the thread ends, or has ended."""
        call = IoCall[T]()

        def begin() -> None:
            if self._not_started.pop(coroutine, None) is not None:
                call.task = self.loop.create_task(coroutine)
                call.task.add_done_callback(call.on_done)

        self._not_started[coroutine] = partial(call.set_exception, _closed_error())
        if not self.call_soon(begin):
            self._reject(coroutine)
        return call

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run `coroutine` on the I/O thread and return its result.

        Raises:
            RuntimeError: called on the I/O thread, where waiting would block all network I/O. Await the coroutine.
            RequestTimeout: not done within `timeout_s`; the coroutine is cancelled.
            ClientClosed: the thread has ended.
        """
        try:
            self.check_not_current()
        except RuntimeError:
            coroutine.close()
            raise
        if self.loop.is_closed():
            coroutine.close()
            raise ClientClosed("the client is closed; make a new one")
        call = self.begin(coroutine)
        try:
            if not call.wait(timeout_s):
                name = getattr(coroutine, "__name__", "call").strip("_").replace("_", " ")
                raise RequestTimeout(name, "the I/O thread", timeout_s or 0)
        except BaseException:
            self.call_soon(call.cancel)
            raise
        return call.result()

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Do the same as `run`, for a caller on another asyncio loop. If it is cancelled, so is `coroutine`."""
        call = self.begin(coroutine)
        try:
            await call.wait_async()
        except BaseException:
            self.call_soon(call.cancel)
            raise
        return call.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `coroutine` on the I/O thread and return a future of its result at once.

        The future is cancelled if the thread ends first.

        Raises:
            ClientClosed: the thread has ended.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise ClientClosed("the client is closed; make a new one") from None
        self._not_started[coroutine] = future.cancel
        future.add_done_callback(lambda done: self._not_started.pop(coroutine, None))
        if self.loop.is_closed():  # it was closed before the coroutine was registered
            self._reject(coroutine)
        return future

    def call_soon(self, function: Callable[[], object]) -> bool:
        """Call `function` on the thread. Return False if its loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            return False
        return True


class IoCall(ThreadFuture[T]):
    """The result of a coroutine on the I/O thread."""

    task: asyncio.Task[T] | None = None  # once it has started

    def cancel(self) -> None:
        """Cancel the coroutine, on the I/O thread."""
        if self.task is not None:
            self.task.cancel()

    def on_done(self, task: asyncio.Task[T]) -> None:
        """Take over the result of the task."""
        if task.cancelled():
            self.set_exception(_closed_error())
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


def _closed_error() -> ClientClosed:
    return ClientClosed("the client was closed while the call waited")


class SerialExecutor(concurrent.futures.Executor):
    """An executor that runs one call at a time, in the order in which they were submitted, on one daemon thread.

    Other executors do not use daemon threads. Here a hanging call cannot keep the process alive. Calls that `atexit`
    handlers submit still run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> concurrent.futures.Future[T]:
        """Call `work` on the thread, and return a future of its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((done, lambda: work(*arguments, **named)))
        return done

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the thread after the calls submitted so far. Do not wait for it."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            done, work = call
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            del call, done, work  # so that an idle thread keeps none of their objects alive
