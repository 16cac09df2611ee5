"""Send requests to several servers at once, without waiting for slow ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

GRACE_S = 1.0
"""How long to wait for the other responses after the first one."""


class StragglerPoll(Generic[T]):
    """Polls the same servers repeatedly. It does not wait for a server that was late, until that responds in time.

    The first poll waits for all servers. Confined to one loop.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._running: dict[str, asyncio.Task[tuple[T, float]]] = {}
        self._late: set[str] = set()
        self._has_polled = False

    async def poll(self, requests: Mapping[str, Callable[[], Coroutine[Any, Any, T]]]) -> dict[str, T]:
        """Return the responses that have arrived, by name, including late ones to earlier polls.

        A server has one request in progress at a time. The error of a request is raised here.
        """
        started = []
        for name, fetch in requests.items():
            if name not in self._running:
                self._running[name] = asyncio.create_task(_timed(fetch))
                if name not in self._late:
                    started.append(self._running[name])
        await self._wait(started)
        responses: dict[str, T] = {}
        for name, task in list(self._running.items()):
            if not task.done():
                self._late.add(name)
                continue
            del self._running[name]
            responses[name], took_s = task.result()
            if took_s <= self._grace_s:
                self._late.discard(name)
        return responses

    async def _wait(self, started: list[asyncio.Task[tuple[T, float]]]) -> None:
        if started and not self._has_polled:
            self._has_polled = True
            await asyncio.wait(started)
        elif started:
            _, rest = await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            if rest:
                await asyncio.wait(rest, timeout=self._grace_s)
        elif self._running:
            await asyncio.wait(self._running.values(), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)

    async def stop(self) -> None:
        """Cancel the requests in progress."""
        tasks = list(self._running.values())
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _timed(fetch: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    began = time.monotonic()
    return await fetch(), time.monotonic() - began
