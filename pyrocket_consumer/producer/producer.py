"""The producer: it sends messages one by one, many at a time, one-way, and in batches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from types import TracebackType
from typing import Self, TypeVar, Unpack

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.cluster.client import NotCopied
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.config import NameServers, ProducerConfig, ProducerOptions, check_config, check_range
from pyrocket_consumer.errors import ClientClosed, ConfigError, RequestTimeout, RocketError, SendError
from pyrocket_consumer.model import RETRY_PREFIX, MessageQueue
from pyrocket_consumer.producer.outgoing_message import (
    BatchMessage,
    OutgoingMessage,
    check_delivery,
    check_properties_size,
    check_send_topic,
    check_sharding_key,
    check_size,
    split_batch,
)
from pyrocket_consumer.producer.send_future import CallbackThread, ResultSink, SendFuture
from pyrocket_consumer.producer.send_request import Flush, SendRequest, SendResult
from pyrocket_consumer.producer.session import CloseHook, Session, flush_at_exit, new_ids
from pyrocket_consumer.protocol.compression import compress
from pyrocket_consumer.protocol.message import BatchItem, encode_batch
from pyrocket_consumer.protocol.properties import PropertyName, encode_properties
from pyrocket_consumer.transport.forks import renew_locks_in_children
from pyrocket_consumer.transport.io_thread import ThreadFuture

T = TypeVar("T")

MAX_TIMEOUT_S = 3600
_DEADLINE_GRACE_S = 5.0  # a deadline missed by this much means that the I/O thread does not run


class ProducerState(Enum):
    """The state of a producer."""

    CREATED = "created"
    RUNNING = "running"
    CLOSED = "closed"


class Producer(NotCopied):
    """Sends messages. Safe to share between threads; it starts with the first message, or with `start()`.

        with Producer(name_server="127.0.0.1:9876") as producer:
            sent = producer.send("orders", b"...", tags="paid", keys=["o-1"])

    A message goes to the next queue of its topic. If the broker refuses it, is unreachable, or no longer has the topic,
    the producer fetches the route again. It then retries, with another broker if there is one, until the timeout.

    If a response is lost, the message may be stored. The producer retries it, up to `send_attempts` attempts in all.
    The broker may then store the message twice, with the same `message_id`; `SendResult.attempts` is above 1.

    The producer sends messages for the same `queue` or `sharding_key` one after the other, so that brokers store them
    in the order of the calls. It retries them on the same queue. A message never overtakes one without a response, even
    if that one has timed out. The next message is sent after the response, or after the end of the connection.
    """

    def __init__(
        self,
        group: str = "DEFAULT_PRODUCER",
        *,
        name_server: NameServers | None = None,
        config: ProducerConfig | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        """Check the options. The producer connects with the first message, or with `start()`.

        Args:
            group ("DEFAULT_PRODUCER"; 1–120 of a-zA-Z0-9_-%|): the producer group
            config (–; a ProducerConfig): all options in one, instead of single ones
            send_timeout_s (3; 0.01–600 s): the deadline of one send with all its attempts
            send_attempts (3; 1–100): how often a message may reach a broker. A refused attempt does not count. An
                attempt without a response counts, because the broker may have stored the message
            compress_above_bytes (4096; bytes): bodies of at least this size are compressed
            compression ("zlib"; "zlib", "lz4", "zstd"): the compression; the others need the extra of the same name
            max_message_bytes (4 MiB; bytes, up to 15.875 MiB): the largest body. The producer refuses larger ones
            max_in_flight_messages (4096; messages): the number of unfinished sends at which send_async waits
            max_in_flight_bytes (64 MiB; bytes): the size of unfinished sends at which send_async waits
            auto_create_topic (False): send to a topic that does not exist yet, if brokers create topics on demand
            accept_degraded (True): count "stored, but not flushed or replicated in time" as stored; SendResult.status
                shows it. With False the producer tries another broker, or raises SendError, and the message may be
                stored twice
            name_server (NAMESRV_ADDR; host:port, several joined by ;, or a list): the name servers to ask for routes;
                one that responds is enough
            client_ip (detected; printable text): the first part of the client id
            instance_name ("DEFAULT"; printable text): the second part of the client id; if you set it, give each
                process its own
            unit_name (–; printable text): the unit name, as in the Java client
            namespace (–; 1–127 of a-zA-Z0-9_-%|): the prefix of all topics and groups, as in the Java client
            access_key (–; text): the account that signs every request
            secret_key (–; text): the secret of the account; never shown, and not pickled
            security_token (–; text): the token of a temporary account
            tls (False; True, an ssl.SSLContext): encrypt connections; True verifies certificates with the authorities
                of the system
            allowed_addresses (–; host, host:port, network, or a list): the only brokers that the client connects to,
                and sends signed requests to; the default allows all
            call_timeout_s (3; 0.01–600 s): the deadline of a request
            connect_timeout_s (3; 0.01–600 s): the deadline of a connection attempt
            heartbeat_interval_s (30; 0.05–3600 s): the time between two heartbeats to a broker
            route_refresh_interval_s (30; 0.05–3600 s): the time between two requests for the routes of topics
            max_frame_bytes (16 MiB; 65536–2³⁰, bytes): the largest frame to send or receive. A server that sends a
                larger one loses its connection. Servers accept 16 MiB by default

        Raises:
            ConfigError: an option is unknown, its value is not allowed, or its package is not installed.
        """
        if config is None:
            config = ProducerConfig.from_options({"group": group, "name_server": name_server, **options})
        else:
            unless_default = None if group == ProducerConfig.group else group
            config = check_config(ProducerConfig, config, name_server, options, unless_default)
        compress(b"-", config.compression)  # raises if the package is not installed
        self.config = config
        self._group = wrap(config.namespace, config.group)
        self.renew_locks()
        renew_locks_in_children(self)
        self._session: Session | None = None
        self._connecting: Cluster | None = None
        self._is_closed = False
        self._closers: set[threading.Thread] = set()  # threads that are in `close` now
        self._callback_thread = CallbackThread()
        self._wire_topics: dict[str, str] = {}

    def __repr__(self) -> str:
        servers = ";".join(self.config.name_servers)
        return f"{type(self).__name__}(group={self.group!r}, state={self.state.value!r}, name_server={servers!r})"

    # --- life

    @property
    def state(self) -> ProducerState:
        """The state of the producer."""
        if self._is_closed:
            return ProducerState.CLOSED
        return ProducerState.CREATED if self._session is None else ProducerState.RUNNING

    @property
    def group(self) -> str:
        """The producer group."""
        return self.config.group

    def start(self) -> None:
        """Connect to a name server. The first send does it, too; `start` reports a wrong address earlier.

        Raises:
            ConnectError: no name server responds. The producer can be started again.
            ClientClosed: the producer is closed, perhaps during the start.
        """
        with self._start_lock:
            self._check_open()
            if self._session is not None:
                return
            cluster = Cluster(self.config, make_client_id(self.config))
            cluster.membership.add_producer(self._group)
            close_hook = self._prepare(cluster)
            self._connecting = cluster
            try:
                self._check_open()  # again, because a close has not seen `_connecting` before
                cluster.start()
                self._check_open()
                session = Session(cluster, self.config, self._group, self._callback_thread, close_hook)
                if self._session is None:  # a signal handler may have started it meanwhile
                    self._session = session
                flush_at_exit(self._session)
            finally:
                self._connecting = None
                if self._session is None or self._session.cluster is not cluster:
                    cluster.close()
            if self._is_closed:  # by a close that has not seen the session
                self._session.close(0)
                self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosed("the producer is closed; make a new one")

    def renew_locks(self) -> None:
        """Make a new lock, which no thread holds. A forked child calls it."""
        self._start_lock = threading.RLock()  # reentrant, because a signal handler may send during a start

    def _prepare(self, cluster: Cluster) -> CloseHook:
        """Register handlers for the requests of brokers to this kind of producer. Return the hook that ends them."""
        return lambda timeout_s: None

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every message passed so far has its result. The producer stays open.

        The futures of `send_async` are done then, but their callbacks may still run. `flush` ends even without
        `timeout_s` (seconds, 0.001 to 3600), because every message has a deadline. A process that exits without `flush`
        or `close` flushes for up to `send_timeout_s`, and logs the lost messages.

        Raises:
            RequestTimeout: some messages have no result within `timeout_s`; the text has their number. The producer
                still sends them.
            ClientClosed: the producer was started in the parent process.
        """
        if timeout_s is not None:
            check_range("timeout_s", timeout_s, 0.001, MAX_TIMEOUT_S)
        if self._is_closed or (session := self._session) is None:
            return  # nothing was sent, or close() waits for it
        try:
            flush = session.begin_flush()
        except ClientClosed:
            if self.state is ProducerState.CLOSED:
                return
            raise
        wait_s = flush.longest_timeout_s + _DEADLINE_GRACE_S if timeout_s is None else timeout_s
        before = None
        while not flush.wait(wait_s):
            if timeout_s is not None or flush.pending == before:  # otherwise a lane moves
                left = f"a flush ({flush.pending} of {flush.messages} messages are in flight)"
                raise RequestTimeout(left, "the brokers", wait_s)
            before = flush.pending

    def close(self, timeout_s: float | None = None) -> None:
        """Accept no more messages, wait until the messages in flight have their results, and disconnect.

        It ends, because every message has a deadline. After `timeout_s`, or an interrupt (Ctrl-C), the unfinished
        messages fail with SendError. A second close waits for the same end. In a callback, or in a signal handler that
        interrupts the first one, it returns at once. In a child forked after the start it does nothing.

        Raises:
            ConfigError: `timeout_s` is neither None nor 0 to 3600 seconds. The producer stays open.
        """
        if timeout_s is not None:
            check_range("timeout_s", timeout_s, 0, MAX_TIMEOUT_S)
        self._is_closed = True
        me, session = threading.current_thread(), self._session
        if me in self._closers or (self._closers and self._callback_thread.is_current):
            return
        if session is not None and session.pid != os.getpid():
            return
        try:
            self._closers.add(me)
            if (connecting := self._connecting) is not None:
                connecting.close()  # ends the start
            if session is not None:
                session.close(timeout_s)
        finally:
            self._closers.discard(me)

    def __del__(self) -> None:
        session: Session | None = getattr(self, "_session", None)
        if session is not None and not self._is_closed:
            session.cluster.warn_unclosed(self, session.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- sending

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Sequence[str] | str = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        flag: int = 0,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Store a message, and return its position.

        `tags` is one tag, for subscriptions; `keys` are for searches; `properties` belong to the application.

        `queue` selects the queue. `sharding_key` selects the same queue for all messages with this key, while the
        topic keeps its queues. It is number `abs(String.hashCode(key)) % queues` of the writable queues, sorted by
        broker name and queue id, as in Java's SelectMessageQueueByHash.

        `delay_level` 1 to 18 delivers the message after 1 s … 2 h (`messageDelayLevel` of the broker). `deliver_at`
        delivers it at a time. This needs a broker from 5.0 on, which allows at most three days (`timerMaxDelaySec`).

        `timeout_s` (default: `send_timeout_s`) limits the whole call with all attempts. It includes the wait for
        capacity and for earlier messages in the same queue, and the search for the broker.

        Raises:
            ConfigError: an argument is not allowed.
            RouteNotFound: the topic does not exist. Create it, or set `auto_create_topic`.
            SendError: the message is not stored, as far as is known; the error lists every attempt. After a timeout or
                a lost connection the message may still be stored.
            ConnectError: the producer could not start, because no name server responds.
            ClientClosed: the producer is closed, or was started in the parent process.
        """
        message, more = OutgoingMessage(body, tags, keys, properties, flag), check_delivery(delay_level, deliver_at)
        outcome: ThreadFuture[SendResult] = ThreadFuture()
        request = self._make_request(topic, message, outcome, queue, sharding_key, timeout_s, more)
        return self._send_and_wait(request, outcome)

    def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Sequence[str] | str = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        flag: int = 0,
        timeout_s: float | None = None,
    ) -> SendFuture[SendResult]:
        """Queue a message, and return a future with the result or the error of `send`.

        If `max_in_flight_messages` or `max_in_flight_bytes` are in flight, the call waits for capacity, within
        `timeout_s`. A message may then wait for others of its queue or key. It expires `timeout_s` after the call or
        after the last response to one of them, whichever is later. So a burst may take longer than `timeout_s`.

        Callbacks of the future run on a thread of the producer, one at a time, and may send. Only the producer resolves
        the future.

        Raises:
            ConfigError, ConnectError, ClientClosed: as for `send`.
            SendError: the message did not fit into the limits within `timeout_s`.
        """
        message, more = OutgoingMessage(body, tags, keys, properties, flag), check_delivery(delay_level, deliver_at)
        future: SendFuture[SendResult] = SendFuture(self._callback_thread)  # calling an alias would be slower
        request = self._make_request(topic, message, future.outcome, queue, sharding_key, timeout_s, more)
        request.is_blocking = False
        self._submit(request)
        return future

    def hand_over(
        self,
        topic: str,
        message: OutgoingMessage,
        waiting: ResultSink,
        *,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message as `send_async` does, but pass the result to `waiting` instead of a future.

        Raises:
            ConfigError, ConnectError, ClientClosed, SendError: as for `send_async`; `waiting` gets no result then.
        """
        more = check_delivery(delay_level, deliver_at)
        request = self._make_request(topic, message, waiting, queue, sharding_key, timeout_s, more)
        request.is_blocking = False
        self._submit(request)

    def send_oneway(
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Sequence[str] | str = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay_level: int = 0,
        deliver_at: datetime | None = None,
        flag: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message without waiting for a response; return when it is written to the connection.

        A refusal by the broker, or a loss with the connection, stays unknown. In all else it behaves as `send`.

        Raises:
            ConfigError, RouteNotFound, SendError, ConnectError, ClientClosed: as for `send`. Nothing was sent.
        """
        message, more = OutgoingMessage(body, tags, keys, properties, flag), check_delivery(delay_level, deliver_at)
        outcome: ThreadFuture[None] = ThreadFuture()
        request = self._make_request(topic, message, outcome, queue, sharding_key, timeout_s, more)
        request.is_oneway = True
        self._send_and_wait(request, outcome)

    def send_batch(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        timeout_s: float | None = None,
    ) -> list[SendResult]:
        """Store many messages with few requests, and return their positions in the same order.

        The messages of one request go to one queue, and get consecutive offsets there. Messages that exceed
        `max_message_bytes`, or 10,000 messages, need several requests. The producer sends these one after the other,
        each with the whole `timeout_s`. Without `queue` or `sharding_key` they go to different queues. Bodies are not
        compressed.

        Raises:
            SendError: `stored` is the number of messages, counted from the first, that are stored. In all else as
                `send`.
            ConfigError: as for `send`; also for a batch to a %RETRY% topic, which brokers refuse. Nothing was sent.
        """
        results: list[SendResult] = []
        for part in self._batch_parts(topic, messages, queue, sharding_key):
            outcome = ThreadFuture[list[SendResult]]()
            request = self._make_batch_request(topic, part, outcome, queue, sharding_key, timeout_s)
            with counting_stored(topic, results):
                stored = self._send_and_wait(request, outcome)
            results += stored
        return results

    def _batch_parts(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        queue: MessageQueue | None,
        sharding_key: str | None,
    ) -> list[Sequence[BatchMessage]]:
        """Return the messages of each request."""
        if not isinstance(messages, Iterable) or isinstance(messages, (str, bytes, bytearray, memoryview)):
            raise ConfigError(f"messages must be a list of messages, not {type(messages).__name__}; for one use send")
        name = self._wire_topic(topic)
        if name.startswith(RETRY_PREFIX):
            raise ConfigError(f"topic {name!r} accepts no batches; send its messages one by one")
        self._wire_queue(name, queue, sharding_key)
        ready = [self._batch_message(topic, each, sharding_key) for each in messages]
        return list(split_batch(ready, self.config.max_message_bytes))

    def _make_batch_request(
        self,
        topic: str,
        part: Sequence[BatchMessage],
        sink: ResultSink,
        queue: MessageQueue | None,
        sharding_key: str | None,
        timeout_s: float | None,
    ) -> SendRequest:
        name = self._wire_topic(topic)
        return SendRequest(
            topic=name,
            shown_topic=topic,
            body=encode_batch(item for item, _ in part),
            properties="",
            message_ids=tuple(message_id for _, message_id in part),
            sink=sink,
            timeout_s=self._timeout_s(timeout_s),
            born_at_ms=time.time_ns() // 1_000_000,
            is_batch=True,
            queue=self._wire_queue(name, queue, sharding_key),
            sharding_key=sharding_key,
        )

    def _batch_message(self, topic: str, message: bytes | OutgoingMessage, sharding_key: str | None) -> BatchMessage:
        if not isinstance(message, OutgoingMessage):
            message = OutgoingMessage(message)
        if message.topic is not None and message.topic != topic:
            raise ConfigError(f"a batch is for one topic: {topic!r}, and a message in it is for {message.topic!r}")
        check_size(len(message.body), self.config.max_message_bytes)
        message_id, properties = self._travelling_properties(message, sharding_key)
        return BatchMessage(BatchItem(message.body, properties, message.flag), message_id)

    def _make_request(
        self,
        topic: str,
        message: OutgoingMessage,
        sink: ResultSink,
        queue: MessageQueue | None,
        sharding_key: str | None,
        timeout_s: float | None,
        more_properties: Mapping[str, str],
        more_flags: int = 0,
    ) -> SendRequest:
        name = self._wire_topic(topic)
        wire_queue = self._wire_queue(name, queue, sharding_key)
        body, sys_flag = message.body, 0
        check_size(len(body), self.config.max_message_bytes)
        if len(body) >= self.config.compress_above_bytes:
            compressed, compressed_flag = compress(body, self.config.compression)
            if len(compressed) < len(body):
                body, sys_flag = compressed, compressed_flag
        message_id, properties = self._travelling_properties(message, sharding_key, more_properties)
        timeout = self._timeout_s(timeout_s)
        return SendRequest(
            topic=name,
            shown_topic=topic,
            body=body,
            properties=properties,
            message_ids=(message_id,),
            sink=sink,
            timeout_s=timeout,
            born_at_ms=time.time_ns() // 1_000_000,
            sys_flag=sys_flag | more_flags,
            flag=message.flag,
            queue=wire_queue,
            sharding_key=sharding_key,
            needs_timer=PropertyName.TIMER_DELIVER_MS in more_properties,
        )

    def _travelling_properties(
        self, message: OutgoingMessage, sharding_key: str | None, more: Mapping[str, str] | None = None
    ) -> tuple[str, str]:
        """Return a new message id, and all encoded properties with the id."""
        properties = message.travelling_properties()
        message_id = properties[PropertyName.UNIQUE_KEY] = self._next_id()
        if sharding_key is not None:
            properties[PropertyName.SHARDING_KEY] = sharding_key
        if more:
            properties.update(more)
        text = encode_properties(properties)
        check_properties_size(text)
        return message_id, text

    def _next_id(self) -> str:
        session = self._session
        return (new_ids(self.config) if session is None else session.ids).next()  # not kept before the start

    def _wire_topic(self, topic: str) -> str:
        """Return the name that brokers know. A name is checked only once."""
        name = self._wire_topics.get(topic) if isinstance(topic, str) else None
        if name is None:
            name = self._wire_topics[topic] = wrap(self.config.namespace, check_send_topic(topic))
        return name

    def _wire_queue(self, topic: str, queue: MessageQueue | None, sharding_key: str | None) -> MessageQueue | None:
        """Return the selected queue with the topic that brokers know, or None."""
        if sharding_key is not None:
            check_sharding_key(sharding_key)
        if queue is None:
            return None
        if sharding_key is not None:
            raise ConfigError("queue and sharding_key both choose the queue; give one of them")
        if not isinstance(queue, MessageQueue):
            raise ConfigError(f"queue must be a MessageQueue, not {type(queue).__name__}")
        if wrap(self.config.namespace, queue.topic) != topic:
            raise ConfigError(f"queue {queue} does not belong to topic {topic!r}")
        return MessageQueue(topic, queue.broker_name, queue.queue_id)

    def _timeout_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.config.send_timeout_s
        check_range("timeout_s", timeout_s, 0.001, MAX_TIMEOUT_S)
        return timeout_s

    def _ensure_session(self) -> Session:
        """Return the session, and start the producer if necessary.

        Raises:
            ConnectError: the producer cannot start.
            ClientClosed: the producer is closed, or belongs to the parent process.
        """
        if self._session is None:
            self.start()
        self._check_open()
        assert self._session is not None
        self._session.cluster.check_usable()
        return self._session

    def _submit(self, request: SendRequest) -> None:
        session = self._ensure_session()
        request.deadline = session.cluster.loop.time() + request.timeout_s
        if not session.in_flight.put(request, request.timeout_s):
            raise in_flight_limit_error(request, self.config)

    def _try_submit(self, request: SendRequest, left_s: float) -> bool:
        """Submit a request if it fits now. Its deadline is in `left_s`. For `AsyncProducer`, after the start."""
        session = self._ensure_session()
        request.deadline = session.cluster.loop.time() + left_s
        return session.in_flight.try_put(request)

    async def _begin_async_flush(self) -> Flush:
        """Count the results of the messages in flight, as `flush` does."""
        if self._is_closed or (session := self._session) is None:
            return Flush(())
        return await session.cluster.run_async(session.flush())

    def _send_and_wait(self, request: SendRequest, outcome: ThreadFuture[T]) -> T:
        """Return the result of a send. The I/O thread applies the deadline; this only detects that it does not run."""
        self._submit(request)
        if not outcome.wait(request.timeout_s + _DEADLINE_GRACE_S):
            raise RequestTimeout("a send", "the I/O thread", request.timeout_s + _DEADLINE_GRACE_S)
        return outcome.result()


@contextmanager
def counting_stored(topic: str, results: Sequence[SendResult]) -> Iterator[None]:
    """Raise the error of a part of a batch with the number of messages stored by the parts before it."""
    try:
        yield
    except SendError as error:
        raise SendError(error.topic, error.attempts, len(results)) from error.__cause__
    except RocketError as error:
        if not results:
            raise
        raise SendError(topic, (str(error),), len(results)) from error


def in_flight_limit_error(request: SendRequest, config: ProducerConfig) -> SendError:
    """Return the error of a message that did not fit into the limits in time."""
    text = (
        f"no free capacity within {request.timeout_s:g} s: the producer was at its limit "
        f"max_in_flight_messages={config.max_in_flight_messages} or max_in_flight_bytes={config.max_in_flight_bytes}"
    )
    return SendError(request.shown_topic, (text,))
