"""Failed messages: back to the broker, which sends them again later, or gives them up to %DLQ%."""

from __future__ import annotations

import asyncio
import logging

from pyrocket_consumer.consumer.delivery import Delivery
from pyrocket_consumer.consumer.group import Group
from pyrocket_consumer.consumer.process_queue import ProcessQueue
from pyrocket_consumer.consumer.statistics import Counts
from pyrocket_consumer.errors import ConnectError, FlowControl, RequestTimeout, RocketError
from pyrocket_consumer.model import EventKind, retry_topic
from pyrocket_consumer.wire.command import SendMessageHeader
from pyrocket_consumer.wire.message import Message
from pyrocket_consumer.wire.properties import PropertyName, encode_properties

log = logging.getLogger("pyrocket_consumer.consumer")

SEND_BACK_TRIES = 3
FIRST_PAUSE_S = 0.1
LOCAL_RETRY_S = 5.0
AT_ONCE = 32
"""Most send-backs under way: a broker answers more than it can store in 200 ms with "busy"."""


class Retries:
    """Sends failed messages back; until that is done they stay unfinished, so no crash can lose them."""

    def __init__(self, group: Group, delivery: Delivery, counts: Counts) -> None:
        self._group = group
        self._delivery = delivery
        self._counts = counts
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._going_back: set[int] = set()  # ids of messages: each is the matter of one task
        self._resting = 0

    @property
    def under_way(self) -> int:
        return len(self._tasks) - self._resting

    def add(self, window: ProcessQueue, failed: list[tuple[Message, int]]) -> None:
        """Have messages of `window` consumed again, later; not those that are on their way already.

        A listener that took too long may fail just while its message is sent back.
        """
        for message, delay_level in failed:
            if message._done or window.dropped or id(message) in self._going_back:
                continue
            task = self._group.loop.create_task(self._again(window, message, delay_level))
            self._tasks[task] = id(message)
            self._going_back.add(id(message))
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._going_back.discard(self._tasks.pop(task))
        if not task.cancelled() and (error := task.exception()) is not None:
            self._group.surprised("a failed message could not be sent back", error)

    def cancel(self) -> None:
        """Give up what is not done; those messages stay unfinished."""
        for task in self._tasks:
            task.cancel()

    async def _again(self, window: ProcessQueue, message: Message, delay_level: int) -> None:
        group = self._group
        if group.config.broadcasting:
            window.ack([message])
            self._counts.sent_back(window.queue.topic, 1)
            group.event(
                EventKind.MESSAGE_GIVEN_UP,
                "a broadcasting group has no retry: the message counts as consumed",
                window.queue,
                {"offset": message.queue_offset, "message_id": message.message_id},
                level=logging.WARNING,
            )
            return
        async with self._at_once:
            error = await self._send_back(message, delay_level, window)
        if error is None:
            if not window.dropped:
                window.ack([message])
                self._counts.sent_back(window.queue.topic, 1)
            group.event(
                EventKind.MESSAGE_SENT_BACK,
                "will come again",
                window.queue,
                {"offset": message.queue_offset, "attempt": message.reconsume_times + 1},
                level=logging.DEBUG,
            )
            return
        group.trouble(EventKind.SEND_BACK_FAILED, f"message {message.message_id} stays here: {error}", window.queue)
        self._resting += 1  # nobody need wait for it
        try:
            await asyncio.sleep(LOCAL_RETRY_S)
        finally:
            self._resting -= 1
        if not window.dropped and not message._done:
            message._extra_attempts += 1
            self._delivery.deliver(window, [message])

    async def give_up(self, window: ProcessQueue, message: Message) -> bool:
        """Send a message of an orderly queue to the dead letters; returns whether it is there."""
        group = self._group
        facts = {"offset": message.queue_offset, "message_id": message.message_id}
        if not group.config.broadcasting:
            error = await self._send_back(message, -1, window)
            if error is not None:
                group.trouble(EventKind.SEND_BACK_FAILED, f"message {message.message_id} stays: {error}", window.queue)
                return False
        self._counts.sent_back(window.queue.topic, 1)
        text = f"after {message.reconsume_times} failures the message is given up"
        group.event(EventKind.MESSAGE_GIVEN_UP, text, window.queue, facts, level=logging.WARNING)
        return True

    async def _send_back(self, message: Message, delay_level: int, window: ProcessQueue) -> RocketError | None:
        group, pause_s = self._group, FIRST_PAUSE_S
        error: RocketError | None = None
        for _ in range(SEND_BACK_TRIES):
            try:
                await group.cluster.broker(window.queue.broker_name).send_back(
                    group.name, message, delay_level, group.config.most_attempts
                )
                return None
            except RocketError as failure:
                error = failure
                if not isinstance(failure, (FlowControl, RequestTimeout)):
                    break
            await asyncio.sleep(pause_s)
            pause_s *= 2
        try:
            await self._send_again(message, delay_level)
        except RocketError as failure:
            return failure if error is None else error
        return None

    async def _send_again(self, message: Message, delay_level: int) -> None:
        """Send the message to the retry topic ourselves, through any broker. Source: sendMessageBackAsNormalMessage."""
        group = self._group
        topic = retry_topic(group.name)
        times = message.reconsume_times + 1
        properties = dict(message.properties)
        properties.setdefault(PropertyName.RETRY_TOPIC, message.topic)
        properties.setdefault(PropertyName.ORIGIN_MESSAGE_ID, message.message_id)
        properties.pop(PropertyName.TRANSACTION_PREPARED, None)
        properties[PropertyName.DELAY] = str(delay_level if delay_level > 0 else 3 + message.reconsume_times)
        limit = 0 if delay_level < 0 else group.config.most_attempts
        route = await group.cluster.route(topic)
        error: RocketError | None = None
        for queue in group.rng.sample(list(route.publish_queues()), k=min(3, len(route.publish_queues()))):
            header = SendMessageHeader(
                producer_group=group.name,  # ACL 2.0 of 5.3.3 checks the group in this field
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue.queue_id,
                sys_flag=0,
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
                await group.cluster.broker(queue.broker_name).send(header, message.body)
                return
            except RocketError as failure:
                error = failure
        raise error or ConnectError(f"topic {topic}", "no route names a queue of it to write to")
