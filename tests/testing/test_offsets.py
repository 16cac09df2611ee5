"""Committed offsets, first and last offsets of queues, and search by time."""

from __future__ import annotations

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster
from tests.testing.brokers import every_version
from tests.testing.raw_client import RawClient


@every_version
def test_a_group_without_an_offset_gets_zero_or_not_found(broker, client, version):
    old = version == "4.9.7"
    empty = client.query("G", "T", 0)
    assert (empty.code, empty.fields.get("offset")) == ((0, "0") if old else (22, None))
    assert client.query("G", "nowhere", 0).code == (0 if old else 22)
    client.produce("T")
    assert client.query("G", "T", 0).fields == {"offset": "0"}
    assert client.query("G", "T", 0, setZeroIfNotFound=False).code == (0 if old else 22)
    broker.count_as_on_disk()
    assert client.query("G", "T", 0).code == 22
    broker.count_as_on_disk(False)
    client.produce("T")
    broker.delete_before("T", 0, 1)
    assert client.query("G", "T", 0).code == 22


@every_version
def test_a_commit_is_stored_as_it_is(broker, client):
    client.heartbeat("G", "T")
    client.produce("T")
    for offset in (5, 3, 10**12):
        assert client.commit("G", "T", 0, offset).code == 0
        assert client.query("G", "T", 0).fields == {"offset": str(offset)}
    client.commit("G", "T", 0, -1)
    assert broker.committed("G", "T") == {0: -1}
    assert client.query("G", "T", 0).fields == {"offset": "0"}  # like a group without an offset
    for queue_id in (99, 2**30, 2**31 - 1, -5):
        assert client.commit("G", "T", queue_id, 1).code == 0
        assert client.query("G", "T", queue_id).fields == {"offset": "1"}


@every_version
def test_what_a_commit_must_name(client, version):
    client.heartbeat("G", "T")
    assert client.commit("G", "nowhere", 0, 1).code == (0 if version == "4.9.7" else 17)
    assert client.commit("nobody", "T", 0, 1).code == (26 if version in ("5.3.3", "5.5.0") else 0)
    missing = client.call(RequestCode.UPDATE_CONSUMER_OFFSET, {"consumerGroup": "G", "topic": "T", "queueId": 0})
    assert missing.code == (29 if version in ("5.3.3", "5.5.0") else 1)


def test_a_oneway_commit_that_fails_is_silent(broker, client):
    fields = {"consumerGroup": "G", "topic": "nowhere", "queueId": 0, "commitOffset": 1}
    client.post(RequestCode.UPDATE_CONSUMER_OFFSET, fields, oneway=True)
    broker.wait_for(RequestCode.UPDATE_CONSUMER_OFFSET)
    assert client.is_silent()


@every_version
def test_the_ends_of_a_queue(broker, client):
    for topic, queue_id in (("T", 0), ("T", 99), ("nowhere", 0)):
        where = {"topic": topic, "queueId": queue_id}
        assert client.call(RequestCode.GET_MAX_OFFSET, where).fields == {"offset": "0"}
        assert client.call(RequestCode.GET_MIN_OFFSET, where).fields == {"offset": "0"}
        assert client.call(RequestCode.GET_EARLIEST_MSG_STORETIME, where).fields == {"timestamp": "-1"}
    for number in range(3):
        broker.cluster.send("T", queue_id=0, stored_at_ms=1000 + number)
    broker.delete_before("T", 0, 1)
    where = {"topic": "T", "queueId": 0}
    assert client.call(RequestCode.GET_MAX_OFFSET, where).fields == {"offset": "3"}
    assert client.call(RequestCode.GET_MIN_OFFSET, where).fields == {"offset": "1"}
    assert client.call(RequestCode.GET_EARLIEST_MSG_STORETIME, where).fields == {"timestamp": "1001"}


# Messages 0 to 9 were stored every 250 ms from 10,000 on.
SEARCHES = [  # time, 4.9, 5.x lower, 5.x upper
    (0, 0, 0, 0),
    (-1, 0, 0, 0),
    (10_000, 0, 0, 0),
    (11_250, 5, 5, 5),
    (11_251, 5, 6, 5),
    (11_499, 6, 6, 5),
    (12_250, 9, 9, 9),
    (12_251, 9, 10, 9),
    (10**15, 9, 10, 9),
]


@every_version
def test_search_by_time(broker, client, version):
    for number in range(10):
        broker.cluster.send("T", queue_id=0, stored_at_ms=10_000 + 250 * number)

    def search(time_ms: int, topic: str = "T", **boundary: str) -> int:
        fields = {"topic": topic, "queueId": 0, "timestamp": time_ms, **boundary}
        return int(client.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, fields).fields["offset"])

    for time_ms, nearest, lower, upper in SEARCHES:
        first, last = (nearest, nearest) if version == "4.9.7" else (lower, upper)
        assert search(time_ms) == search(time_ms, boundaryType="lower") == first, time_ms
        assert search(time_ms, boundaryType="Upper") == last, time_ms
        assert search(time_ms, "nowhere") == 0


def test_a_slave_keeps_its_commits_until_it_copies_those_of_the_master() -> None:
    with EmbeddedCluster(slaves=1) as cluster:
        cluster.create_topic("T")
        master, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
        master.create_group("G")
        slave.sync_with_master()
        with RawClient(slave.address) as to_slave, RawClient(master.address) as to_master:
            assert to_slave.commit("G", "T", 0, 7).code == 0
            assert to_master.query("G", "T", 0).code == 22
            to_master.commit("G", "T", 0, 3)
            slave.sync_with_master()
            assert to_slave.query("G", "T", 0).fields == {"offset": "3"}


@every_version
def test_offsets_of_a_deleted_topic(broker, client, version):
    client.heartbeat("G", "T")
    client.commit("G", "T", 0, 5)
    client.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})
    assert broker.committed("G", "T") == ({0: 5} if version == "4.9.7" else {})


def test_offsets_are_cloned(broker, client):
    broker.commit("G", "T", {0: 5, 1: 6})
    client.call(RequestCode.CLONE_GROUP_OFFSET, {"srcGroup": "G", "destGroup": "H", "offline": True})
    assert broker.committed("H", "T") == {0: 5, 1: 6}
