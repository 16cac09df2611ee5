"""Queues that a broker has locked for a client or allocated to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.json_object import read_object, read_record


@dataclass(frozen=True, slots=True)
class LockRequest:
    """Queues that a client wants to lock or unlock."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


def encode_lock_request(lock: LockRequest) -> bytes:
    """Return the body of a lock or unlock request. Source: LockBatchRequestBody, UnlockBatchRequestBody."""
    return fastjson.dumps({"clientId": lock.client_id, "consumerGroup": lock.group, "mqSet": sorted(lock.queues)})


def decode_lock_request(body: bytes) -> LockRequest:
    """Return the queues to lock or unlock."""
    found = read_object(body, "lock request")
    return LockRequest(found.text("consumerGroup"), found.text("clientId"), frozenset(found.queues("mqSet")))


def encode_lock_response(queues: Iterable[MessageQueue]) -> bytes:
    """Return the body with the locked queues. Source: LockBatchResponseBody."""
    return fastjson.dumps({"lockOKMQSet": sorted(queues)})


def decode_lock_response(body: bytes) -> set[MessageQueue]:
    """Return the queues that are now locked for this client."""
    return set(read_object(body, "lock response").queues("lockOKMQSet"))


@dataclass(frozen=True, slots=True)
class AssignmentRequest:
    """The request to a 5.x broker to allocate the queues of a topic."""

    topic: str = ""
    consumer_group: str = ""
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


@dataclass(frozen=True, slots=True)
class MessageQueueAssignment:
    """A queue that the broker allocated, and whether to pull or pop from it."""

    queue: MessageQueue
    mode: str = "PULL"


def decode_assignment_request(body: bytes) -> AssignmentRequest:
    """Return the request."""
    return read_record(AssignmentRequest, read_object(body, "assignment request"), "assignment request")


def encode_assignments(assignments: Iterable[MessageQueueAssignment] | None) -> bytes:
    """Return the body. None means that no assignment is possible, so the body has no list."""
    if assignments is None:
        return b"{}"
    listed = [{"messageQueue": each.queue, "mode": each.mode} for each in assignments]
    return fastjson.dumps({"messageQueueAssignments": listed})
