"""A name server and brokers of a real RocketMQ release on loopback, with stores that are thrown away."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pyrocket_consumer.model import MASTER_ID, MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.message import Message, decode_messages
from tests.real_brokers.jars import NEWEST, VERSIONS
from tests.real_brokers.process import JavaProcess, new_directory, remove_directory
from tests.real_brokers.remoting import Peer, Refused, as_text

START_TIMEOUT_S = 120
CLUSTER = "DefaultCluster"

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS = range(20_000, 32_000, 10)[_WORKER[0] :: _WORKER[1]]  # below the range of outgoing connections
_GET_ALL_CONSUMER_OFFSETS = 43  # a slave's request, which distinguishes "none" from 0 in every release
_PULL_WITH_SUBSCRIPTION = 4  # neither commit nor suspend
_given_ports: set[int] = set()

_BROKER_SETTINGS: dict[str, object] = {
    "brokerClusterName": CLUSTER,
    "brokerIP1": "127.0.0.1",
    "brokerIP2": "127.0.0.1",
    "enablePropertyFilter": True,
    "mappedFileSizeCommitLog": 16 << 20,
    "mappedFileSizeConsumeQueue": 600_000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 5000,
    "diskMaxUsedSpaceRatio": 99,
    "waitTimeMillsInSendQueue": 10_000,
    "timerFlushIntervalMs": 10_000,  # a flush of the 37 MB of timers each second needs a quarter of a core
    "transactionMetricFlushInterval": 500,  # 5.3 and later spin for this long at the start: 10 s by default
}


MadeOf = tuple[dict[str, object], tuple[str, ...], tuple[str, str] | None, dict[str, str]]
"""The differences between brokers: settings, options of the Java machine, account, and files below ROCKETMQ_HOME."""


class PortTaken(Exception):
    """Another process took a port after the check that it is free."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Where a message was stored."""

    queue: MessageQueue
    queue_offset: int
    message_id: str
    offset_message_id: str


