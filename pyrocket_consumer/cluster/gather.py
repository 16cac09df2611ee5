"""The same work for many, so many at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

AT_ONCE = 16
"""Most calls under way at the same time to one broker."""


async def for_each(
    keys: Iterable[K], work: Callable[[K], Coroutine[Any, Any, V]], at_once: int = AT_ONCE
) -> dict[K, V]:
    """Return key -> what `work(key)` gives, so many at the same time.

    Raises:
        RocketError: the first failure, when none is under way any more.
    """
    places = asyncio.Semaphore(at_once)
    wanted: Collection[K] = list(keys)

    async def placed(key: K) -> V:
        async with places:
            return await work(key)

    outcomes = await asyncio.gather(*(placed(key) for key in wanted), return_exceptions=True)
    done: dict[K, V] = {}
    for key, outcome in zip(wanted, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        done[key] = outcome
    return done
