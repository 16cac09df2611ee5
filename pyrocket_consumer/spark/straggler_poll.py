"""Asking several at once without being held up by who does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

GRACE_S = 1.0
"""So long after the first answer the others are waited for."""


class StragglerPoll(Generic[T]):
    """Asks the same servers again and again; who was late once is asked beside, until it answers in time.

    All are waited for the first time. Confined to one loop.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._running: dict[str, asyncio.Task[tuple[T, float]]] = {}
        self._late: set[str] = set()
        self._has_polled = False

    async def poll(self, requests: Mapping[str, Callable[[], Coroutine[Any, Any, T]]]) -> dict[str, T]:
        """Return the answers that have come, by name: to `requests`, or late ones to the same questions before.

        An error that a question raises is raised here, when its turn comes.
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
        """Wait for nobody any more."""
        tasks = list(self._running.values())
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _timed(fetch: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    began = time.monotonic()
    return await fetch(), time.monotonic() - began
