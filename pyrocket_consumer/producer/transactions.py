"""Send messages that are delivered only if a transaction of the application commits."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Unpack

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import NameServers, ProducerConfig, ProducerOptions
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.producer.outgoing_message import OutgoingMessage
from pyrocket_consumer.producer.producer import Producer
from pyrocket_consumer.producer.send_future import CallbackThread
from pyrocket_consumer.producer.send_request import SendResult
from pyrocket_consumer.producer.session import CloseHook
from pyrocket_consumer.protocol.codes import RequestCode, SysFlag
from pyrocket_consumer.protocol.command import CheckTransactionStateHeader, EndTransactionHeader
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.ids import parse_offset_message_id
from pyrocket_consumer.protocol.message import Message, decode_message
from pyrocket_consumer.protocol.properties import PropertyName
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.io_thread import ThreadFuture

log = logger("producer")

_MAX_CHECKS, _MAX_CHECK_BYTES = 1000, 64 << 20  # limits of waiting checks; brokers repeat the others
_BROKER_SHARE = 4  # each broker may use a quarter of the limits, so that others have capacity


class TransactionState(Enum):
    """The result of the application's transaction. After UNKNOWN, which means undecided, the broker checks again.

    Source: LocalTransactionState; the values are the transaction bits of the sysFlag.
    """

    COMMIT = SysFlag.TRANSACTION_COMMIT
    ROLLBACK = SysFlag.TRANSACTION_ROLLBACK
    UNKNOWN = 0


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The position of the message (`sent`), and the result of the transaction.

    `decided` is the decision of the application, and `state` the one that the broker has accepted. If the broker
    refused the decision or did not respond, `state` is UNKNOWN and `not_told` has the reason. The broker then requests
    `check`, if it still has the message.
    """

    sent: SendResult
    state: TransactionState
    decided: TransactionState
    not_told: str | None = None


@dataclass(frozen=True, slots=True)
class _PendingCheck:
    """A check that a broker requested, and the address for the response."""

    header: CheckTransactionStateHeader
    address: str
    first: str  # the broker that requested it first; its limit counts the message
    message_bytes: int
    header_bytes: int


