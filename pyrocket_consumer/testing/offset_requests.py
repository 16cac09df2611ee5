"""Requests about offsets: committed offsets, first and last offsets of queues, and search by time.

Source: ConsumerManageProcessor, AdminBrokerProcessor.
"""

from __future__ import annotations

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
from pyrocket_consumer.testing.broker_state import BrokerState, Refused
from pyrocket_consumer.testing.connection import Connection
from pyrocket_consumer.testing.handlers import Handlers

_BOOTS_FIRST = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
_NOT_TO_ZERO = "Not found, do not set to zero, maybe this group boot first"


class OffsetRequests:
    """Handles requests about offsets at one broker."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

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
        offsets, release = self._state.offsets, self._state.release
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
        store = self._state.store
        if store.min_offset(topic, queue_id) > 0:
            return False
        if store.max_offset(topic, queue_id) == 0:
            return self._state.release.zero_for_empty_queues
        return not self._state.on_disk

    def update(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        state, release = self._state, self._state.release
        try:
            header = UpdateConsumerOffsetHeader.from_fields(command.fields)
        except ProtocolError as error:
            raise Refused(release.commit_missing_field, str(error)) from error
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        if release.commit_checks_topic and state.topics.get(topic) is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
        if release.commit_checks_group and group not in state.groups:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        if state.offsets.marked(topic, group, queue_id) is not None:
            return command.make_response(remark="Offset has been previously reset")
        state.offsets.commit(topic, group, queue_id, header.commit_offset)
        return command.make_response()

    def search(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = SearchOffsetHeader.from_fields(command.fields)
        upper = self._state.release.boundary_type and (header.boundary_type or "").upper() == "UPPER"
        found = search_offset(self._state, header.topic, header.queue_id, header.timestamp, upper)
        return _offset_response(command, found)

    def max_offset(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetMaxOffsetHeader.from_fields(command.fields)
        return _offset_response(command, self._state.store.max_offset(header.topic, header.queue_id))

    def min_offset(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetMinOffsetHeader.from_fields(command.fields)
        return _offset_response(command, self._state.store.min_offset(header.topic, header.queue_id))

    def earliest_store_time(self, command: RemotingCommand, connection: Connection) -> RemotingCommand:
        header = GetEarliestStoreTimeHeader.from_fields(command.fields)
        queue = self._state.store.queue(header.topic, header.queue_id)
        timestamp = queue.stored_at_ms[0] if queue is not None and queue.stored_at_ms else -1
        return command.make_response(fields={"timestamp": str(timestamp)})


def search_offset(state: BrokerState, topic: str, queue_id: int, time_ms: int, upper: bool = False) -> int:
    """Return the offset that a broker of this release finds for a time."""
    queue = state.store.queue(topic, queue_id)
    if queue is None:
        return 0
    if state.release.searches_nearest_time:
        return queue.nearest(time_ms)
    return queue.last_until(time_ms) if upper else queue.first_since(time_ms)


def _offset_response(command: RemotingCommand, offset: int) -> RemotingCommand:
    return command.make_response(fields={"offset": str(offset)})
