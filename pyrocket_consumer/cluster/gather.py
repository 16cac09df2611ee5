"""Requests to several brokers at once: queues by broker, calls with a limit, and polls that wait for no slow server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, TypeVar

from pyrocket_consumer.model import MessageQueue

K = TypeVar("K")
V = TypeVar("V")

MAX_CONCURRENT_CALLS = 16
"""The most concurrent calls to one broker."""

GRACE_S = 1.0
"""How long a poll waits for the other responses after the first one."""


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
    pending = list(keys)
    rest, results, failures = iter(pending), dict[K, V](), dict[K, Exception]()

    async def run() -> None:
        for key in rest:
            try:
                results[key] = await work(key)
            except Exception as error:
                failures[key] = error

    await asyncio.gather(*(run() for _ in range(min(limit, len(pending)))))
    for key in pending:
        if key in failures:
            raise failures[key]
    return {key: results[key] for key in pending}


async def gather_at_brokers(
    queues: Iterable[MessageQueue],
    work: Callable[[MessageQueue], Coroutine[Any, Any, V]],
    limit: int = MAX_CONCURRENT_CALLS,
) -> dict[MessageQueue, V]:
    """Return queue -> result of `work(queue)`; run at most `limit` at the same time for each broker.

    Raises:
        RocketError: the first failure at a broker, after all of its calls have ended.
    """
    found = await asyncio.gather(*(gather_limited(each, work, limit) for each in by_broker(queues).values()))
    return {queue: result for results in found for queue, result in results.items()}


class StragglerPoll(Generic[V]):
    """Polls the same servers repeatedly. It does not wait for a server that was late, until that responds in time.

    The first poll waits for all servers. Confined to one loop.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._running: dict[str, asyncio.Task[tuple[V, float]]] = {}
        self._late: set[str] = set()
        self._has_polled = False

    async def poll(self, requests: Mapping[str, Callable[[], Coroutine[Any, Any, V]]]) -> dict[str, V]:
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
        responses: dict[str, V] = {}
        for name, task in list(self._running.items()):
            if not task.done():
                self._late.add(name)
                continue
            del self._running[name]
            responses[name], took_s = task.result()
            if took_s <= self._grace_s:
                self._late.discard(name)
        return responses

    async def _wait(self, started: list[asyncio.Task[tuple[V, float]]]) -> None:
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


async def _timed(fetch: Callable[[], Coroutine[Any, Any, V]]) -> tuple[V, float]:
    began = time.monotonic()
    return await fetch(), time.monotonic() - began
