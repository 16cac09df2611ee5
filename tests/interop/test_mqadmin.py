"""The commands of mqadmin about members give the same results for our members and for Java members."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial

import pytest

from pyrocket_consumer import MessageQueue, Retry
from pyrocket_consumer.model import retry_topic
from pyrocket_consumer.protocol.bodies import decode_consumer_status_table
from pyrocket_consumer.protocol.codes import RequestCode
from tests.consuming import RecordingListener, consuming, numbered, until
from tests.interop.members import java_options, our_options, wait_until_committed


@contextmanager
def one_of_each(cluster, java, topic, names, listener=None, **options):
    """Consume `topic` in a group with our member and in one with a Java member. Yield both groups and members."""
    our_group, java_group = names.group("ours"), names.group("java")
    for group in (our_group, java_group):
        cluster.create_topic(retry_topic(group), queues=1)  # otherwise Java fetches its route 30 s after its start
    with (
        consuming(cluster, topic, our_group, listener, **our_options("ours")) as (consumer, seen),
        java.consumer(cluster.name_server, java_group, topic, **java_options("java"), **options) as java_member,
    ):
        java_member.wait_for_queues(topic, len(consumer.progress()) - 1)
        yield our_group, java_group, consumer, seen, java_member


def fill(cluster, topic, count, start=0, **where):
    return [cluster.send(topic, body, **where)[0] for body in numbered(count, start)]


def section(text: str, title: str) -> list[list[str]]:
    """Return the rows of a section of a report, as words."""
    part = re.split(r"^#(Consumer [^#\n]+|User [^#\n]+)#\n", text, flags=re.MULTILINE)
    lines = part[part.index(title) + 1].strip().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def titles(text: str) -> list[str]:
    return re.findall(r"^#((?:Consumer|User) [^#\n]+)#$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", ["real", "embedded"])
def test_consumer_status(either_cluster, java, topic, names):
    """The report on our member has the same sections and columns as that on a Java member, with the same values."""
    either_cluster.create_topic(topic, queues=2)
    fails = RecordingListener(lambda message: Retry(delay_level=5) if message.body in numbered(4) else None)
    with one_of_each(either_cluster, java, topic, names, fails) as (our_group, java_group, consumer, seen, java_member):
        fill(either_cluster, topic, 20)
        seen.wait_for(20)
        java_member.wait_for_messages(20)
        until(lambda: sum(either_cluster.committed(our_group, topic).values()) == 20, "committed")
        wait_until_committed(either_cluster, java_group, java_member.client_id, topic, 20)
        members = {our_group: consumer.client_id, java_group: java_member.client_id}
        lists = {group: java.mqadmin(either_cluster.name_server, "consumerStatus", "-g", group) for group in members}
        reports = {
            group: java.mqadmin(either_cluster.name_server, "consumerStatus", "-g", group, "-i", member, "-s", "true")
            for group, member in members.items()
        }
    for group, member in members.items():
        assert member in lists[group]
        assert "Same subscription in the same group of consumer" in lists[group]
        assert "Rebalance OK" in lists[group]
    ours, javas = (reports[group].replace(group, "GROUP") for group in (our_group, java_group))
    assert titles(ours) == titles(javas)
    assert section(ours, "Consumer Subscription") == section(javas, "Consumer Subscription")
    began_at = [["0" if cell == "-1" else cell for cell in row] for row in section(javas, "Consumer Offset")]
    assert section(ours, "Consumer Offset") == began_at, "our member knows the start offset of a queue at once"
    assert [topic, "broker-a", "0", "10"] in section(ours, "Consumer Offset")
    our_queues, java_queues = (queue_details(report) for report in (ours, javas))
    assert our_queues.keys() == java_queues.keys()
    for queue, our_rows in our_queues.items():
        java_rows = java_queues[queue]
        assert our_rows.keys() == java_rows.keys()
        assert our_rows["commitOffset"] == java_rows["commitOffset"].replace("-1", "0"), queue
        for name in ("cachedMsgCount", "cachedMsgMinOffset", "cachedMsgMaxOffset", "droped"):
            assert our_rows[name] == java_rows[name], (queue, name)
        assert within_a_minute(our_rows["lastPullTimestamp"], java_rows["lastPullTimestamp"])
        if queue[0] == topic:
            assert within_a_minute(our_rows["lastConsumeTimestamp"], java_rows["lastConsumeTimestamp"])
    rates = {row[0]: row[1:] for row in section(ours, "Consumer RT&TPS")}
    java_rates = {row[0]: row[1:] for row in section(javas, "Consumer RT&TPS")}
    assert {len(row) for row in rates.values()} == {len(row) for row in java_rates.values()}
    pull_rt, pull_tps, consume_rt, ok_tps, failed_tps, failed_in_hour = map(float, rates[topic])
    assert min(pull_rt, pull_tps, ok_tps, failed_tps) > 0
    assert failed_in_hour == 4
    assert "pyrocket-io" in ours
    assert "in run_forever" in ours


def test_consumer_status_shows_the_settings(real_cluster, java, mqadmin, topic, names):
    """The settings of both clients have Java's names, and the same units."""
    real_cluster.create_topic(topic, queues=1)
    with one_of_each(real_cluster, java, topic, names) as (our_group, java_group, consumer, _, java_member):
        ours = settings(mqadmin("consumerStatus", "-g", our_group, "-i", consumer.client_id))
        javas = settings(mqadmin("consumerStatus", "-g", java_group, "-i", java_member.client_id))
    assert ours.keys() - javas.keys() <= {"client", "clientIP", "language", "namesrvAddr"} | CLIENT_SETTINGS
    assert {name for name in javas if name.startswith("PROP_")} <= ours.keys()
    ours_alone = {"PROP_CLIENT_VERSION", "PROP_CONSUMER_START_TIMESTAMP", "consumerGroup", "instanceName"} | {
        "allocateMessageQueueStrategy",
        "maxReconsumeTimes",
        "persistConsumerOffsetInterval",
        "pollNameServerInterval",
        "heartbeatBrokerInterval",
        "language",
    }
    same = ours.keys() & javas.keys() - ours_alone
    assert {name: ours[name] for name in same} == {name: javas[name] for name in same}


