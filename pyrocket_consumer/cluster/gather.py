"""Requests to several brokers at once: queues by broker, and concurrent calls with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

from pyrocket_consumer.model import MessageQueue

K = TypeVar("K")
V = TypeVar("V")

MAX_CONCURRENT_CALLS = 16
"""The most concurrent calls to one broker."""


def by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    """Return broker name -> its queues, in the given order."""
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.broker_name, []).append(queue)
    return found


async def gather_limited(
    keys: Iterable[K], work: Callable[[K], Coroutine[Any, Any, V]], limit: int = MAX_CONCURRENT_CALLS
) -> dict[K, V]:
    """Return key -> result of `work(key)`; run at most `limit` at the same time.

    Raises:
        RocketError: the first failure, after all calls have ended.
    """
    slots = asyncio.Semaphore(limit)
    pending: Collection[K] = list(keys)

    async def run_one(key: K) -> V:
        async with slots:
            return await work(key)

    outcomes = await asyncio.gather(*(run_one(key) for key in pending), return_exceptions=True)
    results: dict[K, V] = {}
    for key, outcome in zip(pending, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        results[key] = outcome
    return results
