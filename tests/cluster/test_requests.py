"""What servers ask of a client."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pyrocket_consumer.errors import BrokerError, OffsetStoreUnwritable
from pyrocket_consumer.testing import EmbeddedCluster
from pyrocket_consumer.wire.codes import RequestCode
from pyrocket_consumer.wire.command import GetConsumerRunningInfoHeader, NotifyConsumerIdsChangedHeader
from tests.asking import Asking
from tests.cluster.conftest import Told, find_route, join


@pytest.fixture
def member(client):
    """A member of the group `app`."""
    join(client, consumer="app")
    return client


def ask(embedded, connect, member):
    """Have the broker ask `member` for its running info, as an admin does, and return the answer."""
    admin = connect(embedded)
    header = GetConsumerRunningInfoHeader("app", member.client_id)
    address = embedded.broker("broker-a").address
    return admin.run(admin.call(address, header, timeout_s=5), 6)


def handle(client, code, handler):
    async def register():
        client.on_request(code, handler)

    client.run(register(), 30)


def test_a_handler_gets_request_and_address_and_answers(embedded, connect, member):
    told = Told()

    async def answer(command, address):
        told(command.fields["consumerGroup"], address)
        return command.answer(body=b'{"properties":{}}')

    handle(member, RequestCode.GET_CONSUMER_RUNNING_INFO, answer)
    assert ask(embedded, connect, member).body == b'{"properties":{}}'
    assert told.next() == ("app", embedded.broker("broker-a").address)


def test_what_nobody_handles_is_answered_as_unknown(embedded, connect, member):
    with pytest.raises(BrokerError, match="request type 307 not supported") as raised:
        ask(embedded, connect, member)
    assert raised.value.code == 3


@pytest.mark.parametrize(
    ("error", "remark"),
    [(ZeroDivisionError("a defect"), "ZeroDivisionError: a defect"), (OffsetStoreUnwritable("disk full"), "disk full")],
)
def test_a_handler_that_fails_is_answered_with_the_reason(embedded, connect, member, error, remark):
    async def fail(command, address):
        raise error

    handle(member, RequestCode.GET_CONSUMER_RUNNING_INFO, fail)
    with pytest.raises(BrokerError, match=remark) as raised:
        ask(embedded, connect, member)
    assert raised.value.code == 1


def test_a_slow_handler_holds_up_no_call_and_no_request(embedded, broker, connect, member):
    told = Told()
    told_to_end = asyncio.Event()

    async def slow(command, address):
        await told_to_end.wait()
        return command.answer(body=b"{}")

    async def changed(command, address):
        told(NotifyConsumerIdsChangedHeader.from_fields(command.fields).consumer_group)

    handle(member, RequestCode.GET_CONSUMER_RUNNING_INFO, slow)
    handle(member, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, changed)
    admin = connect(embedded)
    asking = admin.submit(
        admin.call(broker.address, GetConsumerRunningInfoHeader("app", member.client_id), timeout_s=5)
    )
    broker.wait_for(RequestCode.GET_CONSUMER_RUNNING_INFO)
    join(connect(embedded), consumer="app")
    assert told.next() == ("app",)  # one-way: the member list changed
    queue = find_route(member).consume_queues()[0]
    assert member.run(member.broker("broker-a").max_offset(queue), 30) == 0

    async def end():
        told_to_end.set()

    member.run(end(), 30)
    assert asking.result(30).body == b"{}"


def test_only_brokers_in_routes_or_in_use_may_ask(connect):
    """Name servers may lose sight of a broker that is up; what it asks is heard while there is something of it."""
    with EmbeddedCluster(brokers=2) as embedded:
        embedded.create_topic("orders", queues=2)
        client, told, held = connect(embedded, route_refresh_interval_s=0.1), Told(), True

        async def answer(command, address):
            return command.answer(body=b"{}")

        client.on_request_refused(told)
        client.keep_brokers(lambda broker_name: held)
        join(client, consumer="app")
        handle(client, RequestCode.GET_CONSUMER_RUNNING_INFO, answer)
        other, fields = embedded.broker("broker-b"), {"consumerGroup": "app", "clientId": client.client_id}
        embedded.call(lambda: embedded.unregister(other))
        embedded.wait_until(lambda: find_route(client).brokers[-1].broker_name == "broker-a")
        assert Asking(other).ask(RequestCode.GET_CONSUMER_RUNNING_INFO, fields).body == b"{}"
        assert told.nothing
        answer = Asking(embedded.name_server_node).ask(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
        assert (answer.code, answer.remark) == (
            1, "GET_CONSUMER_RUNNING_INFO is not obeyed: only brokers of the topics in use may ask"
        )  # fmt: skip
        assert told.next() == (307, embedded.name_server, "only brokers of the topics in use may ask")
        held = False
        embedded.wait_until(lambda: not other.connections)


def test_a_refused_request_is_logged_once(embedded, client, caplog):
    find_route(client)
    for _ in range(3):
        assert Asking(embedded.name_server_node).ask(RequestCode.CHECK_TRANSACTION_STATE, {}).code == 1
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [
        f"request=CHECK_TRANSACTION_STATE from={embedded.name_server} not obeyed: "
        "only brokers of the topics in use may ask"
    ]


def test_only_so_many_requests_are_under_way(embedded, connect, member):
    handled, told, go_on = Told(), Told(), asyncio.Event()

    async def slow(command, address):
        handled(command.fields["n"])
        await go_on.wait()
        return command.answer(body=b"{}")

    async def register():
        member.on_request_refused(told)
        member.on_request(RequestCode.GET_CONSUMER_RUNNING_INFO, slow)

    member.run(register(), 30)
    broker = Asking(embedded.broker("broker-a"))
    answers = broker.ask_each(RequestCode.GET_CONSUMER_RUNNING_INFO, [{"n": str(number)} for number in range(70)])
    busy = [next(answers) for _ in range(6)]
    assert {(answer.code, answer.remark) for answer in busy} == {
        (2, "GET_CONSUMER_RUNNING_INFO is not obeyed: 64 of them are under way")
    }
    assert [handled.next() for _ in range(64)] == [(str(number),) for number in range(64)]
    assert [told.next()[0] for _ in range(6)] == 6 * [307]
    assert broker.ask(65_000, {}).code == 3, "others are answered meanwhile"
    member.run(_set(go_on), 30)
    assert [next(answers).body for _ in range(64)] == 64 * [b"{}"]
    assert broker.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, {"n": "70"}).body == b"{}"
    assert told.nothing


def test_only_so_many_bytes_of_requests_are_under_way(embedded, connect, member):
    go_on = asyncio.Event()

    async def slow(command, address):
        await go_on.wait()
        return command.answer(body=b"%d" % len(command.body))

    handle(member, RequestCode.CONSUME_MESSAGE_DIRECTLY, slow)
    broker, large = Asking(embedded.broker("broker-a")), bytes(9 << 20)
    answers = broker.ask_each(RequestCode.CONSUME_MESSAGE_DIRECTLY, [{}, {}], large)
    assert (busy := next(answers)).code == 2
    assert busy.remark == f"CONSUME_MESSAGE_DIRECTLY is not obeyed: requests under way hold {len(large)} bytes"
    member.run(_set(go_on), 30)
    assert next(answers).body == b"%d" % len(large)
    assert broker.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, {}, large).body == b"%d" % len(large)


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_defect_in_handling_is_logged_once(embedded, connect, member, caplog):
    async def fail(command, address):
        raise ZeroDivisionError

    handle(member, RequestCode.GET_CONSUMER_RUNNING_INFO, fail)
    for _ in range(3):
        assert Asking(embedded.broker("broker-a")).ask(RequestCode.GET_CONSUMER_RUNNING_INFO, {}).code == 1
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [logging.ERROR]
