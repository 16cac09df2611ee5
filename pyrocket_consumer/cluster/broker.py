"""Typed calls to one broker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from functools import partial

from pyrocket_consumer.cluster.client import Client, read_body
from pyrocket_consumer.cluster.pull_core import HOLD_TICK_S, PULL_CODES, pull_header, read_pull_response
from pyrocket_consumer.cluster.routes import Routes
from pyrocket_consumer.errors import BrokerError, ConfigError, ConnectError, ProtocolError, RocketError
from pyrocket_consumer.model import MASTER_ID, MessageQueue, PullResponse, PullStatus, Subscription
from pyrocket_consumer.protocol.bodies import (
    LockRequest,
    decode_consumer_list,
    decode_lock_response,
    encode_lock_request,
)
from pyrocket_consumer.protocol.codes import ResponseCode, version_ordinal
from pyrocket_consumer.protocol.command import (
    ConsumerSendMsgBackHeader,
    GetConsumerListByGroupHeader,
    GetMaxOffsetHeader,
    GetMinOffsetHeader,
    Header,
    LockBatchHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetHeader,
    SearchOffsetHeader,
    SendMessageHeader,
    SendMessageResponseHeader,
    UnlockBatchHeader,
    UpdateConsumerOffsetHeader,
    request,
)
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import (
    MAX_RECORDS,
    Message,
    decode_messages,
    inner_messages,
    mark_batch_unreadable,
)
from pyrocket_consumer.protocol.reset_format import MAX_RECORDED_OFFSET
from pyrocket_consumer.protocol.subscription import matches
from pyrocket_consumer.transport.connection import OnLateResponse

DEGRADED_CODES = frozenset(
    {
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    }
)
"""Responses to a send that mean "stored, but not flushed or replicated in time"."""

STORED_CODES = DEGRADED_CODES | {ResponseCode.SUCCESS}
"""Responses to a send that mean "stored"."""

MAX_MEMBERS = 10_000
"""The most members that a response may list. Larger groups do not exist, because each member lists all others."""

_STORED_REMARKS = frozenset({"FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"})
"""Remarks of errors to a send back that mean "stored, but not flushed or replicated in time"."""

_RESET_PENDING_REMARK = "previously reset"
_NO_CONSUMER_REMARK = "no consumer for this group"
_EXACT_SEARCH_VERSION = version_ordinal(5, 1, 1)


def _unpack_batch(batch: Message, begin: int) -> list[Message]:
    """Return the messages of an inner batch; if it cannot be unpacked, the batch as one message whose body raises."""
    try:
        return inner_messages(batch)
    except ProtocolError as error:
        mark_batch_unreadable(batch, error, begin)
        return [batch]


class Broker:
    """Calls to the master of one broker name, unless a method documents otherwise. Cheap to make, nothing to close.

    Every method raises BrokerError if the broker refuses the request. It raises ConnectError if no route names an
    address or no server accepts a connection there, and RequestTimeout or ConnectionLost if no response arrives.
    """

    __slots__ = ("_client", "_routes", "name")

    def __init__(self, client: Client, routes: Routes, name: str) -> None:
        self.name = name
        self._client = client
        self._routes = routes

    # --- messages

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        group: str,
        subscription: Subscription,
        max_messages: int = 32,
        hold_s: float = 0,
        broker_id: int = MASTER_ID,
    ) -> tuple[PullResponse, list[Message]]:
        """Return the messages of `queue` from `offset` on that match `subscription`, and the next offset.

        If there are no messages, the broker holds the call for up to `hold_s` seconds and until its next check, at
        most 5 s later. The request contains the subscription, so the broker needs none from heartbeats. `broker_id`
        is the one that the last response suggested.
        """
        address = await self._address(queue.topic, broker_id, any_id=True)
        header = pull_header(group, queue, offset, max_messages, subscription, hold_s=hold_s)
        timeout_s = hold_s + HOLD_TICK_S + self._client.config.call_timeout_s
        response = await self._client.call(address, header, timeout_s=timeout_s, accept=PULL_CODES)
        found = read_pull_response(response, offset)
        if found.status is not PullStatus.FOUND:
            return found, []
        messages = decode_messages(response.body, queue, partial(_unpack_batch, begin=offset), max_records=MAX_RECORDS)
        # an inner batch may begin before `offset`
        return found, [each for each in messages if each.queue_offset >= offset and matches(subscription, each.tags)]

    async def send(self, header: SendMessageHeader, body: bytes) -> tuple[SendMessageResponseHeader, int]:
        """Store a message. Return its location, and the response code, which is one of `STORED_CODES`.

        If no response arrives, the broker may have stored the message; a repeated send may store it twice.
        """
        response = await self._call(header, header.topic, body, accept=STORED_CODES)
        return SendMessageResponseHeader.from_fields(response.fields), response.code

    async def send_back(
        self,
        group: str,
        message: Message,
        delay_level: int,
        max_reconsume_times: int | None = None,
        *,
        on_late: Callable[[], None] = lambda: None,
    ) -> None:
        """Have the broker redeliver `message` to `group` later, through the group's retry topic.

        With `delay_level` 0 the broker chooses the delay by the number of attempts. With a negative one, or after
        `max_reconsume_times` attempts, it moves the message to the dead-letter topic. `on_late` is called if the
        broker confirms after RequestTimeout was raised.

        Raises:
            RequestTimeout, ConnectionLost: the broker may have done it. Each repetition may add one more message.
            FlowControl: the broker is busy and has not done it. Repeat the call.
            BrokerError: the broker refused, for example with code 1 because it has deleted the message.
        Source: ConsumerSendMsgBackRequestHeader.
        """
        header = ConsumerSendMsgBackHeader(
            offset=message.commit_log_offset,
            group=group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=message.topic,
            unit_mode=False,
            max_reconsume_times=max_reconsume_times,
            broker_name=self.name,
        )

        def handle_late(response: RemotingCommand) -> None:
            if response.code == ResponseCode.SUCCESS or response.remark in _STORED_REMARKS:
                on_late()

        try:
            await self._call(header, message.queue.topic, on_late=handle_late)
        except BrokerError as error:
            if error.remark not in _STORED_REMARKS:
                raise

    # --- offsets

    async def query_offset(self, group: str, queue: MessageQueue) -> int | None:
        """Return the offset that `group` has committed for `queue`, None if it has not committed any.

        For a new queue without a committed offset, brokers before 5.0 return 0 instead of None.
        """
        header = QueryConsumerOffsetHeader(group, queue.topic, queue.queue_id, False, self.name)
        response = await self._call(header, queue.topic, accept=(ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND))
        if response.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        offset = OffsetResponseHeader.from_fields(response.fields).offset
        return offset if offset >= 0 else None  # brokers store negative offsets, which mean "none"

    async def query_offsets(
        self, group: str, queues: Collection[MessageQueue]
    ) -> dict[MessageQueue, int | RocketError | None]:
        """Return for each queue the result of `query_offset`, or its error. Sends all requests at once.

        Raises:
            ConnectError: no request was sent.
        """
        wanted = list(queues)
        commands = [
            request(QueryConsumerOffsetHeader(group, queue.topic, queue.queue_id, False, self.name)) for queue in wanted
        ]
        responses = await self._client.call_many(await self._address(wanted[0].topic), commands) if wanted else []
        found: dict[MessageQueue, int | RocketError | None] = {}
        for queue, response in zip(wanted, responses, strict=True):
            if isinstance(response, RocketError):
                nothing = isinstance(response, BrokerError) and response.code == ResponseCode.QUERY_NOT_FOUND
                found[queue] = None if nothing else response
                continue
            try:
                offset = OffsetResponseHeader.from_fields(response.fields).offset
                found[queue] = offset if offset >= 0 else None
            except ProtocolError as error:
                found[queue] = error
        return found

    async def commit_offset(self, group: str, queue: MessageQueue, offset: int) -> bool:
        """Store `offset` as the next one of `queue` that `group` consumes. Return when the broker has acknowledged it.

        Returns False if the broker ignored the offset, because a reset waits there for the next pull. The broker
        writes offsets to disk every 5 s. If it is killed before, the previous offset is restored.

        Raises:
            ConfigError: `offset` is negative. A broker would store it as "no offset".
        """
        header = UpdateConsumerOffsetHeader(group, queue.topic, queue.queue_id, _check_offset(offset), self.name)
        response = await self._call(header, queue.topic)
        return _RESET_PENDING_REMARK not in (response.remark or "")

    async def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the next message of `queue` will have; 0 if the broker does not have the queue."""
        return await self._fetch_offset(GetMaxOffsetHeader(queue.topic, queue.queue_id, None, self.name), queue)

    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message of `queue`; 0 if the broker does not have the queue."""
        return await self._fetch_offset(GetMinOffsetHeader(queue.topic, queue.queue_id, self.name), queue)

    async def max_offsets(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int | RocketError]:
        """Return for each queue the result of `max_offset`, or the error that it raises.

        All requests are sent at once, so pass at most a few hundred queues.

        Raises:
            ConnectError: no request was sent.
        """
        return await self._fetch_offsets(lambda topic: GetMaxOffsetHeader(topic, 0, None, self.name), queues)

    async def min_offsets(self, queues: Collection[MessageQueue]) -> dict[MessageQueue, int | RocketError]:
        """Return for each queue the result of `min_offset`, or the error that it raises; see `max_offsets`."""
        return await self._fetch_offsets(lambda topic: GetMinOffsetHeader(topic, 0, self.name), queues)

    async def search_offset(self, queue: MessageQueue, timestamp_ms: int, *, group: str | None = None) -> int:
        """Return the offset of the first message stored at or after `timestamp_ms`, by the broker's clock.

        If all messages are older, that is the max offset; if all are newer, the min offset. Brokers before 5.1.1
        return the nearest message instead. With a `group`, this method then pulls messages to find the right one.
        """
        header = SearchOffsetHeader(queue.topic, queue.queue_id, timestamp_ms, broker_name=self.name)
        response = await self._call(header, queue.topic)
        offset = _read_offset(response)
        if group is None or response.version >= _EXACT_SEARCH_VERSION:
            return offset
        return await self._find_first_stored_at(queue, timestamp_ms, group)

    async def _find_first_stored_at(self, queue: MessageQueue, timestamp_ms: int, group: str) -> int:
        """Find the first message that is not older than `timestamp_ms` by a binary search of the queue."""

        async def is_older(offset: int) -> bool:
            _, messages = await self.pull(
                queue, offset, group=group, subscription=Subscription(queue.topic), max_messages=1
            )
            return bool(messages) and messages[0].stored_at_ms < timestamp_ms

        low, high = await self.min_offset(queue), await self.max_offset(queue)
        while low < high:
            middle = (low + high) // 2
            if await is_older(middle):
                low = middle + 1
            else:
                high = middle
        return low

    async def _fetch_offsets(
        self, header: Callable[[str], Header], queues: Collection[MessageQueue]
    ) -> dict[MessageQueue, int | RocketError]:
        """Fetch the offsets of queues with requests that differ only in topic and queue."""
        if not queues:
            return {}
        prepared = {topic: request(header(topic)) for topic in {queue.topic for queue in queues}}
        commands = [
            RemotingCommand(same.code, {**same.fields, "queueId": str(queue.queue_id)})
            for queue in queues
            for same in (prepared[queue.topic],)
        ]
        address = await self._address(next(iter(queues)).topic)
        responses = await self._client.call_many(address, commands)
        return {queue: _read_offset_or_error(response) for queue, response in zip(queues, responses, strict=True)}

    async def _fetch_offset(self, header: Header, queue: MessageQueue) -> int:
        response = await self._call(header, queue.topic)
        return max(0, _read_offset(response))  # -1 is the first offset of an empty batch queue

    # --- membership

    async def consumer_ids(self, group: str, topic: str | None = None) -> list[str]:
        """Return the sorted client ids of the group's members that this broker knows. A slave may respond."""
        header = GetConsumerListByGroupHeader(group)
        address = await self._address(topic, any_id=True)
        try:
            ids = await self._client.read(address, header, decode_consumer_list)
        except BrokerError as error:
            if error.code == ResponseCode.SYSTEM_ERROR and _NO_CONSUMER_REMARK in error.remark:
                return []
            raise
        if len(ids) > MAX_MEMBERS:
            raise ProtocolError(
                f"{address} lists {len(ids)} members of group {group!r}; at most {MAX_MEMBERS} are allowed"
            )
        return sorted(set(ids))

    async def lock(self, group: str, queues: Collection[MessageQueue]) -> set[MessageQueue]:
        """Lock `queues` for this client, or renew the locks. Return the queues that it holds now. A lock lasts 60 s.

        Source: RebalanceLockManager.
        """
        if not queues:
            return set()
        body = encode_lock_request(LockRequest(group, self._client.client_id, frozenset(queues)))
        response = await self._call(LockBatchHeader(), next(iter(queues)).topic, body)
        return set(queues).intersection(await read_body(decode_lock_response, response.body))

    async def unlock(self, group: str, queues: Collection[MessageQueue]) -> None:
        """Release this client's locks of `queues`. Return when the broker has acknowledged it."""
        if queues:
            body = encode_lock_request(LockRequest(group, self._client.client_id, frozenset(queues)))
            await self._call(UnlockBatchHeader(), next(iter(queues)).topic, body)

    # --- addresses

    async def _call(
        self,
        header: Header,
        topic: str | None,
        body: bytes = b"",
        *,
        accept: Container[int] = (0,),
        on_late: OnLateResponse | None = None,
    ) -> RemotingCommand:
        return await self._client.call(await self._address(topic), header, body, accept=accept, on_late=on_late)

    async def _address(self, topic: str | None, broker_id: int = MASTER_ID, *, any_id: bool = False) -> str:
        """Return the address of the master; with `any_id`, that of `broker_id` or the next best one.

        If no known route names the broker, fetch the route of `topic`.
        """
        address = self._known_address(broker_id, any_id)
        if address is None and topic is not None:
            await self._routes.get(topic, refresh=True)
            address = self._known_address(broker_id, any_id)
        if address is None:
            raise ConnectError(f"broker {self.name!r}", "no known route names an address of its master")
        return address

    def _known_address(self, broker_id: int, any_id: bool = False) -> str | None:
        return self._routes.address(self.name, broker_id, only_this=not any_id)


def _read_offset_or_error(response: RemotingCommand | RocketError) -> int | RocketError:
    if isinstance(response, RocketError):
        return response
    try:
        offset = int(response.fields["offset"])
        if offset <= MAX_RECORDED_OFFSET:
            return max(0, offset)
    except (KeyError, ValueError):
        pass
    try:
        return max(0, _read_offset(response))  # slower, but raises the right error
    except ProtocolError as error:
        return error


def _read_offset(response: RemotingCommand) -> int:
    """Return the offset in a response; a negative one means that the queue has none.

    Raises:
        ProtocolError: the offset is missing, not a number, or too large for a queue.
    """
    offset = OffsetResponseHeader.from_fields(response.fields).offset
    if offset > MAX_RECORDED_OFFSET:
        raise ProtocolError(f"a broker sent the offset {offset}; the largest of a queue is {MAX_RECORDED_OFFSET}")
    return offset


def _check_offset(offset: int) -> int:
    if offset < 0:
        raise ConfigError(f"offset {offset} cannot be committed, because brokers read it as none; give 0 or more")
    return offset
