"""Shared by tests of mixed groups: members whose names sort, and the queues that each of them holds."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from pyrocket_consumer.consumer.membership.allocation import allocate, strategy_of
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.bodies import RunningInfo, decode_running_info
from pyrocket_consumer.protocol.codes import RequestCode
from tests.consuming import until
from tests.real_brokers.remoting import Peer, Refused

JAVA_STRATEGIES = {"average": "AVG", "circle": "AVG_BY_CIRCLE", "hash": "CONSISTENT_HASH"}
"""Our names of strategies, and those of the Java program."""

IP = "127.0.0.1"

Owners = dict[str, set[MessageQueue]]
"""Queues by client id."""


def our_options(name: str) -> dict[str, str]:
    """Return our options for the client id `client_id(name)`."""
    return {"client_ip": IP, "instance_name": name}


def java_options(name: str) -> dict[str, str]:
    """Return Java's options for the client id `client_id(name)`."""
    return {"clientIp": IP, "instanceName": name}


def client_id(name: str) -> str:
    return f"{IP}@{name}"


def queues_of(topic: str) -> list[MessageQueue]:
    """Return the 8 queues of a topic in these tests."""
    return [MessageQueue(topic, "broker-a", queue_id) for queue_id in range(8)]


def running_info(cluster: Any, group: str, member: str) -> RunningInfo:
    """Return the running info of a member, ours or Java's, through the broker. Raise Refused if it is not there."""
    fields = {"consumerGroup": group, "clientId": member, "jstackEnable": False}
    with closing(Peer(cluster.broker("broker-a").address)) as peer:
        return decode_running_info(peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, fields).body)


def wait_until_committed(cluster: Any, group: str, member: str, topic: str, total: int) -> None:
    """Wait until the commit offsets of a member for `topic` add up to `total`.

    A Java member updates them a moment after its listener has returned. If it closes before, the next member gets the
    message again.
    """

    def noted() -> bool:
        queues = running_info(cluster, group, member).queues
        return sum(info.commit_offset for queue, info in queues.items() if queue.topic == topic) == total

    until(noted, f"{member} has consumed {total} of {topic}")


def owners(cluster: Any, group: str, topic: str) -> Owners:
    """Return the queues of `topic` that each member of a group holds now."""
    found: Owners = {}
    for member in cluster.members(group):
        try:
            queues = running_info(cluster, group, member).queues
        except Refused:
            continue  # it has just left
        found[member] = {queue for queue, info in queues.items() if queue.topic == topic and not info.dropped}
    return found


def wait_for_members(cluster: Any, group: str, topic: str, *names: str, strategy: str = "average") -> None:
    """Wait until the group has exactly these members, and each holds the queues that our allocation gives it."""
    every, ids, found = queues_of(topic), [client_id(name) for name in names], Owners()
    expected = {each: set(allocate(strategy_of(strategy), group, each, every, ids)) for each in ids}

    def reached() -> bool:
        nonlocal found
        found = owners(cluster, group, topic)
        return found == expected

    try:
        until(reached, "owners", 60)
    except AssertionError as error:
        raise AssertionError(f"queues are held by {_ids(found)}, not by {_ids(expected)}") from error


def _ids(found: Owners) -> dict[str, list[int]]:
    return {member: sorted(queue.queue_id for queue in queues) for member, queues in found.items()}
