"""The format of resets of broadcasting groups: a record in a broker's offset table, and requests between clients.

The record consists of a few commits of the group for its retry topic, under queue ids that no topic has. The requests
are GET_CONSUMER_RUNNING_INFO with additional fields and a body, which brokers relay unchanged and other clients ignore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from zlib import crc32

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import Header, wire
from pyrocket_consumer.protocol.fastjson import read_number, read_object

RELAY_VERSION = 1
MAX_RECORDED_QUEUE_ID = 32_000
MAX_PLAN_BYTES = 512 * 1024  # 19,000 queues; the largest request may be twice as large
MAX_STATUS_REQUEST_BYTES = 4096
MAX_RECORDED_OFFSET = 2**63 - 2  # the record contains this plus one

MAX_EPOCH_AHEAD_MS = 24 * 3600 * 1000
"""How far an epoch may be ahead of the clock; larger than any clock error. With a higher one, no later reset counts."""

_FIRST_SLOT = 0x40000000
_AREAS = 0x4000
_PROBES = 8

PlanOffsets = Mapping[MessageQueue, int]


def is_valid_epoch(number: int, now_ms: int) -> bool:
    """Return whether a number can be the epoch of a reset: milliseconds since 1970, up to a day from now."""
    return 0 < number <= now_ms + MAX_EPOCH_AHEAD_MS


@dataclass(frozen=True, slots=True)
class RecordArea:
    """The location of a topic's record among a broker's offsets: 65,536 queue ids of the group's retry topic."""

    base: int

    @property
    def name(self) -> int:
        """The slot of `topic_digest(topic)`, which identifies the topic of this area."""
        return self.base + 65534

    @property
    def head(self) -> int:
        """The slot of the record's highest epoch. A reader that knows this epoch need not read on."""
        return self.base + 65535

    def target(self, queue_id: int) -> int:
        """The slot of a queue's target + 1, because brokers 4.9 return 0 for an empty slot."""
        return self.base + 2 * queue_id

    def epoch(self, queue_id: int) -> int:
        """The slot of the epoch of the reset that set the target."""
        return self.base + 2 * queue_id + 1


def record_areas(topic: str) -> Iterator[RecordArea]:
    """Yield the areas in which the record of `topic` may be, in search order."""
    first = crc32(topic.encode())
    for probe in range(_PROBES):
        yield RecordArea(_FIRST_SLOT + (((first + probe) % _AREAS) << 16))


def topic_digest(topic: str) -> int:
    """Return the number that identifies `topic` in its area; never 0."""
    return int.from_bytes(sha256(topic.encode()).digest()[:8], "big") >> 1 or 1


# --- requests and responses


class RelayHeader(Header, code=RequestCode.GET_CONSUMER_RUNNING_INFO):
    """A request of an admin of this package to one member, which any broker of the member relays."""

    consumer_group: str
    client_id: str
    operation: str = wire("pyrocketOp")
    id: str = wire("pyrocketId")
    jstack_enable: bool = False
    relay_version: int = wire("pyrocketV", default=RELAY_VERSION)


class RelayResponseHeader(Header):
    """The member's response. A response without `acknowledged` comes from another kind of client."""

    state: str = wire("pyrocketState")
    acknowledged: str = wire("pyrocketAck")
    reason: str | None = wire("pyrocketReason", default=None)
    relay_version: int = wire("pyrocketV", default=RELAY_VERSION)


def is_relay_request(fields: Mapping[str, str]) -> bool:
    """Return whether a request for running info contains a relayed request to a member of this package."""
    return "pyrocketOp" in fields


def is_reset_order(fields: Mapping[str, str]) -> bool:
    """Return whether a request for running info orders a member of this package to reset its offsets."""
    return fields.get("pyrocketOp") == "reset"


def is_relay_response(fields: Mapping[str, str]) -> bool:
    """Return whether a response comes from a member of this package."""
    return "pyrocketAck" in fields


@dataclass(frozen=True, slots=True)
class PlanBody:
    """The target offsets of a topic's queues. A newer plan has a higher `epoch`."""

    topic: str
    epoch: int
    targets: PlanOffsets


