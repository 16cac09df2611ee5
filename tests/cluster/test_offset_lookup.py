"""The values of `to` arguments, and their offsets at brokers."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from pyrocket_consumer.cluster.offset_lookup import TOOLS_GROUP, check_to, fetch_first_and_last, fetch_offsets_at
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, answer
from tests.cluster.conftest import find_route
from tests.for_each import for_each

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)
QUEUE = MessageQueue("T", "broker-a", 0)


@pytest.fixture
def two_brokers():
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("T", queues=2)
        for _ in range(8):
            cluster.send("T")
        cluster.broker("broker-a").delete_before("T", 0, 1)
        yield cluster


QUEUES = [MessageQueue("T", broker, number) for broker in ("broker-a", "broker-b") for number in (0, 1)]


def look_up(client, offset_name, queues=QUEUES):
    return client.run(fetch_offsets_at(client, offset_name, queues, groups=(TOOLS_GROUP,)), 30)


@for_each(
    "to, means",
    [
        ("first", "first"),
        ("earliest", "first"),
        ("last", "last"),
        ("latest", "last"),
        (AT, AT),
        ("2026-11-21T08:00:00Z", AT),
        ("2026-11-21T09:00:00+01:00", AT),
        ({QUEUE: 5}, {QUEUE: 5}),
    ],
)
def test_what_is_taken_for_a_place(to, means):
    assert check_to(to) == means


@for_each(
    "to, reason",
    [
        ("yesterday", "to='yesterday' is not allowed; use 'first' or 'earliest', 'last' or 'latest', a time with its"),
        ("", "or {queue: offset}"),
        (None, "to=None is not allowed"),
        (5, "to=5 is not allowed"),
        (datetime(2026, 1, 1), "has no time zone; give it one"),
        ("2026-11-21T08:00:00", "has no time zone; write 2026-11-21T08:00:00Z, or 2026-11-21T08:00:00[+]01:00"),
        (datetime(1960, 1, 1, tzinfo=UTC), "is before 1970; use 'first'"),
        ({}, "names no queue"),
        ({"T": 1}, "to={'T': …} is not allowed; the keys must be MessageQueues"),
        ({QUEUE: -1}, "offset -1 of T/broker-a/0 is not allowed; it must be a whole number from 0"),
        ({QUEUE: True}, "offset True of"),
        ({QUEUE: 1.5}, "offset 1.5 of"),
        ({QUEUE: 2**63}, "offset 9223372036854775808 of"),
    ],
)
def test_an_invalid_target_raises_an_error_with_the_remedy(to, reason):
    with pytest.raises(ConfigError, match=reason):
        check_to(to)


def test_every_broker_returns_the_first_and_last_offsets(two_brokers, connect):
    client = connect(two_brokers)
    find_route(client, "T")
    assert list(look_up(client, "first").values()) == [1, 0, 0, 0]
    assert list(look_up(client, "last").values()) == [2, 2, 2, 2]
    assert list(look_up(client, AT).values()) == [1, 0, 0, 0]
    assert list(look_up(client, datetime.fromtimestamp(time.time() + 3600, UTC)).values()) == [2, 2, 2, 2]
    found = client.run(fetch_first_and_last(client, QUEUES), 30)
    assert [found[queue] for queue in QUEUES] == [(1, 2), (0, 2), (0, 2), (0, 2)]
    assert look_up(client, "last", []) == {}


def test_a_broker_that_does_not_respond_is_named(two_brokers, connect):
    client = connect(two_brokers)
    find_route(client, "T")
    for offset_name, code in (
        ("first", RequestCode.GET_MIN_OFFSET),
        ("last", RequestCode.GET_MAX_OFFSET),
        (AT, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP),
    ):
        two_brokers.broker("broker-b").on(code, answer(1, "not well"), times=None)
        with pytest.raises(RocketError, match=r"not known of 1 of 2 brokers: broker-b: .*not well") as raised:
            look_up(client, offset_name)
        assert "broker-a" not in str(raised.value)


def test_old_brokers_are_searched_with_the_first_group_that_may(cluster_of, connect):
    cluster = cluster_of(version="4.9.7")
    cluster.send("orders", count=3)
    client = connect(cluster)
    find_route(client)
    cluster.broker("broker-a").on(
        RequestCode.PULL_MESSAGE,
        answer(16, "no permission"),
        times=None,
        when=lambda command: command.fields["consumerGroup"] == TOOLS_GROUP,
    )
    queue = MessageQueue("orders", "broker-a", 0)
    assert client.run(fetch_offsets_at(client, AT, [queue], groups=(TOOLS_GROUP, "G")), 30) == {queue: 0}
    with pytest.raises(RocketError, match="no permission"):
        look_up(client, AT, [queue])
