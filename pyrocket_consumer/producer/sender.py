"""Getting messages to brokers: which queue, which connection, and what to do when that does not work."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.answers import refusal
from pyrocket_consumer.cluster.broker import DEGRADED_CODES, STORED_CODES
from pyrocket_consumer.config import ProducerConfig
from pyrocket_consumer.errors import BrokerError, ConnectError, ConsumerClosed, RocketError, RouteNotFound
from pyrocket_consumer.model import MASTER_ID, PERM_WRITE, MessageQueue, TopicRoute
from pyrocket_consumer.net.connection import Connection
from pyrocket_consumer.producer.publish_queues import FailedBrokers, PublishQueues
from pyrocket_consumer.producer.sending import Sending
from pyrocket_consumer.producer.tally import Tally
from pyrocket_consumer.wire.codes import ResponseCode, version_name, version_ordinal
from pyrocket_consumer.wire.frame import RemotingCommand
from pyrocket_consumer.wire.send_template import SendTemplate

log = logging.getLogger("pyrocket_consumer.producer")

# Another broker may take what one refused so. Source: DefaultMQProducer.retryResponseCodes; 215 is 2 by another name.
_ANOTHER_BROKER_MAY = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
        *DEGRADED_CODES,  # asked only where they do not count as stored
    }
)

# Not the message but the broker is the reason, so that the next messages, too, do better elsewhere for a moment.
_IN_TROUBLE = frozenset(
    {
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)

_AUTO_CREATE_TOPIC = "TBW102"
_AUTO_CREATE_QUEUES = 4

_FIRST_TIMER_VERSION = version_ordinal(5, 0, 0)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


class _AttemptFailed(Exception):
    """The broker of one queue could not be had; another may."""

    def __init__(self, error: RocketError) -> None:
        super().__init__(error)
        self.error = error


class Sender:
    """Sends what the outbox holds. Confined to the I/O thread.

    `_start` sends at once when a route and a connection are at hand, without a task; `_prepare` is for everything that
    must wait. Both end in `_post`, and that in `_answered`, which finishes the message or has it prepared again.

    Messages for one queue, or with one sharding key, form a lane: one of them is under way at a time, and it is tried
    once. Brokers handle the requests of one connection side by side, so two at a time, or a second attempt, could
    change their order.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        group: str,
        on_finished: Callable[[Sending], None],
        rng: random.Random | None = None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._group = group
        self._on_finished = on_finished
        self._random = rng or random.Random()
        self._queues: dict[str, PublishQueues] = {}
        self._templates: dict[tuple[MessageQueue, bool], SendTemplate] = {}
        self._stored_codes = STORED_CODES if config.accept_degraded else STORED_CODES - DEGRADED_CODES
        self._failed = FailedBrokers()
        self._unfinished: set[Sending] = set()
        self._lanes: dict[tuple[str, MessageQueue | str], deque[Sending]] = {}

    def begin(self, sending: Sending) -> None:
        """Take a message on its way; whoever waits is told the outcome by the deadline."""
        self._unfinished.add(sending)
        if (lane := sending.lane) is not None:
            if (before := self._lanes.get(lane)) is not None:
                before.append(sending)
                sending.expiry = self._cluster.loop.call_at(sending.deadline, self._expire_in_lane, sending)
                return
            self._lanes[lane] = deque()
        self._start(sending)

    def _expire_in_lane(self, sending: Sending) -> None:
        if sending in self._unfinished:
            sending.attempts += (f"waited {sending.timeout_s:g} s for messages before it in the same queue",)
            self._fail(sending, None)

    def _start_next(self, lane: tuple[str, MessageQueue | str]) -> None:
        waiting = self._lanes[lane]
        while waiting:
            sending = waiting.popleft()
            if sending in self._unfinished:  # else its time is over
                if sending.expiry is not None:
                    sending.expiry.cancel()
                self._start(sending)
                return
        del self._lanes[lane]

    def _start(self, sending: Sending) -> None:
        sending.is_under_way = True
        try:
            queues = self._known_queues(sending.topic)
            queue = self._choose(sending, queues) if queues is not None else None
            if queue is not None and not sending.is_oneway and not sending.needs_timer:
                address = self._cluster.address(queue.broker_name, only_this=True)
                connection = self._cluster.peek_member(address) if address is not None else None
                if connection is not None and self._cluster.loop.time() < sending.deadline:
                    self._post(sending, queue, connection)
                    return
            self._prepare_soon(sending, queue)
        except Exception as error:
            self._surprised(sending, error)

    def _prepare_soon(self, sending: Sending, queue: MessageQueue | None = None) -> None:
        self._cluster.spawn(self._prepare(sending, queue), "send")

    async def _prepare(self, sending: Sending, queue: MessageQueue | None) -> None:
        """Have everything at hand that a message needs, then send it. `queue` is one chosen already."""
        try:
            async with asyncio.timeout_at(sending.deadline):
                connection = None
                while connection is None:
                    if queue is None:
                        queue = await self._next_queue(sending)
                    try:
                        connection = await self._connection_for(sending, queue)
                    except _AttemptFailed as failed:
                        if not self._goes_on(sending, queue, failed.error):
                            return
                        queue = None
                assert queue is not None
                if sending not in self._unfinished:
                    return
                if sending.is_oneway:
                    await self._post_oneway(sending, queue, connection)
                else:
                    self._post(sending, queue, connection)
        except TimeoutError as error:
            sending.attempts += (f"gave up after {sending.timeout_s:g} s",)
            self._fail(sending, error)
        except RocketError as error:
            if isinstance(error, RouteNotFound) and not sending.attempts:
                self._finish(sending, RouteNotFound(sending.shown_topic, error.name_servers))
            else:
                sending.attempts += (_line(error),)
                self._fail(sending, error)
        except Exception as error:
            self._surprised(sending, error)

    async def _next_queue(self, sending: Sending) -> MessageQueue:
        """Return the queue to try next, after a pause if its broker has just refused and there is no other.

        Raises:
            RocketError: there is none that will do.
        """
        queues = await self._queues_of(sending.topic, refresh=sending.wants_new_route)
        queue = self._choose(sending, queues)
        if queue is None and not sending.wants_new_route:
            queues = await self._queues_of(sending.topic, refresh=True)
            queue = self._choose(sending, queues)
        if queue is None:
            raise RocketError(_why_no_queue(sending, queues.route))
        sending.wants_new_route = False
        if queue.broker_name == sending.last_broker:
            await asyncio.sleep(self._pause_s(len(sending.attempts)))
        return queue

    async def _connection_for(self, sending: Sending, queue: MessageQueue) -> Connection:
        """Return an open connection to the queue's broker.

        Raises:
            _AttemptFailed: it cannot be had now.
            RocketError: the broker will not do.
        """
        address = self._cluster.address(queue.broker_name, only_this=True)
        if address is None:
            raise _AttemptFailed(RocketError(f"{queue.broker_name} has no master now"))
        timeout_s = self._attempt_timeout_s(sending)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._cluster.connection(address)
                if sending.needs_timer:
                    await self._check_timer(queue, address)
        except TimeoutError as error:
            raise _AttemptFailed(ConnectError(address, f"no connection within {timeout_s:.3g} s")) from error
        except ConnectError as error:
            raise _AttemptFailed(error) from error
        return connection

    async def _check_timer(self, queue: MessageQueue, address: str) -> None:
        """Raise unless the broker can keep a message until a given time; older ones would deliver it at once."""
        if self._cluster.broker_version(address) is None:
            try:
                await self._cluster.heartbeat_broker(address)
            except RocketError as error:
                raise _AttemptFailed(error) from error
        version = self._cluster.broker_version(address) or 0
        if version < _FIRST_TIMER_VERSION:
            raise RocketError(
                f"{queue.broker_name} ({address}) is {version_name(version)}, and brokers before 5.0 deliver at once "
                "whatever deliver_at says; use delay_level"
            )

    # --- queues

    def _known_queues(self, topic: str) -> PublishQueues | None:
        """Return the queues of the route that is known now, None if none is."""
        route = self._cluster.known_route(topic)
        if route is None:
            return None
        queues = self._queues.get(topic)
        if queues is None or (queues.route is not route and queues.route != route):
            queues = self._queues[topic] = PublishQueues(route, self._random)
        queues.route = route  # an equal one costs no comparison next time
        return queues

    async def _queues_of(self, topic: str, refresh: bool) -> PublishQueues:
        try:
            await self._cluster.route(topic, refresh=refresh)
        except RouteNotFound:
            if not self._config.auto_create_topic:
                raise
            return await self._queues_to_be(topic)
        queues = self._known_queues(topic)
        assert queues is not None
        return queues

    async def _queues_to_be(self, topic: str) -> PublishQueues:
        """Return the queues that brokers will make when the first message for `topic` comes.

        Raises:
            RouteNotFound: no broker makes topics by itself.
        Source: MQClientInstance.updateTopicRouteInfoFromNameServer with the default topic.
        """
        try:
            template = await self._cluster.route(_AUTO_CREATE_TOPIC)
        except RouteNotFound as error:
            raise RouteNotFound(topic, error.name_servers) from error
        queues = tuple(
            replace(data, write_queues=min(data.write_queues, _AUTO_CREATE_QUEUES)) for data in template.queues
        )
        return PublishQueues(TopicRoute(topic, queues, template.brokers), self._random)

    def _choose(self, sending: Sending, queues: PublishQueues) -> MessageQueue | None:
        """Return the queue to try next, None if there is none that will do."""
        if sending.queue is not None:
            return sending.queue if sending.queue in queues else None
        if sending.sharding_key is not None:
            return queues.of_sharding_key(sending.sharding_key)
        avoid = self._failed.names(self._cluster.loop.time())
        if not avoid and not sending.failed_brokers:
            return queues.take()
        # Better one that has failed others than the one that has just failed this message.
        return queues.take(avoid | sending.failed_brokers) or queues.take(sending.failed_brokers) or queues.take()

    # --- attempts

    def _attempt_timeout_s(self, sending: Sending) -> float:
        """Return how long an attempt may take: half of what is left, so that another broker has a chance, or all."""
        remaining = max(sending.deadline - self._cluster.loop.time(), 0.001)
        queues = self._queues.get(sending.topic)
        last = sending.lane is not None or len(sending.attempts) + 1 >= self._config.send_attempts
        return remaining if last or queues is None or queues.broker_count < 2 else remaining / 2

    def _pause_s(self, attempts: int) -> float:
        return float(min(_FIRST_PAUSE_S * 2 ** (attempts - 1), _LONGEST_PAUSE_S)) * (0.5 + self._random.random() / 2)

    def _post(self, sending: Sending, queue: MessageQueue, connection: Connection) -> None:
        command = sending.request(self._template(sending, queue))
        timeout_s = self._attempt_timeout_s(sending)

        def on_answer(answer: RemotingCommand | Exception) -> None:
            self._answered(sending, queue, connection.address, answer)

        connection.send(lambda opaque: connection.encode(command, opaque), on_answer, timeout_s, "SEND_MESSAGE")

    def _template(self, sending: Sending, queue: MessageQueue) -> SendTemplate:
        template = self._templates.get((queue, sending.is_batch))
        if template is None:
            template = SendTemplate(self._group, sending.topic, queue.queue_id, queue.broker_name, sending.is_batch)
            self._templates[queue, sending.is_batch] = template
        return template

    async def _post_oneway(self, sending: Sending, queue: MessageQueue, connection: Connection) -> None:
        await connection.drained()
        connection.oneway(sending.request(self._template(sending, queue)))
        self._finish(sending, None)

    def _answered(
        self, sending: Sending, queue: MessageQueue, address: str, answer: RemotingCommand | Exception
    ) -> None:
        if sending not in self._unfinished:
            return
        try:
            if isinstance(answer, RemotingCommand):
                if answer.code in self._stored_codes:
                    self._failed.answered(queue.broker_name)
                    self._finish(sending, sending.results(queue, answer))
                    return
                answer = refusal(answer, address)
            if not isinstance(answer, RocketError):
                raise answer
            if self._goes_on(sending, queue, answer):
                self._prepare_soon(sending)
        except RocketError as error:
            sending.attempts += (f"{queue}: {_line(error)}",)
            self._fail(sending, error)
        except Exception as error:
            self._surprised(sending, error)

    def _goes_on(self, sending: Sending, queue: MessageQueue, error: RocketError) -> bool:
        """Take note of a failed attempt, and tell whether there will be another; if not, the message has failed."""
        now = self._cluster.loop.time()
        sending.attempts += (f"{queue}: {_line(error)}",)
        code = error.code if isinstance(error, BrokerError) else None
        if code is None or code in _IN_TROUBLE:
            self._failed.failed(queue.broker_name, now)
        if (
            sending.lane is not None
            or len(sending.attempts) >= self._config.send_attempts
            or (code is not None and code not in _ANOTHER_BROKER_MAY)
            or now >= sending.deadline
        ):
            self._fail(sending, error)
            return False
        log.debug("topic=%s attempt=%d failed, another follows reason=%s", sending.topic, len(sending.attempts), error)
        sending.failed_brokers |= {queue.broker_name}
        sending.last_broker = queue.broker_name
        sending.wants_new_route = code == ResponseCode.TOPIC_NOT_EXIST
        return True

    # --- ends

    def _fail(self, sending: Sending, cause: BaseException | None) -> None:
        self._finish(sending, sending.error(cause))

    def _surprised(self, sending: Sending, error: Exception) -> None:
        log.error("topic=%s a send ended by surprise", sending.topic, exc_info=error)
        self._finish(sending, error)

    def _finish(self, sending: Sending, outcome: object) -> None:
        """Give whoever waits the outcome: a result, or an exception."""
        if sending in self._unfinished:
            self._unfinished.discard(sending)
            if sending.is_under_way and (lane := sending.lane) is not None:
                self._cluster.loop.call_soon(self._start_next, lane)
            self._on_finished(sending)
            if isinstance(outcome, BaseException):
                sending.waiting.set_exception(outcome)
            else:
                sending.waiting.set_result(outcome)

    def tally(self) -> Tally:
        """Count how every message ends that is on its way now."""
        return Tally(self._unfinished)

    def abandon(self) -> int:
        """Give every message that is still on its way up, and return how many there were."""
        abandoned = list(self._unfinished)
        for sending in abandoned:
            sending.attempts += ("the producer was closed before an answer came; the message may be stored or not",)
            self._fail(sending, ConsumerClosed("the producer was closed"))
        return len(abandoned)


def _line(error: RocketError) -> str:
    """Return the error's text without the line breaks that brokers put into their remarks."""
    return " ".join(str(error).split())


def _why_no_queue(sending: Sending, route: TopicRoute) -> str:
    if sending.queue is not None:
        return (
            f"{sending.queue} is not a queue that can be written: not in the topic's route, without the write "
            f"permission, or without a master; the route has {_described(route)}"
        )
    return f"no queue can be written; the route has {_described(route)}"


def _described(route: TopicRoute) -> str:
    masters = {broker.broker_name for broker in route.brokers if MASTER_ID in broker.addresses}
    brokers = (
        f"{data.broker_name} with {data.write_queues} write queues, "
        f"{'' if data.perm & PERM_WRITE else 'no '}write permission (perm {data.perm}) and "
        f"{'a' if data.broker_name in masters else 'no'} master"
        for data in route.queues
    )
    return "; ".join(brokers) or "no queues"
