"""Failed messages in a group of Java members and ours are redelivered to the owner of the retry queue."""

from __future__ import annotations

import pytest

from pyrocket_consumer import Retry
from pyrocket_consumer.model import MessageQueue, dlq_topic, retry_topic
from tests.consuming import RecordingListener, consuming, until
from tests.interop.members import java_options, our_options, owners

MAX_SEND_BACKS = 1
"""The shortest delay level, 1 s."""


@pytest.mark.parametrize("kind", ["real", "embedded"])
@pytest.mark.parametrize("holder", ["ours", "java"])
def test_a_failed_message_goes_to_the_owner_of_the_retry_queue(either_cluster, java, topic, group, holder):
    """Both members fail their first messages. All are redelivered to the member whose id sorts first."""
    either_cluster.create_topic(topic, queues=4)
    either_cluster.create_topic(retry_topic(group), queues=1)  # otherwise Java fetches its route 30 s after its start
    our_name, java_name = ("a", "b") if holder == "ours" else ("b", "a")
    seen = RecordingListener(
        lambda message: Retry(delay_level=MAX_SEND_BACKS) if message.reconsume_times == 0 else None
    )
    with (
        consuming(either_cluster, topic, group, seen, **our_options(our_name)),
        java.consumer(
            either_cluster.name_server,
            group,
            topic,
            fail=1,
            delayLevel=MAX_SEND_BACKS,
            persistIntervalMs=500,
            **java_options(java_name),
        ) as java_member,
    ):

        def shares():
            return sorted(len(queues) for queues in owners(either_cluster, group, topic).values())

        until(lambda: shares() == [2, 2], "two queues each")
        carried = {"tags": "paid", "keys": ["k1", "k2"], "properties": {"region": "eu ☃"}}
        sent = [either_cluster.send(topic, b"m%d" % number, **carried)[0] for number in range(8)]

        def attempt(number):
            """Return the messages that our member, and those that Java's, got at that attempt."""
            return tuple(
                [message for message in list(messages) if message.reconsume_times == number]
                for messages in (seen.messages, java_member.messages)
            )

        def different(number):
            return {message.body for messages in attempt(number) for message in messages}

        until(lambda: len(different(0)) == 8 and len(different(1)) == 8, "every message, and again")
        first, second = attempt(0), attempt(1)
        retried = retry_topic(group)
        until(
            lambda: sum(either_cluster.committed(group, retried).values()) == 8,
            "the retries must be committed before a member leaves",
        )
    assert [len(messages) for messages in first] == [4, 4]
    again, nothing = second if holder == "ours" else reversed(second)
    assert nothing == []
    assert {message.message_id: message.body for message in again} == {
        each.message_id: b"m%d" % number for number, each in enumerate(sent)
    }
    for message in again:
        assert message.tags == "paid"
        assert {"KEYS": "k1 k2", "region": "eu ☃", "RETRY_TOPIC": topic}.items() <= message.properties.items()
    if holder == "ours":
        assert {(message.topic, message.queue) for message in again} == {
            (topic, MessageQueue(retry_topic(group), "broker-a", 0))
        }
    assert either_cluster.committed(group, topic) == dict.fromkeys(range(4), 2)
    assert either_cluster.committed(group, retried) == {0: 8}


def test_dead_letters_are_the_same_as_a_java_members(real_cluster, java, topic, names):
    """A message fails twice, in our group and in Java's. The dead letters are equal, and both clients read them."""
    real_cluster.create_topic(topic, queues=1)
    our_group, java_group = names.group("ours"), names.group("java")
    for each in (our_group, java_group):
        real_cluster.create_topic(retry_topic(each), queues=1)
    name_server = real_cluster.name_server
    (sent,) = real_cluster.send(topic, b"poison", tags="paid", keys=["k1"], properties={"region": "eu"})
    with (
        consuming(
            real_cluster,
            topic,
            our_group,
            RecordingListener(lambda _: Retry(delay_level=MAX_SEND_BACKS)),
            max_reconsume_times=1,
        ) as (_, seen),
        java.consumer(
            name_server, java_group, topic, fail=99, delayLevel=MAX_SEND_BACKS, maxReconsumeTimes=1
        ) as java_member,
    ):
        seen.wait(lambda seen: len(seen.messages) == 2)
        java_member.wait_for_messages(2)
        until(lambda: len(_dead_letters(real_cluster, our_group, java_group)) == 2, "dead letters")
    with (
        consuming(real_cluster, dlq_topic(java_group), names.group("our-look")) as (_, java_dead),
        java.consumer(name_server, names.group("java-look"), dlq_topic(our_group)) as our_dead,
    ):
        java_dead.wait_for(1)
        our_dead.wait_for_messages(1)
    assert [message.reconsume_times for message in seen.messages] == [0, 1]
    assert [message.reconsume_times for message in java_member.messages] == [0, 1]
    ours, javas = _dead_letters(real_cluster, our_group, java_group)
    assert describe(ours) == describe(javas)
    assert (ours.body, ours.message_id) == (b"poison", sent.message_id)
    assert [message.body for message in java_dead.messages] == [b"poison"]
    assert [(message.body, message.tags, message.keys) for message in our_dead.messages] == [(b"poison", "paid", "k1")]


def _dead_letters(cluster, *groups):
    return [message for group in groups for message in cluster.messages(dlq_topic(group))]


def describe(message):
    """Return the contents of a dead letter without the id of its retry message, which differs between groups."""
    own_place = dict.fromkeys(["DLQ_ORIGIN_MESSAGE_ID", "ORIGIN_MESSAGE_ID", "REAL_TOPIC"], "…")
    return {
        "message_id": message.message_id,
        "reconsume_times": message.reconsume_times,
        "flags": (message.flag, message.sys_flag),
        **message.properties,
        **{name: value for name, value in own_place.items() if name in message.properties},
    }
