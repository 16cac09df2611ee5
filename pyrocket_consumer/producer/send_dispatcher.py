"""Getting messages to brokers: which queue, which connection, and what to do when that does not work."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.broker import DEGRADED_CODES, STORED_CODES
from pyrocket_consumer.cluster.responses import read_error
from pyrocket_consumer.config import ProducerConfig
from pyrocket_consumer.errors import (
    ConnectError,
    ConsumerClosed,
    ProtocolError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MessageQueue, TopicRoute
from pyrocket_consumer.producer.failures import (
    NoQueue,
    Verdict,
    asks_for_route,
    is_broker_in_trouble,
    is_topic_missing,
    verdict,
)
from pyrocket_consumer.producer.flush_counter import Tally
from pyrocket_consumer.producer.lane import Held, Lane
from pyrocket_consumer.producer.publish_queues import FailedBrokers, PublishQueues
from pyrocket_consumer.producer.send_request import LaneKey, Sending
from pyrocket_consumer.protocol.codes import version_name, version_ordinal
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.send_template import SendTemplate
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.connection import Connection

log = logger("producer")

_AUTO_CREATE_TOPIC = "TBW102"
_AUTO_CREATE_QUEUES = 4

_FIRST_TIMER_VERSION = version_ordinal(5, 0, 0)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 0.5
_SILENT = "it said nothing while messages waited for answers"
_ROUTE_WAIT_S = 0.5  # for a newer route, when one is known: name servers may be away


class _AttemptFailed(Exception):
    """The broker of one queue could not be had now; it may in a moment, and another one, too."""

    def __init__(self, error: RocketError) -> None:
        super().__init__(error)
        self.error = error


class Sender:
    """Sends what the outbox holds. Confined to the I/O thread.

    `_start` sends at once when a route and a connection are at hand, without a task; `_prepare` is for everything that
    must wait. Both end in `_post`, and that in `_answered`, which finishes the message or has it prepared again.

    What was certainly not stored is tried again until the message's time is over; what may be stored, at most
    `send_attempts` times. A failure that says that the route may be old has it asked for before the next try.

    Messages for one queue, or with one sharding key, form a lane: one of them is under way at a time. Brokers handle
    the requests of one connection side by side, so two at a time could change their order. For the same reason the
    lane is held while a request may be stored yet: until its answer, or the end of its connection.
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
        self._brokers_seen: dict[str, set[str]] = {}
        self._templates: dict[tuple[MessageQueue, bool], SendTemplate] = {}
        self._stored_codes = STORED_CODES if config.accept_degraded else STORED_CODES - DEGRADED_CODES
        self._failed = FailedBrokers()
        self._unfinished: set[Sending] = set()
        self._lanes: dict[LaneKey, Lane] = {}
        self._suspected: set[Connection] = set()
        cluster.keep_brokers(self._owes_answers)

    def _owes_answers(self, broker_name: str) -> bool:
        address = self._cluster.address(broker_name, only_this=True)
        connection = self._cluster.peek_member(address) if address is not None else None
        return connection is not None and connection.waiting > 0

    def begin(self, sending: Sending) -> None:
        """Take a message on its way; whoever waits is told the outcome."""
        self._unfinished.add(sending)
        if (pin := sending.queue or sending.sharding_key) is not None:
            sending.lane_key = key = (sending.topic, pin)
            if (lane := self._lanes.get(key)) is not None:
                lane.waiting.append(sending)
                self._look_at(lane, lane.expiry(sending))
                return
            self._lanes[key] = Lane(key, self._cluster.loop.time(), current=sending)
        self._start(sending)

    def _start(self, sending: Sending) -> None:
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
        except ProtocolError as error:  # no frame has room for it
            self._finish(sending, error)
        except Exception as error:
            self._surprised(sending, error)

    def _prepare_soon(self, sending: Sending, queue: MessageQueue | None = None) -> None:
        self._cluster.spawn(self._prepare(sending, queue), "send")

    async def _prepare(self, sending: Sending, queue: MessageQueue | None) -> None:
        """Have everything at hand that a message needs, then send it. `queue` is one chosen already."""
        try:
            async with asyncio.timeout_at(sending.deadline):
                while sending in self._unfinished:
                    if queue is None:
                        queue = await self._next_queue(sending)
                        continue  # unless it was given up meanwhile
                    try:
                        connection = await self._connection_for(sending, queue)
                        if sending.is_oneway:
                            await self._post_oneway(sending, queue, connection)
                    except _AttemptFailed as failed:
                        if not self._goes_on(sending, queue, failed.error):
                            return
                        queue = None
                        continue
                    if sending in self._unfinished and not sending.is_oneway:
                        self._post(sending, queue, connection)
                    return
        except TimeoutError as error:
            why = "" if sending.attempts else ": neither a route nor a connection was to be had"
            sending.note(f"gave up after {sending.timeout_s:g} s{why}")
            self._fail(sending, sending.last_error or error)
        except RocketError as error:
            if isinstance(error, RouteNotFound) and not sending.attempts:
                self._finish(sending, RouteNotFound(sending.shown_topic, error.name_servers))
            else:
                sending.note(str(error))
                self._fail(sending, error)
        except Exception as error:
            self._surprised(sending, error)

    async def _next_queue(self, sending: Sending) -> MessageQueue:
        """Return the queue to try next, after a pause if every broker that it may go to has just failed.

        Raises:
            RocketError: there is none that will do, and none is to be expected.
        """
        while True:
            try:
                queues = await self._queues_of(sending)
            except RouteNotFound:
                raise
            except RocketError as error:  # name servers are away
                self._note_failure(sending, str(error), error)
            else:
                queue = self._choose(sending, queues)
                if queue is not None and queue.broker_name not in sending.failed_brokers:
                    return queue
                if queue is None and sending.wants_route_after is None:
                    sending.wants_route_after = self._cluster.loop.time()
                    continue
                if queue is None:
                    why = NoQueue(_why_no_queue(sending, queues))
                    if not self._may_come(sending, queues):
                        raise why
                    self._note_failure(sending, str(why), why)
                    sending.wants_route_after = self._cluster.loop.time()
            await asyncio.sleep(self._pause_s(sending))
            sending.failed_brokers = frozenset()

    async def _connection_for(self, sending: Sending, queue: MessageQueue) -> Connection:
        """Return an open connection to the queue's broker.

        After an attempt whose outcome is unknown a lane goes on only where a heartbeat was answered: a broker that had
        stopped handles then what it had been sent before.

        Raises:
            _AttemptFailed: it cannot be had now.
            RocketError: the broker will not do.
        """
        address = self._cluster.address(queue.broker_name, only_this=True)
        if address is None:
            raise _AttemptFailed(ConnectError(queue.broker_name, "it has no master now"))
        lane = self._lanes[sending.lane_key] if sending.lane_key is not None else None
        needs_heartbeat = lane is not None and (sending.handed > 0 or lane.is_unsure)
        connect = self._cluster.member_connection if needs_heartbeat else self._cluster.connection
        timeout_s = self._attempt_timeout_s(sending)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await connect(address)
                if sending.needs_timer:
                    await self._check_timer(queue, address)
        except TimeoutError as error:
            raise _AttemptFailed(ConnectError(address, f"no connection within {timeout_s:.3g} s")) from error
        except ConnectError as error:
            raise _AttemptFailed(error) from error
        except RocketError as error:
            if not needs_heartbeat:
                raise
            raise _AttemptFailed(ConnectError(address, f"no heartbeat: {error}")) from error
        if connection.closed:
            raise _AttemptFailed(ConnectError(address, "the connection ended at once"))
        return connection

    async def _check_timer(self, queue: MessageQueue, address: str) -> None:
        """Raise unless the broker can keep a message until a given time; older ones would deliver it at once."""
        if self._cluster.broker_version(address) is None:
            try:
                await self._cluster.heartbeat_broker(address)
            except RocketError as error:
                raise _AttemptFailed(ConnectError(address, f"no heartbeat: {error}")) from error
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
            self._brokers_seen.setdefault(topic, set()).update(data.broker_name for data in route.queues)
        queues.route = route  # an equal one costs no comparison next time
        return queues

    async def _queues_of(self, sending: Sending) -> PublishQueues:
        """Return the topic's queues, by a newer route if the message wants one and it can be had soon.

        Raises:
            RouteNotFound: there is no such topic.
            RocketError: its route is not known, and cannot be had now.
        """
        topic, after = sending.topic, sending.wants_route_after
        try:
            if self._cluster.known_route(topic) is None or after is None:
                await self._cluster.route(topic)
            else:
                async with asyncio.timeout(_ROUTE_WAIT_S):
                    await self._cluster.route(topic, after=after)
        except RouteNotFound as error:
            gone = self._cluster.known_route(topic) is None or is_topic_missing(sending.last_error)
            if gone and self._config.auto_create_topic:
                return await self._queues_to_be(topic, after)
            if gone:
                raise
            self._note_failure(sending, str(error), error)  # its brokers are away
        except (TimeoutError, RocketError):
            if self._cluster.known_route(topic) is None:
                raise
        queues = self._known_queues(topic)
        assert queues is not None
        return queues

    async def _queues_to_be(self, topic: str, after: float | None) -> PublishQueues:
        """Return the queues that brokers will make when the first message for `topic` comes.

        Raises:
            RouteNotFound: no broker makes topics by itself.
        Source: MQClientInstance.updateTopicRouteInfoFromNameServer with the default topic.
        """
        try:
            template = await self._cluster.route(_AUTO_CREATE_TOPIC)
            if after is not None:
                with contextlib.suppress(TimeoutError, RocketError):  # its brokers, or the name servers, are away
                    async with asyncio.timeout(_ROUTE_WAIT_S):
                        template = await self._cluster.route(_AUTO_CREATE_TOPIC, after=after)
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

    def _may_come(self, sending: Sending, queues: PublishQueues) -> bool:
        """Tell whether a queue for the message may be there in a moment: its broker is away, or has no master yet."""
        if (queue := sending.queue) is None:
            return queues.any_waits_for_master
        for data in queues.route.queues:
            if data.broker_name == queue.broker_name:
                return queue.queue_id < data.write_queues and queues.waits_for_master(data)
        return queue.broker_name in self._brokers_seen.get(sending.topic, ())

    # --- attempts

    def _attempt_timeout_s(self, sending: Sending) -> float:
        """Return how long an attempt may take before the next: the attempts are spread over what is left."""
        remaining = max(sending.deadline - self._cluster.loop.time(), 0.001)
        left, call_timeout_s = self._config.send_attempts - sending.handed, self._config.call_timeout_s
        if left < 2:
            return remaining
        queues = self._queues.get(sending.topic)
        if sending.lane_key is None and queues is not None and queues.broker_count > 1:
            return min(remaining / 2, call_timeout_s)  # another broker has a chance
        return min(remaining, max(remaining / left, call_timeout_s))

    def _pause_s(self, sending: Sending) -> float:
        sending.pauses += 1
        longest = min(_FIRST_PAUSE_S * 2 ** min(sending.pauses - 1, 10), _LONGEST_PAUSE_S)
        return float(longest) * (0.5 + self._random.random() / 2)

    def _post(self, sending: Sending, queue: MessageQueue, connection: Connection) -> None:
        heard_bytes, timeout_s = connection.received_bytes, self._attempt_timeout_s(sending)
        encode = partial(sending.frame, self._template(sending, queue), connection)
        if sending.lane_key is None:
            on_answer = partial(self._came, sending, queue, connection, heard_bytes)
            connection.send(encode, on_answer, timeout_s, "SEND_MESSAGE")
            return
        lane, now = self._lanes[sending.lane_key], self._cluster.loop.time()
        held = Held(connection, heard_bytes, suspect_at=now + timeout_s)
        timeout_s = max(sending.deadline - now, 0) + self._config.call_timeout_s  # then the lane is held no longer
        on_answer = partial(self._came_in_lane, lane, sending, queue, connection, heard_bytes)
        connection.send(encode, on_answer, timeout_s, "SEND_MESSAGE")
        lane.held = held
        self._look_at(lane, held.suspect_at)

    def _came(
        self,
        sending: Sending,
        queue: MessageQueue,
        connection: Connection,
        heard_bytes: int,
        answer: RemotingCommand | Exception,
    ) -> None:
        if sending in self._unfinished:
            self._answered(sending, queue, connection, heard_bytes, answer)

    def _came_in_lane(
        self,
        lane: Lane,
        sending: Sending,
        queue: MessageQueue,
        connection: Connection,
        heard_bytes: int,
        answer: RemotingCommand | Exception,
    ) -> None:
        lane.held = None
        if isinstance(answer, RequestTimeout):
            # With its connection the request goes, and the next message cannot overtake it.
            connection.close("a message that must not be overtaken had no answer")
        if sending in self._unfinished:
            self._answered(sending, queue, connection, heard_bytes, answer)
        else:
            self._released(lane, answer)

    def _template(self, sending: Sending, queue: MessageQueue) -> SendTemplate:
        template = self._templates.get((queue, sending.is_batch))
        if template is None:
            template = SendTemplate(self._group, sending.topic, queue.queue_id, queue.broker_name, sending.is_batch)
            self._templates[queue, sending.is_batch] = template
        return template

    async def _post_oneway(self, sending: Sending, queue: MessageQueue, connection: Connection) -> None:
        await connection.drained()
        if connection.closed:
            raise _AttemptFailed(ConnectError(connection.address, "the connection ended"))
        connection.oneway(sending.request(self._template(sending, queue)))
        self._finish(sending, None)

    def _answered(
        self,
        sending: Sending,
        queue: MessageQueue,
        connection: Connection,
        heard_bytes: int,
        answer: RemotingCommand | Exception,
    ) -> None:
        try:
            if isinstance(answer, RemotingCommand):
                if answer.code in self._stored_codes:
                    self._failed.answered(queue.broker_name)
                    if sending.lane_key is not None:
                        lane = self._lanes[sending.lane_key]
                        lane.moved_at, lane.is_unsure = self._cluster.loop.time(), False
                    sending.handed += 1
                    self._finish(sending, sending.results(queue, answer))
                    return
                answer = read_error(answer, connection.address)
            if isinstance(answer, RequestTimeout) and sending.lane_key is None:
                self._suspect(connection, heard_bytes)
            if not isinstance(answer, RocketError):
                raise answer
            if self._goes_on(sending, queue, answer):
                self._prepare_soon(sending)
        except RocketError as error:
            sending.note(f"{queue}: {error}")
            self._fail(sending, error)
        except Exception as error:
            self._surprised(sending, error)

    def _goes_on(self, sending: Sending, queue: MessageQueue, error: RocketError) -> bool:
        """Take note of a failed attempt, and tell whether there will be another; if not, the message has failed."""
        now, name, became = self._cluster.loop.time(), queue.broker_name, verdict(error)
        self._note_failure(sending, f"{queue}: {error}", error)
        sending.failed_brokers |= {name}
        if became is Verdict.UNKNOWN:
            sending.handed += 1
        if is_broker_in_trouble(error):
            self._failed.failed(name, now)
        if asks_for_route(error):
            sending.wants_route_after = now
        if (
            became is Verdict.NEVER
            or (became is Verdict.UNKNOWN and sending.handed >= self._config.send_attempts)
            or (became is Verdict.ELSEWHERE and not self._has_another(sending))
            or now >= sending.deadline
        ):
            if sending.lane_key is not None and became in (Verdict.NEVER, Verdict.ELSEWHERE):
                self._lanes[sending.lane_key].moved_at = now
            self._fail(sending, error)
            return False
        log.debug("topic=%s an attempt failed, another follows reason=%s", sending.topic, error)
        return True

    def _note_failure(self, sending: Sending, text: str, error: Exception) -> None:
        sending.note(text)
        sending.last_error = error

    def _has_another(self, sending: Sending) -> bool:
        """Tell whether there is a broker that the message may go to and that has not failed it."""
        queues = self._known_queues(sending.topic)
        return sending.lane_key is None and queues is not None and queues.take(sending.failed_brokers) is not None

    def _suspect(self, connection: Connection, heard_bytes: int) -> None:
        """Close a connection that has said nothing for the whole time of a message, if it goes on so as long again.

        What has become of a peer that fell silent is learned only by a new connection.
        """

        def judge() -> None:
            self._suspected.discard(connection)
            if connection.received_bytes == heard_bytes:
                connection.close(_SILENT)

        if connection not in self._suspected:
            self._suspected.add(connection)
            self._cluster.loop.call_later(self._config.call_timeout_s, judge)

    # --- lanes

    def _released(self, lane: Lane, answer: RemotingCommand | Exception) -> None:
        """Go on in a lane that was held after its message had failed."""
        if isinstance(answer, RemotingCommand):
            lane.moved_at = self._cluster.loop.time()
        else:
            lane.is_unsure = True
        self._start_next(lane)

    def _start_next(self, lane: Lane) -> None:
        sending = lane.next(self._unfinished)
        if sending is not None:
            if sending.deadline <= self._cluster.loop.time():
                self._waited_in_vain(sending)
            else:
                self._start(sending)
            return
        if lane.timer is not None:
            lane.timer.cancel()
        del self._lanes[lane.key]

    def _look_at(self, lane: Lane, when: float) -> None:
        """Have the lane looked at by `when`."""
        if lane.timer is None or lane.timer.when() > when:
            if lane.timer is not None:
                lane.timer.cancel()
            lane.timer = self._cluster.loop.call_at(when, self._check, lane)

    def _check(self, lane: Lane) -> None:
        """Give up the messages of a lane whose time is over, and a connection that says nothing."""
        lane.timer = None
        now, held, current = self._cluster.loop.time(), lane.held, lane.current
        for sending in lane.expired(now):
            self._waited_in_vain(sending)
        times = [lane.expiry(sending) for sending in lane.waiting]
        if held is not None and current is not None and current in self._unfinished:
            if now >= current.deadline:
                error = RequestTimeout("SEND_MESSAGE", held.connection.address, current.timeout_s)
                self._note_failure(current, str(error), error)
                self._fail(current, error)
            else:
                if now >= held.suspect_at:
                    if held.connection.received_bytes == held.heard_bytes:
                        held.connection.close(_SILENT)
                    held.heard_bytes = held.connection.received_bytes
                    held.suspect_at = now + self._attempt_timeout_s(current)
                times += (held.suspect_at, current.deadline)
        if times:
            self._look_at(lane, min(times))

    def _waited_in_vain(self, sending: Sending) -> None:
        sending.note(f"waited {sending.timeout_s:g} s for messages before it in the same queue")
        self._fail(sending, None)

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
            if (key := sending.lane_key) is not None:
                lane = self._lanes[key]
                if lane.current is sending and lane.held is None:
                    self._cluster.loop.call_soon(self._start_next, lane)
            self._on_finished(sending)
            try:
                if isinstance(outcome, BaseException):
                    sending.waiting.set_exception(outcome)
                else:
                    sending.waiting.set_result(outcome)
            except Exception:  # of one message: lanes, others and a close go on
                log.exception("topic=%s whoever waits for a message cannot be told what became of it", sending.topic)

    def tally(self) -> Tally:
        """Count how every message ends that is on its way now."""
        return Tally(self._unfinished)

    def abandon(self) -> int:
        """Give every message that is still on its way up, and return how many there were."""
        abandoned = list(self._unfinished)
        for sending in abandoned:
            sending.note("the producer was closed before an answer came; the message may be stored or not")
            self._fail(sending, ConsumerClosed("the producer was closed"))
        return len(abandoned)


def _why_no_queue(sending: Sending, queues: PublishQueues) -> str:
    if sending.queue is not None:
        return (
            f"{sending.queue} is not a queue that can be written: not in the topic's route, without the write "
            f"permission, or without a master; the route has {queues.described}"
        )
    return f"no queue can be written; the route has {queues.described}"
