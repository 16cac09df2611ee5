"""Other members of a group, which a broker pretends to have, so that a consumer loses queues to them."""

from __future__ import annotations

import json
from typing import Any

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer
from pyrocket_consumer.testing.faults import Fault
from tests.consuming import until
from tests.hazards.naive import NaiveMember

STRANGER = "0.0.0.0@0#0"
"""A client id that sorts before all others, so that its member gets a single queue."""


def members_of(*client_ids: str) -> Fault:
    """Return a fault that lists these client ids as the members of the group."""
    return answer(0, body=json.dumps({"consumerIdList": list(client_ids)}).encode())


class AnotherMember:
    """Another member, which can take the only queue of a topic."""

    def __init__(self, cluster: Any, group: str, consumer: Any, topic: str) -> None:
        self._broker, self._group = cluster.broker("broker-a"), group
        self._consumer, self._topic = consumer, topic

    def take_queue(self) -> None:
        """Take the queue, and wait until the consumer has given it up."""
        self._broker.on(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            members_of(STRANGER, self._consumer.client_id),
            times=None,
            when=lambda command: command.fields["consumerGroup"] == self._group,
        )
        until(lambda: not self._holds(), "the queue is given up")

    def give_queue_back(self) -> None:
        """Give the queue back, and wait until the consumer holds it again."""
        self._broker.clear_faults(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
        until(self._holds, "the consumer holds the queue again")

    def _holds(self) -> bool:
        return any(each.topic == self._topic for each in self._consumer.held())


class DropsWithoutStoring(NaiveMember):
    """Forgets a queue that it gives up, without storing its last offset and without unlocking it."""

    def drop(self, queue: MessageQueue) -> None:
        with self.lock:
            window = self.windows.pop(queue, None)
            if window is not None:
                window.dropped = True
            self.offsets.pop(queue, None)
