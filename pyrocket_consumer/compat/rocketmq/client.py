"""The classes of the old package's `rocketmq.client`, each a thin wrapper of a class of this package.

docs/from-rocketmq-client-python.md lists the differences and their reasons.
"""

from __future__ import annotations

import atexit
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import ArgumentError
from dataclasses import replace
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from pyrocket_consumer import consumer, producer
from pyrocket_consumer.cluster.client import NotCopied
from pyrocket_consumer.compat.rocketmq.consts import MessageProperty as MessageProperty
from pyrocket_consumer.compat.rocketmq.exceptions import (
    ConsumerException,
    ProducerSendOnewayFailed,
    ProducerSendOrderlyFailed,
    ProducerSendSyncFailed,
    ProducerStartFailed,
    PushConsumerStartFailed,
    RocketMQException,
)
from pyrocket_consumer.compat.rocketmq.exceptions import NullPointerException as NullPointerException
from pyrocket_consumer.compat.rocketmq.exceptions import ffi_check as ffi_check
from pyrocket_consumer.compat.rocketmq.ffi import MessageModel as MessageModel
from pyrocket_consumer.compat.rocketmq.ffi import TraceModel, _warn_once
from pyrocket_consumer.compat.rocketmq.ffi import dll as dll
from pyrocket_consumer.compat.rocketmq.name_servers import fetch_name_servers, parse_address
from pyrocket_consumer.compat.rocketmq.utils import maybe_decode as maybe_decode
from pyrocket_consumer.compat.rocketmq.utils import to_bytes, to_number, to_text
from pyrocket_consumer.config import ConsumerConfig, ProducerConfig, check_group
from pyrocket_consumer.consumer import ConsumeResult, ConsumerState
from pyrocket_consumer.errors import ClientClosed, ConfigError, RocketError
from pyrocket_consumer.producer import OutgoingMessage, TransactionState
from pyrocket_consumer.protocol import message as wire
from pyrocket_consumer.protocol.properties import PropertyName
from pyrocket_consumer.text import logger, safe_repr
from pyrocket_consumer.transport.forks import renew_locks_in_children

__all__ = [
    "ConsumeStatus",
    "Message",
    "Producer",
    "PushConsumer",
    "ReceivedMessage",
    "SendStatus",
    "TransactionMQProducer",
    "TransactionStatus",
]

log = logger("compat")

PY2 = False
text_type = str
binary_type = bytes

_EXIT_TIMEOUT_S = 3.0


def _to_bytes(s: Any) -> Any:
    """Return text as UTF-8, and anything else as it is.

    Nothing here calls it. It exists for code that called the old one.
    """
    return s.encode() if isinstance(s, str) else s


class SendResult(NamedTuple):
    """The result of a send: where the message is stored."""

    status: SendStatus
    msg_id: str
    offset: int


class SendStatus(IntEnum):
    """How safely a message is stored. It is stored in every case."""

    OK = 0
    FLUSH_DISK_TIMEOUT = 1
    FLUSH_SLAVE_TIMEOUT = 2
    SLAVE_NOT_AVAILABLE = 3


class TransactionStatus(IntEnum):
    """The result of a transaction. UNKNOWN: the broker asks the checker later."""

    COMMIT = 0
    ROLLBACK = 1
    UNKNOWN = 2


class ConsumeStatus(IntEnum):
    """The result of a callback. RECONSUME_LATER: the message is redelivered."""

    CONSUME_SUCCESS = 0
    RECONSUME_LATER = 1


