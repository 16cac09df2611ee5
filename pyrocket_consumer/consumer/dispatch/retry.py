"""Failed messages: reports about their listeners, and their way back to the broker.

The broker redelivers them later, or moves them to %DLQ%.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.commits.database import DatabaseCommits
from pyrocket_consumer.consumer.context.events import describe_id, key_facts
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts
from pyrocket_consumer.consumer.listener import ConsumeResult, FailedMessage
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import (
    ConnectError,
    ConnectionLost,
    DatabaseError,
    FlowControl,
    ProtocolError,
    RequestTimeout,
    RocketError,
)
from pyrocket_consumer.model import EventKind, dlq_topic, retry_topic
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.command import SendMessageHeader
from pyrocket_consumer.protocol.message import Message, has_compressed_body, stored_body
from pyrocket_consumer.protocol.properties import PropertyName, encode_properties
from pyrocket_consumer.text import logger, safe_repr
from pyrocket_consumer.transport.backoff import Backoff

log = logger("consumer")

MAX_TRIES = 3
"""How many attempts a busy broker gets before another one is tried."""

FIRST_SEND_BACK_PAUSE_S = 0.1
LOCAL_RETRY_S = 5.0
MAX_SEND_BACK_PAUSE_S = 300.0
GIVE_UP_RETRY_S = 1.0
_COMPRESSION = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK

SEND_BACK_LIMIT = 32
"""The largest number of concurrent send-backs at one broker. More of them than it can store in 200 ms make it busy."""

UNANSWERED = (RequestTimeout, ConnectionLost)
"""After these errors the broker may have executed the request, so each repetition may add a copy."""


@dataclass(slots=True, eq=False)
class SendBack:
    """One failed message that is being sent back."""

    window: ProcessQueue
    message: Message
    delay_level: int
    running: bool
    """Whether its listener call has not returned yet. The listener must not be called again meanwhile."""
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class UnansweredSendBack:
    """A message with unanswered send-back requests. If the broker executed them, copies will arrive."""

    window: ProcessQueue
    message: Message
    last_sent: Message
    """The copy of the latest unanswered request. `message` is the copy that represents all others."""
    backoff: Backoff
    """Its `until` is the loop's time of the next attempt, unless a response arrives before."""
    answered: asyncio.Event


