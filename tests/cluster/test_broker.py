"""Typed calls to one broker."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import replace

import pytest

from pyrocket_consumer.errors import (
    BrokerError,
    ConfigError,
    ConnectError,
    FlowControl,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    RouteNotFound,
)
from pyrocket_consumer.model import MessageQueue, PullStatus, Subscription
from pyrocket_consumer.protocol.bodies import encode_lock_response
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import PullMessageHeader, SendMessageHeader
from pyrocket_consumer.protocol.subscription import parse_subscription
from pyrocket_consumer.testing import answer, drop, rewrite
from tests.cluster.conftest import find_route, join
from tests.for_each import for_each

QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(4)]
QUEUE, SECOND = QUEUES[:2]
ALL = parse_subscription("orders", "*")
PULL = RequestCode.PULL_MESSAGE


@pytest.fixture
def do(client):
    """`do("pull", QUEUE, 0, …)` calls a method of broker-a."""
    return doing(client)


def doing(client, broker_name="broker-a"):
    def call(method, *arguments, **options):
        return client.run(getattr(client.broker(broker_name), method)(*arguments, **options), 30)

    return call


def pull(do, offset, queue=QUEUE, subscription=ALL, **options):
    return do("pull", queue, offset, group="app", subscription=subscription, **options)


def offsets(messages):
    return [message.queue_offset for message in messages]


# --- pull


def test_a_pull_returns_messages_and_the_next_offset(embedded, do):
    found, messages = pull(do, 0)
    assert (found.status, found.next_offset, messages) == (PullStatus.NO_NEW_MESSAGE, 0, [])
    embedded.send("orders", b"hello", count=3, queue_id=0)
    found, messages = pull(do, 1)
    assert (found.status, found.next_offset, found.min_offset, found.max_offset) == (PullStatus.FOUND, 3, 0, 3)
    assert [(m.queue_offset, m.body, m.queue) for m in messages] == [(1, b"hello", QUEUE), (2, b"hello", QUEUE)]
    found, messages = pull(do, 0, max_messages=2)
    assert (offsets(messages), found.next_offset) == ([0, 1], 2)


def test_a_pull_sends_its_tags_and_compares_them(embedded, broker, do):
    for tag in ["Aa", "BB", "C", None]:  # Aa and BB have the same hash, so the broker lets both pass
        embedded.send("orders", b"x", tags=tag, queue_id=0)
    found, messages = pull(do, 0, subscription=parse_subscription("orders", "Aa || B"))
    assert ([message.tags for message in messages], found.next_offset) == (["Aa"], 4)
    header = PullMessageHeader.from_fields(broker.requests(PULL)[-1].command.fields)
    assert (header.sys_flag, header.subscription, header.broker_name) == (4, "Aa || B", "broker-a")


def test_a_held_pull_is_woken_by_a_message(embedded, client):
    waiting = client.submit(client.broker("broker-a").pull(QUEUE, 0, group="app", subscription=ALL, hold_s=20))
    embedded.wait_until(lambda: embedded.broker("broker-a").held_pulls() == 1)
    embedded.send("orders", b"hello", queue_id=0)
    assert offsets(waiting.result(30)[1]) == [0]


def test_a_hold_may_last_until_the_brokers_next_tick(cluster_of, connect):
    do = doing(connect(cluster_of(long_poll_tick_s=2), call_timeout_s=1))  # shorter than the answer takes
    assert pull(do, 0, hold_s=0.1)[0].status is PullStatus.NO_NEW_MESSAGE


def test_an_offset_outside_the_queue_is_corrected(embedded, broker, do):
    embedded.send("orders", b"x", count=4, queue_id=0)
    broker.delete_before("orders", 0, 2)
    for offset, to in ((-5, 2), (0, 2), (9, 4)):
        found, messages = pull(do, offset)
        result = (found.status, found.next_offset, found.offset_reset, messages)
        assert result == (PullStatus.OFFSET_MOVED, to, False, [])
    broker.on(PULL, answer(21, "OFFSET_RESET", {"nextBeginOffset": "7", "minOffset": "0", "maxOffset": "9"}))
    found, _ = pull(do, 0)
    assert (found.status, found.next_offset, found.offset_reset) == (PullStatus.OFFSET_MOVED, 7, True)


@pytest.mark.virtual
def test_an_unanswered_pull_ends_after_hold_tick_and_timeout(cluster_of, connect):
    cluster = cluster_of(idle_timeout_s=3600)
    client = connect(cluster, call_timeout_s=300)
    cluster.broker("broker-a").on(PULL, drop)  # never respond
    began = time.monotonic()
    with pytest.raises(RequestTimeout, match="PULL_MESSAGE"):
        client.run(client.broker("broker-a").pull(QUEUE, 0, group="app", subscription=ALL, hold_s=20), 1000)
    assert 20 + 5 + 300 - 60 < time.monotonic() - began < 20 + 5 + 300 + 60


def test_a_message_of_15_mb_goes_there_and_back(cluster_of, connect):
    do = doing(connect(cluster_of(settings={"maxMessageSize": 16 * 1024 * 1024}), call_timeout_s=20))
    body = bytes(range(256)) * (15 * 1024 * 4)
    do("send", SendMessageHeader("maker", "orders", queue_id=0), body)
    _, (message,) = pull(do, 0)
    assert message.body == body


@for_each(
    "code, remark, kind, retryable",
    [
        (16, "User:u has no permission to access Topic:T", PermissionDenied, False),
        (1, "org.apache.rocketmq.acl.common.AclException: No accessKey is configured", PermissionDenied, False),
        (1, "java.lang.NullPointerException", BrokerError, True),
        (2, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while", FlowControl, True),
        (215, "slow down", FlowControl, True),
        (23, "parse the consumer's subscription failed", BrokerError, False),
        (24, "the consumer's subscription not exist", BrokerError, True),
        (9999, "something new", BrokerError, False),
    ],
)
def test_a_refused_pull_raises_the_reason(broker, do, code, remark, kind, retryable):
    broker.on(PULL, answer(code, remark))
    with pytest.raises(BrokerError) as raised:
        pull(do, 0)
    error = pickle.loads(pickle.dumps(raised.value))
    assert type(error) is kind
    assert (error.code, error.remark, error.address, error.retryable) == (code, remark, broker.address, retryable)
    assert broker.address in str(error) and remark in str(error)


@for_each("name, value", [("nextBeginOffset", None), ("minOffset", None), ("maxOffset", None), ("offsetDelta", "1000")])
def test_a_response_that_is_not_of_a_pull_fails_only_that_call(broker, do, name, value):
    def changed(command):
        fields = {**command.fields, name: value}
        return replace(command, fields={name: each for name, each in fields.items() if each is not None})

    broker.on(PULL, rewrite(changed))
    with pytest.raises(ProtocolError, match="static topic" if value else name):
        pull(do, 0)
    assert pull(do, 0)[0].status is PullStatus.NO_NEW_MESSAGE


# --- slaves


@pytest.fixture
def with_slave(cluster_of):
    """One broker with a slave, and two messages."""
    cluster = cluster_of(slaves=1)
    cluster.send("orders", b"x", count=2, queue_id=0)
    return cluster


def test_a_pull_from_the_suggested_slave_commits_nothing(with_slave, connect):
    do = doing(connect(with_slave))
    with_slave.broker("broker-a").suggest_broker(1)
    found, _ = pull(do, 0)
    assert found.suggested_broker_id == 1
    found, messages = pull(do, 0, broker_id=found.suggested_broker_id)
    assert offsets(messages) == [0, 1]
    (received,) = with_slave.broker("broker-a-1").requests(PULL)
    assert PullMessageHeader.from_fields(received.command.fields).sys_flag & 1 == 0
    assert with_slave.broker("broker-a-1").committed("app", "orders") == {}


def test_without_a_master_a_queue_is_read_and_not_committed(with_slave, connect):
    client = connect(with_slave)
    do = doing(client)
    with_slave.broker("broker-a").kill()
    find_route(client, refresh=True)
    assert offsets(pull(do, 0)[1]) == [0, 1]
    calls = ("commit_offset", "app", QUEUE, 1), ("query_offset", "app", QUEUE), ("max_offset", QUEUE)
    for call in (*calls, ("lock", "app", [QUEUE])):
        with pytest.raises(ConnectError, match="master"):
            do(*call)
    assert with_slave.broker("broker-a-1").requests(RequestCode.UPDATE_CONSUMER_OFFSET) == []


def test_a_broker_without_a_known_route_is_found_by_topic(embedded, connect):
    assert doing(connect(embedded))("max_offset", QUEUE) == 0
    for topic, error, named in (("orders", ConnectError, "broker-x"), ("nowhere", RouteNotFound, "nowhere")):
        with pytest.raises(error, match=named):
            doing(connect(embedded), "broker-x")("max_offset", MessageQueue(topic, "broker-x", 0))


# --- offsets


@pytest.mark.parametrize(("version", "empty"), [("4.9.7", 0), ("5.5.0", None)])
def test_no_offset_reads_as_none_unless_the_broker_returns_zero(cluster_of, connect, version, empty):
    do = doing(connect(cluster_of(version=version)))
    assert do("query_offset", "app", QUEUE) == empty
    pull(do, 0)  # the group is known from now on
    assert do("commit_offset", "app", QUEUE, 42) is True
    assert do("query_offset", "app", QUEUE) == 42


def test_only_no_offset_is_taken_for_none(embedded, broker, do):
    for code in (1, 2, 16, 17, 26):
        broker.on(RequestCode.QUERY_CONSUMER_OFFSET, answer(code, "trouble"))
        with pytest.raises(BrokerError, match="trouble"):
            do("query_offset", "app", QUEUE)
    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, answer(0, None, {"offset": "-1"}))
    assert do("query_offset", "app", QUEUE) is None
    embedded.send("orders", b"x", queue_id=0)  # to a new queue
    assert do("query_offset", "app", QUEUE) is None


def test_a_commit_is_acknowledged_or_raises(broker, do):
    with pytest.raises(ConfigError, match="-1"):
        do("commit_offset", "app", QUEUE, -1)
    assert broker.requests(RequestCode.UPDATE_CONSUMER_OFFSET) == []
    pull(do, 0)
    do("commit_offset", "app", QUEUE, 7)
    (received,) = broker.requests(RequestCode.UPDATE_CONSUMER_OFFSET)
    assert not received.command.is_oneway
    with pytest.raises(BrokerError) as raised:  # 5.3 and later know their groups
        do("commit_offset", "unknown", QUEUE, 7)
    assert raised.value.code == 26


@pytest.mark.live
def test_a_commit_that_a_waiting_reset_overrules_returns_false(broker, do):
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, answer(0, "Offset has been previously reset"))
    assert do("commit_offset", "app", QUEUE, 7) is False


def test_ranges_of_queues_and_their_errors(embedded, broker, do):
    embedded.send("orders", b"x", count=5, queue_id=0)
    embedded.send("orders", b"x", count=3, queue_id=1)
    broker.delete_before("orders", 0, 2)
    assert (do("min_offset", QUEUE), do("max_offset", QUEUE)) == (2, 5)
    queues = [QUEUE, SECOND]
    assert do("min_offsets", queues) == {QUEUE: 2, SECOND: 0}
    assert do("max_offsets", queues) == {QUEUE: 5, SECOND: 3}
    assert do("max_offsets", []) == {}
    broker.on(RequestCode.GET_MAX_OFFSET, answer(1, "AclException: no"), times=1)
    broker.on(RequestCode.GET_MAX_OFFSET, answer(0), times=1)
    refused, unreadable = do("max_offsets", queues).values()
    assert (type(refused), type(unreadable)) == (PermissionDenied, ProtocolError)
    assert "field offset is missing" in str(unreadable)


def test_a_connection_without_responses_to_several_calls_is_closed(embedded, broker, connect):
    client = connect(embedded, call_timeout_s=0.2)
    find_route(client)

    def arrived() -> list[bool]:
        return [isinstance(answer, int) for answer in doing(client)("max_offsets", [QUEUE, SECOND]).values()]

    for _ in range(2):  # responses in between reset the count
        broker.on(RequestCode.GET_MAX_OFFSET, drop, times=1)
        assert arrived() == [False, True]
    connection = client.run(client.connection(broker.address), 30)
    assert not connection.closed
    broker.on(RequestCode.GET_MAX_OFFSET, drop, times=2)
    assert arrived() == [False, False]
    assert connection.closed
    assert arrived() == [True, True]


def test_signed_requests_sent_together_are_admitted(cluster_of, connect):
    cluster = cluster_of(account=("app", "a-secret-key"))
    client = connect(cluster, access_key="app", secret_key="a-secret-key")
    find_route(client)
    assert doing(client)("max_offsets", QUEUES) == dict.fromkeys(QUEUES, 0)


@pytest.mark.parametrize("version", ["4.9.7", "5.1.4", "5.5.0"])
def test_the_first_message_at_or_after_a_time_is_found(cluster_of, connect, version):
    cluster = cluster_of(version=version)
    do = doing(connect(cluster))
    assert do("search_offset", QUEUE, 1000, group="app") == 0, "the only offset of an empty queue"
    for stored_at_ms in [1000, 2000, 2000, 2000, 3000]:
        cluster.send("orders", b"x", queue_id=0, stored_at_ms=stored_at_ms)
    expected = {0: 0, 1000: 0, 1001: 1, 1400: 1, 2000: 1, 2001: 4, 2999: 4, 3000: 4, 3001: 5}
    assert {at_ms: do("search_offset", QUEUE, at_ms, group="app") for at_ms in expected} == expected


# --- send, send back, view


def test_a_send_returns_the_location_and_the_flush_status(embedded, broker, do):
    header = SendMessageHeader("maker", "orders", queue_id=2, broker_name="broker-a")
    for number, code in enumerate((0, 10, 11, 12)):
        if code:
            broker.on(RequestCode.SEND_MESSAGE_V2, rewrite(lambda command, code=code: replace(command, code=code)))
        stored, status = do("send", header, b"hello")
        assert (stored.queue_id, stored.queue_offset, status) == (2, number, code)
    for code in (13, 14, 17):
        broker.on(RequestCode.SEND_MESSAGE_V2, answer(code, "no"))
        with pytest.raises(BrokerError) as raised:
            do("send", header, b"hello")
        assert raised.value.code == code
    assert [message.body for message in embedded.messages("orders")] == [b"hello"] * 4


def test_a_message_sent_back_is_redelivered(cluster_of, connect):
    cluster = cluster_of(delay_scale=0)
    cluster.send("orders", b"hello", queue_id=0)
    do = doing(connect(cluster))
    _, (message,) = pull(do, 0)
    busy = answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy")
    cluster.broker("broker-a").on(RequestCode.CONSUMER_SEND_MSG_BACK, busy)
    with pytest.raises(FlowControl):
        do("send_back", "app", message, 0)
    do("send_back", "app", message, 1, 16)
    cluster.wait_until(lambda: len(cluster.messages("%RETRY%app")) == 1)
    _, (again,) = pull(do, 0, MessageQueue("%RETRY%app", "broker-a", 0), Subscription("%RETRY%app"))
    assert (again.topic, again.body, again.reconsume_times) == ("orders", b"hello", 1)
    assert again.message_id == message.message_id
    do("send_back", "app", again, -1)  # given up
    cluster.wait_until(lambda: len(cluster.messages("%DLQ%app")) == 1)


# --- members and locks


def test_the_members_of_a_group_are_listed_in_order(embedded, connect):
    clients = [connect(embedded) for _ in range(3)]
    do = doing(clients[0])
    assert do("consumer_ids", "app", "orders") == []
    for client in clients:
        join(client, consumer="app")
    assert do("consumer_ids", "app") == sorted(client.client_id for client in clients)


def test_a_refused_member_list_is_an_error_not_an_empty_list(broker, do):
    body = json.dumps({"consumerIdList": [f"10.0.0.1@{number}" for number in range(100_000)]}).encode()
    for refusal, error, reason in (
        (answer(1, "java.lang.NullPointerException"), BrokerError, "java.lang.NullPointerException"),
        (answer(16, "no permission"), BrokerError, "no permission"),
        (answer(0, body=body), ProtocolError, "lists 100000 members"),  # more than a group can have
    ):
        broker.on(RequestCode.GET_CONSUMER_LIST_BY_GROUP, refusal)
        with pytest.raises(error, match=reason):
            do("consumer_ids", "app", "orders")


def test_offsets_outside_the_range_of_queues_are_refused(broker, do):
    for offset in ("9223372036854775807", "9223372036854775808", "1" * 5000, "soon"):
        for code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP):
            broker.on(code, answer(0, fields={"offset": offset}), times=None)
        for ask in ("max_offset", "min_offset"):
            with pytest.raises(ProtocolError):
                do(ask, QUEUE)
            assert isinstance(do(f"{ask}s", [QUEUE])[QUEUE], ProtocolError)
        with pytest.raises(ProtocolError):
            do("search_offset", QUEUE, 0)
        broker.clear_faults()


def test_locks_that_were_not_requested_do_not_count(broker, do):
    body = encode_lock_response([QUEUE, MessageQueue("orders", "broker-a", 7)])
    broker.on(RequestCode.LOCK_BATCH_MQ, answer(0, body=body))
    assert do("lock", "app", [QUEUE]) == {QUEUE}


def test_a_queue_is_locked_for_one_client_at_a_time(broker, embedded, connect):
    clients = [connect(embedded) for _ in range(2)]
    first, second = map(doing, clients)
    assert first("lock", "app", [QUEUE]) == {QUEUE}
    assert second("lock", "app", [QUEUE, SECOND]) == {SECOND}
    assert broker.locks("app") == {QUEUE: clients[0].client_id, SECOND: clients[1].client_id}
    second("unlock", "app", [QUEUE])  # not its own: nothing happens
    assert second("lock", "app", [QUEUE]) == set()
    first("unlock", "app", [QUEUE])
    assert second("lock", "app", [QUEUE]) == {QUEUE}


def test_to_lock_nothing_asks_nobody(broker, do):
    assert do("lock", "app", []) == set()
    do("unlock", "app", [])
    assert broker.requests() == []


# --- the client id and signatures


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_a_signed_client_is_admitted_and_others_are_not(cluster_of, connect, version):
    cluster = cluster_of(version=version, account=("RocketMQ", "12345678"))
    good = connect(cluster, access_key="RocketMQ", secret_key="12345678", security_token="token")
    assert doing(good)("max_offset", QUEUE) == 0
    for options in [{}, {"access_key": "RocketMQ", "secret_key": "wrong"}, {"access_key": "x", "secret_key": "y"}]:
        with pytest.raises(PermissionDenied):
            doing(connect(cluster, **options))("max_offset", QUEUE)
