"""Failed messages: back to the broker, which sends them again later, or gives them up to %DLQ%."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from pyrocket_consumer.consumer.context.events import describe_id, key_facts
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.context.statistics import Counts
from pyrocket_consumer.consumer.dispatch.delivery import Delivery
from pyrocket_consumer.consumer.listener import FailedMessage
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import (
    ConnectError,
    ConnectionLost,
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
from pyrocket_consumer.text import logger

log = logger("consumer")

MAX_TRIES = 3
"""How often a broker that is busy is asked before another one is."""

FIRST_SEND_BACK_PAUSE_S = 0.1
LOCAL_RETRY_S = 5.0
MAX_SEND_BACK_PAUSE_S = 300.0
GIVE_UP_RETRY_S = 1.0
_COMPRESSION = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK

SEND_BACK_LIMIT = 32
"""Most send-backs under way at one broker: it answers more than it can store in 200 ms with "busy"."""

UNANSWERED = (RequestTimeout, ConnectionLost)
"""The broker may have executed what fails like this: each repetition may be one copy more."""


@dataclass(slots=True, eq=False)
class SendBack:
    """One failed message on its way back."""

    window: ProcessQueue
    message: Message
    delay_level: int
    running: bool
    """Its listener call has not returned yet: to call the listener once more would be to have it run twice."""
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class UnansweredSendBack:
    """A message some of whose send-backs nobody answered. If they were executed, copies of it will come."""

    window: ProcessQueue
    message: Message
    last_sent: Message
    """The copy whose send-back was the last without an answer; `message` is the one that stands for all."""
    pause_s: float
    due_at: float
    """Not before is it sent back again, unless an answer comes."""
    answered: asyncio.Event


class Retries:
    """Sends failed messages back; until that is done they stay unfinished, so no crash can lose them.

    A message that no broker takes is given to its listener here again. One whose send-back was not answered is, too,
    and may be at the broker: its send-backs have pauses that grow, and its copies count as the same message.
    """

    def __init__(self, context: MemberContext, delivery: Delivery, counts: Counts) -> None:
        self._context = context
        self._delivery = delivery
        self._counts = counts
        self._slots: dict[str, asyncio.Semaphore] = {}  # by broker: one that does not answer delays no other
        self._send_backs: dict[int, SendBack] = {}  # by id of the message
        self._unanswered: dict[object, UnansweredSendBack] = {}  # by what copies of a message have in common
        self._reported_topics: set[str] = set()  # topics that nobody here reads, once told
        self._waiting = 0

    @property
    def in_flight(self) -> int:
        """How many messages are being sent back; those that wait to be tried again do not count."""
        return len(self._send_backs) - self._waiting

    def add(self, window: ProcessQueue, failed: Iterable[FailedMessage], *, running: bool = False) -> None:
        """Have messages of `window` consumed again, later; not those that are on their way already.

        One that is too large would fail again each time: it is given up at once.
        `running`: their listener takes too long, and may still return or fail.
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
        """Send a retried message back that is of a topic nobody here reads (any more).

        Somebody else may read it, or will; after its attempts it is among the dead letters.
        """
        topic = message.topic
        if topic not in self._reported_topics:
            self._reported_topics.add(topic)
            text = (
                f"retried messages of {topic} come here, which this member has not subscribed to: they are sent back "
                "until they have had their attempts, and are dead letters then; subscribe to it to have them consumed"
            )
            facts = {"topic": topic, "offset": message.queue_offset}
            self._context.emit(EventKind.MESSAGE_UNWANTED, text, window.queue, facts, level=logging.WARNING)
        self.add(window, [(message, 0)])

    def cancel(self) -> None:
        """Give up what is not done; those messages stay unfinished."""
        for send_back in self._send_backs.values():
            if send_back.task is not None:
                send_back.task.cancel()
        self._send_backs.clear()

    async def _handle(self, send_back: SendBack) -> None:
        window, message = send_back.window, send_back.message
        try:
            if self._context.config.broadcasting:
                self._skip(window, message)
            else:
                await self._return_to_broker(send_back)
        finally:
            self._send_backs.pop(id(message), None)  # before the listener gets it, who may fail at once
        if not message._done and not window.dropped:
            message._extra_attempts += 1
            self._delivery.deliver(window, [message])

    async def _return_to_broker(self, send_back: SendBack) -> None:
        """Send a message back, or wait until it is its listener's turn again."""
        window, message = send_back.window, send_back.message
        if (unanswered := self._find_unanswered(window, message)) is not None and not message._done:
            await self._wait_to_retry(unanswered.due_at - self._context.loop.time(), unanswered)
        while not message._done and not window.dropped:
            try:
                async with self._slots.setdefault(window.queue.broker_name, asyncio.Semaphore(SEND_BACK_LIMIT)):
                    given_up = await self._send_back(window, message, send_back.delay_level)
                self._settle(window, message, given_up)
            except RocketError as error:
                text = f"message {describe_id(message)} stays here: {error}"
                self._context.emit_throttled(EventKind.SEND_BACK_FAILED, text, window.queue)
                pause_s = self._next_pause_s(window, message, error, LOCAL_RETRY_S)
                await self._wait_to_retry(pause_s, self._unanswered.get(identity(message)))
                if not send_back.running:
                    return

    async def _wait_to_retry(self, seconds: float, unanswered: UnansweredSendBack | None) -> None:
        """Wait for a time, or until the doubt is settled. Nobody need wait for who rests."""
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await (unanswered.answered if unanswered is not None else asyncio.Event()).wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    async def give_up(self, window: ProcessQueue, message: Message) -> float:
        """Send a message of an orderly queue to the dead letters.

        Returns 0 once it is there, else after how many seconds to try again.
        """
        if self._context.config.broadcasting:
            self._report_given_up(window, message, "it counts as consumed")
            return 0.0
        if message._done:  # an answer came late
            return 0.0
        try:
            self._settle(window, message, await self._send_back(window, message, -1))
        except RocketError as error:
            text = f"message {describe_id(message)} stays: {error}"
            self._context.emit_throttled(EventKind.SEND_BACK_FAILED, text, window.queue)
            return self._next_pause_s(window, message, error, GIVE_UP_RETRY_S)
        return 0.0

    # --- what becomes of a message

    def _settle(self, window: ProcessQueue, message: Message, given_up: bool) -> None:
        """A broker has the message: it is finished here."""
        unanswered = self._unanswered.get(identity(message))
        # A late answer to a copy from before says nothing of the one whose own send-back is now waited for.
        if unanswered is not None and (unanswered.last_sent is message or unanswered.message is message):
            del self._unanswered[identity(message)]
            unanswered.answered.set()
        if message._done:
            return  # another answer came before, or a copy of it
        window.ack([message])
        if given_up:
            self._report_given_up(window, message, f"it is in {dlq_topic(self._context.name)}")
            return
        self._counts.sent_back(window.queue.topic, 1)
        facts = {"offset": message.queue_offset, "attempt": message.reconsume_times + 1}
        self._context.emit(EventKind.MESSAGE_SENT_BACK, "will come again", window.queue, facts, level=logging.DEBUG)

    def _skip(self, window: ProcessQueue, message: Message) -> None:
        window.ack([message])
        self._report_given_up(window, message, "a broadcasting group has no retry: it counts as consumed")

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

    # --- send-backs that were not answered

    def _find_unanswered(self, window: ProcessQueue, message: Message) -> UnansweredSendBack | None:
        """Return the doubt about send-backs of a message, or of another copy of it.

        Of several copies that are unfinished here, one that has been sent back most often stands for all: that it is
        here shows that the broker has executed the send-backs of the others.
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
        """Return after how long a message is tried again that could not be sent back."""
        if not isinstance(error, UNANSWERED):
            return pause_s
        now = self._context.loop.time()
        if (unanswered := self._find_unanswered(window, message)) is not None:
            unanswered.last_sent = message
            unanswered.pause_s = min(2 * unanswered.pause_s, MAX_SEND_BACK_PAUSE_S)
            unanswered.due_at = now + unanswered.pause_s
            return unanswered.pause_s
        self._unanswered = {
            key: each for key, each in self._unanswered.items() if not each.message._done and not each.window.dropped
        }
        self._unanswered[identity(message)] = UnansweredSendBack(
            window, message, message, pause_s, now + pause_s, asyncio.Event()
        )
        return pause_s

    # --- requests

    async def _send_back(self, window: ProcessQueue, message: Message, delay_level: int) -> bool:
        """Have a broker take a message; returns whether that gives it up.

        What may have been executed is not repeated here, neither as it is nor in another form. An answer that says
        yes counts even when it comes late.

        Raises:
            RocketError: no broker took it; one of UNANSWERED: or perhaps one did.
        """
        context, pause_s = self._context, FIRST_SEND_BACK_PAUSE_S
        most = context.config.most_attempts
        given_up = delay_level < 0 or (most is not None and stored_times(message) >= most)
        for _ in range(MAX_TRIES):
            try:
                await context.cluster.broker(window.queue.broker_name).send_back(
                    context.name, message, delay_level, most, on_late=partial(self._settle, window, message, given_up)
                )
                return given_up
            except FlowControl as busy:
                error: RocketError = busy
                await asyncio.sleep(pause_s)
                pause_s *= 2
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
        """Send the message to the retry topic ourselves, through any broker. Source: sendMessageBackAsNormalMessage."""
        context = self._context
        topic = retry_topic(context.name)
        times = message.reconsume_times + 1
        properties = dict(message.properties)
        properties.setdefault(PropertyName.RETRY_TOPIC, message.topic)
        properties.setdefault(PropertyName.ORIGIN_MESSAGE_ID, message.message_id)
        properties.pop(PropertyName.TRANSACTION_PREPARED, None)
        properties[PropertyName.DELAY] = str(delay_level if delay_level > 0 else 3 + message.reconsume_times)
        limit = 0 if delay_level < 0 else context.config.most_attempts
        route = await context.cluster.route(topic)
        error: RocketError | None = None
        is_packed = has_compressed_body(message)  # it stays as it is: to unpack it is the listener's matter
        for queue in context.rng.sample(list(route.publish_queues()), k=min(3, len(route.publish_queues()))):
            header = SendMessageHeader(
                producer_group=context.name,  # ACL 2.0 of 5.3.3 checks the group in this field
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue.queue_id,
                sys_flag=message.sys_flag & _COMPRESSION if is_packed else 0,
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


def stored_times(message: Message) -> int:
    """Return how often a message had failed when its broker stored it: attempts made here since are not in it."""
    return message.reconsume_times - message._extra_attempts


def identity(message: Message) -> object:
    """Return what a message and all copies that send-backs make of it have in common, and no other message."""
    try:
        if message.body_crc:
            origin = message.property(PropertyName.ORIGIN_MESSAGE_ID) or message.offset_message_id
            return message.topic, origin, message.born_at_ms, message.body_crc
    except ProtocolError:  # a damaged record
        pass
    return message.queue, message.queue_offset  # items of an inner batch have the same place in the commit log
