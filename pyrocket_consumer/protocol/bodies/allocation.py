"""Queues that are locked for a client, or allocated to it by a broker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.json_object import read_object, read_record


@dataclass(frozen=True, slots=True)
class LockRequest:
    """Queues a client wants to lock, or to unlock."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


def encode_lock_request(lock: LockRequest) -> bytes:
    """Return the body of a lock or an unlock. Source: LockBatchRequestBody, UnlockBatchRequestBody."""
    return fastjson.dumps({"clientId": lock.client_id, "consumerGroup": lock.group, "mqSet": sorted(lock.queues)})


def decode_lock_request(body: bytes) -> LockRequest:
    """Return which queues are to be locked, or unlocked."""
    found = read_object(body, "lock request")
    return LockRequest(found.text("consumerGroup"), found.text("clientId"), frozenset(found.queues("mqSet")))


def encode_lock_answer(queues: Iterable[MessageQueue]) -> bytes:
    """Return the body that tells which queues are locked. Source: LockBatchResponseBody."""
    return fastjson.dumps({"lockOKMQSet": sorted(queues)})


def decode_lock_answer(body: bytes) -> set[MessageQueue]:
    """Return the queues that are locked for us now."""
    return set(read_object(body, "lock answer").queues("lockOKMQSet"))


@dataclass(frozen=True, slots=True)
class AssignmentRequest:
    """What a 5.x broker must know to allocate a topic's queues."""

    topic: str = ""
    consumer_group: str = ""
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


@dataclass(frozen=True, slots=True)
class MessageQueueAssignment:
    """A queue allocated by the broker, to be pulled or popped from."""

    queue: MessageQueue
    mode: str = "PULL"


def decode_assignment_request(body: bytes) -> AssignmentRequest:
    """Return what is asked for."""
    return read_record(AssignmentRequest, read_object(body, "assignment request"), "assignment request")


def encode_assignments(assignments: Iterable[MessageQueueAssignment] | None) -> bytes:
    """Return the body; None is "no assignment possible", which leaves the list out."""
    if assignments is None:
        return b"{}"
    listed = [{"messageQueue": each.queue, "mode": each.mode} for each in assignments]
    return fastjson.dumps({"messageQueueAssignments": listed})
