"""A thread for blocking code of users: an offset store, an allocation strategy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SerialExecutor(Executor):
    """An executor that runs one call at a time, in the order in which they were submitted, on one daemon thread.

    Other executors do not use daemon threads. Here a hanging call cannot keep the process alive. Calls that `atexit`
    handlers submit still run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Call `work` on the thread, and return a future of its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        done: Future[T] = Future()
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