class _Transactions:
    """The transactions of a running producer. It does not reference the producer, so that the producer can be freed."""

    def __init__(
        self, cluster: Cluster, group: str, call_timeout_s: float, check: Callable[[Message], TransactionState]
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._call_timeout_s = call_timeout_s
        self._check = check
        self._thread = CallbackThread("pyrocket-checks")
        self._lock = threading.Lock()
        self._pending: dict[str, _PendingCheck] = {}  # by message id
        self._waiting: dict[str, deque[Message]] = {}  # by broker that requested first; the next broker is in front
        self._bytes_of: Counter[str] = Counter()
        self._running: set[str] = set()  # ids of messages between their send and the broker's answer to the result
        self._is_full = self._is_closed = False
        cluster.requests.on_request(RequestCode.CHECK_TRANSACTION_STATE, self._on_check)

    @contextmanager
    def running(self, message_id: str) -> Iterator[None]:
        """Ignore requests to check this transaction. `check` would not find a result yet, and could roll it back."""
        self._running.add(message_id)
        try:
            yield
        finally:
            self._running.discard(message_id)

    def _on_check(self, request: RemotingCommand, address: str) -> None:
        header = CheckTransactionStateHeader.from_fields(request.fields)
        message = decode_message(request.body)
        if message.message_id in self._running:
            return
        header_bytes = sum(map(len, request.fields.values()))
        with self._lock:
            before = self._pending.get(message.message_id)
            if before is None:
                first, message_bytes = address, len(request.body)  # as stored; `check` decompresses bodies
                more = message_bytes + header_bytes
            else:  # its message is kept, and this copy is not
                first, message_bytes, more = before.first, before.message_bytes, header_bytes - before.header_bytes
            if self._is_closed or not self._has_capacity(first, before is None, more):
                return
            self._pending[message.message_id] = _PendingCheck(header, address, first, message_bytes, header_bytes)
            self._bytes_of[first] += more
            if before is None:
                self._waiting.setdefault(first, deque()).append(message)
        if before is None:
            self._thread.call_soon(self._check_next)

    def _has_capacity(self, address: str, is_new: bool, more: int) -> bool:
        checks, held = len(self._waiting.get(address, ())), self._bytes_of[address]
        if not (is_new and (len(self._pending) >= _MAX_CHECKS or checks >= _MAX_CHECKS // _BROKER_SHARE)) and (
            more <= 0
            or not held
            or (held + more <= _MAX_CHECK_BYTES // _BROKER_SHARE and self._bytes_of.total() + more <= _MAX_CHECK_BYTES)
        ):
            return True
        if not self._is_full:
            log.warning(
                "group=%s %d transactions wait for check, which is slower than the requests; brokers repeat others",
                self._group,
                len(self._pending),
            )
        self._is_full = True  # until none waits, so that the warning appears once
        return False

    def _check_next(self) -> None:
        """Check one transaction, and respond to the last broker that requested it. Brokers are served round-robin."""
        with self._lock:
            first = next(iter(self._waiting))
            others = self._waiting.pop(first)
            message = others.popleft()
            if others:
                self._waiting[first] = others
        state = TransactionState.UNKNOWN
        try:
            if not self._is_closed:
                state = _as_state(self._check(message), message.message_id)
        except BaseException:  # SystemExit must not end the thread, either
            log.exception(
                "group=%s message=%s: check failed; the broker checks again later", self._group, message.message_id
            )
        with self._lock:  # with each request the broker stores the message again, so only the latest offset is valid
            pending = self._pending.pop(message.message_id)
            self._bytes_of[first] -= pending.message_bytes + pending.header_bytes
            if not self._bytes_of[first]:
                del self._bytes_of[first]
            self._is_full = self._is_full and bool(self._pending)
        header = EndTransactionHeader(
            producer_group=self._group,
            tran_state_table_offset=pending.header.tran_state_table_offset,
            commit_log_offset=pending.header.commit_log_offset,
            commit_or_rollback=state.value,
            from_transaction_check=True,
            msg_id=pending.header.msg_id or message.message_id,
            transaction_id=pending.header.transaction_id,
            topic=message.queue.topic,
            broker_name=pending.header.broker_name,
        )
        self.end_transaction(header, state, pending.address)

    def end_transaction(self, header: EndTransactionHeader, state: TransactionState, address: str | None) -> str | None:
        """Send the result of a transaction to the broker. Return the reason if the broker did not accept it."""
        if state is TransactionState.UNKNOWN:  # brokers do not respond to it
            return None
        try:
            if address is None:
                raise RocketError(f"{header.broker_name} has no master now")
            self._cluster.run(self._cluster.call(address, header), self._call_timeout_s + 1)
        except RocketError as error:
            log.warning(
                "group=%s message=%s: the broker did not accept %s, and will check again if it can reason=%s",
                self._group,
                header.msg_id,
                state.name,
                error,
            )
            return str(error)
        return None

    def close(self, timeout_s: float) -> None:
        """Start no more checks, and wait up to `timeout_s` for the running one."""
        with self._lock:
            self._is_closed = True
        self._thread.stop(timeout_s)


class TransactionProducer(Producer):
    """A producer whose messages are delivered only if a transaction of the application commits.

        def check(message: Message) -> TransactionState:
            return results.get(message.message_id, TransactionState.UNKNOWN)  # results: a table of your database

        with TransactionProducer("payments", check=check, name_server="127.0.0.1:9876") as producer:
            producer.send_in_transaction(OutgoingMessage(b"...", topic="orders"), pay)

    The broker holds a message back until it receives the result of the transaction. Without a result it asks a running
    producer of the group, perhaps in another process. `check(message)` must find the result, for example by
    `message.message_id`. It runs on a thread of its own, one message at a time; if it raises, the broker asks again.
    It is not called while the transaction runs in this producer. Return UNKNOWN while it may run in another process.
    After ROLLBACK the message can be lost although that transaction commits later.
    Repeated requests for a waiting message count once. `close()` waits for the running check only.

    Brokers ask only connected producers. A producer connects to the brokers of the topics that it sends to, and at its
    start to those of `topics`.
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
        """Check the options, which are those of `Producer`. It connects with the first message, or with `start()`.

        Args:
            group (–; 1–120 of a-zA-Z0-9_-%|): the producer group; brokers ask any of its producers
            check (–; a function of one Message): finds the result of a transaction
            topics (none; names): topics that may have open transactions; the producer connects to their brokers
            config (–; a ProducerConfig): all options in one, instead of single ones

        Raises:
            ConfigError: an option is unknown, or its value is not allowed; the text has the allowed values.
        """
        super().__init__(group, name_server=name_server, config=config, **options)
        if not callable(check):
            raise ConfigError(f"check={check!r} is not callable; pass a function of one Message")
        if isinstance(topics, str):
            raise ConfigError(f"topics={topics!r} is one text; pass a list of topics")
        self._check = check
        self._topics_to_know = [self._wire_topic(topic) for topic in topics]

    def start(self) -> None:
        """Connect to a name server, and to the brokers of `topics`.

        Raises:
            RouteNotFound: one of `topics` does not exist. This closes the producer.
            ConnectError, ClientClosed: as for Producer.
        """
        super().start()
        cluster = self._ensure_session().cluster
        try:
            for topic in self._topics_to_know:
                cluster.run(cluster.routes.get(topic), self.config.send_timeout_s)
        except RocketError:
            self.close()
            raise

    def _prepare(self, cluster: Cluster) -> CloseHook:
        self._transactions = _Transactions(cluster, self._group, self.config.call_timeout_s, self._check)
        return self._transactions.close

    def send_in_transaction(
        self,
        message: OutgoingMessage,
        run: Callable[[SendResult], TransactionState],
        *,
        timeout_s: float | None = None,
    ) -> TransactionResult:
        """Store `message`, call `run(sent)`, and have the broker deliver or drop the message by its return value.

        `run` carries out the transaction of the application; `check` gets the same `sent.message_id`. If `run` returns
        UNKNOWN, or no TransactionState, `check` decides later. If `run` raises, this call raises the same error, and
        `check` decides, because the transaction may have committed before the error.
        `TransactionResult.state` is also UNKNOWN if the broker did not accept the decision, or if the producer was
        closed during `run`.

        Raises:
            SendError: the message is not stored, and `run` was not called. In all else as `send`.
            ProtocolError: the response has no position of the message. `run` was not called.
        """
        if not isinstance(message, OutgoingMessage) or message.topic is None:
            raise ConfigError("a transaction needs an OutgoingMessage with its topic: OutgoingMessage(body, topic=…)")
        if not callable(run):
            raise ConfigError(f"run={run!r} is not callable; pass a function of one SendResult")
        half = {PropertyName.TRANSACTION_PREPARED: "true", PropertyName.PRODUCER_GROUP: self._group}
        outcome, flag = ThreadFuture[SendResult](), int(SysFlag.TRANSACTION_PREPARED)
        request = self._make_request(message.topic, message, outcome, None, None, timeout_s, half, flag)
        routes, transactions = self._ensure_session().cluster.routes, self._transactions
        with transactions.running(request.message_ids[0]):
            sent = self._send_and_wait(request, outcome)
            # Parsed before `run`, because a transaction without an offset could not end.
            _, _, commit_log_offset = parse_offset_message_id(sent.offset_message_id)
            state = _as_state(run(sent), sent.message_id)
            header = EndTransactionHeader(
                producer_group=self._group,
                tran_state_table_offset=sent.queue_offset,
                commit_log_offset=commit_log_offset,
                commit_or_rollback=state.value,
                from_transaction_check=False,
                msg_id=sent.message_id,
                transaction_id=sent.transaction_id,
                topic=request.topic,
                broker_name=sent.queue.broker_name,
            )
            master = routes.address(sent.queue.broker_name, only_this=True)
            reason = transactions.end_transaction(header, state, master)
            return TransactionResult(sent, TransactionState.UNKNOWN if reason else state, state, reason)


def _as_state(state: object, message_id: str) -> TransactionState:
    if isinstance(state, TransactionState):
        return state
    log.warning("message=%s: %r is not a TransactionState and counts as UNKNOWN", message_id, state)
    return TransactionState.UNKNOWN
