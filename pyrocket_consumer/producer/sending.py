"""One send request on its way: what it carries, what was tried, and who waits for it."""

from __future__ import annotations

from asyncio import TimerHandle
from dataclasses import dataclass

from pyrocket_consumer.errors import SendError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.producer.callbacks import Waiting
from pyrocket_consumer.producer.result import SendResult, SendStatus
from pyrocket_consumer.wire.command import SendMessageResponseHeader
from pyrocket_consumer.wire.frame import RemotingCommand
from pyrocket_consumer.wire.send_template import SendTemplate


@dataclass(slots=True, eq=False)
class Sending:
    """A message, or a batch of them, between `send` and its result.

    `topic` is the name brokers know, `shown_topic` the user's (they differ with a namespace).
    """

    topic: str
    shown_topic: str
    body: bytes
    properties: str
    message_ids: tuple[str, ...]
    waiting: Waiting
    timeout_s: float
    born_at_ms: int
    deadline: float = 0.0  # by the loop's clock; set when it is handed over
    sys_flag: int = 0
    flag: int = 0
    is_batch: bool = False
    is_oneway: bool = False
    queue: MessageQueue | None = None
    sharding_key: str | None = None
    needs_timer: bool = False
    attempts: tuple[str, ...] = ()
    failed_brokers: frozenset[str] = frozenset()
    last_broker: str | None = None
    wants_new_route: bool = False
    is_under_way: bool = False
    expiry: TimerHandle | None = None  # while it waits for others in its lane

    @property
    def lane(self) -> tuple[str, MessageQueue | str] | None:
        """What it must stay in order with: messages for the same queue or with the same sharding key; None for none."""
        pin = self.queue or self.sharding_key
        return (self.topic, pin) if pin is not None else None

    def request(self, template: SendTemplate) -> RemotingCommand:
        """Return the request that stores it in the queue of `template`."""
        return template.request(self.body, self.properties, self.sys_flag, self.flag, self.born_at_ms, self.is_oneway)

    def results(self, queue: MessageQueue, answer: RemotingCommand) -> SendResult | list[SendResult]:
        """Return where the broker of `queue` says it stored the message; of a batch, where each of its messages is.

        Raises:
            ProtocolError: the answer does not say it.
        """
        fields = answer.fields
        try:
            queue_id, offset, stored_ids = int(fields["queueId"]), int(fields["queueOffset"]), fields["msgId"]
        except (KeyError, ValueError):
            SendMessageResponseHeader.from_fields(fields)  # takes longer, and says what is wrong
            raise
        place, status = MessageQueue(self.shown_topic, queue.broker_name, queue_id), SendStatus(answer.code)
        transaction_id = fields.get("transactionId")
        if not self.is_batch:
            return SendResult(place, offset, self.message_ids[0], stored_ids, status, transaction_id)
        offset_ids = stored_ids.split(",")
        if len(offset_ids) != len(self.message_ids):  # an inner batch (5.x) is one record, with one id
            offset_ids = offset_ids[:1] * len(self.message_ids)
        return [
            SendResult(place, offset + number, message_id, offset_id, status, transaction_id)
            for number, (message_id, offset_id) in enumerate(zip(self.message_ids, offset_ids, strict=True))
        ]

    def error(self, cause: BaseException | None) -> SendError:
        """Return the error that tells all attempts."""
        error = SendError(self.shown_topic, self.attempts)
        error.__cause__ = cause
        return error
