"""The pull loop of one queue. It uses callbacks, so that a response costs no task switch.

`PullCore` decides. The loop sends the requests, counts the memory, and puts messages into the window. It sends the next
pull before it decodes a response.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

from pyrocket_consumer.cluster.membership import BrokerLink
from pyrocket_consumer.cluster.pull_core import (
    HOLD_TICK_S,
    UNHELD_S,
    Failed,
    PullCore,
    Pulled,
    PulledMessages,
    PullRequest,
    PullTemplate,
    is_wanted,
    pull_header,
    read_late_reset,
    read_messages,
)
from pyrocket_consumer.consumer.assignment.registration import Resubscriber
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ConfigError, ProtocolError, RocketError
from pyrocket_consumer.model import EventKind, PullStatus, Subscription
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import Message, MessageIdentity, identify, inner_messages, mark_batch_unreadable
from pyrocket_consumer.transport.connection import Connection
from pyrocket_consumer.transport.io_thread import SerialExecutor

DEFAULT_RESPONSE_BYTES = 1024
"""The bytes that a pull reserves before its queue's first response."""

DELIVERY_CHUNK = 256
"""How many messages of a large inner batch the loop delivers before other tasks run."""

UNPACK_CHECK_EVERY_S = 0.02
"""How often a large inner batch that waits for memory checks whether enough is free."""

READ_AHEAD = 4
"""How many pulls of one queue may be in flight. Measured: with 4 queues, 4 are a tenth faster than 2."""


Suspension = Literal["stopped", "pausing", "blocked", "unpacking"]
"""Why a loop neither sends pulls nor processes responses.

It pauses after a failure. It is blocked while it waits for a connection, a heartbeat or the consumer's decision on an
offset. It is unpacking while it waits for a large inner batch.
"""