@dataclass(frozen=True, slots=True)
class ReportBody:
    """The report of a member about a topic.

    `epochs`: the newest reset that each queue has followed and stored. `offsets`: the current offset of each queue.
    `moved`: the targets of this plan to which the member has moved queues, for groups whose members share queues and
    store no epochs. `resets`: the last target to which any client reset each queue. `reset_counts`: the number of
    resets of each queue, including the last. `database`: an id of the database with the member's offsets, "" without
    a database.
    """

    topic: str
    id: str
    epochs: PlanOffsets = field(default_factory=dict)
    offsets: PlanOffsets = field(default_factory=dict)
    moved: PlanOffsets = field(default_factory=dict)
    resets: PlanOffsets = field(default_factory=dict)
    reset_counts: PlanOffsets = field(default_factory=dict)
    message_model: str = ""
    database: str = ""

    @property
    def in_database(self) -> bool:
        """Whether the member's offsets are in a database."""
        return bool(self.database)


def encode_plan(plan: PlanBody) -> bytes:
    """Return the body of a reset order."""
    return fastjson.dumps({"topic": plan.topic, "epoch": plan.epoch, "targets": _nested(plan.targets)})


def decode_plan(body: bytes) -> PlanBody:
    """Return the plan.

    Raises:
        ProtocolError: it is damaged, larger than `MAX_PLAN_BYTES`, or a number is out of range. Use no part of it.
    """
    if len(body) > MAX_PLAN_BYTES:
        raise ProtocolError(f"the reset plan has {len(body)} bytes; at most {MAX_PLAN_BYTES} are allowed")
    found = read_object(body, "reset plan")
    topic, epoch = found.text("topic"), found.number("epoch")
    if not topic:
        raise ProtocolError("the reset plan names no topic")
    if epoch <= 0:
        raise ProtocolError(f"the reset plan has epoch {epoch}; it must be positive")
    return PlanBody(topic, epoch, _flat(topic, found.table("targets"), "targets"))


def encode_status_request(topic: str) -> bytes:
    """Return the body of a request for the status of a topic."""
    return fastjson.dumps({"topic": topic})


def decode_status_request(body: bytes) -> str:
    """Return the topic of a status request.

    Raises:
        ProtocolError: it is not a status request, or it is too long.
    """
    if len(body) > MAX_STATUS_REQUEST_BYTES:
        raise ProtocolError(f"the status request has {len(body)} bytes; at most {MAX_STATUS_REQUEST_BYTES} are allowed")
    return read_object(body, "status request").text("topic")


_REPORT_TABLES = {
    "epochs": "epochs",
    "offsets": "offsets",
    "moved": "moved",
    "resets": "resets",
    "reset_counts": "resetCounts",
}


def encode_report(report: ReportBody) -> bytes:
    """Return the body of a member's response."""
    tables = {name: _nested(getattr(report, attribute)) for attribute, name in _REPORT_TABLES.items()}
    names = {"messageModel": report.message_model, "database": report.database}
    return fastjson.dumps({"topic": report.topic, "id": report.id, **tables, **names})


def decode_report(body: bytes) -> ReportBody:
    """Return the report of a member; an empty one if the body is empty, as in some refusals."""
    if not body:
        return ReportBody("", "")
    found = read_object(body, "reset report")
    topic = found.text("topic")
    tables = {attribute: _flat(topic, found.table(name), name) for attribute, name in _REPORT_TABLES.items()}
    return ReportBody(
        topic, found.text("id"), **tables, message_model=found.text("messageModel"), database=found.text("database")
    )


def _nested(offsets: PlanOffsets) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for queue, offset in sorted(offsets.items()):
        table.setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    return table


def _flat(topic: str, table: Mapping[Any, Any], what: str) -> dict[MessageQueue, int]:
    offsets = {}
    for broker_name, queues in table.items():
        if not isinstance(broker_name, str) or not broker_name or not isinstance(queues, dict):
            raise ProtocolError(f"{what} must be a table of broker names, each with a table of queue ids")
        for key, value in queues.items():
            queue_id = read_number(key, "a queue id", what)
            offset = read_number(value, f"the value of queue {queue_id}", what)
            if not 0 <= queue_id <= MAX_RECORDED_QUEUE_ID or not 0 <= offset <= MAX_RECORDED_OFFSET:
                raise ProtocolError(f"{what}: queue {queue_id} with {offset} is out of range")
            offsets[MessageQueue(topic, broker_name, queue_id)] = offset
    return offsets