class Retries:
    """Sends failed messages back. They stay unfinished until a broker has them, so a crash loses none.

    If no broker accepts a message, this member gives it to its listener again. It does the same after an unanswered
    send-back, although the broker may have the message. So the pauses between send-backs grow, and all copies count as
    the same message.
    """

    def __init__(self, context: MemberContext, commits: Commits, counts: Counts) -> None:
        self.deliver: Callable[[ProcessQueue, list[Message]], None] = lambda window, messages: None
        """Called to give messages to their listeners again."""
        self._context = context
        self._commits = commits
        self._counts = counts
        self._slots: dict[str, asyncio.Semaphore] = {}  # by broker, so that a slow one delays no other
        self._send_backs: dict[int, SendBack] = {}  # by id of the message
        self._unanswered: dict[object, UnansweredSendBack] = {}  # by `identity`, which all copies of a message share
        self._reported_topics: set[str] = set()  # unsubscribed topics that an event has reported
        self._waiting = 0

    @property
    def in_flight(self) -> int:
        """The number of messages that are being sent back, without those that wait for a retry."""
        return len(self._send_backs) - self._waiting

    def add(self, window: ProcessQueue, failed: Iterable[FailedMessage], *, running: bool = False) -> None:
        """Send messages of `window` back, so that they are consumed again later. Ignore those already being sent back.

        A message that is too large would fail each time, so it goes to the dead letters at once. `running` is true if
        the listener takes too long, and may still return or fail.
        """
        for message, delay_level in failed:
            if message._done or window.dropped:
                continue
            if (send_back := self._send_backs.get(id(message))) is not None:
                send_back.running = send_back.running and running
                continue
            level = -1 if message.is_too_large else delay_level
            send_back = self._send_backs[id(message)] = SendBack(window, message, level, running)
            send_back.task = self._context.tasks.begin(self._handle(send_back), "sending a failed message back")

    def add_unwanted(self, window: ProcessQueue, message: Message) -> None:
        """Send back a retried message of a topic that this member does not subscribe to (or no longer).

        Another member may consume it. After its attempts it is in the dead-letter queue.
        """
        topic = message.topic
        if topic not in self._reported_topics:
            self._reported_topics.add(topic)
            text = (
                f"this member gets retried messages of {topic}, but has not subscribed to it. It sends them back until "
                "their attempts are used up, and then they are dead letters; subscribe to the topic to consume them"
            )
            facts = {"topic": topic, "offset": message.queue_offset}
            self._context.emit(EventKind.MESSAGE_UNWANTED, text, window.queue, facts, level=logging.WARNING)
        self.add(window, [(message, 0)])

    def cancel(self) -> None:
        """Cancel all running send-backs. Their messages stay unfinished."""
        for send_back in self._send_backs.values():
            if send_back.task is not None:
                send_back.task.cancel()
        self._send_backs.clear()

    async def _handle(self, send_back: SendBack) -> None:
        window, message = send_back.window, send_back.message
        try:
            if self._context.config.broadcasting:
                window.ack([message])
                self._report_given_up(window, message, "a broadcasting group has no retry, so it counts as consumed")
            else:
                await self._return_to_broker(send_back)
        finally:
            self._send_backs.pop(id(message), None)  # before the listener gets it, because it may fail at once
        if not message._done and not window.dropped:
            message._extra_attempts += 1
            self.deliver(window, [message])

    async def _return_to_broker(self, send_back: SendBack) -> None:
        """Send a message back, or wait until its listener may get it again."""
        window, message = send_back.window, send_back.message
        if (unanswered := self._find_unanswered(window, message)) is not None and not message._done:
            await self._wait_to_retry(unanswered.backoff.until - self._context.loop.time(), unanswered)
        while not message._done and not window.dropped:
            try:
                async with self._slots.setdefault(window.queue.broker_name, asyncio.Semaphore(SEND_BACK_LIMIT)):
                    given_up = await self._send_back(window, message, send_back.delay_level)
                self._finish(window, message, given_up)
            except RocketError as error:
                text = f"message {describe_id(message)} stays at this member and is retried: {error}"
                self._context.emit_throttled(EventKind.SEND_BACK_FAILED, text, window.queue)
                pause_s = self._next_pause_s(window, message, error, LOCAL_RETRY_S)
                await self._wait_to_retry(pause_s, self._unanswered.get(identity(message)))
                if not send_back.running:
                    return

    async def _wait_to_retry(self, seconds: float, unanswered: UnansweredSendBack | None) -> None:
        """Wait for a time, or until a response to an unanswered request arrives. A close does not wait for this."""
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await (unanswered.answered if unanswered is not None else asyncio.Event()).wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    async def give_up(self, window: ProcessQueue, message: Message) -> float:
        """Send a message of an ordered queue to the dead letters, unless the database counts it as consumed.

        Return 0 once it is there, otherwise the number of seconds until the next attempt.
        """
        if self._context.config.broadcasting:
            self._report_given_up(window, message, "it counts as consumed")
            return 0.0
        if message._done:  # a late response has finished it
            return 0.0
        try:
            if (
                (claim := window.claim) is not None
                and isinstance(self._commits, DatabaseCommits)
                and await self._commits.is_consumed(claim, message.queue_offset)
            ):
                return 0.0
        except DatabaseError as error:
            self._context.emit_throttled(EventKind.STORE_UNREACHABLE, str(error), window.queue)
            return GIVE_UP_RETRY_S
        try:
            self._finish(window, message, await self._send_back(window, message, -1))
        except RocketError as error:
            text = f"message {describe_id(message)} is not given up yet and is retried: {error}"
            self._context.emit_throttled(EventKind.SEND_BACK_FAILED, text, window.queue)
            return self._next_pause_s(window, message, error, GIVE_UP_RETRY_S)
        return 0.0

    # --- the end of a message

    def _finish(self, window: ProcessQueue, message: Message, given_up: bool) -> None:
        """Finish a message that a broker has accepted."""
        unanswered = self._unanswered.get(identity(message))
        # A late response to an earlier copy does not answer the request of the present copy.
        if unanswered is not None and (unanswered.last_sent is message or unanswered.message is message):
            del self._unanswered[identity(message)]
            unanswered.answered.set()
        if message._done:
            return  # another response has finished it, or one of its copies
        window.ack([message])
        if given_up:
            self._report_given_up(window, message, f"it is in {dlq_topic(self._context.name)}")
            return
        self._counts.sent_back(window.queue.topic, 1)
        facts = {"offset": message.queue_offset, "attempt": message.reconsume_times + 1}
        text = "will be redelivered"
        self._context.emit(EventKind.MESSAGE_SENT_BACK, text, window.queue, facts, level=logging.DEBUG)

    def _report_given_up(self, window: ProcessQueue, message: Message, what: str) -> None:
        self._counts.sent_back(window.queue.topic, 1)
        if message.is_too_large:
            most = self._context.config.max_body_bytes
            text = f"the message, stored in {message.store_size} bytes, holds more than max_body_bytes={most}"
            too_large = {"offset": message.queue_offset, "message_id": describe_id(message)}
            self._context.emit(EventKind.MESSAGE_TOO_LARGE, text, window.queue, too_large, level=logging.WARNING)
        failures = message.reconsume_times + (0 if self._context.config.orderly else 1)
        text = f"the message is given up after {failures} failure{'s' if failures > 1 else ''}: {what}"
        facts = {"offset": message.queue_offset, "message_id": describe_id(message), "failures": failures}
        facts.update(key_facts(message))
        self._context.emit(EventKind.MESSAGE_GIVEN_UP, text, window.queue, facts, level=logging.WARNING)

    # --- unanswered send-backs

    def _find_unanswered(self, window: ProcessQueue, message: Message) -> UnansweredSendBack | None:
        """Return the unanswered send-backs of a message or of another copy of it, None without any.

        Of several unfinished copies, the one that was sent back most often represents all. Its arrival proves that the
        broker has executed the send-backs of the others.
        """
        unanswered = self._unanswered.get(identity(message))
        if unanswered is None or unanswered.message is message:
            return unanswered
        other, others_window = unanswered.message, unanswered.window
        if other._done or others_window.dropped or stored_times(message) >= stored_times(other):
            unanswered.window, unanswered.message = window, message
            others_window.ack([other])
        else:
            window.ack([message])
        return unanswered

    def _next_pause_s(self, window: ProcessQueue, message: Message, error: RocketError, pause_s: float) -> float:
        """Return the pause in seconds before the next attempt to send a message back."""
        if not isinstance(error, UNANSWERED):
            return pause_s
        now = self._context.loop.time()
        if (unanswered := self._find_unanswered(window, message)) is not None:
            unanswered.last_sent = message
            return unanswered.backoff.failed(now)
        self._unanswered = {
            key: each for key, each in self._unanswered.items() if not each.message._done and not each.window.dropped
        }
        backoff = Backoff(pause_s, MAX_SEND_BACK_PAUSE_S)
        self._unanswered[identity(message)] = UnansweredSendBack(window, message, message, backoff, asyncio.Event())
        return backoff.failed(now)

    # --- requests

    async def _send_back(self, window: ProcessQueue, message: Message, delay_level: int) -> bool:
        """Send a message to a broker. Return whether the broker moves it to the dead letters.

        Do not repeat a request that a broker may have executed, in any form. A late response still counts.

        Raises:
            RocketError: no broker accepted it. After one of UNANSWERED, a broker may have done so.
        """
        context, backoff = self._context, Backoff(FIRST_SEND_BACK_PAUSE_S, MAX_SEND_BACK_PAUSE_S)
        most = context.config.most_attempts
        given_up = delay_level < 0 or (most is not None and stored_times(message) >= most)
        for _ in range(MAX_TRIES):
            try:
                await context.cluster.broker(window.queue.broker_name).send_back(
                    context.name, message, delay_level, most, on_late=partial(self._finish, window, message, given_up)
                )
                return given_up
            except FlowControl as busy:
                error: RocketError = busy
                await asyncio.sleep(backoff.failed())
            except UNANSWERED:
                raise
            except RocketError as refused:
                error = refused
                break
        try:
            await self._send_as_new(message, delay_level)
        except UNANSWERED:
            raise
        except RocketError as also_refused:
            raise error from also_refused
        return delay_level < 0 or (most is not None and message.reconsume_times >= most)

    async def _send_as_new(self, message: Message, delay_level: int) -> None:
        """Send the message to the retry topic as a new one, to any broker. Source: sendMessageBackAsNormalMessage."""
        context = self._context
        topic = retry_topic(context.name)
        times = message.reconsume_times + 1
        properties = dict(message.properties)
        properties.setdefault(PropertyName.RETRY_TOPIC, message.topic)
        properties.setdefault(PropertyName.ORIGIN_MESSAGE_ID, message.message_id)
        properties.pop(PropertyName.TRANSACTION_PREPARED, None)
        properties[PropertyName.DELAY] = str(delay_level if delay_level > 0 else 3 + message.reconsume_times)
        limit = 0 if delay_level < 0 else context.config.most_attempts
        route = await context.cluster.routes.get(topic)
        error: RocketError | None = None
        # It stays compressed, because only the listener decompresses bodies.
        is_compressed = has_compressed_body(message)
        for queue in context.rng.sample(list(route.publish_queues()), k=min(3, len(route.publish_queues()))):
            header = SendMessageHeader(
                producer_group=context.name,  # ACL 2.0 of 5.3.3 checks the group in this field
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue.queue_id,
                sys_flag=message.sys_flag & _COMPRESSION if is_compressed else 0,
                born_timestamp=message.born_at_ms,
                flag=message.flag,
                properties=encode_properties(properties),
                reconsume_times=times,
                unit_mode=False,
                max_reconsume_times=limit,
                batch=False,
                broker_name=queue.broker_name,
            )
            try:
                await context.cluster.broker(queue.broker_name).send(header, stored_body(message))
                return
            except UNANSWERED:
                raise
            except RocketError as failure:
                error = failure
        raise error or ConnectError(f"topic {topic}", "no route names a queue of it to write to")


