"""Send requests to brokers: select the queue and the connection, and retry after failures."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pyrocket_consumer.cluster import Cluster, ClusterEvents
from pyrocket_consumer.cluster.broker import DEGRADED_CODES, STORED_CODES
from pyrocket_consumer.cluster.client import read_error
from pyrocket_consumer.cluster.membership import BrokerLink
from pyrocket_consumer.config import ProducerConfig
from pyrocket_consumer.errors import (
    ClientClosed,
    ConnectError,
    ProtocolError,
    RequestTimeout,
    RocketError,
    RouteNotFound,
)
from pyrocket_consumer.model import MessageQueue, TopicRoute
from pyrocket_consumer.producer.attempts import (
    FailedBrokers,
    NoWritableQueue,
    PublishQueues,
    SendFailure,
    classify_failure,
    is_broker_in_trouble,
    is_route_stale,
    is_topic_missing,
)
from pyrocket_consumer.producer.send_request import Flush, Lane, LaneKey, SendRequest, SendTemplate, UnansweredRequest
from pyrocket_consumer.protocol.codes import version_name, version_ordinal
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.backoff import Backoff
from pyrocket_consumer.transport.connection import Connection

log = logger("producer")

_AUTO_CREATE_TOPIC = "TBW102"
_AUTO_CREATE_QUEUES = 4

_FIRST_TIMER_VERSION = version_ordinal(5, 0, 0)
_FIRST_RETRY_PAUSE_S = 0.1
_LONGEST_RETRY_PAUSE_S = 0.5
_SILENT = "it received nothing while messages waited for responses"
_ROUTE_WAIT_S = 0.5  # for a newer route, if one is known: name servers may be unreachable


class _AttemptFailed(Exception):
    """The broker of one queue is not available now. It may be soon, and another broker may be now."""

    def __init__(self, error: RocketError) -> None:
        super().__init__(error)
        self.error = error


class SendDispatcher(ClusterEvents):
    """Sends the requests that InFlightQueue passes to the I/O thread. Confined to that thread.

    `_send_or_prepare` sends at once, without a task, if a route and a connection are available. Otherwise `_prepare`
    waits for them in a task. Both call `_send_on`. Its response goes to `_handle_response`, which finishes the message
    or prepares it again.

    The dispatcher retries a message that is certainly not stored until its deadline. It retries a message that may be
    stored up to `send_attempts` times. After a failure that suggests a stale route, it fetches the route first.

    Messages for one queue, or with one sharding key, form a lane. One message of a lane is in flight at a time. Brokers
    handle the requests of a connection concurrently, so two requests could swap their order. A broker may still
    store a request after its timeout. So the lane waits for the response, or for the end of the connection.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        group: str,
        on_finished: Callable[[SendRequest], None],
        rng: random.Random | None = None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._group = group
        self._on_finished = on_finished
        self._random = rng or random.Random()
        self._retry_pauses = Backoff(_FIRST_RETRY_PAUSE_S, _LONGEST_RETRY_PAUSE_S, jitter=self._random.random)
        self._queues: dict[str, PublishQueues] = {}
        self._brokers_seen: dict[str, set[str]] = {}
        self._templates: dict[tuple[MessageQueue, bool], SendTemplate] = {}
        self._stored_codes = STORED_CODES if config.accept_degraded else STORED_CODES - DEGRADED_CODES
        self._failed_brokers = FailedBrokers()
        self._links: dict[str, BrokerLink] = {}
        self._unfinished: set[SendRequest] = set()
        self._flushes: list[Flush] = []
        self._lanes: dict[LaneKey, Lane] = {}
        self._suspected_connections: set[Connection] = set()
        cluster.events = self

    def uses_broker(self, broker_name: str) -> bool:
        """Return whether the broker may still respond to requests in flight."""
        connection = self._cluster.link(broker_name, only_this=True).connection
        return connection is not None and connection.waiting > 0

    def _link_to(self, broker_name: str) -> BrokerLink:
        """Return the way to the master with this name."""
        if (link := self._links.get(broker_name)) is None:
            link = self._links[broker_name] = self._cluster.link(broker_name, only_this=True)
        return link

    def dispatch(self, request: SendRequest) -> None:
        """Start to send a message. Its sink gets the result."""
        self._unfinished.add(request)
        if (pin := request.queue or request.sharding_key) is not None:
            request.lane_key = key = (request.topic, pin)
            if (lane := self._lanes.get(key)) is not None:
                lane.waiting.append(request)
                self._schedule_check(lane, lane.expiry(request))
                return
            self._lanes[key] = Lane(key, self._cluster.loop.time(), current=request)
        self._send_or_prepare(request)

    def _send_or_prepare(self, request: SendRequest) -> None:
        try:
            queues = self._known_queues(request.topic)
            queue = self._choose(request, queues) if queues is not None else None
            if queue is not None and not request.is_oneway and not request.needs_timer:
                connection = self._link_to(queue.broker_name).connection
                if connection is not None and self._cluster.loop.time() < request.deadline:
                    self._send_on(request, queue, connection)
                    return
            self._prepare_soon(request, queue)
        except ProtocolError as error:  # it is too large for a frame
            self._finish(request, error)
        except Exception as error:
            self._fail_unexpectedly(request, error)

    def _prepare_soon(self, request: SendRequest, queue: MessageQueue | None = None) -> None:
        self._cluster.spawn(self._prepare(request, queue), "send")

    async def _prepare(self, request: SendRequest, queue: MessageQueue | None) -> None:
        """Wait for the queue and the connection that a message needs, then send it. `queue` may be selected already."""
        try:
            async with asyncio.timeout_at(request.deadline):
                while request in self._unfinished:
                    if queue is None:
                        queue = await self._next_queue(request)
                        continue  # check again, because the message may have failed meanwhile
                    try:
                        connection = await self._connection_for(request, queue)
                        if request.is_oneway:
                            await self._send_oneway_on(request, queue, connection)
                    except _AttemptFailed as failed:
                        if not self._will_retry(request, queue, failed.error):
                            return
                        queue = None
                        continue
                    if request in self._unfinished and not request.is_oneway:
                        self._send_on(request, queue, connection)
                    return
        except TimeoutError as error:
            why = "" if request.attempts else ": neither a route nor a connection was available"
            request.note(f"gave up after {request.timeout_s:g} s{why}")
            self._fail(request, request.last_error or error)
        except RocketError as error:
            if isinstance(error, RouteNotFound) and not request.attempts:
                self._finish(request, RouteNotFound(request.shown_topic, error.name_servers))
            else:
                request.note(str(error))
                self._fail(request, error)
        except Exception as error:
            self._fail_unexpectedly(request, error)

    async def _next_queue(self, request: SendRequest) -> MessageQueue:
        """Return the queue for the next attempt, after a pause if every possible broker has just failed.

        Raises:
            RocketError: no queue is suitable, and none is expected.
        """
        while True:
            try:
                queues = await self._queues_of(request)
            except RouteNotFound:
                raise
            except RocketError as error:  # name servers are unreachable
                request.note(str(error), error)
            else:
                queue = self._choose(request, queues)
                if queue is not None and queue.broker_name not in request.failed_brokers:
                    return queue
                if queue is None and request.wants_route_after is None:
                    request.wants_route_after = self._cluster.loop.time()
                    continue
                if queue is None:
                    why = NoWritableQueue(_why_no_queue(request, queues))
                    if not self._may_appear(request, queues):
                        raise why
                    request.note(str(why), why)
                    request.wants_route_after = self._cluster.loop.time()
            request.pauses += 1
            await asyncio.sleep(self._retry_pauses.pause_s(request.pauses))
            request.failed_brokers = frozenset()

    async def _connection_for(self, request: SendRequest, queue: MessageQueue) -> Connection:
        """Return an open connection to the queue's broker.

        After an attempt with unknown result, a lane continues only on a connection with a successful heartbeat. If the
        broker had paused, it has handled the earlier requests by then.

        Raises:
            _AttemptFailed: no connection is available now.
            RocketError: the broker is not suitable.
        """
        link = self._link_to(queue.broker_name)
        if (address := link.address) is None:
            raise _AttemptFailed(ConnectError(queue.broker_name, "it has no master now"))
        lane = self._lanes[request.lane_key] if request.lane_key is not None else None
        needs_heartbeat = lane is not None and (request.possible_stores > 0 or lane.is_unsure)
        timeout_s = self._attempt_timeout_s(request)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await (link.open() if needs_heartbeat else self._cluster.connection(address))
                if request.needs_timer:
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
        """Raise an error if the broker is too old to deliver at a given time. It would deliver the message at once."""
        if self._cluster.membership.versions.get(address) is None:
            try:
                await self._cluster.membership.heartbeat_broker(address)
            except RocketError as error:
                raise _AttemptFailed(ConnectError(address, f"no heartbeat: {error}")) from error
        version = self._cluster.membership.versions.get(address) or 0
        if version < _FIRST_TIMER_VERSION:
            raise RocketError(
                f"{queue.broker_name} ({address}) is {version_name(version)}, and brokers before 5.0 ignore "
                "deliver_at and deliver at once; use delay_level"
            )

    # --- queues

    def _known_queues(self, topic: str) -> PublishQueues | None:
        """Return the queues of the known route, or None if no route is known."""
        route = self._cluster.routes.known(topic)
        if route is None:
            return None
        queues = self._queues.get(topic)
        if queues is None or (queues.route is not route and queues.route != route):
            queues = self._queues[topic] = PublishQueues(route, self._random)
            self._brokers_seen.setdefault(topic, set()).update(data.broker_name for data in route.queues)
        queues.route = route  # so that the next call compares by identity
        return queues

    async def _queues_of(self, request: SendRequest) -> PublishQueues:
        """Return the queues of the topic. If the message wants a newer route, wait a short time for it.

        Raises:
            RouteNotFound: the topic does not exist.
            RocketError: its route is not known, and not available now.
        """
        topic, after = request.topic, request.wants_route_after
        try:
            if self._cluster.routes.known(topic) is None or after is None:
                await self._cluster.routes.get(topic)
            else:
                async with asyncio.timeout(_ROUTE_WAIT_S):
                    await self._cluster.routes.get(topic, after=after)
        except RouteNotFound as error:
            gone = self._cluster.routes.known(topic) is None or is_topic_missing(request.last_error)
            if gone and self._config.auto_create_topic:
                return await self._auto_created_queues(topic, after)
            if gone:
                raise
            request.note(str(error), error)  # its brokers are unreachable
        except (TimeoutError, RocketError):
            if self._cluster.routes.known(topic) is None:
                raise
        queues = self._known_queues(topic)
        assert queues is not None
        return queues

    async def _auto_created_queues(self, topic: str, after: float | None) -> PublishQueues:
        """Return the queues that brokers will create with the first message for `topic`.

        Raises:
            RouteNotFound: no broker creates topics on demand.
        Source: MQClientInstance.updateTopicRouteInfoFromNameServer with the default topic.
        """
        try:
            template = await self._cluster.routes.get(_AUTO_CREATE_TOPIC)
            if after is not None:
                with contextlib.suppress(TimeoutError, RocketError):  # its brokers or the name servers are unreachable
                    async with asyncio.timeout(_ROUTE_WAIT_S):
                        template = await self._cluster.routes.get(_AUTO_CREATE_TOPIC, after=after)
        except RouteNotFound as error:
            raise RouteNotFound(topic, error.name_servers) from error
        queues = tuple(
            replace(data, write_queues=min(data.write_queues, _AUTO_CREATE_QUEUES)) for data in template.queues
        )
        return PublishQueues(TopicRoute(topic, queues, template.brokers), self._random)

    def _choose(self, request: SendRequest, queues: PublishQueues) -> MessageQueue | None:
        """Return the queue for the next attempt, or None if no queue is suitable."""
        if request.queue is not None:
            return request.queue if request.queue in queues else None
        if request.sharding_key is not None:
            return queues.queue_for_key(request.sharding_key)
        avoid = self._failed_brokers.avoided(self._cluster.loop.time())
        if not avoid and not request.failed_brokers:
            return queues.next_queue()
        # A broker that failed for others is better than one that has just failed for this message.
        return (
            queues.next_queue(avoid | request.failed_brokers)
            or queues.next_queue(request.failed_brokers)
            or queues.next_queue()
        )

    def _may_appear(self, request: SendRequest, queues: PublishQueues) -> bool:
        """Return whether a queue for the message may appear soon: its broker is unreachable, or has no master yet."""
        if (queue := request.queue) is None:
            return queues.any_waits_for_master
        for data in queues.route.queues:
            if data.broker_name == queue.broker_name:
                return queue.queue_id < data.write_queues and queues.waits_for_master(data)
        return queue.broker_name in self._brokers_seen.get(request.topic, ())

    # --- attempts

    def _attempt_timeout_s(self, request: SendRequest) -> float:
        """Return the timeout of an attempt: the remaining time is divided between the remaining attempts."""
        remaining = max(request.deadline - self._cluster.loop.time(), 0.001)
        left, call_timeout_s = self._config.send_attempts - request.possible_stores, self._config.call_timeout_s
        if left < 2:
            return remaining
        queues = self._queues.get(request.topic)
        if request.lane_key is None and queues is not None and queues.broker_count > 1:
            return min(remaining / 2, call_timeout_s)  # leave time for another broker
        return min(remaining, max(remaining / left, call_timeout_s))

    def _send_on(self, request: SendRequest, queue: MessageQueue, connection: Connection) -> None:
        received_before, timeout_s = connection.received_bytes, self._attempt_timeout_s(request)
        encode = partial(request.frame, self._template(request, queue), connection)
        lane = self._lanes[request.lane_key] if request.lane_key is not None else None
        on_response = partial(self._on_response, lane, request, queue, connection, received_before)
        if lane is None:
            connection.send(encode, on_response, timeout_s, "SEND_MESSAGE")
            return
        now = self._cluster.loop.time()
        longest_s = max(request.deadline - now, 0) + self._config.call_timeout_s  # the lane waits no longer
        connection.send(encode, on_response, longest_s, "SEND_MESSAGE")
        lane.unanswered = UnansweredRequest(connection, received_before, suspect_at=now + timeout_s)
        self._schedule_check(lane, lane.unanswered.suspect_at)

    def _on_response(
        self,
        lane: Lane | None,
        request: SendRequest,
        queue: MessageQueue,
        connection: Connection,
        received_before: int,
        response: RemotingCommand | Exception,
    ) -> None:
        if lane is not None:
            lane.unanswered = None
            if isinstance(response, RequestTimeout):
                # The broker may still store it. The end of the connection ends the request, so none overtakes it.
                connection.close("a message that must not be overtaken had no response")
        if request in self._unfinished:
            self._handle_response(request, queue, connection, received_before, response)
        elif lane is not None:  # it waited for the response of a failed message
            if isinstance(response, RemotingCommand):
                lane.moved_at = self._cluster.loop.time()
            else:
                lane.is_unsure = True
            self._start_next(lane)

    def _template(self, request: SendRequest, queue: MessageQueue) -> SendTemplate:
        template = self._templates.get((queue, request.is_batch))
        if template is None:
            template = SendTemplate(self._group, request.topic, queue.queue_id, queue.broker_name, request.is_batch)
            self._templates[queue, request.is_batch] = template
        return template

    async def _send_oneway_on(self, request: SendRequest, queue: MessageQueue, connection: Connection) -> None:
        await connection.drain()
        if connection.closed:
            raise _AttemptFailed(ConnectError(connection.address, "the connection ended"))
        connection.oneway(request.to_command(self._template(request, queue)))
        self._finish(request, None)

    def _handle_response(
        self,
        request: SendRequest,
        queue: MessageQueue,
        connection: Connection,
        received_before: int,
        response: RemotingCommand | Exception,
    ) -> None:
        try:
            if isinstance(response, RemotingCommand):
                if response.code in self._stored_codes:
                    self._failed_brokers.forget(queue.broker_name)
                    if request.lane_key is not None:
                        lane = self._lanes[request.lane_key]
                        lane.moved_at, lane.is_unsure = self._cluster.loop.time(), False
                    request.possible_stores += 1
                    self._finish(request, request.results(queue, response))
                    return
                response = read_error(response, connection.address)
            if isinstance(response, RequestTimeout) and request.lane_key is None:
                self._close_if_silent(connection, received_before)
            if not isinstance(response, RocketError):
                raise response
            if self._will_retry(request, queue, response):
                self._prepare_soon(request)
        except RocketError as error:
            request.note(f"{queue}: {error}")
            self._fail(request, error)
        except Exception as error:
            self._fail_unexpectedly(request, error)

    def _will_retry(self, request: SendRequest, queue: MessageQueue, error: RocketError) -> bool:
        """Record a failed attempt. Return whether another follows; otherwise the message fails."""
        now, name, failure = self._cluster.loop.time(), queue.broker_name, classify_failure(error)
        request.note(f"{queue}: {error}", error)
        request.failed_brokers |= {name}
        if failure is SendFailure.UNKNOWN:
            request.possible_stores += 1
        if is_broker_in_trouble(error):
            self._failed_brokers.add_failure(name, now)
        if is_route_stale(error):
            request.wants_route_after = now
        if (
            failure is SendFailure.PERMANENT
            or (failure is SendFailure.UNKNOWN and request.possible_stores >= self._config.send_attempts)
            or (failure is SendFailure.RETRY_ELSEWHERE and not self._has_another(request))
            or now >= request.deadline
        ):
            if request.lane_key is not None and failure in (SendFailure.PERMANENT, SendFailure.RETRY_ELSEWHERE):
                self._lanes[request.lane_key].moved_at = now
            self._fail(request, error)
            return False
        log.debug("topic=%s an attempt failed, another follows reason=%s", request.topic, error)
        return True

    def _has_another(self, request: SendRequest) -> bool:
        """Return whether another broker, which has not failed for the message, may store it."""
        queues = self._known_queues(request.topic)
        return request.lane_key is None and queues is not None and queues.next_queue(request.failed_brokers) is not None

    def _close_if_silent(self, connection: Connection, received_before: int) -> None:
        """Close a connection that received nothing for the timeout of a message, if it stays silent as long again.

        Only a new connection shows whether the silent peer still runs.
        """

        def close_if_still_silent() -> None:
            self._suspected_connections.discard(connection)
            if connection.received_bytes == received_before:
                connection.close(_SILENT)

        if connection not in self._suspected_connections:
            self._suspected_connections.add(connection)
            self._cluster.loop.call_later(self._config.call_timeout_s, close_if_still_silent)

    # --- lanes

    def _start_next(self, lane: Lane) -> None:
        request = lane.start_next(self._unfinished)
        if request is not None:
            if request.deadline <= self._cluster.loop.time():
                self._expire(request)
            else:
                self._send_or_prepare(request)
            return
        if lane.timer is not None:
            lane.timer.cancel()
        del self._lanes[lane.key]

    def _schedule_check(self, lane: Lane, when: float) -> None:
        """Call `_check_lane` at `when`, or earlier."""
        if lane.timer is None or lane.timer.when() > when:
            if lane.timer is not None:
                lane.timer.cancel()
            lane.timer = self._cluster.loop.call_at(when, self._check_lane, lane)

    def _check_lane(self, lane: Lane) -> None:
        """Fail the expired messages of a lane, and close a silent connection."""
        lane.timer = None
        now, unanswered, current = self._cluster.loop.time(), lane.unanswered, lane.current
        for request in lane.pop_expired(now):
            self._expire(request)
        times = [lane.expiry(request) for request in lane.waiting]
        if unanswered is not None and current is not None and current in self._unfinished:
            if now >= current.deadline:
                error = RequestTimeout("SEND_MESSAGE", unanswered.connection.address, current.timeout_s)
                current.note(str(error), error)
                self._fail(current, error)
            else:
                if now >= unanswered.suspect_at:
                    if unanswered.connection.received_bytes == unanswered.received_before:
                        unanswered.connection.close(_SILENT)
                    unanswered.received_before = unanswered.connection.received_bytes
                    unanswered.suspect_at = now + self._attempt_timeout_s(current)
                times += (unanswered.suspect_at, current.deadline)
        if times:
            self._schedule_check(lane, min(times))

    def _expire(self, request: SendRequest) -> None:
        request.note(f"waited {request.timeout_s:g} s for messages before it in the same queue")
        self._fail(request, None)

    # --- ends

    def _fail(self, request: SendRequest, cause: BaseException | None) -> None:
        self._finish(request, request.error(cause))

    def _fail_unexpectedly(self, request: SendRequest, error: Exception) -> None:
        log.error("topic=%s a send failed unexpectedly", request.topic, exc_info=error)
        self._finish(request, error)

    def _finish(self, request: SendRequest, outcome: object) -> None:
        """Pass the result, or an exception, to the sink of the request."""
        if request not in self._unfinished:
            return
        self._unfinished.discard(request)
        if (key := request.lane_key) is not None:
            lane = self._lanes[key]
            if lane.current is request and lane.unanswered is None:
                self._cluster.loop.call_soon(self._start_next, lane)
        self._on_finished(request)
        error = outcome if isinstance(outcome, BaseException) else None
        try:
            if error is not None:
                request.sink.set_exception(error)
            else:
                request.sink.set_result(outcome)
        except Exception:  # the sink of one message; lanes, others and a close continue
            log.exception("topic=%s the result of a message cannot be passed to its sink", request.topic)
        if self._flushes:
            for flush in self._flushes:
                flush.count(request, error)
            self._flushes = [flush for flush in self._flushes if flush.pending]

    def begin_flush(self) -> Flush:
        """Count the results of all messages in flight."""
        flush = Flush(self._unfinished)
        if flush.pending:
            self._flushes.append(flush)
        return flush

    def abandon(self) -> int:
        """Fail every message in flight, and return their number."""
        abandoned = list(self._unfinished)
        for request in abandoned:
            request.note("the producer was closed before a response arrived; the message may be stored or not")
            self._fail(request, ClientClosed("the producer was closed"))
        return len(abandoned)


def _why_no_queue(request: SendRequest, queues: PublishQueues) -> str:
    if request.queue is not None:
        return (
            f"{request.queue} cannot be written: it is not in the route of the topic, or has no write permission or "
            f"no master; the route has {queues.description}"
        )
    return f"no queue can be written; the route has {queues.description}"
