"""Asking several at once without being held up by who does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

GRACE_S = 1.0
"""So long after the first answer the others are waited for."""


class Beside(Generic[T]):
    """Asks the same servers again and again; who was late once is asked beside, until it answers in time.

    All are waited for the first time. Confined to one loop.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._under_way: dict[str, asyncio.Task[tuple[T, float]]] = {}
        self._late: set[str] = set()
        self._began = False

    async def answers(self, questions: Mapping[str, Callable[[], Coroutine[Any, Any, T]]]) -> dict[str, T]:
        """Return the answers that have come, by name: to `questions`, or late ones to the same questions before.

        An error that a question raises is raised here, when its turn comes.
        """
        fresh = []
        for name, ask in questions.items():
            if name not in self._under_way:
                self._under_way[name] = asyncio.create_task(_timed(ask))
                if name not in self._late:
                    fresh.append(self._under_way[name])
        await self._wait(fresh)
        answers: dict[str, T] = {}
        for name, task in list(self._under_way.items()):
            if not task.done():
                self._late.add(name)
                continue
            del self._under_way[name]
            answers[name], took_s = task.result()
            if took_s <= self._grace_s:
                self._late.discard(name)
        return answers

    async def _wait(self, fresh: list[asyncio.Task[tuple[T, float]]]) -> None:
        if fresh and not self._began:
            self._began = True
            await asyncio.wait(fresh)
        elif fresh:
            _, rest = await asyncio.wait(fresh, return_when=asyncio.FIRST_COMPLETED)
            if rest:
                await asyncio.wait(rest, timeout=self._grace_s)
        elif self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)

    async def stop(self) -> None:
        """Wait for nobody any more."""
        tasks = list(self._under_way.values())
        self._under_way.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _timed(ask: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    began = time.monotonic()
    return await ask(), time.monotonic() - began
