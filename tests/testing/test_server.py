"""The order in which the requests of one connection are executed."""

from __future__ import annotations

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.frame import ONEWAY_FLAG, RemotingCommand, encode_command
from pyrocket_consumer.testing import EmbeddedCluster, RequestCode
from tests.testing.raw_client import RawClient

COUNT = 30


def burst(broker_address: str, oneway: bool = False) -> RawClient:
    """Send many commits of one queue together, as a client with many threads does. Each stores its number."""
    client, requests = RawClient(broker_address), []
    for number in range(COUNT):
        fields = {"consumerGroup": "app", "topic": "orders", "queueId": "0", "commitOffset": str(number)}
        command = RemotingCommand(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
        command.opaque, command.flag = 1000 + number, ONEWAY_FLAG if oneway else 0
        requests.append(encode_command(command))
    client.send_bytes(b"".join(requests))
    return client


def executed(**options: float) -> list[int]:
    with EmbeddedCluster(**options) as cluster:  # type: ignore[arg-type]
        cluster.create_topic("orders", queues=1)
        broker = cluster.broker("broker-a")
        broker.create_group("app")
        with burst(broker.address) as client:
            assert all(client.answer(1000 + number).code == 0 for number in range(COUNT))
        commits = broker.requests(RequestCode.UPDATE_CONSUMER_OFFSET)
        order = [int(each.command.fields["commitOffset"]) for each in commits]
        assert broker.committed("app", "orders") == {0: order[-1]}
        return order


@pytest.mark.differs("side by side")
def test_requests_are_executed_in_their_order() -> None:
    assert executed() == list(range(COUNT))


def test_the_seed_decides_the_order_of_concurrent_requests() -> None:
    one, again, other = (executed(side_by_side_s=20, seed=seed) for seed in (1, 1, 2))
    assert sorted(one) == sorted(other) == list(range(COUNT))
    assert one == again
    assert one not in (sorted(one), other)


def test_a_killed_broker_loses_the_requests_that_it_had_not_started() -> None:
    with EmbeddedCluster(side_by_side_s=60) as cluster:
        broker = cluster.broker("broker-a")
        broker.create_group("app")
        with burst(broker.address, oneway=True) as client:
            cluster.wait_until(lambda: bool(broker.connections))
            broker.kill()
            broker.start()
            client.wait_closed()
        assert broker.requests() == []


@pytest.mark.parametrize("side_by_side_s", [-1, 61, float("nan")])
def test_side_by_side_s_has_limits(side_by_side_s: float) -> None:
    with pytest.raises(ConfigError, match="side_by_side_s=.* from 0 to 60"):
        EmbeddedCluster(side_by_side_s=side_by_side_s)
