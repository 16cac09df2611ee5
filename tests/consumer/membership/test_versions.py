"""H08: a subscription has a new version only when the queues change."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.protocol.bodies import decode_heartbeat
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from tests.consumer.orders import ours_and
from tests.consuming import RecordingListener
from tests.hazards.members import faulty, request_matcher
from tests.hazards.naive import NaiveMember, Window
from tests.resets import fill

CLUSTER = {"auto_create_topics": False}


class NewVersionEachRound(NaiveMember):
    """Java from 5.0 on makes a new version in every round while a topic has no route."""

    def rebalance(self) -> None:
        super().rebalance()
        if any(not self.route(topic).brokers for topic in self.subscriptions if not topic.startswith("%RETRY%")):
            self.queues_changed()


class CountsNanoseconds(NaiveMember):
    """Go has a version in nanoseconds, which no member in another language ever exceeds."""

    def queues_changed(self) -> None:
        super().queues_changed()
        self.sub_version = time.time_ns()


class BeatsAfterwards(NaiveMember):
    """Pulls with a version that the broker gets only with the next heartbeat."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pulled: set[MessageQueue] = set()

    def queues_changed(self) -> None:
        self.sub_version = max(self.sub_version + 1, int(time.time() * 1000))

    def pull(self, window: Window) -> RemotingCommand:
        answer = super().pull(window)
        self._pulled.add(window.queue)
        return answer

    def beat(self) -> None:
        if self._pulled.issuperset(self.windows):
            super().beat()


def versions(broker: Any) -> list[tuple[float, int]]:
    """Return the time of each heartbeat, and its version of the subscription to T."""
    beats = [(each.at_s, decode_heartbeat(each.command.body)) for each in broker.requests(RequestCode.HEART_BEAT)]
    consumers = [(at_s, consumer) for at_s, beat in beats for consumer in beat.consumers]
    return [(at_s, one.version) for at_s, each in consumers for one in each.subscriptions if one.topic == "T"]


@pytest.mark.hazard("H08")
@ours_and(
    NaiveMember,
    faulty(NewVersionEachRound, "versions while nothing changed"),
    faulty(CountsNanoseconds, "is not in milliseconds"),
    faulty(BeatsAfterwards, "before the heartbeat"),
)
def test_the_subscription_has_a_new_version_with_its_queues_only(embedded, broker, member):
    """The version, in milliseconds, changes with the held queues, and brokers get it before any pull has it.

    Rounds without a change, paused consumers and topics without a route do not change it.

    Faulty: Java 5 makes one per round for a topic without a route. Go counts nanoseconds, so Java's never win.
    """
    # Many rounds run, with a topic that has no route, and paused. Then the topic gets another queue.
    fill(embedded, "T", 4, queues=2)
    options = dict.fromkeys(["rebalance_interval_s", "heartbeat_interval_s", "route_refresh_interval_s"], 0.05)

    def rounds(count: int) -> None:
        """Wait for `count` requests for the group's members, and for three heartbeats in all."""
        broker.forget_requests()
        broker.wait_for(RequestCode.GET_CONSUMER_LIST_BY_GROUP, count, 30)
        embedded.wait_until(lambda: len(versions(broker)) >= 3, 30)

    with member(embedded, "T", "G", **options) as consumer:
        consumer.seen.wait_for(4)
        consumer.subscribe("nowhere", RecordingListener())
        rounds(2)  # so that the changes of a new subscription are complete
        consumer.pause()
        rounds(7)
        consumer.resume()
        quiet = {version for _, version in versions(broker)}
        assert len(quiet) == 1, f"{len(quiet)} versions while nothing changed"
        (before,) = quiet
        broker.forget_requests()
        embedded.create_topic("T", queues=3)
        (pull, *_) = broker.wait_for(RequestCode.PULL_MESSAGE, timeout_s=30, when=request_matcher("T", queueId=2))
        embedded.wait_until(lambda: len(versions(broker)) >= 5, 30)
        carried, beats = int(pull.command.fields["subVersion"]), versions(broker)
        assert abs(carried / 1000 - time.time()) < 86400, f"version {carried} is not in milliseconds"
        assert {version for _, version in beats} <= {before, carried} and carried > before
        sent_at = [at_s for at_s, version in beats if version == carried]
        assert sent_at and sent_at[0] <= pull.at_s, "a pull came before the heartbeat with its version"