class PullLoop:
    """Keeps one window filled, from its start offset until `stop`. Confined to the I/O thread."""

    def __init__(
        self,
        context: MemberContext,
        deliver: Callable[[ProcessQueue, list[Message]], None],
        resubscriber: Resubscriber,
        window: ProcessQueue,
        offset: int,
        batch: int,
        *,
        read_ahead: int = READ_AHEAD,
    ) -> None:
        """Pull from `offset` on, at most `batch` messages at a time, and `deliver` them to their listener."""
        hold_s, call_timeout_s = context.config.pull_hold_s, context.config.call_timeout_s
        self.window = window
        self.queue = window.queue
        self.core = PullCore(
            window.queue,
            offset,
            batch,
            read_ahead=read_ahead,
            unheld_s=min(UNHELD_S, hold_s / 2),
            retry_delay_s=context.config.pull_retry_delay_s,
        )
        self.is_paused = False  # by the user
        self.last_pull_at = context.loop.time()
        self.last_error = ""
        self.pulls = 0  # pulls whose response had messages
        self.pull_time_s = 0.0  # the time between their requests and responses
        self.pulled = 0
        self.moves = 0  # responses in a row that moved the offset and had no message
        self.last_read: MessageIdentity | None = None  # shows later whether the broker's log is still the same
        self._context = context
        self._deliver_messages = deliver
        self._resubscriber = resubscriber
        self._batch = batch
        self._hold_s = hold_s
        self._timeout_s = max(2 * hold_s, hold_s + HOLD_TICK_S + call_timeout_s)  # Java waits for twice its hold
        self._usual_size = DEFAULT_RESPONSE_BYTES  # in bytes, of a response
        self._undelivered = deque[tuple[PullRequest, Pulled]]()  # responses that are not decoded yet
        self._undelivered_messages = 0
        self._retry: asyncio.TimerHandle | None = None
        self._suspended_by = set[Suspension]()
        self._link: BrokerLink | None = None
        self._template: PullTemplate | None = None
        self._template_of: Subscription | None = None

    @property
    def next_offset(self) -> int:
        """The offset of the next pull. It is ahead of the window while responses are decoded."""
        return self.core.next_offset

    @property
    def max_offset(self) -> int:
        """The offset of the queue's next message, in the last response."""
        return self.core.max_offset

    # --- requests

    def pull(self) -> None:
        """Send as many pulls as the window has space for. Called at the start, after responses, and by a wake-up."""
        if self.is_paused or self._suspended_by:
            self.window.stop_waiting()
            return
        core = self.core
        while (offset := core.next_pull()) is not None:
            expected = 0 if core.may_be_empty(offset) else self._usual_size
            if not self._has_space(offset, expected):
                return
            topic = self._context.subscriptions.get(self.queue.topic)
            if topic is None:
                self.window.settle(expected)
                return  # unsubscribed; the next rebalance drops this queue
            link = self._link
            if link is None or link.broker_id != core.next_broker_id:
                link = self._link = self._context.cluster.link(self.queue.broker_name, core.next_broker_id)
            if (connection := link.connection) is None:
                self.window.settle(expected)
                self._run_then_pull(link.open)
                return
            self._send_pull(connection, offset, expected, topic.subscription)

    def _has_space(self, offset: int, expected: int) -> bool:
        ahead = len(self.core.in_flight)
        if not ahead and not self._undelivered_messages:
            return self.window.may_pull(self._batch, expected)
        # The space that undelivered messages leave is unknown until they are put. Then `_deliver` pulls again.
        wanted = self._batch * (ahead + 1) + self._undelivered_messages
        return self.window.may_pull_ahead(wanted, offset, expected)

    def _send_pull(self, connection: Connection, offset: int, expected: int, subscription: Subscription) -> None:
        self.last_pull_at = self._context.loop.time()
        pull = self.core.sent(offset, self.last_pull_at)
        pull.expected = expected
        if self._template is None or self._template_of is not subscription:
            group, hold_s = self._context.name, self._hold_s
            header = pull_header(group, self.queue, 0, self._batch, subscription, hold_s=hold_s, is_registered=True)
            self._template, self._template_of = PullTemplate(header.to_fields()), subscription
        template = self._template
        connection.send(
            partial(connection.encode, template.command(offset))
            if connection.is_signing
            else partial(template.encode, offset),
            partial(self._on_response, pull),
            self._timeout_s,
            on_late=self._check_late_response,
        )

    def pull_from_master_next(self) -> None:
        """Send the next pull to the master, because it has a reset of this queue that a slave never returns."""
        self.core.pull_from_master_next()

    def pull_again(self) -> None:
        """Continue at the offset before the broker's correction, which the consumer does not follow."""
        self._suspended_by.discard("blocked")
        self.pull()

    # --- responses

    def _on_response(self, pull: PullRequest, response: RemotingCommand | Exception) -> Callable[[], None] | None:
        if pull.abandoned:
            self._check_late_response(response)
            return None
        pull.response = response
        self._process_responses()
        return self._deliver if self._undelivered else None

    def _process_responses(self) -> None:
        """Process the responses that are next in order, and send pulls."""
        while not self._suspended_by and (found := self.core.next_result()) is not None:
            pull, result = found
            if isinstance(result, Failed):
                self._on_failed(result)
                self._settle(pull)
            elif self._accept(pull, result):
                self._undelivered.append((pull, result))
                self._undelivered_messages += result.count
            else:
                self._settle(pull)
        self.pull()

    def _accept(self, pull: PullRequest, pulled: Pulled) -> bool:
        """Continue at the next offset of a response. Return False if its messages are not put."""
        core, header = self.core, pulled.header
        core.broker_id = header.suggested_broker_id
        self.last_error = ""
        if header.status is PullStatus.OFFSET_MOVED:
            self._abandon()
            self._suspended_by.add("blocked")
            self._context.member.offset_moved(self.queue, pull.offset, header)
            return False
        now = self._context.loop.time()
        if pulled.count:
            self._usual_size = size = len(pulled.response.body)
            if not self.window.budget.accept(self.window, pull.expected, size):
                self._abandon()  # the response is larger than expected; pull again when memory is free
                return False
            pull.expected = pull.arrived = size
            self.pulls += 1
            self.pull_time_s += now - pull.sent_at
        pause_s = core.advance(pull, header, now)
        if core.is_guess_wrong:
            self._abandon()
        if pause_s:
            self._pause(pause_s)
        return True

    # --- messages

    def _deliver(self) -> None:
        """Put the messages of processed responses into the window, and give them to their listener."""
        while self._undelivered and "unpacking" not in self._suspended_by:
            pull, pulled = self._undelivered.popleft()
            self._undelivered_messages -= pulled.count
            if "stopped" not in self._suspended_by:
                found = self._put(pull, pulled)
                if found is not None:
                    self._suspended_by.add("unpacking")
                    work = self._put_rest(pull, found, pulled.header.next_offset)
                    self._context.tasks.keep_running(work, f"unpacking messages of {self.queue}")
                    return
            self._settle(pull)
            if not self.core.in_flight:
                self.pull()

    def _put(self, pull: PullRequest, pulled: Pulled) -> PulledMessages | None:
        """Put the messages of a response into the window, up to the first large inner batch; return a rest."""
        next_offset, body = pulled.header.next_offset, pulled.response.body
        if not pulled.count:
            self.core.progressed(False)
            self.window.put((), next_offset, 0)
            return None
        topic = self._context.subscriptions.get(self.queue.topic)
        subscription = topic.subscription if topic is not None else None
        try:
            found = read_messages(body, self.queue, pull.offset, next_offset, subscription, self.window.budget.bodies)
        except (ProtocolError, ConfigError) as error:  # damaged, or compressed with a codec that is not installed
            self._pull_from(pull.offset, error)
            return None
        has_messages = self._put_messages(found.messages, found.next_offset, len(body))
        self.core.progressed(has_messages)
        if has_messages:
            self._deliver_messages(self.window, found.messages)
        return found if found.rest else None

    def _put_messages(self, messages: list[Message], next_offset: int, size: int) -> bool:
        """Put messages into the window, and return whether there are any for their listener."""
        if not self.window.put(messages, next_offset, size) or not messages:
            return False
        self.last_read = identify(messages[-1])
        self.pulled += len(messages)
        return True

    async def _put_rest(self, pull: PullRequest, found: PulledMessages, next_offset: int) -> None:
        """Put messages one after the other, each inner batch when enough memory is free; then continue to pull."""
        rest, begin = found.rest, pull.offset
        try:
            for index, message in enumerate(rest):
                begin = max(pull.offset, message.queue_offset)
                end = min(rest[index + 1].queue_offset, next_offset) if index + 1 < len(rest) else next_offset
                if message in found.large_batches:
                    await self._put_batch(message, pull.offset, end)
                elif begin == message.queue_offset < next_offset:
                    await self._put_unpacked([message], end, message.store_size)
                if "stopped" in self._suspended_by:
                    break
        except ConfigError as error:  # compressed with a codec that is not installed
            self._pull_from(begin, error)
        finally:
            self._suspended_by.discard("unpacking")
            self._settle(pull)
            self._deliver()
        self._resume()

    async def _put_batch(self, batch: Message, begin: int, end: int) -> None:
        """Unpack a large inner batch on another thread, one batch at a time, and put its messages."""
        window = self.window
        while "stopped" not in self._suspended_by:
            async with window.budget.bodies.unpack_lock:
                if window.may_unpack(self._batch):
                    topic = self._context.subscriptions.get(self.queue.topic)
                    subscription = topic.subscription if topic is not None else None
                    items, size = await unpack_in_thread(batch, begin, end, subscription)
                    await self._put_unpacked(items, end, size)
                    return
            await asyncio.sleep(UNPACK_CHECK_EVERY_S)

    async def _put_unpacked(self, messages: list[Message], next_offset: int, size: int) -> None:
        if self._put_messages(messages, next_offset, size):
            self.core.progressed(True)
            for start in range(0, len(messages), DELIVERY_CHUNK):
                self._deliver_messages(self.window, messages[start : start + DELIVERY_CHUNK])
                await asyncio.sleep(0)

    def _settle(self, pull: PullRequest) -> None:
        if pull.expected:
            self.window.settle(pull.expected, pull.arrived)

    # --- errors and pauses

    def _pull_from(self, offset: int, error: Exception) -> None:
        """Pull again from `offset` on, because no later message was put. Responses behind it are discarded."""
        self.core.next_offset = offset
        while self._undelivered:
            pull, pulled = self._undelivered.popleft()
            self._undelivered_messages -= pulled.count
            self._settle(pull)
        self._on_failed(self.core.fail(error))

    def _on_failed(self, failed: Failed) -> None:
        self._report_error(failed.error)
        self._abandon()
        if failed.remedy == "register":
            self._run_then_pull(partial(self._resubscriber.wait_registered, self.queue))
            return
        self._pause(failed.pause_s)
        if failed.remedy == "refresh route":
            self._run_then_pull(self._refresh_route)

    def _report_error(self, error: Exception) -> None:
        self.last_error = str(error)
        kind = EventKind.ANSWER_REFUSED if isinstance(error, ProtocolError) else EventKind.BROKER_UNREACHABLE
        self._context.emit_throttled(kind, f"pull failed, tried again: {error}", self.queue)

    async def _refresh_route(self) -> None:
        await self._context.cluster.routes.get(self.queue.topic, refresh=True)
        self._context.rebalance_wanted.set()

    def _pause(self, seconds: float) -> None:
        if self._retry is None and "stopped" not in self._suspended_by:
            self._suspended_by.add("pausing")
            self._retry = self._context.loop.call_later(seconds, self._end_pause)

    def _end_pause(self) -> None:
        self._retry = None
        self._suspended_by.discard("pausing")
        self._resume()

    def _resume(self) -> None:
        """Continue after a pause, or after other work. Meanwhile responses may have arrived."""
        self._process_responses()
        self._deliver()

    def _run_then_pull(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run work that takes time, then continue to pull."""
        self._suspended_by.add("blocked")

        async def wait() -> None:
            try:
                await work()
            except RocketError as error:
                self._suspended_by.discard("blocked")
                self._on_failed(self.core.fail(error))
            else:
                self._suspended_by.discard("blocked")
                self._resume()

        self._context.tasks.keep_running(wait(), f"pulling {self.queue}")

    def _abandon(self) -> None:
        """Give up the pulls in flight. Their responses change nothing, except for a reset."""
        for pull in self.core.abandon():
            self._settle(pull)
            self._check_late_response(pull.response)  # it may have arrived before the response to an earlier pull

    def _check_late_response(self, response: RemotingCommand | Exception | None) -> None:
        try:
            if (reset := read_late_reset(response)) is not None:
                self._context.member.late_reset(self.queue, reset)
        except ProtocolError as error:
            self._report_error(error)

    def pause(self) -> None:
        """Give up the pulls in flight, and send none until `resume`."""
        self.is_paused = True
        self._abandon()

    def resume(self) -> None:
        """Pull again."""
        self.is_paused = False
        self.pull()

    def stop(self) -> None:
        """Give up the pulls in flight, and send no more."""
        self._suspended_by.add("stopped")
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._abandon()


_MEMORY_OF_MESSAGE = 600  # in addition to its record


async def unpack_in_thread(
    batch: Message, begin: int, end: int, subscription: Subscription | None
) -> tuple[list[Message], int]:
    """Return the wanted messages of a large inner batch from `begin` to before `end`, and the memory that they take.

    If the batch cannot be unpacked, return the batch itself; reading it raises the error in the listener.
    """
    thread = SerialExecutor("pyrocket-unpack")
    work = asyncio.get_running_loop().run_in_executor(thread, _unpack_range, batch, begin, end, subscription)
    thread.shutdown()
    return await work


def _unpack_range(batch: Message, begin: int, end: int, subscription: Subscription | None) -> tuple[list[Message], int]:
    try:
        items = inner_messages(batch)
    except ProtocolError as error:
        mark_batch_unreadable(batch, error, begin)
        return [batch], batch.store_size
    items = [item for item in items if begin <= item.queue_offset < end]
    if subscription is not None and subscription.tags:
        items = [item for item in items if is_wanted(subscription, item)]
    return items, sum(item.store_size + _MEMORY_OF_MESSAGE for item in items)
