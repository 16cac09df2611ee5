"""Faults: each has its documented effect the given number of times, and changes no other request."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import (
    EmbeddedCluster,
    Exchange,
    Gate,
    answer,
    close_connection,
    cut_after,
    delay,
    delay_request,
    drop,
    drop_answer,
    duplicate,
    garbage,
    handle_and_close,
    now_and_then,
    reset_connection,
    rewrite,
)
from tests.for_each import for_each
from tests.testing.brokers import broker_and_client
from tests.testing.raw_client import RawClient

MAX, COMMIT, PULL = RequestCode.GET_MAX_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.PULL_MESSAGE
QUEUE = {"topic": "T", "queueId": 0}


def commit_fields(offset: int = 5) -> dict[str, object]:
    return {"consumerGroup": "G", "topic": "T", "queueId": 0, "commitOffset": offset}


def test_drop_loses_the_request_and_drop_answer_only_the_answer() -> None:
    with broker_and_client(version="4.9.7") as (broker, client):
        broker.on(COMMIT, drop)
        broker.on(COMMIT, drop_answer)
        client.post(COMMIT, commit_fields(5))
        broker.wait_for(COMMIT, 1)
        assert broker.committed("G", "T") == {}
        client.post(COMMIT, commit_fields(6))
        broker.wait_for(COMMIT, 2)
        assert broker.committed("G", "T") == {0: 6}
        assert client.is_silent()
        assert client.call(COMMIT, commit_fields(7)).code == 0  # each fault was for one request


def test_counted_conditional_and_lasting_faults(broker, client):
    broker.on(MAX, answer(2, "busy"), times=2, when=lambda command: command.fields["queueId"] == "1")
    other = {**QUEUE, "queueId": 1}
    codes = [client.call(MAX, where).code for where in (QUEUE, other, QUEUE, other, other)]
    assert codes == [0, 2, 0, 2, 0]
    broker.on(MAX, answer(1), times=None)
    assert [client.call(MAX, QUEUE).code for _ in range(3)] == [1, 1, 1]
    broker.clear_faults(MAX)
    assert client.call(MAX, QUEUE).code == 0


@pytest.mark.differs("busy")
def test_a_test_can_define_the_response(broker, client):
    broker.on(PULL, answer(21, "OFFSET_RESET", {"nextBeginOffset": "7"}, b"body"))
    got = client.pull("T", 0, 0)
    assert (got.code, got.remark, got.fields, got.body) == (21, "OFFSET_RESET", {"nextBeginOffset": "7"}, b"body")


def test_delays() -> None:
    with broker_and_client(version="4.9.7") as (broker, client):
        broker.on(COMMIT, delay(0.2))
        start = time.monotonic()
        opaque = client.post(COMMIT, commit_fields())
        broker.wait_for(COMMIT)
        assert broker.committed("G", "T") == {0: 5}  # handled immediately, its response is late
        client.answer(opaque)
        assert time.monotonic() - start >= 0.2
        broker.on(COMMIT, delay_request(1))
        opaque = client.post(COMMIT, commit_fields(6))
        broker.wait_for(COMMIT, 2)
        assert broker.committed("G", "T") == {0: 5}
        client.answer(opaque)
        assert broker.committed("G", "T") == {0: 6}


def test_faults_of_all_codes_and_of_one_take_turns(broker, client):
    broker.on(MAX, answer(2))
    broker.on(None, answer(1), times=3)
    codes = [client.call(code, QUEUE).code for code in (MAX, RequestCode.GET_MIN_OFFSET, MAX, MAX, MAX)]
    assert codes == [2, 1, 1, 1, 0]
    broker.on(None, drop, times=None)
    client.post(MAX, QUEUE)
    assert client.is_silent(0.05)
    broker.clear_faults()
    assert client.call(MAX, QUEUE).code == 0


def test_a_fault_now_and_then_changes_no_other_request(broker, client):
    broker.on(MAX, now_and_then(0.3, answer(2)), times=None)
    codes = [client.call(MAX, QUEUE).code for _ in range(100)]
    assert set(codes) == {0, 2}
    assert 15 <= codes.count(2) <= 45
    assert [client.call(RequestCode.GET_MIN_OFFSET, QUEUE).code for _ in range(20)] == [0] * 20


def test_connections_end() -> None:
    with broker_and_client(version="4.9.7") as (broker, _):
        for fault, ends, committed in (
            (close_connection, "closed", {}),
            (reset_connection, "reset", {}),
            (handle_and_close, "closed", {0: 5}),
        ):
            broker.on(COMMIT, fault)
            with RawClient(broker.address) as client:
                client.post(COMMIT, commit_fields())
                assert client.wait_closed() == ends
            assert broker.committed("G", "T") == committed


def test_answers_before_a_connection_ends_still_arrive(broker, client):
    broker.on(COMMIT, close_connection)
    first = client.post(MAX, QUEUE)
    client.post(COMMIT, commit_fields())
    assert client.answer(first).code == 0
    assert client.wait_closed() == "closed"


def test_a_cut_answer(broker, client):
    client.produce("T", b"x" * 1000)
    broker.on(PULL, cut_after(100))
    client.post_pull("T", 0, 0)
    received = bytearray()
    while part := client._socket.recv(4096):
        received += part
    assert len(received) == 100
    assert int.from_bytes(received[:4]) > 1000


def test_garbage_and_duplicates(broker, client):
    broker.on(MAX, duplicate)
    opaque = client.post(MAX, QUEUE)
    assert [client.answer(opaque).code, client.answer(opaque).code] == [0, 0]
    broker.on(MAX, garbage(b"HTTP/1.1 400 Bad Request\r\n"))
    client.post(MAX, QUEUE)
    assert client._socket.recv(100).startswith(b"HTTP")


def test_an_answer_is_rewritten(broker, client):
    def from_slave(command: RemotingCommand) -> RemotingCommand:
        command.fields["suggestWhichBrokerId"] = "1"
        return command

    broker.on(PULL, rewrite(from_slave))
    assert client.pull("T", 0, 0).fields["suggestWhichBrokerId"] == "1"
    assert client.pull("T", 0, 0).fields["suggestWhichBrokerId"] == "0"


def test_faults_reach_the_answers_of_held_pulls() -> None:
    with broker_and_client(long_poll_tick_s=600.0) as (broker, client):
        broker.on(PULL, duplicate)
        opaque = client.post_pull("T", 0, 0, sysFlag=6, suspendTimeoutMillis=15_000)
        broker.cluster.wait_until(lambda: broker.held_pulls() == 1)
        broker.cluster.send("T", queue_id=0)
        assert [client.answer(opaque).code, client.answer(opaque).code] == [0, 0]


@pytest.mark.parametrize("answers", [False, True])
def test_a_gate_holds_requests_or_answers(answers: bool) -> None:
    gate = Gate(answers=answers)
    with broker_and_client(version="4.9.7") as (broker, client):
        broker.on(COMMIT, gate, times=None)
        opaques = [client.post(COMMIT, commit_fields(offset)) for offset in (5, 6)]
        assert [command.fields["commitOffset"] for command in gate.wait_held(2)] == ["5", "6"]
        assert broker.committed("G", "T") == ({0: 6} if answers else {})
        assert client.is_silent(0.05)
        gate.open()
        assert [client.answer(opaque).code for opaque in opaques] == [0, 0]
        assert broker.committed("G", "T") == {0: 6}
        assert client.call(COMMIT, commit_fields(7)).code == 0  # the gate is open
        with pytest.raises(TimeoutError):
            gate.wait_held(1, timeout_s=0.01)


def test_faults_of_the_name_server() -> None:
    with EmbeddedCluster() as cluster, RawClient(cluster.name_server) as client:
        cluster.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, answer(17))
        codes = [client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}).code for _ in range(2)]
        assert codes == [17, 0]


def test_requests_are_recorded_and_waited_for(broker, client):
    client.commit("G", "T", 0, 5)
    client.commit("G", "T", 1, 6)
    [first, second] = broker.wait_for(COMMIT, 2)
    assert first.command.fields["commitOffset"] == "5"
    assert first.client == client.address
    assert first.at_s <= second.at_s
    [found] = broker.wait_for(COMMIT, when=lambda command: command.fields["queueId"] == "1")
    assert found.command.fields["commitOffset"] == "6"
    assert [each.command.code for each in broker.requests()] == [COMMIT, COMMIT]
    broker.forget_requests()
    assert broker.requests(COMMIT) == []
    with pytest.raises(TimeoutError, match="0 of 1 UPDATE_CONSUMER_OFFSET requests"):
        broker.wait_for(COMMIT, timeout_s=0.01)


def test_recording_is_bounded_and_can_be_disabled() -> None:
    for limit in (3, 0):
        with broker_and_client(record_limit=limit) as (broker, client):
            for offset in range(5):
                client.commit("G", "T", 0, offset)
            offsets = [each.command.fields["commitOffset"] for each in broker.requests(COMMIT)]
            assert offsets == ["2", "3", "4"][3 - limit :]


@for_each(
    "options, text",
    [
        ({"code": "PULL_MESSAGE"}, "code='PULL_MESSAGE' is not allowed; give a RequestCode"),
        ({"fault": None}, "None is not a fault"),
        ({"times": 0}, "times=0 is not allowed; give 1 or more, or None"),
        ({"times": True}, "times=True is not allowed"),
        ({"when": "always"}, "when='always' is not a condition"),
    ],
)
def test_an_invalid_fault_is_refused(broker, client, options, text):
    given: dict[str, Any] = {"code": MAX, "fault": drop, **options}
    with pytest.raises(ConfigError, match=text):
        broker.on(given.pop("code"), given.pop("fault"), **given)
    assert client.call(MAX, QUEUE).code == 0


async def awaited(exchange: Exchange) -> None:
    raise AssertionError


NOT_MADE_YET = "returns a fault; call it first|missing 1 required"


@for_each(
    "fault, options, text",
    [
        *((maker, {}, NOT_MADE_YET) for maker in (delay, answer, Gate, now_and_then)),
        (awaited, {}, "returns a coroutine; give a function that is not async"),
        (lambda exchange: 1 // 0, {}, "ZeroDivisionError"),
        (lambda exchange: None, {"when": lambda request: bool(request.fields["group"])}, "KeyError: 'group'"),
    ],
)
def test_a_mistake_in_a_fault_fails_the_test_that_made_it(fault, options, text):
    """A broken fault loses no request silently. It ends the connection, and closing the cluster raises its error."""
    ended = None
    with pytest.raises(RuntimeError, match=text), broker_and_client() as (broker, client):
        broker.on(MAX, fault, **options)
        client.post(MAX, QUEUE)
        ended = client.wait_closed()
    assert ended, "the error of the cluster would hide one of this"
