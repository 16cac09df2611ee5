"""Requests that servers send to a client."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pyrocket_consumer.errors import BrokerError, OffsetStoreUnwritable
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import GetConsumerRunningInfoHeader, NotifyConsumerIdsChangedHeader
from pyrocket_consumer.testing import EmbeddedCluster
from tests.cluster.conftest import RecordedCalls, find_route, join
from tests.server_requests import RequestSender


@pytest.fixture
def member(client):
    """A member of the group `app`."""
    join(client, consumer="app")
    return client


RUNNING_INFO = RequestCode.GET_CONSUMER_RUNNING_INFO


def ask(embedded, connect, member):
    """Request the running info of `member` through the broker, as an admin does, and return the response."""
    admin = connect(embedded)
    header = GetConsumerRunningInfoHeader("app", member.client_id)
    return admin.run(admin.call(embedded.broker("broker-a").address, header, timeout_s=5), 6)


def handle(client, code, handler):
    async def register():
        client.requests.on_request(code, handler)

    client.run(register(), 30)


def set_event(client, event):
    async def work():
        event.set()

    client.run(work(), 30)


def test_a_handler_receives_request_and_address_and_responds(embedded, broker, connect, member):
    with pytest.raises(BrokerError, match="request type 307 not supported") as raised:
        ask(embedded, connect, member)
    assert raised.value.code == 3
    calls = RecordedCalls()

    async def response(command, address):
        calls(command.fields["consumerGroup"], address)
        return command.make_response(body=b'{"properties":{}}')

    handle(member, RUNNING_INFO, response)
    assert ask(embedded, connect, member).body == b'{"properties":{}}'
    assert calls.next() == ("app", broker.address)


@pytest.mark.parametrize(
    ("error", "remark", "logged"),
    [
        (ZeroDivisionError("a defect"), "ZeroDivisionError: a defect", [logging.ERROR]),
        (OffsetStoreUnwritable("disk full"), "disk full", [logging.WARNING]),
    ],
)
def test_a_failing_handler_responds_with_the_reason_and_logs_it_once(
    embedded, connect, member, caplog, error, remark, logged
):
    async def fail(command, address):
        raise error

    handle(member, RUNNING_INFO, fail)
    for _ in range(3):
        with pytest.raises(BrokerError, match=remark) as raised:
            ask(embedded, connect, member)
        assert raised.value.code == 1
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == logged


def test_a_slow_handler_delays_no_call_and_no_request(embedded, broker, connect, member):
    calls = RecordedCalls()
    go_on = asyncio.Event()

    async def slow(command, address):
        await go_on.wait()
        return command.make_response(body=b"{}")

    async def changed(command, address):
        calls(NotifyConsumerIdsChangedHeader.from_fields(command.fields).consumer_group)

    handle(member, RUNNING_INFO, slow)
    handle(member, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, changed)
    admin = connect(embedded)
    sender = admin.submit(
        admin.call(broker.address, GetConsumerRunningInfoHeader("app", member.client_id), timeout_s=5)
    )
    broker.wait_for(RUNNING_INFO)
    join(connect(embedded), consumer="app")
    assert calls.next() == ("app",)  # one-way: the member list changed
    queue = find_route(member).consume_queues()[0]
    assert member.run(member.broker("broker-a").max_offset(queue), 30) == 0

    set_event(member, go_on)
    assert sender.result(30).body == b"{}"


def test_only_brokers_in_routes_or_in_use_may_send_requests(connect):
    """A name server may lose a broker that is up. Its requests are accepted while its queues are in use."""
    with EmbeddedCluster(brokers=2) as embedded:
        embedded.create_topic("orders", queues=2)
        client, calls, held = connect(embedded, route_refresh_interval_s=0.1), RecordedCalls(), True

        async def response(command, address):
            return command.make_response(body=b"{}")

        client.requests.on_refused = calls
        client.events.uses_broker = lambda broker_name: held
        join(client, consumer="app")
        handle(client, RUNNING_INFO, response)
        other, fields = embedded.broker("broker-b"), {"consumerGroup": "app", "clientId": client.client_id}
        embedded.call(lambda: embedded.unregister(other))
        embedded.wait_until(lambda: find_route(client).brokers[-1].broker_name == "broker-a")
        assert RequestSender(other).call(RUNNING_INFO, fields).body == b"{}"
        assert calls.is_empty
        response = RequestSender(embedded.name_server_node).call(RUNNING_INFO, fields)
        assert (response.code, response.remark) == (
            1,
            "GET_CONSUMER_RUNNING_INFO is refused: only brokers of the topics in use may send requests",
        )
        assert calls.next() == (307, embedded.name_server, "only brokers of the topics in use may send requests")
        held = False
        embedded.wait_until(lambda: not other.connections)


def test_a_refused_request_is_logged_once(embedded, client, caplog):
    find_route(client)
    for _ in range(3):
        assert RequestSender(embedded.name_server_node).call(RequestCode.CHECK_TRANSACTION_STATE, {}).code == 1
    why = "only brokers of the topics in use may send requests"
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [f"request=CHECK_TRANSACTION_STATE from={embedded.name_server} refused: {why}"]


def test_the_number_of_requests_in_flight_is_limited(broker, member):
    handled, calls, go_on = RecordedCalls(), RecordedCalls(), asyncio.Event()

    async def slow(command, address):
        handled(command.fields["n"])
        await go_on.wait()
        return command.make_response(body=b"{}")

    async def register():
        member.requests.on_refused = calls
        member.requests.on_request(RUNNING_INFO, slow)

    member.run(register(), 30)
    sender = RequestSender(broker)
    responses = sender.call_each(RUNNING_INFO, [{"n": str(number)} for number in range(70)])
    busy = [next(responses) for _ in range(6)]
    assert {(response.code, response.remark) for response in busy} == {
        (2, "GET_CONSUMER_RUNNING_INFO is refused: 64 of them are in flight")
    }
    assert [handled.next() for _ in range(64)] == [(str(number),) for number in range(64)]
    assert [calls.next()[0] for _ in range(6)] == 6 * [307]
    assert sender.call(65_000, {}).code == 3, "others are answered meanwhile"
    set_event(member, go_on)
    assert [next(responses).body for _ in range(64)] == 64 * [b"{}"]
    assert sender.call(RUNNING_INFO, {"n": "70"}).body == b"{}"
    assert calls.is_empty


def test_the_bytes_of_requests_in_flight_are_limited(broker, member):
    go_on = asyncio.Event()

    async def slow(command, address):
        await go_on.wait()
        return command.make_response(body=b"%d" % len(command.body))

    handle(member, RequestCode.CONSUME_MESSAGE_DIRECTLY, slow)
    sender, large = RequestSender(broker), bytes(9 << 20)
    responses = sender.call_each(RequestCode.CONSUME_MESSAGE_DIRECTLY, [{}, {}], large)
    assert (busy := next(responses)).code == 2
    assert busy.remark == f"CONSUME_MESSAGE_DIRECTLY is refused: requests in flight hold {len(large)} bytes"
    set_event(member, go_on)
    assert next(responses).body == b"%d" % len(large)
    assert sender.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, {}, large).body == b"%d" % len(large)
