"""A thread for code of the user's that may block: an offset store, an allocation strategy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SerialExecutor(Executor):
    """Runs calls one after the other, in the order in which they are asked for.

    It is a daemon, which the threads of other executors are not: a call that hangs keeps no process from ending, and
    others are made until the process is gone, by `atexit` too.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Have `work` called; the future gets its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        done: Future[T] = Future()
        self._calls.put((done, lambda: work(*arguments, **named)))
        return done

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Do what was asked for before, and nothing more. Nobody waits for it here."""
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
            del call, done, work  # what they hold is not kept while nothing is asked for
