"""INVOKE_BROKER_TO_RESET_OFFSET, handled by the members or by the broker."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from pyrocket_consumer.protocol.bodies import decode_offset_table
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import EmbeddedBroker
from tests import golden
from tests.for_each import for_each
from tests.testing.brokers import broker_and_client, pull_result
from tests.testing.raw_client import RawClient

AT_MEMBERS = [("4.9.7", False), ("5.1.4", False), ("5.5.0", False)]
AT_BROKER = [("5.1.4", True), ("5.3.3", True), ("5.5.0", True)]
BOTH = AT_MEMBERS + AT_BROKER


def at(mode: tuple[str, bool]) -> AbstractContextManager[tuple[EmbeddedBroker, RawClient]]:
    """A broker whose release resets at the members, or at the broker."""
    return broker_and_client(version=mode[0], server_side_reset=mode[1])


def reset(
    client: RawClient, timestamp: int = 0, *, force: bool = True, language: str = "PYTHON", **others: object
) -> RemotingCommand:
    fields = {"topic": "T", "group": "G", "timestamp": timestamp, "isForce": force, **others}
    return client.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields, language=language)


def targets(answer: RemotingCommand) -> dict[int, int]:
    return {queue.queue_id: offset for queue, offset in decode_offset_table(answer.body).items()}


def ten_messages(broker: EmbeddedBroker) -> None:
    """Store messages 0 to 9 in queue 0, every 250 ms from 10,000 on. Queue 1 stays empty."""
    for number in range(10):
        broker.cluster.send("T", queue_id=0, stored_at_ms=10_000 + 250 * number)


@pytest.mark.parametrize("mode", AT_MEMBERS)
def test_the_broker_refuses_a_reset_at_members(mode: tuple[str, bool]) -> None:
    with at(mode) as (broker, client):
        refused = reset(client)
        assert (refused.code, refused.remark) == (1, "THe consumer group <G> not exist")
        client.heartbeat("G", "T")
        broker.commit("G", "T", {0: 3})
        assert reset(client).code == 1  # queue 1 has no offset
        broker.commit("G", "T", {1: -1})
        assert reset(client).code == 1  # a negative offset does not count
        broker.commit("G", "T", {1: 0})
        assert reset(client).code == 0
        client.call(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "G"})
        offline = reset(client, 7)
        assert (offline.code, offline.remark) == (
            206,
            "Consumer not online, so can not reset offset, Group: G Topic: T Timestamp: 7",
        )
        unknown = reset(client, topic="nowhere")
        assert unknown.code == (17 if mode[0] == "5.5.0" else 1)
        assert unknown.remark == "[reset-offset] reset offset failed, no topic in this broker. topic=nowhere"


@pytest.mark.parametrize("mode", AT_BROKER)
def test_the_broker_refuses_a_reset_at_the_broker(mode: tuple[str, bool]) -> None:
    with at(mode) as (broker, client):
        assert (reset(client).code, reset(client).remark) == (26, "Group G does not exist")
        broker.create_group("G")
        assert reset(client).code == 0  # no member is online, and no offset is committed
        unknown = reset(client, topic="nowhere")
        assert (unknown.code, unknown.remark) == (17, "Topic nowhere does not exist")


@for_each("mode", AT_MEMBERS)
@for_each("language", ["PYTHON", "JAVA", "OTHER", "CPP"])
def test_members_get_the_format_of_the_language_of_the_admin(mode: tuple[str, bool], language: str) -> None:
    with at(mode) as (broker, client), RawClient(broker.address, "c2") as second:
        ten_messages(broker)
        client.heartbeat("G", "T")
        second.heartbeat("G", "T")
        broker.commit("G", "T", {0: 3, 1: 0})
        answer = reset(client, 0, language=language)
        assert (answer.code, answer.remark, targets(answer)) == (0, "not set any response code", {0: 0, 1: 0})
        for member in (client, second):
            [order] = member.wait_received(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
            assert order.is_oneway
            assert order.fields == {
                "topic": "T",
                "group": "G",
                "timestamp": "0",
                "isForce": "false",
                **({} if mode[0] == "4.9.7" else {"queueId": "-1"}),
            }
            name = f"220_{mode[0]}{'cs' if mode[0] == '5.5.0' else ''}_admin{language}.bin"
            recorded = golden.frame("reset", name)
            assert (b'"offsetTable":[' in order.body) == (b'"offsetTable":[' in recorded) == (language == "CPP")
            assert {queue.queue_id: offset for queue, offset in decode_offset_table(order.body).items()} == {0: 0, 1: 0}
        assert broker.committed("G", "T") == {0: 3, 1: 0}  # only members change committed offsets


# Ten messages, 3 committed. Timestamps and the target for queue 0: 4.9 forced, 5.x at members forced, at the broker.
TARGETS = [
    (0, 0, 0, 0),
    (11_250, 5, 5, 5),
    (11_251, 5, 6, 6),
    (12_251, 9, 10, 10),
    (-1, 10, 10, 10),
    (-2, 0, 0, 10),
    (10**15, 9, 10, 10),
]


@for_each("mode", BOTH)
@for_each("row", TARGETS)
def test_targets(mode: tuple[str, bool], row: tuple[int, int, int, int]) -> None:
    with at(mode) as (broker, client):
        ten_messages(broker)
        client.heartbeat("G", "T")
        broker.commit("G", "T", {0: 3, 1: 0})
        expected = row[3] if mode[1] else row[1] if mode[0] == "4.9.7" else row[2]
        assert targets(reset(client, row[0])) == {0: expected, 1: 0}
        unforced = expected if mode[1] else min(3, expected)
        if mode[1]:
            client.pull("T", 0, 0)
        assert targets(reset(client, row[0], force=False))[0] == unforced


@pytest.mark.parametrize("mode", AT_BROKER)
def test_a_mark_is_delivered_once_by_the_next_pull(mode: tuple[str, bool]) -> None:
    with at(mode) as (broker, client), RawClient(broker.address, "c2") as other:
        ten_messages(broker)
        broker.create_group("G")
        broker.commit("G", "T", {0: 9})
        assert targets(reset(client, 11_250)) == {0: 5, 1: 0}
        assert broker.committed("G", "T")[0] == 5
        assert client.query("G", "T", 0).fields == {"offset": "5"}
        ignored = client.commit("G", "T", 0, 9)
        assert (ignored.code, ignored.remark) == (0, "Offset has been previously reset")
        assert client.query("G", "T", 0).fields == {"offset": "5"}
        assert pull_result(other.pull("T", 0, 9)) == (21, "OFFSET_RESET", 5, 0, 10)
        assert pull_result(client.pull("T", 0, 9)) == (0, "FOUND", 10, 0, 10)
        assert client.commit("G", "T", 0, 9).remark is None


@pytest.mark.parametrize("mode", AT_BROKER)
def test_the_pull_that_takes_a_mark_commits_its_stale_offset(mode: tuple[str, bool]) -> None:
    with at(mode) as (broker, client):
        ten_messages(broker)
        broker.create_group("G")
        broker.commit("G", "T", {0: 9})
        reset(client, 0)
        assert pull_result(client.pull("T", 0, 9, sysFlag=5, commitOffset=7))[:3] == (21, "OFFSET_RESET", 0)
        assert broker.committed("G", "T")[0] == 7


def test_a_held_pull_meets_the_mark_when_its_hold_ends() -> None:
    with broker_and_client(long_poll_tick_s=600.0) as (broker, client):
        ten_messages(broker)
        opaque = client.post_pull("T", 0, 10, sysFlag=6, suspendTimeoutMillis=0)
        broker.cluster.wait_until(lambda: broker.held_pulls() == 1)
        reset(client, 0)
        assert broker.held_pulls() == 1
        broker.tick()
        assert pull_result(client.answer(opaque)) == (21, "OFFSET_RESET", 0, 0, 10)


@pytest.mark.parametrize(("version", "expected"), [("5.1.4", {}), ("5.3.3", {0: 10, 1: 0})])
def test_a_group_that_never_committed(version: str, expected: dict[int, int]) -> None:
    with broker_and_client(version=version, server_side_reset=True) as (broker, client):
        ten_messages(broker)
        broker.create_group("G")
        reset(client, -1)
        assert broker.committed("G", "T") == expected
        assert client.query("G", "T", 0).fields == {"offset": "10"}  # the mark


def test_one_queue_and_an_exact_offset(broker, client):
    ten_messages(broker)
    broker.create_group("G")
    assert targets(reset(client, 0, queueId=0, offset=4)) == {0: 4}
    assert targets(reset(client, 0, queueId=0, offset=11)) == {0: 11}
    beyond = reset(client, 0, queueId=0, offset=12)
    assert (beyond.code, beyond.remark) == (1, "Target offset 12 not in consume queue range [0-10]")
    assert reset(client, 0, queueId=0, offset=-2).code == 1
    assert targets(reset(client, 11_250, queueId=0, offset=-1)) == {0: 5}
    assert targets(reset(client, 0, queueId=77)) == {77: 0}
    assert targets(reset(client, 0, queueId=-1, offset=4)) == {0: 0, 1: 0}


@pytest.mark.parametrize("mode", AT_MEMBERS)
def test_members_get_the_offsets_of_all_queues(mode: tuple[str, bool]) -> None:
    with at(mode) as (broker, client):
        ten_messages(broker)
        client.heartbeat("G", "T")
        broker.commit("G", "T", {0: 3, 1: 0})
        assert targets(reset(client, 0, force=False, queueId=0, offset=4)) == {0: 0, 1: 0}


def test_marks_do_not_survive_a_restart(broker, client):
    ten_messages(broker)
    broker.create_group("G")
    reset(client, 11_250)
    broker.restart()
    with RawClient(broker.address) as again:
        assert pull_result(again.pull("T", 0, 9)) == (0, "FOUND", 10, 0, 10)
        assert broker.committed("G", "T")[0] == 5
