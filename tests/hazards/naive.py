"""A consumer of a few hundred lines, to show the faults of other clients.

`NaiveMember` blocks and polls, but its offsets are right. A faulty variant is a subclass in a test. It overrides one
method as some client implements it wrongly. Each failed operation raises an OSError.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from pyrocket_consumer import ConsumeResult, ConsumerEvent, Message, MessageQueue
from pyrocket_consumer.consumer.membership.allocation import average
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import EventKind, TopicRoute
from pyrocket_consumer.offsets.local.directories import store_directory
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from pyrocket_consumer.protocol import bodies
from pyrocket_consumer.protocol.codes import PullFlag, RequestCode, ResponseCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import decode_messages
from pyrocket_consumer.protocol.subscription import parse_subscription
from tests.consuming import Events, RecordingListener
from tests.hazards.connection import Refused, Wire
from tests.hazards.members import QUICK, Queues, at_brokers
from tests.offsets.local.driving import encode_offsets


@dataclass(eq=False)
class Window:
    """The unfinished messages of a queue: pulled, but not acknowledged. The commit offset is their lowest offset."""

    queue: MessageQueue
    next_offset: int
    """The offset of the next pull."""
    unfinished: dict[int, Message] = field(default_factory=dict)
    dropped: bool = False
    """Whether the member has given the queue up. Later results change nothing."""
    pull_from: int = 0
    """The broker id that the last response suggested."""
    tasks: SimpleQueue[Task] = field(default_factory=SimpleQueue)
    """The messages that wait for the listener: all of the member, or only of this queue for an orderly member."""
    uncommitted: list[Message] = field(default_factory=list)
    """Consumed, but not yet committed by an orderly listener with `auto_commit=False`."""

    def edge(self) -> int:
        """Return the offset of the oldest unfinished message, or of the next one to pull."""
        return min(self.unfinished, default=self.next_offset)


Task = tuple[Window, Message] | None


class NaiveMember:
    """A member of a group, with a thread for each queue and one lock, which is never held across a call.

    Each method makes one decision. Tests override those that other clients implement wrongly. The state of windows and
    `offsets` change only under `lock`. Every write to broker or file happens under `commit_lock`, one at a time.
    """

    pull_margin_s = 30.0
    """How long to wait for the response of a pull, in addition to the time that the broker may hold it."""

    def __init__(
        self,
        cluster: Any,
        topic: str,
        group: str,
        listener: Callable[[Message], Any] | None = None,
        *,
        selector: str = "*",
        **options: Any,
    ) -> None:
        """Take the options of a PushConsumer, and ignore those that do not matter here."""
        self.options = {"name_server": cluster.name_server, **QUICK, **options}
        self.cluster, self.group = cluster, group
        self.broadcasting = self.options.get("message_model") == "broadcasting"
        self.orderly = bool(self.options.get("orderly"))
        instance = "DEFAULT" if self.broadcasting else f"{os.getpid()}#{time.time_ns()}"
        self.client_id = f"{self.options['client_ip']}@{self.options.get('instance_name') or instance}"
        self.events = self.options.get("on_event") or Events()
        self.seen = (
            listener
            if isinstance(listener, RecordingListener)
            else RecordingListener(*[] if listener is None else [listener])
        )
        self.subscriptions: dict[str, tuple[Callable[[Message], Any], str]] = {topic: (self.seen, selector)}
        if not self.broadcasting:
            self.subscriptions[f"%RETRY%{group}"] = (self.seen, "*")
        self.sub_version = int(time.time() * 1000)

        self.lock, self.commit_lock = threading.RLock(), threading.RLock()
        self.windows: dict[MessageQueue, Window] = {}
        self.offsets: dict[MessageQueue, int] = {}
        """The commit offset of each queue in memory."""
        self.committed: dict[MessageQueue, int] = {}
        """The offsets that the store has acknowledged."""
        self.known: dict[str, set[MessageQueue]] = {}
        """The queues of each topic at the time when the member first saw it."""
        self.paused = False
        self.running = 0
        """The number of running listener calls."""
        self.closing, self.closed = threading.Event(), threading.Event()
        self.tasks: SimpleQueue[Task] = SimpleQueue()
        self._rebalance_due = threading.Event()
        self._rebalancing, self._connecting = threading.Lock(), threading.Lock()
        self._wires: dict[str, Wire] = {}
        self._routes: dict[str, tuple[float, TopicRoute]] = {}
        self._threads: list[threading.Thread] = []

    # --- start and close

    def start(self) -> None:
        """Join the group, and return after the first rebalance."""
        self.rebalance()
        self._run(self._rebalance_loop)
        self._run(self._commit_loop)
        for _ in range(0 if self.orderly else self.options.get("consume_threads", 20)):
            self._run(self._consume_loop, self.tasks)

    def close(self) -> None:
        """Stop pulling, wait for listeners, store the offsets, and leave the group."""
        if self.closed.is_set():
            return
        self.closing.set()
        self.finish_listeners()
        self.drop_all()
        self.persist_all()
        with self._rebalancing:  # no heartbeat is in flight, and none follows
            self.leave()
        self._end()

    def kill(self) -> None:
        """End as by kill -9: store no offset, and notify no broker."""
        self.closing.set()
        self.drop_all()
        self._end()

    def drop_all(self) -> None:
        with self.lock:
            for window in self.windows.values():
                window.dropped = True

    def finish_listeners(self) -> None:
        """Wait until no listener runs, for at most `shutdown_timeout_s`. No new call starts meanwhile."""
        deadline = time.monotonic() + self.options["shutdown_timeout_s"]
        while self.running and time.monotonic() < deadline:
            time.sleep(0.005)

    def leave(self) -> None:
        """Unlock the queues, and unregister at the brokers."""
        if self.orderly and not self.broadcasting:
            for queue in list(self.windows):
                self.unlock(queue)
        fields = {"clientID": self.client_id, "consumerGroup": self.group}
        for wire in self.broker_wires():
            with contextlib.suppress(OSError):
                wire.call(RequestCode.UNREGISTER_CLIENT, fields, timeout_s=self.options["call_timeout_s"])

    def _end(self) -> None:
        self.closed.set()
        self._rebalance_due.set()
        for _ in range(self.options.get("consume_threads", 20)):
            self.tasks.put(None)
        for window in list(self.windows.values()):
            window.tasks.put(None)
        for wire in list(self._wires.values()):
            wire.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True, name=f"naive-{work.__name__}")
        self._threads.append(thread)
        thread.start()

    # --- the interface of Member

    def held(self) -> dict[MessageQueue, int | None]:
        with self.lock:
            return {queue: self.offsets.get(queue) for queue in self.windows if not queue.topic.startswith("%RETRY%")}

    def stored(self) -> dict[MessageQueue, int]:
        if self.broadcasting:
            return self.read_file()
        return at_brokers(self.cluster, self.group, list(self.windows))

    def subscribe(self, topic: str, listener: Callable[[Message], Any], selector: str = "*") -> None:
        self.subscriptions[topic] = (listener, selector)
        self.rebalance()

    def unsubscribe(self, topic: str) -> None:
        """Give the topic's queues up, and store their offsets."""
        self.subscriptions.pop(topic, None)
        self.rebalance()

    def reset(self, topic: str, targets: Queues) -> None:
        self.on_reset(targets)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def emit(self, kind: EventKind, text: str, queue: MessageQueue | None = None, **facts: object) -> None:
        self.events(ConsumerEvent(kind, text, queue, facts))

    # --- connections and routes

    def wire(self, address: str) -> Wire:
        """Return the connection to a server. A new connection to a broker first sends a heartbeat."""
        with self._connecting:
            wire = self._wires.get(address)
            if wire is None or wire.lost:
                wire = Wire(address, self.on_request, self.options["call_timeout_s"])
                if address not in self.options["name_server"].split(";"):
                    try:
                        self.heartbeat(wire)
                    except BaseException:  # a broker counts each connection that has joined
                        wire.close()
                        raise
                self._wires[address] = wire
            return wire

    def broker_wires(self) -> list[Wire]:
        """Return the open connections to brokers."""
        servers = self.options["name_server"].split(";")
        return [wire for address, wire in list(self._wires.items()) if address not in servers and not wire.lost]

    def call(
        self,
        address: str,
        code: int,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> RemotingCommand:
        """Call a server and return its response. Raise Refused unless it is a success."""
        answer = self.wire(address).call(code, fields, body, timeout_s or self.options["call_timeout_s"])
        if answer.code != ResponseCode.SUCCESS:
            raise Refused(answer)
        return answer

    def route(self, topic: str) -> TopicRoute:
        """Return a topic's route, at most `route_refresh_interval_s` old. It is empty if the topic does not exist."""
        fetched_at, route = self._routes.get(topic, (-1e9, TopicRoute(topic)))
        if time.monotonic() - fetched_at < self.options["route_refresh_interval_s"]:
            return route
        server = self.options["name_server"].split(";")[0]
        try:
            answer = self.call(server, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
            route = bodies.decode_route(topic, answer.body)
        except Refused as refusal:
            if refusal.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            route = TopicRoute(topic)
        self._routes[topic] = (time.monotonic(), route)
        return route

    def master(self, queue: MessageQueue, broker_id: int = 0) -> str:
        """Return the address of a queue's broker with this id, or of the master if there is no such broker."""
        for broker in self.route(queue.topic).brokers:
            if broker.broker_name == queue.broker_name:
                address = broker.addresses.get(broker_id) or broker.addresses.get(0)
                if address is not None:
                    return address
        raise ConnectionError(f"no master of {queue.broker_name} is known")

    # --- membership

    def heartbeat(self, wire: Wire) -> None:
        """Send the client id and the subscriptions to a broker. This always precedes the first pull."""
        selectors = [(topic, selector) for topic, (_, selector) in list(self.subscriptions.items())]
        subscriptions = tuple(parse_subscription(*each, self.sub_version) for each in selectors)
        model = "BROADCASTING" if self.broadcasting else "CLUSTERING"
        data = bodies.ConsumerData(self.group, message_model=model, subscriptions=subscriptions)
        body = bodies.encode_heartbeat(bodies.HeartbeatData(self.client_id, (data,)))
        wire.call(RequestCode.HEART_BEAT, body=body, timeout_s=self.options["call_timeout_s"])

    def members(self, topic: str) -> list[str]:
        """Return the client ids of the group, including this member's."""
        for broker in self.route(topic).brokers:
            for _, address in sorted(broker.addresses.items()):
                answer = self.call(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": self.group})
                return sorted(bodies.decode_consumer_list(answer.body))
        return []

    def on_request(self, wire: Wire, request: RemotingCommand) -> None:
        """Execute a request of a broker."""
        if request.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            self._rebalance_due.set()
        elif request.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
            self.on_reset(bodies.decode_offset_table(request.body))
            wire.reply(request)
        else:
            wire.reply(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "not in this member")

    # --- rebalance

    def allocate(self, topic: str) -> list[MessageQueue]:
        """Return the queues that this member should hold: all, or its part of them."""
        queues = self.route(topic).consume_queues()
        if self.broadcasting or not queues:
            return queues
        members = self.members(topic)
        if (
            self.client_id not in members
        ):  # a broker has forgotten this member, so join again, and keep the held queues until then
            for wire in self.broker_wires():
                self.heartbeat(wire)
            return [queue for queue in queues if queue in self.windows]
        return average(self.group, self.client_id, queues, members)

    def rebalance(self) -> None:
        """Give up the queues of other members, and begin new ones."""
        with self._rebalancing:
            if self.closing.is_set():
                return
            for topic in {*self.subscriptions, *(queue.topic for queue in list(self.windows))}:
                try:
                    mine = self.allocate(topic) if topic in self.subscriptions else []
                    self.known.setdefault(topic, set(self.route(topic).consume_queues()))
                except OSError:
                    continue  # the members or the route are unknown, so change nothing
                held = {queue for queue in list(self.windows) if queue.topic == topic}
                for queue in sorted(held.difference(mine)):
                    self.drop(queue)
                new = [queue for queue in mine if queue not in held and not self.closing.is_set()]
                if new or held.difference(mine):
                    self.queues_changed()
                for queue in new:
                    with contextlib.suppress(OSError):  # the next round tries again
                        self.begin(queue)

    def queues_changed(self) -> None:
        """Send a new version of the subscription, because the held queues change. Brokers get it before any pull."""
        self.sub_version = max(self.sub_version + 1, int(time.time() * 1000))
        for wire in self.broker_wires():
            with contextlib.suppress(OSError):
                self.heartbeat(wire)

    def begin(self, queue: MessageQueue) -> None:
        """Begin a new queue."""
        if self.orderly and not self.broadcasting:
            self.acquire(queue)
        self.pull_at(queue, self.start_offset(queue))

    def pull_at(self, queue: MessageQueue, offset: int) -> None:
        """Pull a queue from `offset` on, with a new window."""
        with self.lock:
            if self.closing.is_set():
                return
            window = self.windows[queue] = Window(queue, offset)
            if not self.orderly:
                window.tasks = self.tasks
        self._run(self._pull_loop, window)
        if self.orderly:
            self._run(self._consume_loop, window.tasks)

    def drop(self, queue: MessageQueue) -> None:
        """Give a queue up: ignore later acks, store its offset, then unlock and forget it."""
        with self.lock:
            window = self.windows.pop(queue, None)
            if window is not None:
                window.dropped = True
        try:
            self.persist(queue)
        except OSError:
            return  # memory keeps the offset that the store refused
        if self.orderly and not self.broadcasting:
            self.unlock(queue)
        with self.lock:
            if queue not in self.windows:
                self.offsets.pop(queue, None)
                self.committed.pop(queue, None)

    def acquire(self, queue: MessageQueue) -> None:
        """Lock a queue at its broker."""
        answer = self._send_lock_request(RequestCode.LOCK_BATCH_MQ, queue)
        if queue not in bodies.decode_lock_response(answer.body):
            raise ConnectionError(f"{queue} is locked by another member")

    def unlock(self, queue: MessageQueue) -> None:
        with contextlib.suppress(OSError):
            self._send_lock_request(RequestCode.UNLOCK_BATCH_MQ, queue)

    def _send_lock_request(self, code: int, queue: MessageQueue) -> RemotingCommand:
        request = bodies.LockRequest(self.group, self.client_id, frozenset([queue]))
        return self.call(self.master(queue), code, body=bodies.encode_lock_request(request))

    # --- start offsets

    def start_offset(self, queue: MessageQueue) -> int:
        """Return the offset in memory, else the stored one, else the one of `consume_from`."""
        offset = self.offsets.get(queue)
        if offset is None:
            offset = self.read_stored(queue)
        return self.first_offset(queue) if offset is None else offset

    def read_stored(self, queue: MessageQueue) -> int | None:
        """Return the offset in the file or at the broker, or None without one."""
        if self.broadcasting:
            return self.read_file().get(queue)
        fields = {"consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id}
        try:
            answer = self.call(
                self.master(queue), RequestCode.QUERY_CONSUMER_OFFSET, {**fields, "setZeroIfNotFound": False}
            )
        except Refused as refusal:
            if refusal.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        return int(answer.fields["offset"])

    def first_offset(self, queue: MessageQueue) -> int:
        """Return the start offset of a queue without one. A queue added after the start begins at its first message."""
        at_the_end = self.options["consume_from"] == "last" and not queue.topic.startswith("%RETRY%")
        return self.max_offset(queue) if at_the_end and queue in self.known[queue.topic] else self.min_offset(queue)

    def max_offset(self, queue: MessageQueue) -> int:
        return self._offset(RequestCode.GET_MAX_OFFSET, queue)

    def min_offset(self, queue: MessageQueue) -> int:
        return self._offset(RequestCode.GET_MIN_OFFSET, queue)

    def _offset(self, code: int, queue: MessageQueue) -> int:
        answer = self.call(self.master(queue), code, {"topic": queue.topic, "queueId": queue.queue_id})
        return int(answer.fields["offset"])

    # --- pulling

    def _pull_loop(self, window: Window) -> None:
        while not window.dropped and not self.closing.is_set():
            if self.paused or len(window.unfinished) >= self.options.get("max_cached_messages", 1000):
                self.closing.wait(0.01)
                continue
            try:
                answer = self.pull(window)
            except OSError:
                self.closing.wait(self.options["pull_retry_delay_s"])
                continue
            self.on_pull_response(window, answer)

    def pull(self, window: Window) -> RemotingCommand:
        """Pull messages from the broker, which may hold the request for `pull_hold_s`. It contains no commit."""
        queue, hold_s = window.queue, self.options["pull_hold_s"]
        fields = {
            "consumerGroup": self.group,
            "topic": queue.topic,
            "queueId": queue.queue_id,
            "queueOffset": window.next_offset,
            "maxMsgNums": self.options.get("pull_batch_size", 32),
            "sysFlag": int(PullFlag.SUSPEND),
            "commitOffset": 0,
            "suspendTimeoutMillis": int(hold_s * 1000),
            "subVersion": self.sub_version,
            "expressionType": "TAG",
        }
        address = self.master(queue, window.pull_from)
        return self.wire(address).call(RequestCode.PULL_MESSAGE, fields, timeout_s=hold_s + self.pull_margin_s)

    def on_pull_response(self, window: Window, answer: RemotingCommand) -> None:
        """Process a pull response. Ignore it if the window was dropped meanwhile."""
        if window.dropped:
            return
        if "suggestWhichBrokerId" in answer.fields:
            window.pull_from = int(answer.fields["suggestWhichBrokerId"])
        if answer.code == ResponseCode.SUCCESS:
            self.on_found(window, decode_messages(answer.body, window.queue), int(answer.fields["nextBeginOffset"]))
        elif answer.code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY):
            self.on_nothing_found(window, int(answer.fields["nextBeginOffset"]))
        elif answer.code == ResponseCode.PULL_OFFSET_MOVED:
            self.on_offset_moved(window, answer)
        else:
            self.closing.wait(self.options["pull_retry_delay_s"])

    def on_found(self, window: Window, messages: list[Message], next_offset: int) -> None:
        with self.lock:
            if window.dropped:
                return
            window.unfinished.update((message.queue_offset, message) for message in messages)
            window.next_offset = next_offset
        for message in messages:
            window.tasks.put((window, message))

    def on_nothing_found(self, window: Window, next_offset: int) -> None:
        """Continue after a response without messages. Commit its offset only if no message is unfinished."""
        with self.lock:
            if not window.dropped and next_offset >= window.next_offset:
                window.next_offset = next_offset
                self.offsets[window.queue] = window.edge()

    def on_offset_moved(self, window: Window, answer: RemotingCommand) -> None:
        """Process the broker's report of a wrong pull offset, or of a reset."""
        target = int(answer.fields["nextBeginOffset"])
        if answer.remark == "OFFSET_RESET":
            self.on_reset({window.queue: target})
        elif target < window.next_offset and self.max_offset(window.queue) >= window.next_offset:
            self.closing.wait(self.options["pull_retry_delay_s"])  # a broker that is not ready yet reports 0
        else:
            self.on_correction(window, target)

    def on_correction(self, window: Window, target: int) -> None:
        """Wait for unfinished messages, then continue at `target`: store it, durably if possible, and pull there."""
        while window.unfinished and not window.dropped and not self.closing.is_set():
            self.closing.wait(0.01)
        with self.lock:
            if window.dropped or self.closing.is_set():
                return
            before, window.next_offset = window.next_offset, target
            self.offsets[window.queue] = target
        self.emit(
            EventKind.OFFSET_CORRECTED,
            "the broker corrected the offset",
            window.queue,
            **{"from": before, "to": target},
        )
        with contextlib.suppress(OSError):
            self.persist(window.queue)

    # --- consuming

    def _consume_loop(self, tasks: SimpleQueue[Task]) -> None:
        while (task := tasks.get()) is not None:
            window, message = task
            if window.dropped or self.closing.is_set():
                continue
            with self.lock:
                self.running += 1
            try:
                (self.consume_in_order if self.orderly else self.consume)(window, message)
            finally:
                with self.lock:
                    self.running -= 1

    def consume(self, window: Window, message: Message) -> None:
        """Run the listener on a message once."""
        listener = self.subscriptions.get(message.topic, (self.seen, "*"))[0]
        try:
            listener(message)
        except Exception as error:
            self.failed(window, message, error)
        else:
            self.acked(window, message)

    def consume_in_order(self, window: Window, message: Message) -> None:
        """Run the listener on a message until it succeeds. Later messages wait."""
        while not window.dropped and not self.closing.is_set():
            listener = self.subscriptions.get(message.topic, (self.seen, "*"))[0]
            try:
                result = listener(message)
            except Exception:
                self.closing.wait(self.options["pull_retry_delay_s"])
                continue
            window.uncommitted.append(message)
            if self.options.get("auto_commit", True) or result is ConsumeResult.COMMIT:
                for each in window.uncommitted:
                    self.acked(window, each)
                window.uncommitted.clear()
            return

    def acked(self, window: Window, message: Message) -> None:
        """Note that the listener has returned. The commit offset is then the window's edge, unless it was dropped."""
        with self.lock:
            if window.dropped:
                return
            window.unfinished.pop(message.queue_offset, None)
            self.offsets[window.queue] = window.edge()

    def failed(self, window: Window, message: Message, error: Exception) -> None:
        """Note that the listener has raised. The broker redelivers the message, but not for broadcasting."""
        if window.dropped or self.closing.is_set():
            return
        if not self.broadcasting:
            try:
                self.send_back(message)
            except OSError:
                self.closing.wait(self.options["pull_retry_delay_s"])
                window.tasks.put((window, message))
                return
            self.emit(EventKind.MESSAGE_SENT_BACK, repr(error), window.queue)
        else:
            self.emit(EventKind.MESSAGE_GIVEN_UP, repr(error), window.queue)
        self.acked(window, message)

    def send_back(self, message: Message, delay_level: int = 0) -> None:
        """Let the broker redeliver a message."""
        fields = {
            "group": self.group,
            "originTopic": message.topic,
            "offset": message.commit_log_offset,
            "delayLevel": delay_level,
            "originMsgId": message.message_id,
            "unitMode": False,
            "maxReconsumeTimes": 16,
        }
        self.call(self.master(message.queue), RequestCode.CONSUMER_SEND_MSG_BACK, fields)

    # --- resets

    def on_reset(self, targets: Queues) -> None:
        """Continue at other offsets: drop the windows, store the targets, and begin new windows there."""
        queues = [queue for queue in targets if queue in self.windows]
        with self.lock:
            for queue in queues:
                self.windows[queue].dropped = True
                self.offsets[queue] = targets[queue]
        for queue in queues:
            with contextlib.suppress(OSError):
                self.persist(queue)
            self.emit(EventKind.OFFSET_RESET, "reset", queue, to=targets[queue])
            self.pull_at(queue, targets[queue])

    # --- storing

    def _commit_loop(self) -> None:
        while not self.closing.wait(self.options["commit_interval_s"]):
            self.persist_all()

    def persist_all(self) -> None:
        """Store the offset of every held queue. The next tick retries those that fail."""
        for queue in list(self.windows):
            with contextlib.suppress(OSError):
                self.persist(queue)

    def persist(self, queue: MessageQueue) -> None:
        """Store the offset of a queue, unless the store has acknowledged it already."""
        with self.commit_lock:
            offset = self.offsets.get(queue)
            if offset is None or offset == self.committed.get(queue):
                return
            if self.broadcasting:
                try:
                    self.write_file({**self.read_file(), queue: offset})
                except OSError as error:
                    self.emit(EventKind.STORE_UNWRITABLE, str(error), queue)
                    raise
            else:
                self.commit(queue, offset)
            self.committed[queue] = offset

    def commit(self, queue: MessageQueue, offset: int) -> None:
        """Store an offset at the broker, and return when it has acknowledged that."""
        fields = {"consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id, "commitOffset": offset}
        self.call(self.master(queue), RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    @property
    def file(self) -> Path:
        """The path of this member's offsets.json."""
        return store_directory(self.options["offset_store_dir"], self.client_id, self.group) / "offsets.json"

    def read_file(self) -> dict[MessageQueue, int]:
        """Return the offsets in the file; it is empty if there is no file."""
        try:
            return decode_checkpoint(self.file.read_bytes())[0]
        except FileNotFoundError:
            return {}
        except ProtocolError as error:
            raise OSError(str(error)) from error

    def write_file(self, offsets: Queues) -> None:
        """Replace the file as a whole."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_bytes(encode_offsets(offsets))
        new.replace(self.file)

    # --- timers

    def _rebalance_loop(self) -> None:
        interval_s = self.options.get("heartbeat_interval_s", 30)
        beat_at = time.monotonic() + interval_s
        while not self.closing.is_set():
            self._rebalance_due.wait(self.options["rebalance_interval_s"])
            self._rebalance_due.clear()
            if self.closing.is_set():
                return
            self.rebalance()
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + interval_s
                self.beat()

    def beat(self) -> None:
        """Send a heartbeat to every broker, unless the member has left."""
        with self._rebalancing:
            for wire in self.broker_wires() if not self.closing.is_set() else ():
                with contextlib.suppress(OSError):
                    self.heartbeat(wire)