class RealServer:
    """A name server or broker: a process that can be killed and started again with the same address and store."""

    main: str
    options: tuple[str, ...]

    def __init__(self, version: str, directory: Path, port: int, settings: Mapping[str, object]) -> None:
        self.version, self.directory, self.address = version, directory, f"127.0.0.1:{port}"
        self.peer = Peer(self.address)
        self._settings = {**settings, "listenPort": port, "bindAddress": "127.0.0.1"}
        self._process: JavaProcess | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int:
        """The process id. Raises AssertionError when it was never started."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """The output of the server."""
        return (self.directory / "output.log").read_text(errors="replace")

    def launch(self) -> None:
        """Start the process, and do not wait until it responds."""
        assert not self.running, f"{self.address} runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        properties = self.directory / "server.properties"
        if not properties.exists():  # a broker rewrites it after a change of its configuration
            properties.write_text("".join(f"{name}={as_text(value)}\n" for name, value in self._settings.items()))
        self._process = JavaProcess(
            self.version, self.main, ["-c", str(properties)], self.directory, options=self.options
        )

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until the server responds. Raise PortTaken or AssertionError if it ends, or needs too long."""
        assert self._process is not None
        while True:
            try:
                self.check_ready()
                return
            except (OSError, Refused) as error:
                if not self._process.running:
                    if re.search("BindException|Address already in use", self.log):
                        raise PortTaken(self.address) from error
                    ended = f"RocketMQ {self.version} ended with {self._process.exit_code}"
                    raise AssertionError(f"{ended}:\n{self._process.tail()}") from error
                if time.monotonic() > deadline:
                    raise AssertionError(f"{self.address} is not ready: {error}\n{self._process.tail()}") from error
                time.sleep(0.1)  # a starting server emits no event, so poll it

    def check_ready(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the server, also after a kill or stop, and return when it responds."""
        self.launch()
        self.wait_until_ready(time.monotonic() + START_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the server with SIGKILL. Connections close, and data that is not on disk is lost."""
        self.peer.close()
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Stop the server with SIGTERM, which takes 7 to 22 s."""
        self.peer.close()
        if self._process is not None:
            self._process.stop()

    def restart(self) -> None:
        """Stop the server with SIGTERM and start it again."""
        self.stop()
        self.start()


class RealNameServer(RealServer):
    main = "org.apache.rocketmq.namesrv.NamesrvStartup"
    options: tuple[str, ...] = ("-Xms64m", "-Xmx128m")

    def check_ready(self) -> None:
        self.peer.call(RequestCode.GET_BROKER_CLUSTER_INFO, timeout_s=5)


class RealBroker(RealServer):
    """A broker, at `address`. `name` is its broker name; `broker_id` 0 is a master, others are slaves."""

    main = "org.apache.rocketmq.broker.BrokerStartup"

    def __init__(
        self,
        version: str,
        directory: Path,
        port: int,
        name: str,
        broker_id: int,
        name_server: RealNameServer,
        made_of: MadeOf,
    ) -> None:
        self.made_of = made_of
        settings, jvm_options, account, home_files = made_of
        store = directory / "store"
        own = {
            "brokerName": name,
            "brokerId": broker_id,
            "namesrvAddr": name_server.address,
            "haListenPort": port + 1,
            "brokerRole": "ASYNC_MASTER" if broker_id == MASTER_ID else "SLAVE",
            "storePathRootDir": store,
            "storePathCommitLog": store / "commitlog",
        }
        super().__init__(version, directory, port, {**_BROKER_SETTINGS, **own, **settings})
        self.peer.account = account
        self.name, self.broker_id, self._name_server = name, broker_id, name_server
        for path, text in home_files.items():
            (directory / "home" / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / "home" / path).write_text(text)
        self.options: tuple[str, ...] = ("-Xms128m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", *jvm_options)

    def check_ready(self) -> None:
        """A broker is ready when a topic made at it has a route that names it; a slave when it is registered.

        5.x brokers mostly register before they are connected, and again only after 10 s; so they are asked to.
        """
        try:
            if self.broker_id == MASTER_ID:
                self.create_topic("pyrocket-ready", 1)
                if self.name not in _route(self._name_server, "pyrocket-ready"):
                    raise Refused("GET_ROUTEINFO_BY_TOPIC", self._name_server.address, 0, f"no {self.name} yet")
            elif not self._is_registered():
                raise Refused("GET_BROKER_CLUSTER_INFO", self._name_server.address, 0, f"no {self.address} yet")
        except Refused:
            self._ask_to_register()
            raise

    def register(self) -> None:
        """Make the broker register itself and all its topics at the name server, and wait for that."""

        def registered() -> bool:
            self._ask_to_register()
            return self._is_registered()

        wait_until(registered, f"registration of {self.name}")

    def _ask_to_register(self) -> None:
        """Set the broker's permission to its current value, because the broker then registers."""
        self.update_config(brokerPermission=self._settings.get("brokerPermission", 6))

    def _is_registered(self) -> bool:
        answer = self._name_server.peer.call(RequestCode.GET_BROKER_CLUSTER_INFO)
        return f'"{self.address}"'.encode() in answer.body

    def create_topic(
        self,
        name: str,
        queues: int = 4,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = 6,
        order: bool = False,
        attributes: str | None = None,
    ) -> tuple[int, int]:
        """Create or change a topic at this broker, and return its numbers of queues. The route follows soon after."""
        read, write = (queues if each is None else each for each in (read_queues, write_queues))
        fields = {
            "topic": name,
            "defaultTopic": "TBW102",
            "readQueueNums": read,
            "writeQueueNums": write,
            "perm": perm,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": order,
            "attributes": attributes,
        }
        self.peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
        return read, write

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets a group has committed, by queue id; queues without one are absent."""
        text = self.peer.call(_GET_ALL_CONSUMER_OFFSETS).body.decode()
        table = json.loads(re.sub(r"([{,])(\d+):", r'\1"\2":', text))["offsetTable"]
        return {int(queue_id): offset for queue_id, offset in sorted(table.get(f"{topic}@{group}", {}).items())}

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets, by queue id, for a group that exists."""
        for queue_id, offset in offsets.items():
            fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id, "commitOffset": offset}
            self.peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    def create_group(self, group: str, **settings: object) -> None:
        """Create or change a subscription group, for example with `consumeBroadcastEnable=False`."""
        body = json.dumps({"groupName": group, **settings}).encode()
        self.peer.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)

    def members(self, group: str) -> list[str]:
        """Return the client ids of a group's members, sorted."""
        answer = self.peer.call(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}, accept=(0, ResponseCode.SYSTEM_ERROR)
        )
        return sorted(json.loads(answer.body)["consumerIdList"]) if answer.code == 0 else []

    def _has_dispatched(self) -> bool:
        """Return whether every acknowledged message is in its queue, which happens after the acknowledgement."""
        answer = self.peer.call(RequestCode.GET_BROKER_RUNTIME_INFO, accept=(0, ResponseCode.SYSTEM_ERROR))
        if answer.code != 0:
            return "NoSuchElement" in (answer.remark or "")  # the error of 4.9 with an empty store
        return int(json.loads(answer.body)["table"]["dispatchBehindBytes"]) == 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._offset(RequestCode.GET_MAX_OFFSET, topic, queue_id)

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self._offset(RequestCode.GET_MIN_OFFSET, topic, queue_id)

    def _offset(self, code: RequestCode, topic: str, queue_id: int) -> int:
        return int(self.peer.call(code, {"topic": topic, "queueId": queue_id}).fields["offset"])

    def messages(self, topic: str, queue_id: int | None = None) -> list[Message]:
        """Return the messages of a topic, or of one queue, by queue and offset. Does not change committed offsets."""
        wait_until(self._has_dispatched, f"{self.name} puts what it has stored into its queues")
        if queue_id is None:
            ids = range(max(_route(self._name_server, topic).get(self.name, (0, 0))))
            return [message for each in ids for message in self.messages(topic, each)]
        queue, found = MessageQueue(topic, self.name, queue_id), list[Message]()
        offset, end = max(self.min_offset(topic, queue_id), 0), self.max_offset(topic, queue_id)
        while offset < end:
            fields = {
                "consumerGroup": "pyrocket-look",
                "topic": topic,
                "queueId": queue_id,
                "queueOffset": offset,
                "maxMsgNums": 32,
                "sysFlag": _PULL_WITH_SUBSCRIPTION,
                "commitOffset": 0,
                "suspendTimeoutMillis": 0,
                "subscription": "*",
                "subVersion": 0,
                "expressionType": "TAG",
            }
            later = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED)
            answer = self.peer.call(RequestCode.PULL_MESSAGE, fields, accept=(0, *later))
            if answer.code == 0:
                found += [message.detach() for message in decode_messages(answer.body, queue)]
            following = int(answer.fields["nextBeginOffset"])
            if following == offset:
                time.sleep(0.02)  # max counts what is stored; the index follows within milliseconds
            offset = following
        return found

    def send(self, topic: str, body: bytes, properties: Mapping[str, str], queue_id: int, flag: int = 0) -> Sent:
        """Store one message; Refused if several attempts did not."""
        fields = {
            "producerGroup": "pyrocket-tests",
            "topic": topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 4,
            "queueId": queue_id,
            "sysFlag": 0,
            "bornTimestamp": time.time_ns() // 1_000_000,
            "flag": flag,
            "properties": "".join(f"{name}\x01{value}\x02" for name, value in properties.items()),
            "reconsumeTimes": 0,
            "unitMode": False,
            "batch": False,
        }
        for attempt in itertools.count(1):
            try:
                answer = self.peer.call(RequestCode.SEND_MESSAGE, fields, body, accept=(0, 10, 11, 12))
                break
            except Refused as error:
                if error.code not in (ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE) or attempt == 20:
                    raise
                time.sleep(0.1)  # the broker reported that it is busy
        queue = MessageQueue(topic, self.name, int(answer.fields["queueId"]))
        stored = answer.fields["msgId"]
        return Sent(queue, int(answer.fields["queueOffset"]), properties.get("UNIQ_KEY", stored), stored)

    def update_config(self, **settings: object) -> None:
        """Change settings while the broker runs. Set them back: the cluster may be shared by tests."""
        body = "".join(f"{name}={as_text(value)}\n" for name, value in settings.items()).encode()
        self.peer.call(RequestCode.UPDATE_BROKER_CONFIG, body=body)