class Message:
    """A message to send."""

    def __init__(self, topic: str | bytes) -> None:
        """Make an empty message to `topic`.

        Raises:
            NullPointerException, ctypes.ArgumentError: it is None; or neither text nor bytes. The setters raise the
                same.
        """
        self._topic = to_text("topic", topic)
        self._body = b""
        self._properties: dict[str, str] = {}

    def set_keys(self, keys: str | bytes) -> None:
        """Set the keys by which tools find the message, one or several with spaces between."""
        self._properties[PropertyName.KEYS] = to_text("keys", keys)

    def set_tags(self, tags: str | bytes) -> None:
        """Give the message a tag, for subscriptions."""
        self._properties[PropertyName.TAGS] = to_text("tags", tags)

    def set_body(self, body: str | bytes) -> None:
        """Set the body. Text is sent as UTF-8, bytes are sent unchanged."""
        self._body = to_bytes("body", body)

    def set_property(self, key: str | bytes, value: str | bytes) -> None:
        """Set a property: one of the application, or KEYS, TAGS or DELAY."""
        name = to_text("property name", key)
        self._properties[name] = to_text(f"property {safe_repr(name)}", value)

    def set_delay_time_level(self, delay_time_level: int) -> None:
        """Delay the delivery. Levels 1 to 18 are 1 s to 2 h unless the broker is configured otherwise; 0 is at once."""
        self._properties[PropertyName.DELAY] = str(to_number("delay_time_level", delay_time_level))

    def __repr__(self) -> str:
        return f"<Message topic={self._topic!r} body={safe_repr(self._body)}>"

    def _outgoing(self) -> OutgoingMessage:
        """Return the message for the producer.

        Raises:
            ConfigError: a part is not allowed; the text names it, and the reason.
        """
        properties = {name: value for name, value in self._properties.items() if value}  # empty ones are not stored
        properties.pop(PropertyName.DELAY, None)
        if properties.pop(PropertyName.WAIT, "true") != "true":
            _warn_once("property WAIT", "messages are acknowledged when they are stored; false has no effect")
        tags = properties.pop(PropertyName.TAGS, None)
        keys = tuple(properties.pop(PropertyName.KEYS, "").split())
        return OutgoingMessage(self._body, tags, keys, properties or None, topic=self._topic)

    def _delay(self) -> int:
        level = self._properties.get(PropertyName.DELAY) or "0"
        try:
            return int(level)
        except ValueError:
            raise ConfigError(
                f"property DELAY={safe_repr(level)} is not allowed; it must be a level, 0 to 18"
            ) from None


class ReceivedMessage:
    """A message that was received. It may be kept after the callback has returned."""

    _handle: wire.Message
    _namespace: str | None = None  # of the client that received it; applications do not see it

    def __init__(self, handle: wire.Message) -> None:
        """Wrap `handle`, a message of this package."""
        self._handle = handle

    @property
    def topic(self) -> str:
        """The topic it was sent to, as `subscribe` names it."""
        topic = self._handle.topic
        return topic if self._namespace is None else topic.removeprefix(f"{self._namespace}%")

    @property
    def tags(self) -> bytes:
        """Its tag; b"" without one."""
        return self.get_property(PropertyName.TAGS)

    @property
    def keys(self) -> bytes:
        """Its keys as they were set; b"" without any."""
        return self.get_property(PropertyName.KEYS)

    @property
    def body(self) -> bytes:
        """The body, uncompressed."""
        return self._handle.body

    @property
    def id(self) -> str:
        """The id its producer gave it: the `msg_id` of the `SendResult`."""
        return self._handle.message_id

    @property
    def delay_time_level(self) -> int:
        """The level of its delay; 0 without one."""
        level = self._handle.property(PropertyName.DELAY)
        return int(level) if level is not None and level.isdecimal() else 0

    @property
    def queue_id(self) -> int:
        """The number of its queue at the broker."""
        return self._handle.queue.queue_id

    @property
    def reconsume_times(self) -> int:
        """How often it was consumed before, without success."""
        return self._handle.reconsume_times

    @property
    def store_size(self) -> int:
        """The size of its record at the broker, in bytes."""
        return self._handle.store_size

    @property
    def born_timestamp(self) -> int:
        """When it was sent, in milliseconds since the epoch."""
        return self._handle.born_at_ms

    @property
    def store_timestamp(self) -> int:
        """When it was stored, in milliseconds since the epoch."""
        return self._handle.stored_at_ms

    @property
    def queue_offset(self) -> int:
        """Its offset in its queue."""
        return self._handle.queue_offset

    @property
    def commit_log_offset(self) -> int:
        """Its offset in the broker's commit log."""
        return self._handle.commit_log_offset

    @property
    def prepared_transaction_offset(self) -> int:
        """The offset of its transaction's half message in the commit log; 0 without one."""
        return self._handle.prepared_transaction_offset

    def get_property(self, prop: str | bytes | MessageProperty) -> bytes:
        """Return the property `prop`; b"" when it is absent."""
        if type(prop) is not str:
            prop = prop.value if isinstance(prop, MessageProperty) else to_text("property name", prop)
        return self._handle.property_bytes(prop) or b""

    def __getitem__(self, key: str | bytes | MessageProperty) -> bytes:
        return self.get_property(key)

    def __str__(self) -> str:
        return self.body.decode()

    def __bytes__(self) -> bytes:
        return self.body

    def __repr__(self) -> str:
        return f"<ReceivedMessage topic={self.topic!r} id={self.id!r} body={safe_repr(self.body)}>"


