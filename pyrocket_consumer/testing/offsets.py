"""Committed offsets, marks of server-side resets, and requests about offsets.

Source: ConsumerOffsetManager, ConsumerManageProcessor, AdminBrokerProcessor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.command import (
    GetEarliestStoreTimeHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    QueryConsumerOffsetHeader,
    SearchOffsetHeader,
    UpdateConsumerOffsetHeader,
)
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing.node import Connection, Handlers, Refused

if TYPE_CHECKING:
    from pyrocket_consumer.testing.broker import Broker


Key = tuple[str, str]
"""Topic and group."""


class ConsumerOffsets:
    """Committed offsets per (topic, group) and queue, the state last flushed to "disk", and reset marks.

    Any value is stored, also negative ones and queue ids that do not exist, as brokers do.
    """

    def __init__(self) -> None:
        self._offsets: dict[Key, dict[int, int]] = {}
        self._flushed: dict[Key, dict[int, int]] = {}
        self._marks: dict[Key, dict[int, int]] = {}
        self._pulled: dict[tuple[str, str, int], int] = {}

    def commit(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        self._offsets.setdefault((topic, group), {})[queue_id] = offset

    def committed(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return the stored offset, which may be negative; None if there is no offset."""
        return self._offsets.get((topic, group), {}).get(queue_id)

    def table(self, topic: str, group: str) -> dict[int, int]:
        return dict(self._offsets.get((topic, group), {}))

    def pulled(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Remember the offset of the group's last pull of a queue."""
        self._pulled[topic, group, queue_id] = offset

    def last_pulled(self, topic: str, group: str, queue_id: int) -> int:
        return self._pulled.get((topic, group, queue_id), 0)

    def topics_of(self, group: str) -> set[str]:
        return {topic for topic, its_group in self._offsets if its_group == group}

    def groups_of(self, topic: str) -> set[str]:
        return {group for its_topic, group in self._offsets if its_topic == topic}

    def remove(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Remove the offsets and marks of a topic, of a group, or of one group in one topic."""
        for table in (self._offsets, self._marks):
            for key in [key for key in table if topic in (None, key[0]) and group in (None, key[1])]:
                del table[key]

    # --- marks of server-side resets: in memory only

    def mark(self, topic: str, group: str, queue_id: int, target: int) -> None:
        self._marks.setdefault((topic, group), {})[queue_id] = target

    def marked(self, topic: str, group: str, queue_id: int) -> int | None:
        return self._marks.get((topic, group), {}).get(queue_id)

    def take_mark(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return a queue's mark and erase it."""
        if not self._marks:
            return None
        return self._marks.get((topic, group), {}).pop(queue_id, None)

    # --- the disk

    def flush(self) -> None:
        """Write the offsets to "disk": a kill loses only later commits."""
        self._flushed = {key: dict(table) for key, table in self._offsets.items()}

    def restart(self, lose_unflushed: bool) -> None:
        """Load the offsets after a stop, or after a kill that lost unflushed ones. Marks are lost in both cases."""
        if lose_unflushed:
            self._offsets = {key: dict(table) for key, table in self._flushed.items()}
        self._marks.clear()

    def copy_from(self, other: ConsumerOffsets) -> None:
        """Copy another broker's offsets, as a slave does from its master."""
        self._offsets = {key: dict(table) for key, table in other._offsets.items()}

    def clear(self) -> None:
        self._offsets.clear()
        self._flushed.clear()
        self._marks.clear()


_BOOTS_FIRST = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
_NOT_TO_ZERO = "Not found, do not set to zero, maybe this group boot first"


class OffsetRequests:
    """Handles requests about offsets at one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def handlers(self) -> Handlers:
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self.update,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search,
            RequestCode.GET_MAX_OFFSET: self.max_offset,
            RequestCode.GET_MIN_OFFSET: self.min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest_store_time,
        }

    def query(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = QueryConsumerOffsetHeader.from_fields(command.fields)
        offsets, release = self._broker.offsets, self._broker.release
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        offset = offsets.marked(topic, group, queue_id)
        if offset is None:
            offset = offsets.committed(topic, group, queue_id)
        if offset is not None and offset >= 0:
            return _offset_response(command, offset)
        if release.set_zero_if_not_found and header.set_zero_if_not_found is False:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, _NOT_TO_ZERO)
        if self._starts_at_zero(topic, queue_id):
            return _offset_response(command, 0)
        raise Refused(ResponseCode.QUERY_NOT_FOUND, _BOOTS_FIRST)

    def _starts_at_zero(self, topic: str, queue_id: int) -> bool:
        """Return whether a group without an offset gets 0, because the queue is young enough to be in memory."""
        store = self._broker.store
        if store.min_offset(topic, queue_id) > 0:
            return False
        if store.max_offset(topic, queue_id) == 0:
            return self._broker.release.zero_for_empty_queues
        return not self._broker.on_disk

    def update(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        broker, release = self._broker, self._broker.release
        try:
            header = UpdateConsumerOffsetHeader.from_fields(command.fields)
        except ProtocolError as error:
            raise Refused(release.commit_missing_field, str(error)) from error
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        if release.commit_checks_topic and broker.topics.get(topic) is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
        if release.commit_checks_group and group not in broker.groups:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        if broker.offsets.marked(topic, group, queue_id) is not None:
            return command.make_response(remark="Offset has been previously reset")
        broker.offsets.commit(topic, group, queue_id, header.commit_offset)
        return command.make_response()

    def search(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = SearchOffsetHeader.from_fields(command.fields)
        upper = self._broker.release.boundary_type and (header.boundary_type or "").upper() == "UPPER"
        found = search_offset(self._broker, header.topic, header.queue_id, header.timestamp, upper)
        return _offset_response(command, found)

    def max_offset(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetMaxOffsetHeader.from_fields(command.fields)
        return _offset_response(command, self._broker.store.max_offset(header.topic, header.queue_id))

    def min_offset(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetMinOffsetHeader.from_fields(command.fields)
        return _offset_response(command, self._broker.store.min_offset(header.topic, header.queue_id))

    def earliest_store_time(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetEarliestStoreTimeHeader.from_fields(command.fields)
        queue = self._broker.store.queue(header.topic, header.queue_id)
        timestamp = queue.stored_at_ms[0] if queue is not None and queue.stored_at_ms else -1
        return command.make_response(fields={"timestamp": str(timestamp)})


def search_offset(broker: Broker, topic: str, queue_id: int, time_ms: int, upper: bool = False) -> int:
    """Return the offset that a broker of this release finds for a time."""
    queue = broker.store.queue(topic, queue_id)
    if queue is None:
        return 0
    if broker.release.searches_nearest_time:
        return queue.nearest(time_ms)
    return queue.last_until(time_ms) if upper else queue.first_since(time_ms)


def _offset_response(command: RemotingCommand, offset: int) -> RemotingCommand:
    return command.make_response(fields={"offset": str(offset)})
