"""The thread of a cluster's loop, and calls to it from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

CALL_TIMEOUT_S = 30.0


class LoopThread:
    """An asyncio loop on a daemon thread, or a loop of the caller, who runs it and calls from its thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._owned = loop is None
        self.loop = loop if loop is not None else asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the process of the thread, which does not run here."""
        return self._pid != os.getpid()

    def start(self) -> None:
        if self._owned:
            self._thread = threading.Thread(target=self._main, name="rocketmq-embedded", daemon=True)
            self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:  # on this thread, because the caller of stop() may run another loop
            self.loop.run_until_complete(_finish())
            self.loop.close()

    def stop(self) -> None:
        """End the thread and close the loop."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
            self._thread = None
        elif self._owned and not self.loop.is_closed():
            self.loop.close()

    @property
    def is_current_thread(self) -> bool:
        """Whether the loop runs on the current thread, so that calls need no hand-over."""
        return not self._owned or threading.current_thread() is self._thread

    def call(self, action: Callable[[], _T]) -> _T:
        """Run `action` on the loop's thread and return its result, from any thread."""
        if self.is_current_thread:
            return action()
        self._check_running()
        result: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(action())
            except BaseException as error:
                result.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return _result(result)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and return its result. Do not call this from the loop's own thread."""
        try:
            if self.is_current_thread:
                raise RuntimeError("this call waits for the loop that runs on this thread; await open() instead")
            self._check_running()
        except RuntimeError:
            coroutine.close()
            raise
        return _result(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def _check_running(self) -> None:
        if self._thread is None:
            raise RuntimeError("the embedded cluster was closed; make a new one")
        if self.is_forked:
            raise RuntimeError(
                "the embedded cluster runs in the process that started it, not in this forked one; "
                "create clients here that connect to its name_server"
            )


async def _finish() -> None:
    """Cancel the tasks of a stopped loop, mainly TLS handshakes of silent clients."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.sleep(0)  # the loop closes their sockets in its next iteration


def _result(future: concurrent.futures.Future[_T]) -> _T:
    if not concurrent.futures.wait([future], CALL_TIMEOUT_S).done:
        raise TimeoutError(f"the embedded cluster's thread was busy for {CALL_TIMEOUT_S:g} s; does a fault wait there?")
    return future.result()