_C = TypeVar("_C", ConsumerConfig, ProducerConfig)
_K = TypeVar("_K", consumer.PushConsumer, producer.Producer)


class _Client(NotCopied, Generic[_C, _K]):
    """The base of the clients. Applications set options one by one before the start."""

    _config: _C  # its group and name servers are placeholders until the start
    _client: _K | None = None  # of this package, from start() to shutdown()

    def __init__(self, config: _C, group_id: str | bytes) -> None:
        self._config = config
        self._group = to_text("group_id", group_id)
        self._address: str | None = None
        self._domain: str | None = None
        self._pid: int | None = None
        self.renew_locks()
        renew_locks_in_children(self)

    def renew_locks(self) -> None:
        # One start at a time. It is reentrant, because a signal's handler may start or stop the client.
        self._starting = threading.RLock()

    @property
    def _handle(self) -> Self:  # applications pass it to the functions of `ffi.dll` for the log
        return self

    @property
    def _is_running(self) -> bool:
        return self._client is not None and self._pid == os.getpid()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} group={self._group!r} {'running' if self._is_running else 'not running'}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exec_type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def start(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError

    def _start(self, starting: _K) -> None:
        """Start a client of this package. Return early if shutdown() ends it meanwhile."""
        self._client, self._pid = starting, os.getpid()  # so that shutdown() can end the start
        try:
            starting.start()
        except BaseException as error:
            if self._client is starting:
                self._client = None
            elif isinstance(error, ClientClosed):
                return  # shutdown() was called meanwhile
            raise

    def set_name_server_address(self, addr: str | bytes) -> None:
        """Set the name servers: `host:port`, several joined by `;`, or an endpoint `http://host:port`."""
        address, namespace = parse_address(to_text("addr", addr))
        if address:
            self._set("set_name_server_address", name_server=address, namespace=namespace)
        self._address = address or None

    def set_name_server_domain(self, domain: str | bytes) -> None:
        """Set the HTTP address that returns the name servers. The start sends the request."""
        self._domain = to_text("domain", domain) or None
        self._warn_if_running("set_name_server_domain")

    def set_session_credentials(
        self, access_key: str | bytes, access_secret: str | bytes, channel: str | bytes
    ) -> None:
        """Sign every request. Brokers ignore `channel`."""
        account = to_text("access_key", access_key), _secret(access_secret)
        to_text("channel", channel)
        access_key_, secret_key = account if all(account) else (None, None)  # without one nothing is signed
        self._set("set_session_credentials", access_key=access_key_, secret_key=secret_key)

    def set_instance_name(self, name: str | bytes) -> None:
        """Set the second part of the client id. Every process needs its own; an empty text means the default."""
        self._set("set_instance_name", instance_name=to_text("name", name) or type(self._config).instance_name)

    def set_message_trace(self, message_trace: bool | TraceModel) -> None:
        """Do nothing, because this package does not trace messages."""
        _warn_once("set_message_trace", "messages are not traced here")

    def _set(self, what: str, **options: Any) -> None:
        try:
            self._config = replace(self._config, **options)
        except ConfigError as error:
            raise RocketMQException(f"{what}: {error}") from error
        if what != "set_timeout":
            self._warn_if_running(what)

    def _warn_if_running(self, what: str) -> None:
        if self._is_running:
            _warn_once(what, "called after start(); it takes effect at the next start")

    def _full_config(self) -> _C:
        """Return the settings, with group and name servers.

        Raises:
            RocketError: a setting is missing, or not allowed; or the domain did not return the name servers.
        """
        check_group(self._group)
        servers: str | tuple[str, ...] | None = self._address
        if servers is None and self._domain is not None:
            servers = fetch_name_servers(self._domain)
        if servers is None and not os.environ.get("NAMESRV_ADDR", "").strip():
            raise ConfigError("no name server: call set_name_server_address('host:9876') first, or set NAMESRV_ADDR")
        return replace(self._config, group=self._group, name_server=servers)


def _secret(value: str | bytes) -> str:
    """Return a secret as text. No error shows it."""
    try:
        return maybe_decode(value)
    except (TypeError, UnicodeDecodeError):
        what = "access_secret must be a text or bytes that are UTF-8"
    if isinstance(value, bytes):
        raise RocketMQException(what)
    raise (NullPointerException if value is None else ArgumentError)(f"{what}, not {type(value).__name__}")


@contextmanager
def _raise_as(failed: type[RocketMQException]) -> Iterator[None]:
    try:
        yield
    except RocketError as error:
        raise failed(str(error)) from error


_PLACEHOLDER_ADDRESS = "127.0.0.1:9876"


class Producer(_Client[ProducerConfig, producer.Producer]):
    """Sends messages. Threads can share it."""

    def __init__(
        self,
        group_id: str | bytes,
        orderly: bool = False,
        timeout: int | None = None,
        compress_level: int | None = None,
        max_message_size: int | None = None,
    ) -> None:
        """Make a producer of a group; `timeout` is in milliseconds, `max_message_size` in bytes."""
        super().__init__(ProducerConfig(name_server=_PLACEHOLDER_ADDRESS, auto_create_topic=True), group_id)
        if timeout is not None:
            self.set_timeout(timeout)
        if compress_level is not None:
            self.set_compress_level(compress_level)
        if max_message_size is not None:
            self.set_max_message_size(max_message_size)

    def set_group(self, group_name: str | bytes) -> None:
        """Set the producer group."""
        self._group = to_text("group_name", group_name)
        self._warn_if_running("set_group")

    def set_timeout(self, timeout: int) -> None:
        """Set the deadline of a send, in milliseconds: 10 to 600 000."""
        if not 10 <= to_number("timeout", timeout) <= 600_000:
            raise RocketMQException(f"timeout={timeout} is not allowed; it must be from 10 to 600000, in milliseconds")
        self._set("set_timeout", send_timeout_s=timeout / 1000)

    def set_compress_level(self, level: int) -> None:
        """Do nothing. Bodies of 4 KiB and more are compressed at the default level."""
        to_number("level", level)
        _warn_once("set_compress_level", "bodies of 4 KiB and more are compressed at the usual level")

    def set_max_message_size(self, max_size: int) -> None:
        """Set the most bytes of a body. Brokers accept 4 MiB unless configured otherwise."""
        self._set("set_max_message_size", max_message_bytes=to_number("max_size", max_size))

    def start(self) -> None:
        """Connect to a name server. Do nothing if it is started.

        `shutdown()` may run meanwhile, in the handler of a signal for example. Then it acts as if called afterwards.

        Raises:
            ProducerStartFailed: a setting is not allowed, or no name server answers.
        """
        with self._starting, _raise_as(ProducerStartFailed):
            if not self._is_running:
                self._group = self._group or "DEFAULT_PRODUCER"
                self._start(self._make(self._full_config()))

    def shutdown(self) -> None:
        """Wait for the sends in flight, and disconnect. The producer can be started again."""
        running, self._client = self._client, None
        if running is not None and self._pid == os.getpid():
            with _raise_as(RocketMQException):
                running.close()

    def send_sync(self, msg: Message) -> SendResult:
        """Send a message, and return where it is stored.

        Raises:
            ProducerSendSyncFailed: the send failed, or its response was lost; or the producer is not started.
            NullPointerException, ctypes.ArgumentError: `msg` is None, or no Message.
        """
        with _raise_as(ProducerSendSyncFailed):
            return self._send(msg, None)

    def send_oneway(self, msg: Message) -> None:
        """Send a message without waiting for a response.

        Raises:
            ProducerSendOnewayFailed: not sent; or the producer is not started.
            NullPointerException, ctypes.ArgumentError: `msg` is None, or no Message.
        """
        with _raise_as(ProducerSendOnewayFailed):
            message = self._outgoing(msg)
            self._running_producer().send_oneway(**self._arguments(msg, message))

    def send_orderly_with_sharding_key(self, msg: Message, sharding_key: str | bytes) -> SendResult:
        """Send a message to the queue of its key, after the earlier messages with that key.

        Raises:
            ProducerSendOrderlyFailed: the send failed, or its response was lost; or the producer is not started.
            NullPointerException, ctypes.ArgumentError: an argument is None, or is of another type.
        """
        # An empty key cannot be transmitted, and its messages must stay in order, too.
        key = to_text("sharding_key", sharding_key) or "-"
        with _raise_as(ProducerSendOrderlyFailed):
            return self._send(msg, key)

    def _send(self, msg: Message, sharding_key: str | None) -> SendResult:
        message = self._outgoing(msg)
        sent = self._running_producer().send(**self._arguments(msg, message), sharding_key=sharding_key)
        return _result(sent)

    def _outgoing(self, msg: Message) -> OutgoingMessage:
        message, limit = _check_message(msg)._outgoing(), self._config.max_message_bytes
        if len(message.body) > limit:
            raise ConfigError(
                f"body of {len(message.body)} bytes is more than {limit}; send it in parts, or call "
                "set_max_message_size, and raise the broker's maxMessageSize"
            )
        return message

    def _arguments(self, msg: Message, message: OutgoingMessage) -> dict[str, Any]:
        return {
            "topic": msg._topic,
            "body": message.body,
            "tags": message.tags,
            "keys": message.keys,
            "properties": message.properties,
            "delay_level": msg._delay(),
            "timeout_s": self._config.send_timeout_s,
        }

    def _make(self, config: ProducerConfig) -> producer.Producer:
        return producer.Producer(config=config)

    def _running_producer(self) -> producer.Producer:
        """Return the started producer; in a process that was forked after the start, a new one.

        Raises:
            RocketError: the producer is not started.
        """
        running = self._client
        if running is None:
            raise ClientClosed("the producer is not started; call start() before it sends, and shutdown() after that")
        if self._pid != os.getpid():
            self.start()
            assert self._client is not None
            return self._client
        return running


class TransactionMQProducer(Producer):
    """A producer whose messages are delivered only after the application commits its transaction."""

    def __init__(
        self,
        group_id: str | bytes,
        checker_callback: Callable[[ReceivedMessage], TransactionStatus],
        user_args: object = None,
        timeout: int | None = None,
        compress_level: int | None = None,
        max_message_size: int | None = None,
    ) -> None:
        """Make a producer. If a broker gets no result of a transaction, it makes the producer call `checker_callback`.

        Raises:
            ctypes.ArgumentError: it cannot be called.
        """
        super().__init__(group_id, False, timeout, compress_level, max_message_size)
        if not callable(checker_callback):
            raise ArgumentError(f"checker_callback must be a function of a message, not {safe_repr(checker_callback)}")
        self._checker = checker_callback

    def _make(self, config: ProducerConfig) -> producer.Producer:
        return producer.TransactionProducer(config.group, check=self._check, config=config)

    def _check(self, message: wire.Message) -> TransactionState:
        half = ReceivedMessage(message)
        half._namespace = self._config.namespace
        return _state(self._checker(half), "checker_callback")

    def send_message_in_transaction(
        self,
        message: Message,
        local_execute: Callable[[ReceivedMessage, Any], TransactionStatus],
        user_args: Any = None,
    ) -> SendResult:
        """Store a message, and call `local_execute(message, user_args)`. Its result delivers or drops the message.

        UNKNOWN, or a `local_execute` that raises, leaves the decision to the checker.

        Raises:
            RocketMQException: the send failed, and `local_execute` was not called; or the producer is not started.
            NullPointerException, ctypes.ArgumentError: `message` is None, or no Message.
        """
        if not callable(local_execute):
            raise ArgumentError(f"local_execute must be a function of two arguments, not {safe_repr(local_execute)}")

        def run(sent: producer.SendResult) -> TransactionState:
            try:
                return _state(local_execute(ReceivedMessage(_half(sent, outgoing)), user_args), "local_execute")
            except Exception:
                log.exception("message=%s: local_execute failed; the broker asks the checker", sent.message_id)
                return TransactionState.UNKNOWN

        with _raise_as(RocketMQException):
            outgoing = self._outgoing(message)
            running = self._running_producer()
            assert isinstance(running, producer.TransactionProducer)
            result = running.send_in_transaction(outgoing, run, timeout_s=self._config.send_timeout_s)
            return _result(result.sent)


def _state(status: object, who: str) -> TransactionState:
    if isinstance(status, int) and not isinstance(status, bool) and status in list(TransactionStatus):
        return TransactionState[TransactionStatus(status).name]
    log.error("%s returned %s, which is not a TransactionStatus and counts as UNKNOWN", who, safe_repr(status))
    return TransactionState.UNKNOWN


def _half(sent: producer.SendResult, message: OutgoingMessage) -> wire.Message:
    """Return a message that has just been stored, as its consumers will receive it."""
    _, _, commit_log_offset = wire.parse_offset_message_id(sent.offset_message_id)
    now_ms = time.time_ns() // 1_000_000
    record = wire.encode_message(
        wire.StoredMessage(
            topic=message.topic or "",
            body=message.body,
            properties={**message.travelling_properties(), PropertyName.UNIQUE_KEY: sent.message_id},
            queue_id=sent.queue.queue_id,
            queue_offset=sent.queue_offset,
            commit_log_offset=commit_log_offset,
            born_at_ms=now_ms,
            stored_at_ms=now_ms,
        )
    )
    return wire.decode_message(record, sent.queue)


def _check_message(msg: object) -> Message:
    if isinstance(msg, Message):
        return msg
    if msg is None:
        raise NullPointerException("the message is None; pass a Message")
    raise ArgumentError(f"the message must be a Message, not {type(msg).__name__} ({safe_repr(msg)})")


def _result(sent: producer.SendResult) -> SendResult:
    return SendResult(SendStatus[sent.status.name], sent.message_id, sent.queue_offset)


Callback = Callable[[ReceivedMessage], ConsumeStatus | None]


class PushConsumer(_Client[ConsumerConfig, consumer.PushConsumer]):
    """Receives the messages of a group, and passes each to the callback of its topic."""

    def __init__(
        self,
        group_id: str | bytes,
        orderly: bool = False,
        message_model: MessageModel = MessageModel.CLUSTERING,
    ) -> None:
        """Make a consumer of a group. With `orderly`, a queue has one callback at a time, in order."""
        config = ConsumerConfig(
            group="-",
            name_server=_PLACEHOLDER_ADDRESS,
            orderly=bool(orderly),
            consume_threads=min(_processor_count(), 1000),
        )
        super().__init__(config, group_id)
        self._closing: consumer.PushConsumer | None = None  # the last one shut down; its close may wait for a callback
        self._subscriptions: dict[str, tuple[Callable[[wire.Message], Any], str]] = {}
        self.set_message_model(message_model)

    @property
    def _is_running(self) -> bool:
        running = self._client
        return running is not None and self._pid == os.getpid() and running.state is not ConsumerState.FAILED

    def set_group(self, group_id: str | bytes) -> None:
        """Set the consumer group."""
        self._group = to_text("group_id", group_id)
        self._warn_if_running("set_group")

    def set_message_model(self, model: MessageModel | int) -> None:
        """Deliver each message to one member of the group, or to every member."""
        try:
            chosen = MessageModel(MessageModel.from_param(model))
        except (TypeError, ValueError) as error:
            allowed = "MessageModel.CLUSTERING or MessageModel.BROADCASTING"
            raise ArgumentError(f"message_model={safe_repr(model)} is not allowed; use {allowed}") from error
        self._set("set_message_model", message_model=chosen.name.lower())

    def set_thread_count(self, thread_count: int) -> None:
        """Set how many callbacks run at a time: 1 to 1000. The default is the number of processors."""
        if to_number("thread_count", thread_count) == 0:
            raise NullPointerException("thread_count is 0; use 1 to 1000")
        self._set("set_thread_count", consume_threads=int(thread_count))

    def set_message_batch_max_size(self, max_size: int) -> None:
        """Do nothing. A callback gets one message, as in the old package."""
        if to_number("max_size", max_size) == 0:
            raise NullPointerException("max_size is 0; use 1 or more")
        if max_size < 1:
            raise RocketMQException(f"max_size={max_size} is not allowed; use 1 or more")
        if max_size != 1:
            _warn_once("set_message_batch_max_size", "a callback gets one message at a time; batches have no effect")

    def subscribe(self, topic: str | bytes, callback: Callback, expression: str | bytes = "*") -> None:
        """Call `callback` with the messages of `topic` that have one of the tags in `expression` (`"a || b"`).

        A callback that returns ConsumeStatus.CONSUME_SUCCESS, or None, has consumed the message. After RECONSUME_LATER,
        any other result, or an exception, the message is redelivered. Each topic has its own callback.

        Raises:
            ConsumerException: topic, callback or expression is not allowed.
            NullPointerException, ctypes.ArgumentError: an argument is None, or is of another type.
        """
        name, selector = to_text("topic", topic), to_text("expression", expression) or "*"
        listener = _listener(callback, self)
        # The lock keeps it from running during a start, which has read the subscriptions already.
        with self._starting, _raise_as(ConsumerException):
            consumer.PushConsumer(config=self._config).subscribe(name, listener, selector)  # raises if it is wrong
            self._subscriptions[name] = listener, selector
            running = self._client
            if running is not None and self._is_running:
                running.subscribe(name, listener, selector)

    def start(self) -> None:
        """Start consuming. Do nothing if it is started.

        `shutdown()` may run meanwhile, in a callback for example. Then it acts as if called afterwards.

        Raises:
            PushConsumerStartFailed: nothing is subscribed to, a setting is not allowed, or no name server answers.
        """
        with self._starting, _raise_as(PushConsumerStartFailed):
            if self._is_running:
                return
            if not self._subscriptions:
                raise ConfigError("there is no subscription; call subscribe(topic, callback) before start()")
            starting = consumer.PushConsumer(config=self._full_config())
            for topic, (listener, selector) in self._subscriptions.items():
                starting.subscribe(topic, listener, selector)
            self._closing = None
            _discard_closed()
            _open_consumers.add(starting)
            try:
                self._start(starting)
            except BaseException:
                _open_consumers.discard(starting)
                raise

    def shutdown(self) -> None:
        """Let callbacks finish, store offsets, and leave the group. The consumer can be started again.

        A callback may call it. There it returns at once, and the consumer closes after the callback.

        Raises:
            ConsumerException: the consumer had failed before; the text has the reason.
        """
        if self._pid != os.getpid():
            return
        running, self._client = self._client, None
        if running is not None:
            self._closing = running
        if (closing := self._closing) is not None:  # a second call waits for the same close
            try:
                with _raise_as(ConsumerException):
                    closing.close()
            finally:
                _discard_closed()


_open_consumers: set[consumer.PushConsumer] = set()
"""Started consumers. This keeps them running without a reference of the application, until they are shut down."""


def _discard_closed() -> None:
    for each in list(_open_consumers):
        if each.state in (ConsumerState.CLOSED, ConsumerState.FAILED):
            _open_consumers.discard(each)


def _processor_count() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _listener(callback: Callback, subscriber: PushConsumer) -> Callable[[wire.Message], Any]:
    """Return a listener that calls `callback` for `subscriber`, and converts its result.

    Raises:
        ConsumerException: it cannot be called with a message, or is a coroutine function.
    """
    if isinstance(callback, type) or not callable(callback):
        raise ConsumerException(f"callback must be a function of a message, not {safe_repr(callback)}")
    if inspect.iscoroutinefunction(callback):
        raise ConsumerException(
            f"callback {safe_repr(callback)} is an `async def`, which this class never awaits; "
            "subscribe it with pyrocket_consumer.PushConsumer"
        )
    try:
        inspect.signature(callback).bind(None)
    except ValueError:
        pass  # some built-ins have no signature
    except TypeError as error:
        raise ConsumerException(f"callback {safe_repr(callback)} cannot be called with one message: {error}") from error
    success, new = ConsumeStatus.CONSUME_SUCCESS, ReceivedMessage.__new__

    def listen(message: wire.Message) -> object:
        received = new(ReceivedMessage)  # faster than a call with `__init__`
        received._handle = message
        if (namespace := subscriber._config.namespace) is not None:
            received._namespace = namespace
        status = callback(received)
        return None if status is success or status is None else _result_of(status)

    return listen


def _result_of(status: object) -> object:
    """Return the result for an unusual status. Numbers keep their old meaning; any other value is logged."""
    if isinstance(status, int):
        if status is True:
            _warn_once("a callback returned True", "True equals RECONSUME_LATER; return ConsumeStatus.CONSUME_SUCCESS")
        if status == ConsumeStatus.CONSUME_SUCCESS:
            return None
        if status == ConsumeStatus.RECONSUME_LATER:
            return ConsumeResult.RETRY
    return status


def _close_all() -> None:
    for each in list(_open_consumers):
        try:
            each.close(_EXIT_TIMEOUT_S)
        except RocketError as error:
            log.error("group=%s close at process exit failed reason=%s", each.config.group, error)


atexit.register(_close_all)
