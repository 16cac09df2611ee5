"""Several are asked at once, and nobody who is late holds up the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pyrocket_consumer.spark.straggler_poll import StragglerPoll

GRACE_S = 0.05


class Server:
    """Answers with the number of times it was asked, once it may."""

    def __init__(self) -> None:
        self.requested = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self) -> int:
        self.requested += 1
        await self.may_answer.wait()
        return self.requested


@asynccontextmanager
async def polling() -> AsyncIterator[tuple[StragglerPoll[int], Server, Server]]:
    poll = StragglerPoll[int](GRACE_S)
    try:
        async with asyncio.timeout(30):
            yield poll, Server(), Server()
    finally:
        await poll.stop()


async def test_all_are_waited_for_the_first_time():
    async with polling() as (poll, quick, slow):
        slow.may_answer.clear()
        asyncio.get_running_loop().call_later(3 * GRACE_S, slow.may_answer.set)
        assert await poll.poll({"quick": quick.ask, "slow": slow.ask}) == {"quick": 1, "slow": 1}


async def test_one_that_is_late_is_asked_once():
    async with polling() as (poll, quick, silent):
        both = {"quick": quick.ask, "silent": silent.ask}
        await poll.poll(both)
        silent.may_answer.clear()
        for number in range(2, 50):
            assert await poll.poll(both) == {"quick": number}
        assert silent.requested == 2  # one question is under way
        assert await poll.poll({"silent": silent.ask}) == {}, "nobody else is a reason to wait for long"
        silent.may_answer.set()
        while "silent" not in (found := await poll.poll(both)):
            pass
        assert found["silent"] == 2


async def test_one_that_is_new_and_silent_has_no_answer():
    async with polling() as (poll, quick, silent):
        await poll.poll({"quick": quick.ask})
        silent.may_answer.clear()
        assert await poll.poll({"quick": quick.ask, "silent": silent.ask}) == {"quick": 2}


async def test_an_error_is_raised_where_the_answer_would_be():
    async def fail() -> int:
        raise ValueError("no")

    async with polling() as (poll, quick, _):
        with pytest.raises(ValueError, match="no"):
            await poll.poll({"quick": quick.ask, "bad": fail})
        assert await poll.poll({"quick": quick.ask}) == {"quick": 2}