class RealCluster:
    """A name server and brokers `broker-a`, `broker-b`, …, each with `slaves` slaves (`broker-a-1`, …).

    `settings` are lines of broker.properties, `jvm_options` go to the brokers' Java machines. `account` (access key,
    secret key) is the cluster's own if the settings require one. The cluster writes `home_files`, by path, below the
    brokers' ROCKETMQ_HOME. Starting takes 3 to 8 s on an idle machine, after one download of the jars.
    """

    def __init__(self, version: str = NEWEST, brokers: int = 1, **options: Any) -> None:
        """Take the other options of `become`."""
        if version not in VERSIONS:
            raise ValueError(f"version {version!r} is not one of {', '.join(VERSIONS)}")
        self.version = version
        self._options: dict[str, Any] = {"brokers": brokers, **options}
        self._brokers: dict[str, RealBroker] = {}
        self._round_robin: dict[str, itertools.count[int]] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the name server and all brokers, and return when each is ready."""
        for attempt in range(1, 4):
            self.directory = new_directory(self.version)
            self.name_server_node = RealNameServer(self.version, self.directory / "name-server", _free_ports(), {})
            try:
                self.name_server_node.start()  # first, because a 5.x broker without it retries only after 10 s
                self.become(**self._options)
                return
            except BaseException as error:
                self.close()
                if attempt == 3 or not isinstance(error, PortTaken):
                    raise

    def become(
        self,
        brokers: int = 1,
        *,
        slaves: int = 0,
        settings: Mapping[str, object] | None = None,
        jvm_options: Sequence[str] = (),
        account: tuple[str, str] | None = None,
        home_files: Mapping[str, str] | None = None,
        lock_expiry_s: float = 60.0,
    ) -> None:
        """Change the brokers to those of a cluster with these options, and return when each is ready.

        Brokers with the wanted options keep their data, and start again if they were stopped. The others end.
        """
        lock_life = f"-Drocketmq.broker.rebalance.lockMaxLiveTime={lock_expiry_s * 1000:.0f}"
        made_of = (dict(settings or {}), (*jvm_options, lock_life), account, dict(home_files or {}))
        wanted = [(f"broker-{letter}", each) for letter in "abcdefgh"[:brokers] for each in range(slaves + 1)]
        for label, broker in list(self._brokers.items()):
            if (broker.name, broker.broker_id) not in wanted or broker.made_of != made_of:
                broker.kill()
                remove_directory(broker.directory)
                del self._brokers[label]
        if not self.name_server_node.running:
            self.start_name_server()
        launched, deadline = list[RealBroker](), time.monotonic() + START_TIMEOUT_S
        for name, broker_id in wanted:
            label = name if broker_id == MASTER_ID else f"{name}-{broker_id}"
            if label not in self._brokers:
                self._brokers[label] = RealBroker(
                    self.version, self.directory / label, _free_ports(), name, broker_id, self.name_server_node, made_of
                )
            if not self._brokers[label].running:
                self._brokers[label].launch()
                launched.append(self._brokers[label])
        for broker in launched:
            broker.wait_until_ready(deadline)

    def stop_name_server(self) -> None:
        """Kill the name server, which keeps nothing on disk."""
        self.name_server_node.kill()

    def start_name_server(self, *, register: bool = True) -> None:
        """Start the name server again. With `register`, brokers register now, else within 30 s."""
        self.name_server_node.start()
        if register:
            for broker in self._brokers.values():
                if broker.running:
                    broker.register()

    def close(self) -> None:
        """Kill every process with SIGKILL, and remove their directories."""
        for broker in self._brokers.values():
            broker.kill()
        self.name_server_node.kill()
        self._brokers.clear()
        remove_directory(self.directory)

    @property
    def name_server(self) -> str:
        """The name server's address."""
        return self.name_server_node.address

    @property
    def brokers(self) -> list[RealBroker]:
        """The masters."""
        return [broker for broker in self._brokers.values() if broker.broker_id == MASTER_ID]

    def broker(self, name: str) -> RealBroker:
        """Return the broker `broker-a`, or the slave `broker-a-1`."""
        return self._brokers[name]

    def create_topic(self, name: str, queues: int = 4, *, brokers: Sequence[str] | None = None, **options: Any) -> None:
        """Create or change a topic with `queues` queues on each master (or the named ones). Wait for its route."""
        chosen = self.brokers if brokers is None else [self.broker(each) for each in brokers]
        expected = {broker.name: broker.create_topic(name, queues, **options) for broker in chosen}
        wait_until(lambda: expected.items() <= _route(self.name_server_node, name).items(), f"route of {name}")

    def delete_topic(self, name: str) -> None:
        """Delete a topic on all brokers, including its route."""
        for broker in self.brokers:
            broker.peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name})
        self.name_server_node.peer.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": name, "clusterName": CLUSTER})

    def send(
        self,
        topic: str,
        body: bytes | Callable[[int], bytes] = b"-",
        *,
        count: int = 1,
        tags: str | None = None,
        keys: Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue_id: int | None = None,
        delay_level: int = 0,
        broker_name: str | None = None,
    ) -> list[Sent]:
        """Store `count` messages one after the other, over all queues in turn unless `queue_id` is given.

        `body` may be a function of the message's number. A topic that does not exist is made by the first message.
        """
        own = {"TAGS": tags, "KEYS": " ".join(keys) or None, "DELAY": str(delay_level) if delay_level else None}
        carried = {name: value for name, value in {**(properties or {}), **own}.items() if value is not None}
        route = _route(self.name_server_node, topic)
        targets = [
            (broker, each)
            for broker in ([self.broker(broker_name)] if broker_name else self.brokers)
            for each in ([queue_id] if queue_id is not None else range(route[broker.name][1] if route else 4))
        ]
        round_robin = self._round_robin.setdefault(topic, itertools.count())
        sent = []
        for number in range(count):
            broker, target = targets[next(round_robin) % len(targets)]
            own_body = body(number) if callable(body) else body
            carried["UNIQ_KEY"] = f"{random.getrandbits(128):032X}"
            sent.append(broker.send(topic, own_body or b"-", carried, target))
        return sent

    def messages(self, topic: str) -> list[Message]:
        """Return all messages of a topic, by broker, queue and offset."""
        return [message for broker in self.brokers for message in broker.messages(topic)]

    def wait_until(self, predicate: Callable[[], object], timeout_s: float = 30) -> bool:
        """Poll until `predicate()` is true, and return True. Raise AssertionError after `timeout_s`."""
        wait_until(predicate, "the condition waited for", timeout_s)
        return True

    def committed(self, group: str, topic: str, broker_name: str | None = None) -> dict[int, int]:
        """Return the offsets a group committed at one broker (the first), by queue id, as they are stored."""
        return self.broker(broker_name or "broker-a").committed(group, topic)

    def members(self, group: str, broker_name: str | None = None) -> list[str]:
        """Return the client ids of a group's members, sorted, as one broker (the first) knows them."""
        return self.broker(broker_name or "broker-a").members(group)


def wait_until(ready: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    """Poll until `ready()` is true, for changes without an event. Raise AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


def _route(name_server: RealNameServer, topic: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of queues to read and to write, by broker name; empty if the topic has no route."""
    fields = {"topic": topic, "acceptStandardJsonOnly": True}
    accept = (0, ResponseCode.TOPIC_NOT_EXIST)
    answer = name_server.peer.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields, accept=accept)
    queues = json.loads(answer.body)["queueDatas"] if answer.code == 0 else []
    return {each["brokerName"]: (each["readQueueNums"], each["writeQueueNums"]) for each in queues}


def _free_ports() -> int:
    """Return a free port whose neighbours −2 and +1 are free, too, because a broker uses all three."""
    for base in random.sample(_PORTS, len(_PORTS)):
        if base not in _given_ports and all(_is_free(port) for port in (base - 2, base, base + 1)):
            _given_ports.add(base)
            return base
    raise AssertionError(f"no free ports from {_PORTS.start} to {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
