"""H36: pause and resume: no message arrives meanwhile, none is skipped, and no queue counts as lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from pyrocket_consumer import AsyncPushConsumer, ConfigError
from pyrocket_consumer.protocol.codes import RequestCode
from tests.consumer.orders import GROUP, TOPIC, request_matcher
from tests.consuming import RecordingListener, until
from tests.hazards.members import faulty
from tests.simulation.scenario import TOPIC as SIMULATED
from tests.simulation.scenario import Member, Plan, Scenario


@pytest.mark.parametrize("only_some", [False, True])
def test_no_message_arrives_while_queues_are_paused(orders, broker, only_some):
    """Not even the responses to pulls that a broker already holds."""
    orders.make(queues=4)
    orders.send(b"before", count=4)
    with orders.consuming(rebalance_interval_s=20, pull_hold_s=60) as (consumer, seen):
        seen.wait(lambda seen: len(seen.messages) == 4)
        until(lambda: broker.held_pulls(TOPIC) == 4, "each queue's pull is held")
        queues = [queue for queue in consumer.progress() if queue.topic == TOPIC]
        paused = [queue for queue in queues if queue.queue_id < 2 or not only_some]
        consumer.pause(paused if only_some else None)
        assert [queue for queue in queues if consumer.progress()[queue].paused] == paused
        for queue_id in range(4):
            orders.send(b"x", queue_id=queue_id, count=51)
        if only_some:
            seen.wait(lambda seen: len(seen.bodies) == 4 + 2 * 51)
        time.sleep(0.5)  # no message may arrive in this time
        assert not [message for message in seen.messages[4:] if message.queue in paused]
        assert broker.held_pulls(TOPIC) == 4 - len(paused), "paused queues are not pulled"
        consumer.resume(paused if only_some else None)
        seen.wait(lambda seen: len(seen.messages) == 4 * 52)
    assert set(seen.counts.values()) == {1}
    assert orders.committed == dict.fromkeys(range(4), 52)


def test_pausing_again_and_again_loses_and_repeats_nothing(orders):
    orders.make(queues=2)
    with orders.consuming(RecordingListener(lambda message: time.sleep(0.001)), max_span=64) as (consumer, seen):
        for number in range(40):
            orders.fill(10, number * 10)
            consumer.pause()
            consumer.resume()
        seen.wait_for(400)
    assert max(seen.counts.values()) == 1
    assert orders.committed == {0: 200, 1: 200}


def test_an_invalid_queue_is_refused(embedded, orders):
    async def main():
        async with AsyncPushConsumer(GROUP, name_server=embedded.name_server) as asynchronous:
            for wrong in ([1], ["orders"], "orders", [None], 7):
                for call in (blocking.pause, blocking.resume, asynchronous.pause, asynchronous.resume):
                    with pytest.raises(ConfigError, match=r"queues=.*MessageQueues"):
                        if (answer := call(wrong)) is not None:
                            await answer

    with orders.consumer(instance_name="blocking") as blocking:
        asyncio.run(main())


class LongPause(Scenario):
    """A member that is paused for 200 s, in virtual time, while its listener consumes the pulled messages."""

    def __init__(self) -> None:
        slowly = Plan(members=1, queues=1, faults=(), failing=0, slow=1, slowest_s=55, calm_s=500)
        super().__init__(1, slowly)

    async def _trouble(self) -> None:
        self._sending = False
        (owner,) = self.members
        while not owner.running:
            await asyncio.sleep(1)
        self.cluster.send(SIMULATED, count=40)
        await asyncio.sleep(5)
        assert owner.member is not None
        owner.member.assignments.pause(None)
        self.world.create_task(self._beside(owner))
        await asyncio.sleep(200)
        owner.member.assignments.resume(None)

    async def _beside(self, owner: Member) -> None:
        """Do nothing else meanwhile."""


class QueuesExpire(LongPause):
    """Gives up a queue whose last pull is 120 s ago, and begins it again."""

    async def _beside(self, owner: Member) -> None:
        while True:
            await asyncio.sleep(20)
            assert owner.member is not None
            requests = self.cluster.broker("broker-a").requests(RequestCode.PULL_MESSAGE)
            pulls = [each for each in requests if request_matcher(SIMULATED)(each.command)]
            if self.world.now - pulls[-1].at_s > 120:
                for mq in owner.member.assignments.held(SIMULATED):
                    held = owner.member.assignments.queue(mq)
                    await self.world.run_as(owner.process, held.end("expired"))
                    beginning = held.begin(is_new=False, is_ours=lambda: True)
                    await self.world.run_as(owner.process, beginning)
                return


@pytest.mark.hazard("H36")
@pytest.mark.parametrize("scenario", [LongPause, faulty(QueuesExpire, "messages were consumed again")])
def test_a_queue_that_is_paused_for_minutes_is_kept(scenario):
    """A queue that is not pulled for a long time, because it is paused or full, is kept.

    Faulty: Java drops a queue that was not pulled for 120 s and begins it again, so its messages are redelivered.
    """
    counts = Counter(each.position for each in scenario().run().consumed)
    assert len(counts) >= 40
    again = [position for position, times in counts.items() if times > 1]
    assert not again, f"{len(again)} messages were consumed again"
