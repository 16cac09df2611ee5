"""Requests of brokers to a consumer: follow a changed group, reset or report offsets, report state, consume a message.

Source: ClientRemotingProcessor. Tools such as mqadmin consumerStatus show members by these responses.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.locks import LOCK_VALID_S
from pyrocket_consumer.consumer.context.events import describe_error
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Statistics
from pyrocket_consumer.consumer.context.tasks import Throttle
from pyrocket_consumer.consumer.dispatch.concurrent import ConsumeService
from pyrocket_consumer.consumer.listener import ConsumeContext, Listener, find_failed
from pyrocket_consumer.consumer.resets.requests import ResetRequests
from pyrocket_consumer.consumer.resets.resets import Resets
from pyrocket_consumer.errors import ProtocolError, RocketError
from pyrocket_consumer.model import RETRY_PREFIX, EventKind, MessageQueue, retry_topic
from pyrocket_consumer.protocol import bodies
from pyrocket_consumer.protocol.codes import CLIENT_VERSION, RequestCode, ResponseCode, request_name, version_name
from pyrocket_consumer.protocol.command import (
    ConsumeMessageDirectlyHeader,
    GetConsumerRunningInfoHeader,
    GetConsumerStatusHeader,
    NotifyConsumerIdsChangedHeader,
    ResetOffsetHeader,
)
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import BodyLimit, Message, decode_message
from pyrocket_consumer.protocol.reset_format import is_relay_request, is_reset_order
from pyrocket_consumer.protocol.subscription import matches
from pyrocket_consumer.text import logger

log = logger("consumer")

T = TypeVar("T")

MANY_QUEUES = 50
MAX_STACK_FRAMES = 64  # of one thread
MAX_STACK_CHARACTERS = 256 * 1024

DIRECT_CALL_TIMEOUT_S = 9.0  # the broker waits 10 s

NOTICE_BURST, NOTICE_EVERY_S = 10, 2.0
"""How many notices of changed members are followed at once, and then one per interval, because each may move queues."""

MAX_DIRECT_CALLS = 4
"""How many messages in requests of brokers are consumed at once; never more than `consume_threads`."""


class BrokerRequests:
    """Handles the requests of brokers for one member. Confined to the I/O thread."""

    def __init__(
        self,
        context: MemberContext,
        assignments: Assignments,
        resets: Resets,
        statistics: Statistics,
        calls: ConsumeService,
    ) -> None:
        self.started_at_ms = 0
        self._context = context
        self._assignments = assignments
        self._resets = resets
        self._reset_requests = ResetRequests(context, assignments, resets)
        self._statistics = statistics
        self._calls = calls
        self._direct_calls: set[asyncio.Task[Any]] = set()
        self._notices = float(NOTICE_BURST)  # how many may be followed at once, as of then
        self._noticed_at = context.loop.time()
        self._notice_timer: asyncio.TimerHandle | None = None
        self._decoding = Throttle(context.loop)

    def begin(self) -> None:
        """Handle requests from now on."""
        requests, self.started_at_ms = self._context.cluster.requests, self._context.now_ms()
        requests.on_refused = self._report_refused
        requests.on_request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._on_ids_changed)
        requests.on_request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, self._on_reset)
        requests.on_request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, self._on_status)
        requests.on_request(RequestCode.GET_CONSUMER_RUNNING_INFO, self._on_running_info)
        requests.on_request(RequestCode.CONSUME_MESSAGE_DIRECTLY, self._on_consume_directly)

    def _report_refused(self, code: int, address: str, why: str) -> None:
        text = f"{request_name(code)} from {address} is refused: {why}"
        facts = {"code": code, "address": address}
        self._context.emit(EventKind.REQUEST_REFUSED, text, facts=facts, level=logging.WARNING)

    def _check_group(self, command: RemotingCommand, group: str) -> RemotingCommand | None:
        if group == self._context.name:
            return None
        remark = f"The Consumer Group <{group}> not exist in this consumer"
        return command.make_response(ResponseCode.SYSTEM_ERROR, remark)

    def _on_ids_changed(self, command: RemotingCommand, address: str) -> None:
        if NotifyConsumerIdsChangedHeader.from_fields(command.fields).consumer_group != self._context.name:
            return
        now = self._context.loop.time()
        self._notices = min(self._notices + (now - self._noticed_at) / NOTICE_EVERY_S, NOTICE_BURST)
        self._noticed_at = now
        if self._notices >= 1:
            self._notices -= 1
            self._context.rebalance_wanted.set()
        elif self._notice_timer is None:
            self._notice_timer = self._context.loop.call_later(
                (1 - self._notices) * NOTICE_EVERY_S, self._follow_notices
            )

    def _follow_notices(self) -> None:
        """Start a rebalance round, for all notices that have arrived meanwhile."""
        self._notice_timer, self._notices, self._noticed_at = None, 0.0, self._context.loop.time()
        self._context.rebalance_wanted.set()

    async def _on_reset(self, command: RemotingCommand, address: str) -> RemotingCommand | None:
        header = ResetOffsetHeader.from_fields(command.fields)
        if header.group != self._context.name or not command.body:
            return None
        if self._context.config.remote_reset == "refuse":
            self._resets.report_refusal(f"a reset of {header.topic}")
            return None
        try:
            targets = await self._reset_requests.read(bodies.decode_offset_table, command.body)
        except ProtocolError as error:
            self._context.emit(
                EventKind.OFFSET_RESET,
                f"a reset of {header.topic} from {address} cannot be read, and nothing moved: {error}",
                level=logging.ERROR,
            )
            return None
        await self._reset_requests.on_broker_reset(header.topic, targets)
        return None

    async def _on_status(self, command: RemotingCommand, address: str) -> RemotingCommand | None:
        header = GetConsumerStatusHeader.from_fields(command.fields)
        if header.group != self._context.name:
            return command.make_response(body=bodies.encode_consumer_status({}))
        async with self._decoding:
            table = self._assignments.offsets(header.topic)
            return command.make_response(body=await _encode(bodies.encode_consumer_status, table, len(table)))

    async def _on_running_info(self, command: RemotingCommand, address: str) -> RemotingCommand | None:
        header = GetConsumerRunningInfoHeader.from_fields(command.fields)
        refusal = self._check_group(command, header.consumer_group)
        if refusal is not None:
            return refusal
        if is_reset_order(command.fields):
            return await self._reset_requests.handle_relayed(command)
        async with self._decoding:
            if is_relay_request(command.fields):
                return await self._reset_requests.handle_relayed(command)
            stacks = await asyncio.to_thread(_format_stacks) if header.jstack_enable else None
            info = self.running_info(stacks)
            return command.make_response(body=await _encode(bodies.encode_running_info, info, len(info.queues)))

    def running_info(self, stacks: str | None) -> bodies.RunningInfo:
        """Return the state of this member that tools show."""
        context, now = self._context, time.time() * 1000
        loop_now, lock_now = context.loop.time(), context.lock_clock()
        is_locked = context.config.orderly and not context.config.broadcasting

        def wall_ms(loop_time: float) -> int:
            return int(now - 1000 * (loop_now - loop_time))

        queues = {}
        for held in self._assignments.all():
            window, pull_loop = held.window, held.pulls
            assert window is not None
            assert pull_loop is not None
            count, size, _ = window.unfinished()
            low, high = window.cached_range()
            queues[held.queue] = bodies.QueueRunningInfo(
                commit_offset=offset if (offset := held.commit.current()) is not None else -1,
                cached_msg_min_offset=low,
                cached_msg_max_offset=high,
                cached_msg_count=count,
                cached_msg_size_in_mib=size >> 20,
                locked=is_locked and lock_now < window.lease.valid_until,
                last_lock_timestamp=int(now - 1000 * (lock_now + LOCK_VALID_S - window.lease.valid_until))
                if is_locked
                else 0,
                dropped=window.dropped,
                last_pull_timestamp=wall_ms(pull_loop.last_pull_at),
                last_consume_timestamp=wall_ms(window.last_consumed_at) if window.last_consumed_at else 0,
            )
        return bodies.RunningInfo(
            properties=self._properties(),
            subscriptions=tuple(context.subscriptions.all()),
            queues=queues,
            status=self._statistics.status(),
            jstack=stacks,
        )

    def _properties(self) -> dict[str, str]:
        """Return the properties that tools read, and the settings under their names in Java."""
        config, heartbeat = self._context.config, self._context.heartbeat_data()
        settings: dict[str, object] = {
            "consumerGroup": config.group,
            "messageModel": heartbeat.message_model,
            "consumeFromWhere": heartbeat.consume_from_where,
            "allocateMessageQueueStrategy": config.allocation,
            "instanceName": config.instance_name,
            "clientIP": self._context.client_id.partition("@")[0],
            "namesrvAddr": ";".join(config.name_servers),
            "consumeThreadMin": config.consume_threads,
            "consumeThreadMax": config.consume_threads,
            "consumeMessageBatchMaxSize": config.listener_batch_size,
            "consumeConcurrentlyMaxSpan": config.max_span,
            "pullBatchSize": config.pull_batch_size,
            "pullThresholdForQueue": config.max_cached_messages,
            "maxReconsumeTimes": -1 if config.most_attempts is None else config.most_attempts,
            "consumeTimeout": round(config.consume_timeout_s / 60),
            "persistConsumerOffsetInterval": round(config.commit_interval_s * 1000),
            "heartbeatBrokerInterval": round(config.heartbeat_interval_s * 1000),
            "pollNameServerInterval": round(config.route_refresh_interval_s * 1000),
            "language": "PYTHON",
            "client": "pyrocket_consumer",
        }
        return {
            **{name: str(value) for name, value in settings.items()},
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CONSUMER_START_TIMESTAMP": str(self.started_at_ms),
            "PROP_CONSUMEORDERLY": "true" if config.orderly else "false",
            "PROP_CLIENT_VERSION": version_name(CLIENT_VERSION),
            "PROP_NAMESERVER_ADDR": "".join(f"{address};" for address in config.name_servers),
            "PROP_THREADPOOL_CORE_SIZE": str(config.consume_threads),
        }

    async def _on_consume_directly(self, command: RemotingCommand, address: str) -> RemotingCommand | None:
        """Call the listener with one message, independently of all queues; no offset moves."""
        header = ConsumeMessageDirectlyHeader.from_fields(command.fields)
        refusal = self._check_group(command, header.consumer_group)
        if refusal is not None:
            return refusal
        config = self._context.config
        if self._context.closing:
            raise RocketError("this consumer is closing")
        if not config.server_messages:
            raise RocketError("this consumer has server_messages=False")
        most = min(MAX_DIRECT_CALLS, config.consume_threads)
        if len(self._direct_calls) >= most:
            raise RocketError(f"{most} messages of brokers are being consumed already")
        message, listener = self._find_listener(command.body, address)
        context = ConsumeContext(
            MessageQueue(message.topic, message.queue.broker_name, message.queue.queue_id),
            message.reconsume_times + 1,
            time.monotonic() + DIRECT_CALL_TIMEOUT_S,
        )
        began = time.perf_counter()
        outcome, remark = "CR_SUCCESS", None
        unit = [message] if listener.batch_size > 1 else message
        call = self._context.loop.create_task(self._calls.call_once(listener, unit, context))
        self._direct_calls.add(call)  # until it ends, so that calls that hang do not accumulate
        call.add_done_callback(self._direct_calls.discard)
        done, _ = await asyncio.wait([call], timeout=DIRECT_CALL_TIMEOUT_S)
        if not done:
            return command.make_response(ResponseCode.CONSUME_MSG_TIMEOUT, "the listener took too long")
        result, raised = call.result()
        if raised is not None:
            outcome, remark = "CR_THROW_EXCEPTION", describe_error(raised)
        elif find_failed(result, [message])[0]:
            outcome = "CR_LATER"
        spent = int((time.perf_counter() - began) * 1000)
        result_body = bodies.ConsumeDirectlyResult(outcome, order=config.orderly, spent_time_mills=spent, remark=remark)
        return command.make_response(body=bodies.encode_consume_directly_result(result_body))

    def _find_listener(self, record: bytes, address: str) -> tuple[Message, Listener]:
        """Return the message of the request, as if it was pulled from that broker, and its listener.

        Raises:
            RocketError: no listener of this consumer takes the message; send it to another member.
        """
        stored = decode_message(record).queue
        names = self._context.cluster.routes.names_at(address)
        queue = MessageQueue(stored.topic, names[0] if names else stored.broker_name, stored.queue_id)
        message = decode_message(record, queue, BodyLimit(self._context.config.max_body_bytes))
        if stored.topic.startswith(RETRY_PREFIX) and stored.topic != retry_topic(self._context.name):
            found = None
        else:
            found = self._context.subscriptions.get(message.topic)
        if found is None or message.topic.startswith(RETRY_PREFIX) or not matches(found.subscription, message.tags):
            raise RocketError(f"no listener of this consumer takes messages of {message.topic} like that one")
        return message, found.listener


async def _encode(encode: Callable[[T], bytes], value: T, queues: int) -> bytes:
    """Return `encode(value)`; use another thread for many queues, because each takes a tenth of a millisecond."""
    return encode(value) if queues <= MANY_QUEUES else await asyncio.to_thread(encode, value)


def _format_stacks() -> str:
    """Return the call stack of each thread, last call first: file, line and function, without source and values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks, size = list[str](), 0
    frames = sys._current_frames()
    # Read all before formatting any. The threads run meanwhile, and a call that returns no longer has a caller.
    calls = {ident: list(islice(traceback.walk_stack(frame), MAX_STACK_FRAMES)) for ident, frame in frames.items()}
    for ident, stack in calls.items():
        lines = [f"  {each.f_code.co_filename}:{line} in {each.f_code.co_name}" for each, line in stack]
        stacks.append("\n".join([str(names.get(ident, ident)), *lines, ""]))
        size += len(stacks[-1])
        if size > MAX_STACK_CHARACTERS:
            stacks.append("and more threads")
            break
    return "\n".join(stacks)