class ListenerReports:
    """Turns what happens in listener calls into events, statistics and retries. Any thread, except where stated."""

    def __init__(self, context: MemberContext, retries: Retries, counts: Counts) -> None:
        self._context = context
        self._counts = counts
        self.retries = retries

    def failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        """Have failed messages consumed again."""
        self._context.call_soon(self._failed, window, failed)

    def _failed(self, window: ProcessQueue, failed: list[FailedMessage]) -> None:
        self.count_failed(window, len(failed))
        if not self._context.closing:
            self.retries.add(window, failed)

    def count_failed(self, window: ProcessQueue, count: int) -> None:
        """Count attempts whose listener failed. I/O thread."""
        self._counts.failed(window.queue.topic, count)

    def listener_raised(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """Report an exception of a listener."""
        facts = {"offset": message.queue_offset, "error": safe_repr(error), **key_facts(message)}
        text = "the listener raised; the message has failed"
        self._context.emit(EventKind.LISTENER_FAILED, text, window.queue, facts, level=logging.WARNING, error=error)

    def result_unknown(self, window: ProcessQueue, message: Message, result: object) -> None:
        """Report the first unknown result of this type from a listener."""
        if hasattr(type(result), "__await__"):  # of the type, because the value itself may raise
            remedy = "it is not awaited; subscribe with the `async def` function itself"
        elif result is ConsumeResult.COMMIT or result is ConsumeResult.ROLLBACK:
            remedy = "COMMIT and ROLLBACK are for orderly=True, auto_commit=False; return SUCCESS or None instead"
        else:
            remedy = "return None when a message is consumed, otherwise a ConsumeResult or Retry"
        text = f"the listener returned {safe_repr(result)}, so its messages are redelivered (reported once): {remedy}"
        facts = {"offset": message.queue_offset}
        self._context.emit(EventKind.LISTENER_RESULT_UNKNOWN, text, window.queue, facts, level=logging.WARNING)

    def key_failed(self, window: ProcessQueue, message: Message, error: BaseException) -> None:
        """Report that `order_by` failed for a message. Workers call this, because the error's repr runs user code."""
        facts = {"offset": message.queue_offset, "message_id": describe_id(message), "error": safe_repr(error)}
        text = (
            "order_by raised, or returned a value that cannot be a key. The message has failed and is retried alone "
            "(reported once); later messages of its key may overtake it"
        )
        self._context.emit(EventKind.LISTENER_FAILED, text, window.queue, facts, level=logging.WARNING, error=error)

    def stuck(self, window: ProcessQueue, messages: Sequence[Message]) -> None:
        """Report messages whose listener call takes too long, and send them back. I/O thread.

        An orderly queue keeps its messages, because the order matters more. A broadcasting group has no retry.
        """
        config = self._context.config
        also = ", or order_by," if callable(config.order_by) else ""
        self._stuck(window, messages[0], f"its listener{also} has run for more than {config.consume_timeout_s:g} s")
        if not config.broadcasting and not config.orderly:
            self.retries.add(window, [(message, 3) for message in messages], running=True)

    def held_up(self, window: ProcessQueue, why: str) -> None:
        """Report that an ordered queue waits for its listener. The facts are of the oldest unfinished message."""
        self._stuck(window, window.unfinished()[2], why)

    def _stuck(self, window: ProcessQueue, message: Message | None, why: str) -> None:
        facts = dict[str, object]()
        if message is not None:
            facts = {"offset": message.queue_offset, "message_id": describe_id(message), **key_facts(message)}
        self._context.emit(EventKind.MESSAGE_STUCK, why, window.queue, facts, level=logging.WARNING)

    def worker_failed(self, error: BaseException) -> None:
        """Report an unexpected error outside of the listener: in the offset store, or in the worker itself."""
        self._context.call_soon(self._context.report_unexpected, "a worker failed", error)


def stored_times(message: Message) -> int:
    """Return how often a message had failed when its broker stored it, without later attempts of this member."""
    return message.reconsume_times - message._extra_attempts


def identity(message: Message) -> object:
    """Return a value that a message and its copies from send-backs share, and no other message has."""
    try:
        if message.body_crc:
            origin = message.property(PropertyName.ORIGIN_MESSAGE_ID) or message.offset_message_id
            return message.topic, origin, message.born_at_ms, message.body_crc
    except ProtocolError:  # a damaged record
        pass
    return message.queue, message.queue_offset  # items of an inner batch share their commit log offset
