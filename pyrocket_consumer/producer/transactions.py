"""Messages that are delivered only if a transaction of the application is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Unpack

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import NameServers, ProducerConfig, ProducerOptions
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.producer.callbacks import SendFuture
from pyrocket_consumer.producer.outgoing import OutgoingMessage
from pyrocket_consumer.producer.producer import Producer, wait_for
from pyrocket_consumer.producer.result import SendResult
from pyrocket_consumer.wire.codes import RequestCode, SysFlag
from pyrocket_consumer.wire.command import CheckTransactionStateHeader, EndTransactionHeader
from pyrocket_consumer.wire.frame import RemotingCommand
from pyrocket_consumer.wire.ids import parse_offset_message_id
from pyrocket_consumer.wire.message import Message, decode_messages
from pyrocket_consumer.wire.properties import PropertyName

log = logging.getLogger("pyrocket_consumer.producer")


class TransactionState(Enum):
    """What became of the application's transaction. UNKNOWN: not decided yet, the broker asks again later.

    Source: LocalTransactionState; the values are the transaction bits of the sysFlag.
    """

    COMMIT = SysFlag.TRANSACTION_COMMIT
    ROLLBACK = SysFlag.TRANSACTION_ROLLBACK
    UNKNOWN = 0


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """Where the broker keeps the message (`sent`), and what became of the transaction."""

    sent: SendResult
    state: TransactionState


class TransactionProducer(Producer):
    """A producer whose messages are delivered only if a transaction of the application is committed.

        def check(message: Message) -> TransactionState:
            return TransactionState.COMMIT if is_paid(message.message_id) else TransactionState.ROLLBACK

        with TransactionProducer("payments", check=check, name_server="127.0.0.1:9876") as producer:
            producer.send_in_transaction(OutgoingMessage(b"...", topic="orders"), pay)

    The broker keeps a message back until it hears how the transaction ended. When it does not hear it, it asks a
    running producer of the group, maybe of another process: `check(message)` must find out, by `message.message_id`
    for example. It runs on a thread of the producer, one message at a time; when it raises, the broker asks again.

    Brokers ask producers that are connected to them. A producer is to those of the topics it has sent to, and to those
    of `topics` from the start.
    """

    def __init__(
        self,
        group: str,
        *,
        check: Callable[[Message], TransactionState],
        topics: Iterable[str] = (),
        name_server: NameServers | None = None,
        config: ProducerConfig | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        """Check the options, those of `Producer`; nothing is connected before the first message, or `start()`.

        Args:
            group (–; 1–120 of a-zA-Z0-9_-%|): the producer group; brokers ask any of its producers
            check (–; a function of one Message): finds out what became of a transaction
            topics (none; names): where transactions may be open from before, so that their brokers are connected to
            config (–; a ProducerConfig): all options in one, instead of single ones

        Raises:
            ConfigError: an option is unknown, or its value is not allowed; the text says what is.
        """
        super().__init__(group, name_server=name_server, config=config, **options)
        if not callable(check):
            raise ConfigError(f"check={check!r} is not callable; pass a function of one Message")
        if isinstance(topics, str):
            raise ConfigError(f"topics={topics!r} is one text; pass a list of topics")
        self._check = check
        self._topics_to_know = [self._topic(topic) for topic in topics]

    def start(self) -> None:
        """Connect to a name server, and to the brokers of `topics`.

        Raises:
            RouteNotFound: one of `topics` does not exist. The producer is closed then.
            ConnectError, ConsumerClosed: as for Producer.
        """
        super().start()
        cluster = self._usable().cluster
        try:
            for topic in self._topics_to_know:
                cluster.run(cluster.route(topic), self.config.send_timeout_s)
        except RocketError:
            self.close()
            raise

    def _prepare(self, cluster: Cluster) -> None:
        async def on_check(request: RemotingCommand, address: str) -> None:
            header = CheckTransactionStateHeader.from_fields(request.fields)
            for message in decode_messages(request.body):
                self._callbacks.call(partial(self._answer, cluster, header, message, address))

        cluster.on_request(RequestCode.CHECK_TRANSACTION_STATE, on_check)

    def send_in_transaction(
        self,
        message: OutgoingMessage,
        run: Callable[[SendResult], TransactionState],
        *,
        timeout_s: float | None = None,
    ) -> TransactionResult:
        """Store `message`, call `run(sent)`, and have it delivered or dropped as that returns.

        `run` carries out the application's transaction; `sent.message_id` is what `check` will know it by. UNKNOWN, or
        anything that is not a TransactionState, leaves the decision to `check`. When `run` raises, that is raised
        here, and the decision is left to `check` as well: the transaction may have been committed before.

        Raises:
            SendError: not stored, and `run` was not called. For the rest as `send`.
        """
        if not isinstance(message, OutgoingMessage) or message.topic is None:
            raise ConfigError("a transaction needs an OutgoingMessage with its topic: OutgoingMessage(body, topic=…)")
        if not callable(run):
            raise ConfigError(f"run={run!r} is not callable; pass a function of one SendResult")
        half = {PropertyName.TRANSACTION_PREPARED: "true", PropertyName.PRODUCER_GROUP: self._group}
        future, flag = SendFuture[SendResult](self._callbacks), int(SysFlag.TRANSACTION_PREPARED)
        sending = self._sending(message.topic, message, future, None, None, timeout_s, half, flag)
        self._hand_over(sending)
        sent = wait_for(future, sending.timeout_s)
        state = _checked(run(sent), sent.message_id)
        cluster = self._usable().cluster
        _, _, commit_log_offset = parse_offset_message_id(sent.offset_message_id)
        address = cluster.address(sent.queue.broker_name, only_this=True)
        header = EndTransactionHeader(
            producer_group=self._group,
            tran_state_table_offset=sent.queue_offset,
            commit_log_offset=commit_log_offset,
            commit_or_rollback=state.value,
            from_transaction_check=False,
            msg_id=sent.message_id,
            transaction_id=sent.transaction_id,
            topic=sending.topic,
            broker_name=sent.queue.broker_name,
        )
        self._end(cluster, address, header, state)
        return TransactionResult(sent, state)

    def _answer(self, cluster: Cluster, asked: CheckTransactionStateHeader, message: Message, address: str) -> None:
        """Find out what became of a transaction, and tell the broker that asked."""
        try:
            state = _checked(self._check(message), message.message_id)
        except Exception:
            log.exception(
                "group=%s message=%s: check failed; the broker asks again later", self.group, message.message_id
            )
            return
        header = EndTransactionHeader(
            producer_group=self._group,
            tran_state_table_offset=asked.tran_state_table_offset,
            commit_log_offset=asked.commit_log_offset,
            commit_or_rollback=state.value,
            from_transaction_check=True,
            msg_id=asked.msg_id or message.message_id,
            transaction_id=asked.transaction_id,
            topic=message.queue.topic,
            broker_name=asked.broker_name,
        )
        self._end(cluster, address, header, state)

    def _end(
        self, cluster: Cluster, address: str | None, header: EndTransactionHeader, state: TransactionState
    ) -> None:
        """Tell the broker how a transaction ended. When it does not hear it, it asks."""
        if state is TransactionState.UNKNOWN:  # a broker does not even answer that
            return
        try:
            if address is None:
                raise RocketError(f"{header.broker_name} has no master now")
            cluster.run(cluster.call(address, header), self.config.call_timeout_s + 1)
        except RocketError as error:
            log.warning(
                "group=%s message=%s: %s was not told to the broker, which will ask reason=%s",
                self.group,
                header.msg_id,
                state.name,
                error,
            )


def _checked(state: object, message_id: str) -> TransactionState:
    if isinstance(state, TransactionState):
        return state
    log.warning("message=%s: %r is not a TransactionState and counts as UNKNOWN", message_id, state)
    return TransactionState.UNKNOWN
