"""The tasks of a member: loops that run until it ends, and steps that change something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pyrocket_consumer.errors import RocketError

T = TypeVar("T")

MAX_WORK_PAUSE_S = 1.0
"""The longest pause of a `Throttle`."""


class Tasks:
    """Owns every task of a member. Confined to the I/O thread.

    A loop runs until the member ends. A step (begin, move, end, reset, send back, commit) always runs to its end.
    Its caller may wait for it, and may stop waiting.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_unexpected_error: Callable[[str, BaseException], None]
    ) -> None:
        self._loop = loop
        self._on_unexpected_error = on_unexpected_error
        self._loops: dict[asyncio.Task[Any], str] = {}
        self._steps: dict[asyncio.Task[Any], str] = {}
        self._stopping = False

    def keep_running(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run a loop until the member ends. An error that ends it earlier is reported as unexpected."""
        self._create_task(self._loops, work, what)

    def begin(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        """Begin a step. A `RocketError` is for a caller that waits; any other error is reported as unexpected."""
        return self._create_task(self._steps, work, what)

    async def finish(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of a step. If the caller is cancelled, the step continues."""
        return await asyncio.shield(self.begin(work, what))

    def _create_task(
        self, kind: dict[asyncio.Task[Any], str], work: Coroutine[Any, Any, T], what: str
    ) -> asyncio.Task[T]:
        def ended(task: asyncio.Task[T]) -> None:
            kind.pop(task, None)
            error: BaseException | None
            if not task.cancelled():
                error = task.exception()
            else:  # only `stop_loops` may cancel a loop
                is_expected = self._stopping or kind is not self._loops
                error = None if is_expected else asyncio.CancelledError("something else cancelled it")
            if error is not None and (kind is self._loops or not isinstance(error, RocketError)):
                self._on_unexpected_error(what, error)

        task = self._loop.create_task(work, name=f"pyrocket {what}")
        kind[task] = what
        task.add_done_callback(ended)
        return task

    async def stop_loops(self) -> None:
        """End every loop. Steps that loops have begun continue."""
        self._stopping = True
        await self._end(self._loops)

    async def drain(self, until: float) -> list[str]:
        """Wait for running steps until the loop's time `until`. Cancel the others, and return their names."""
        if self._steps:
            await asyncio.wait(list(self._steps), timeout=max(0.0, until - self._loop.time()))
        left = list(self._steps.values())
        await self._end(self._steps)
        return left

    @staticmethod
    async def _end(tasks: dict[asyncio.Task[Any], str]) -> None:
        ending = [task for task in tasks if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


class Throttle:
    """Runs work one at a time with pauses, so that any amount of it takes at most a tenth of the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = asyncio.Lock()
        self._not_before = 0.0

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            if (wait_s := self._not_before - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
        except BaseException:
            self._lock.release()
            raise
        self._began = self._loop.time()

    async def __aexit__(self, *raised: object) -> None:
        now = self._loop.time()
        self._not_before = now + min(9 * (now - self._began), MAX_WORK_PAUSE_S)
        self._lock.release()
