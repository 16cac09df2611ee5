"""Concurrent calls have a limit, and a late server does not delay the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pyrocket_consumer.cluster.gather import StragglerPoll, gather_at_brokers, gather_limited
from pyrocket_consumer.model import MessageQueue

GRACE_S = 0.05


class Server:
    """Responds with the number of requests, once it may."""

    def __init__(self) -> None:
        self.requested = 0
        self.may_respond = asyncio.Event()
        self.may_respond.set()

    async def respond(self) -> int:
        self.requested += 1
        await self.may_respond.wait()
        return self.requested


@asynccontextmanager
async def polling() -> AsyncIterator[tuple[StragglerPoll[int], Server, Server]]:
    poll = StragglerPoll[int](GRACE_S)
    try:
        async with asyncio.timeout(30):
            yield poll, Server(), Server()
    finally:
        await poll.stop()


async def test_the_first_poll_waits_for_all_servers():
    async with polling() as (poll, quick, slow):
        slow.may_respond.clear()
        asyncio.get_running_loop().call_later(3 * GRACE_S, slow.may_respond.set)
        assert await poll.poll({"quick": quick.respond, "slow": slow.respond}) == {"quick": 1, "slow": 1}


async def test_a_late_server_gets_one_request():
    async with polling() as (poll, quick, silent):
        both = {"quick": quick.respond, "silent": silent.respond}
        await poll.poll(both)
        silent.may_respond.clear()
        for number in range(2, 50):
            assert await poll.poll(both) == {"quick": number}
        assert silent.requested == 2  # one request is in progress
        assert await poll.poll({"silent": silent.respond}) == {}, "a silent server is no reason to wait"
        silent.may_respond.set()
        while "silent" not in (found := await poll.poll(both)):
            pass
        assert found["silent"] == 2


async def test_a_new_server_without_a_response_is_skipped():
    async with polling() as (poll, quick, silent):
        await poll.poll({"quick": quick.respond})
        silent.may_respond.clear()
        assert await poll.poll({"quick": quick.respond, "silent": silent.respond}) == {"quick": 2}


async def test_the_error_of_a_request_is_raised():
    async def fail() -> int:
        raise ValueError("no")

    async with polling() as (poll, quick, _):
        with pytest.raises(ValueError, match="no"):
            await poll.poll({"quick": quick.respond, "bad": fail})
        assert await poll.poll({"quick": quick.respond}) == {"quick": 2}


async def test_a_limit_counts_for_each_broker():
    running, most = Counter[str](), Counter[str]()

    async def work(queue: MessageQueue) -> int:
        running[queue.broker_name] += 1
        most[queue.broker_name] = max(most[queue.broker_name], running[queue.broker_name])
        await asyncio.sleep(0)
        running[queue.broker_name] -= 1
        return queue.queue_id

    queues = [MessageQueue("T", broker, number) for number in range(9) for broker in ("broker-a", "broker-b")]
    assert await gather_at_brokers(queues, work, limit=3) == {queue: queue.queue_id for queue in queues}
    assert most == {"broker-a": 3, "broker-b": 3}


async def test_the_first_failure_is_raised_after_all_calls():
    ended = list[int]()

    async def work(number: int) -> None:
        for _ in range(10 - number):
            await asyncio.sleep(0)
        ended.append(number)
        if number in (2, 5):
            raise ValueError(number)

    with pytest.raises(ValueError, match="2"):
        await gather_limited(range(8), work, limit=4)
    assert sorted(ended) == list(range(8))