CLIENT_SETTINGS = {"instanceName", "heartbeatBrokerInterval", "pollNameServerInterval", "persistConsumerOffsetInterval"}
"""Settings that 4.9 does not report."""


def settings(report: str) -> dict[str, str]:
    return {row[0]: " ".join(row[2:]) for row in section(report, "Consumer Properties")}


def queue_details(report: str) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the report on each queue: topic, broker and id -> names and values."""
    return {
        tuple(row[:3]): dict(re.findall(r"(\w+)=([^,\]]+)", " ".join(row[3:])))
        for row in section(report, "Consumer MQ Detail")
    }


def within_a_minute(*times: str) -> bool:
    first, second = (datetime.strptime(time[:14], "%Y%m%d%H%M%S") for time in times)
    return abs(first - second) < timedelta(minutes=1)


def test_consumer_progress_and_connection(real_cluster, java, mqadmin, topic, names):
    """The report shows the uncommitted messages as lag, and the connection like that of a Java member."""
    real_cluster.create_topic(topic, queues=2)
    release = threading.Event()
    holds = RecordingListener(lambda message: release.wait(60) if message.queue_offset >= 3 else None)
    with one_of_each(real_cluster, java, topic, names, holds) as (our_group, java_group, consumer, seen, java_member):
        try:
            fill(real_cluster, topic, 20)
            java_member.wait_for_messages(20)
            until(lambda: real_cluster.committed(our_group, topic) == {0: 3, 1: 3}, "the first three of each queue")
            until(lambda: sorted(each.lag for each in consumer.progress().values()) == [0, 7, 7], "it knows of all 20")
            held = {queue.queue_id: each for queue, each in consumer.progress().items() if queue.topic == topic}
            progress = mqadmin("consumerProgress", "-g", our_group, "-s", "true")
            connections = [mqadmin("consumerConnection", "-g", group) for group in (our_group, java_group)]
            overview = mqadmin("consumerProgress")
        finally:
            release.set()
        until(lambda: len(real_cluster.committed(java_group, topic)) == 2, "the first commit of the Java member")
        java_progress = mqadmin("consumerProgress", "-g", java_group, "-s", "true")
    assert [(each.committed, each.lag) for each in held.values()] == [(3, 7)] * 2
    rows = [row for row in progress_rows(progress) if row[0] == topic]
    assert [row[1:7] for row in rows] == [["broker-a", str(each), "10", "3", "127.0.0.1", "7"] for each in (0, 1)]
    assert re.search(r"Diff Total: 14$", progress, re.MULTILINE)
    assert {len(row) for row in rows} == {len(row) for row in progress_rows(java_progress) if row[0] == topic}
    (shown,) = [row for row in progress_rows(overview) if row[0] == our_group[:64]]
    assert (shown[1], *shown[3:5], shown[-1]) == ("1", "PUSH", "CLUSTERING", "14")

    (ours, our_rest), (javas, java_rest) = (
        connected_clients(text, group) for text, group in zip(connections, (our_group, java_group), strict=True)
    )
    assert (ours[0][0], ours[0][2]) == (consumer.client_id, "PYTHON")
    assert [row[0] for row in javas] == [java_member.client_id]
    assert our_rest == java_rest
    assert {topic, "%RETRY%GROUP", "CLUSTERING", "CONSUME_FROM_FIRST_OFFSET"} <= our_rest


def progress_rows(report: str) -> list[list[str]]:
    return [line.split() for line in report.splitlines() if line and not line.startswith(("#", "Consume", "Diff"))]


def connected_clients(report: str, group: str) -> tuple[list[list[str]], set[str]]:
    """Return the rows of a consumerConnection report about members, and the words of the rest."""
    above, _, below = report.replace(group, "GROUP").partition("Below is subscription")
    return [line.split() for line in above.splitlines() if "@" in line], set(below.split())


def test_get_consumer_status(real_cluster, java, topic, names):
    """Both kinds of members report the same offsets to a tool."""
    real_cluster.create_topic(topic, queues=2)
    with one_of_each(real_cluster, java, topic, names) as (our_group, java_group, consumer, seen, java_member):
        fill(real_cluster, topic, 20)
        seen.wait_for(20)
        java_member.wait_for_messages(20)
        offsets = {MessageQueue(topic, "broker-a", queue_id): 10 for queue_id in (0, 1)}
        for group, member in ((our_group, consumer.client_id), (java_group, java_member.client_id)):
            expected = {member: offsets}
            until(partial(is_status, real_cluster, group, topic, expected), "10 of each queue")
            assert status(real_cluster, group, topic, member) == expected
            assert status(real_cluster, group, topic, "nobody") == {}
            assert status(real_cluster, group, "")[member].items() >= offsets.items()


def is_status(cluster, group, topic, expected):
    return status(cluster, group, topic) == expected


def status(cluster, group, topic, member=None):
    fields = {"topic": topic, "group": group, "clientAddr": member}
    answer = cluster.broker("broker-a").peer.call(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, fields)
    return decode_consumer_status_table(answer.body)


def test_consume_message_directly(real_cluster, java, mqadmin, topic, names):
    """A tool lets our listener consume one message. It shows the result as for a Java member, and no offset moves."""
    real_cluster.create_topic(topic, queues=1)
    extra = () if real_cluster.version in ("4.9.7", "5.1.4") else ("-t", topic)

    def judge(message):
        if message.body == b"m1":
            return Retry()
        if message.body == b"m2":
            raise ValueError("not like this")

    # The second time; the first time they are consumed as usual.
    again = RecordingListener(lambda message: judge(message) if again.bodies.count(message.body) > 1 else None)
    with one_of_each(real_cluster, java, topic, names, again) as (our_group, java_group, consumer, seen, java_member):
        sent = fill(real_cluster, topic, 3, tags="paid", keys=["k1"])
        seen.wait_for(3)
        until(lambda: real_cluster.committed(our_group, topic) == {0: 3}, "committed")

        def directly(number, group=our_group, member=consumer.client_id):
            arguments = ("-i", sent[number].offset_message_id, "-g", group, "-d", member)
            return dict(re.findall(r"(\w+)=([^,\]]+)", mqadmin("queryMsgById", *arguments, *extra)))

        outcomes = [directly(number) for number in range(3)]
        javas = directly(0, java_group, java_member.client_id)
        track = mqadmin("queryMsgById", "-i", sent[0].offset_message_id, *extra)
        nobody = mqadmin("queryMsgById", "-i", sent[0].offset_message_id, "-g", our_group, "-d", "nobody", *extra)
        assert real_cluster.committed(our_group, topic) == {0: 3}
    assert [outcome["consumeResult"] for outcome in outcomes] == ["CR_SUCCESS", "CR_LATER", "CR_THROW_EXCEPTION"]
    assert "ValueError: not like this" in outcomes[2]["remark"]
    del javas["spentTimeMills"], outcomes[0]["spentTimeMills"]
    assert outcomes[0] == javas
    assert sorted(seen.bodies[:3]) == seen.bodies[3:] == numbered(3)
    assert [(message.topic, message.tags, message.keys, message.queue_offset) for message in seen.messages[3:]] == [
        (topic, "paid", ("k1",), number) for number in range(3)
    ]
    assert f"consumerGroup={our_group}, trackType=CONSUMED" in track
    assert "nobody" in nobody
    assert "ConsumeMessageDirectlyResult" not in nobody
