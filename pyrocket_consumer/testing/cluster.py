"""A RocketMQ cluster inside one process, for tests."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from pyrocket_consumer.config import (
    MAX_TOPIC_CHARACTERS,
    check_bool,
    check_choice,
    check_int,
    check_name,
    check_names,
    check_range,
    check_secret,
    check_topic,
)
from pyrocket_consumer.errors import ConfigError, RequestTimeout
from pyrocket_consumer.protocol.message import Message, PropertyName
from pyrocket_consumer.testing.broker import Broker
from pyrocket_consumer.testing.config import (
    DEFAULT_RELEASE,
    LONGEST_S,
    READ_WRITE,
    BrokerConfig,
    Release,
    Timing,
    TopicConfig,
)
from pyrocket_consumer.testing.embedded_node import EmbeddedBroker, EmbeddedNameServer
from pyrocket_consumer.testing.messages import Feed, Sent, check_body, make_properties
from pyrocket_consumer.testing.name_server import NameServer
from pyrocket_consumer.testing.node import Clock
from pyrocket_consumer.testing.server import Changes, Server, describe
from pyrocket_consumer.text import safe_repr
from pyrocket_consumer.transport.io_thread import IoThread

_T = TypeVar("_T")

HOST = "127.0.0.1"

_MOST_QUEUES = 65535
_CALL_TIMEOUT_S = 30.0


class EmbeddedCluster:
    """Name servers and brokers on loopback ports in this process, for tests. Not a production broker.

    It speaks the remoting protocol with any client as brokers of `version` do, and keeps everything in memory::

        with EmbeddedCluster(brokers=2) as cluster:
            cluster.create_topic("orders", queues=4)
            cluster.send("orders", b"hello", tags="paid")
            consumer = PushConsumer("app", name_server=cluster.name_server)

    `brokers` is a number or a list of names; each broker has `slaves` slaves. `settings` are the settings that real
    brokers read from broker.properties, by their Java names. With `account` (access key, secret key), brokers accept
    signed requests only. Tests shorten the options in seconds; real brokers have the defaults. `delay_scale=0.01`
    turns a retry after 10 s into one after 0.1 s. Each node records `record_limit` requests of each code.

    A node executes the requests of one connection in the order in which they arrive. Real brokers execute them on
    several threads. With `side_by_side_s=0.01`, each request starts up to 0.01 s after its arrival, so that requests
    overtake each other. `seed` decides their order, and the choice of queues.

    Methods may be called from any thread. With `loop`, the caller runs the cluster: `await open()` on that loop, call
    methods from its thread only, and call `shut()` at the end. A loop that simulates time and the network also needs
    `wall_clock` and `first_port`. The nodes then use that port and the following ones, and open no real socket.
    """

    def __init__(
        self,
        brokers: int | Sequence[str] = 1,
        *,
        slaves: int = 0,
        name_servers: int = 1,
        version: str = DEFAULT_RELEASE,
        cluster_name: str = "DefaultCluster",
        port: int = 0,
        auto_create_topics: bool = True,
        auto_create_groups: bool = True,
        server_side_reset: bool | None = None,
        delay_scale: float = 1.0,
        long_poll_tick_s: float = 5.0,
        lock_expiry_s: float = 60.0,
        member_expiry_s: float = 120.0,
        scan_interval_s: float = 10.0,
        relay_timeout_s: float = 10.0,
        status_timeout_s: float = 5.0,
        flush_offsets_s: float = 5.0,
        slave_sync_s: float = 10.0,
        idle_timeout_s: float = 120.0,
        settings: Mapping[str, object] | None = None,
        account: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        side_by_side_s: float = 0.0,
        seed: int = 0,
        record_limit: int = 10_000,
        loop: asyncio.AbstractEventLoop | None = None,
        wall_clock: Callable[[], float] = time.time,
        first_port: int | None = None,
    ) -> None:
        self.version = version
        self.changes = Changes()
        self._release = Release(version)
        self._names = _broker_names(brokers)
        for name, number, least, most in (
            ("slaves", slaves, 0, 26),
            ("name_servers", name_servers, 1, 26),
            ("port", port, 0, 65535),
            ("seed", seed, -(2**63), 2**63),
            ("record_limit", record_limit, 0, 2**31 - 1),
            *([] if first_port is None else [("first_port", first_port, 1, 65535)]),
        ):
            check_int(name, number, least, most)
        for name, period_s, longest_s in (
            ("member_expiry_s", member_expiry_s, LONGEST_S),
            ("flush_offsets_s", flush_offsets_s, LONGEST_S),
            ("idle_timeout_s", idle_timeout_s, LONGEST_S),
            ("side_by_side_s", side_by_side_s, 60),
        ):
            check_range(name, period_s, 0, longest_s)
        check_name(cluster_name, "cluster_name", MAX_TOPIC_CHARACTERS)
        self._slaves = slaves
        self._name_server_count = name_servers
        self._port = port
        self._loop = loop
        self._wall_clock = wall_clock
        self._first_port = first_port
        self._timing = Timing(
            delay_scale,
            long_poll_tick_s,
            lock_expiry_s,
            scan_interval_s,
            relay_timeout_s,
            status_timeout_s,
            slave_sync_s,
        )
        self._cluster_name = cluster_name
        check_bool("auto_create_topics", auto_create_topics)
        check_bool("auto_create_groups", auto_create_groups)
        if server_side_reset is not None:
            check_bool("server_side_reset", server_side_reset)
        if not isinstance(settings, Mapping | None):
            raise ConfigError(f"settings={safe_repr(settings)} is not allowed; give values by their Java names")
        self._settings: dict[str, object] = {
            "autoCreateTopicEnable": auto_create_topics,
            "autoCreateSubscriptionGroup": auto_create_groups,
            "channelExpiredTimeout": int(member_expiry_s * 1000),
            "flushConsumerOffsetInterval": int(flush_offsets_s * 1000),
            "useServerSideResetOffset": (
                self._release.server_side_reset_by_default if server_side_reset is None else server_side_reset
            ),
            **(settings or {}),
        }
        BrokerConfig().change(self._settings)  # raises ConfigError now if one of them is wrong
        if server_side_reset and not self._release.has_server_side_reset:
            raise ConfigError(f"server_side_reset: brokers {version} cannot do that; 5.1.0 and later can")
        self._account = None if account is None else _check_account(account)
        if not isinstance(tls, ssl.SSLContext | None):
            raise ConfigError(
                f"tls={safe_repr(tls)} is not allowed; it must be an ssl.SSLContext with a certificate, or None"
            )
        self._tls = tls
        self._idle_timeout_s = idle_timeout_s
        self._side_by_side_s = side_by_side_s
        self._record_limit = record_limit
        self._seed = seed
        self._failures: list[str] = []
        self._thread: IoThread | None = None
        self._pid = os.getpid()
        self._clock: Clock
        self._feed: Feed
        self._name_servers: list[EmbeddedNameServer] = []
        self._brokers: dict[str, list[EmbeddedBroker]] = {}
        self._servers: list[Server] = []

    def _make_nodes(self) -> None:
        loop = self._loop
        if loop is None:
            self._thread = IoThread("rocketmq-embedded")
            loop = self._thread.loop
        self._clock = Clock(loop, self._wall_clock)
        self._feed = Feed(self._clock, self._release, self._cluster_name)
        for index in range(self._name_server_count):
            core = NameServer(self._release)
            server = self._server(self._port if index == 0 else 0)
            server.node = core
            self._name_servers.append(EmbeddedNameServer(self, server, core))
        for name in self._names:
            self._brokers[name] = self._make_brokers(name, self._slaves)

    def _make_brokers(self, name: str, slaves: int) -> list[EmbeddedBroker]:
        made: list[EmbeddedBroker] = []
        for broker_id in range(slaves + 1):
            config = BrokerConfig(broker_name=name, broker_cluster_name=self._cluster_name, broker_id=broker_id)
            config.change(self._settings)
            server = self._server(0)
            config.listen_port = server.port
            core = Broker(
                config,
                self._timing,
                self._release,
                self._clock,
                server.address,
                seed=self._seed + len(self._servers),
                account=self._account,
            )
            server.node = core
            broker = EmbeddedBroker(self, server, core)
            core.on_topics_changed = partial(self._topics_changed, broker)
            core.on_timer = self.changes.notify
            if made:
                core.master = made[0].core
                made[0].core.store.replicas.append(core.store)
            made.append(broker)
        return made

    def _server(self, port: int) -> Server:
        if self._first_port is not None:
            port = self._first_port + len(self._servers)
        server = Server(
            self._clock,
            self.changes,
            host=HOST,
            port=port,
            simulated=self._first_port is not None,
            tls=self._tls,
            idle_timeout_s=self._idle_timeout_s,
            record_limit=self._record_limit,
            side_by_side_s=self._side_by_side_s,
            seed=self._seed + len(self._servers),
            on_failure=self._failed,
        )
        self._servers.append(server)
        return server

    # --- start and stop

    def start(self) -> None:
        """Start all nodes. Return when they listen and the brokers are registered.

        Raises:
            OSError: another process uses the port.
        """
        if self._name_servers:
            raise RuntimeError("the embedded cluster was started already; make a new one")
        try:
            self._make_nodes()
            if self._thread is not None:
                self._thread.start()
            self.run(self._open_nodes())
        except BaseException:
            self._end()
            raise

    async def open(self) -> None:
        """Start all nodes from the loop given at construction."""
        self._make_nodes()
        await self._open_nodes()

    async def _open_nodes(self) -> None:
        for name_server in self._name_servers:
            await name_server.open(register=False)
        for broker in self.nodes:
            await broker.open()

    def close(self) -> None:
        """Stop all nodes. The cluster cannot start again; a single node can, with its own stop() and start().

        In a process forked from the one that started the cluster, it does nothing, because the cluster does not run
        there.

        Raises:
            RuntimeError: a node failed at a request (a defect of the embedded cluster); the text has the traceback.
        """
        if self._pid != os.getpid():
            return
        if self._servers:
            servers = list(self._servers)
            self.end(servers, self.shut)
            self.run(_close_accepted(servers))
        self._end()
        if self._failures:
            raise RuntimeError("the embedded cluster failed:\n" + "\n".join(self._failures))

    def _end(self) -> None:
        for server in self._servers:
            server.release_port()
        self._servers.clear()
        if self._thread is not None:
            self._thread.stop(_CALL_TIMEOUT_S)

    def shut(self) -> None:
        """Stop all nodes from the loop given at construction."""
        for brokers in self._brokers.values():
            for broker in brokers:
                broker.stop_now()
        for name_server in self._name_servers:
            name_server.stop_now()
        for server in self._servers:
            server.release_port()
        self._servers.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def call(self, action: Callable[[], _T]) -> _T:
        """Run `action` on the cluster's thread and return its result."""

        async def run() -> _T:
            return action()

        return action() if self._runs_here() else self.run(run())

    def end(self, servers: Sequence[Server], close: Callable[[], None]) -> None:
        """Run `close`, which closes `servers`, on the cluster's thread. Finish connections that are being accepted.

        A call on that thread itself cannot wait for them. asyncio then leaves open the sockets it has just accepted.
        """
        if not self._runs_here():
            self.run(_finish_accepting(servers))
        self.call(close)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the cluster's loop and return its result; not from that loop."""
        try:
            if self._runs_here() or self._thread is None:
                raise RuntimeError("this call waits for the loop that runs on this thread; await open() instead")
            if self._pid != os.getpid():
                raise RuntimeError(
                    "the embedded cluster runs in the process that started it, not in this forked one; "
                    "create clients here that connect to its name_server"
                )
            if self._thread.has_ended:
                raise RuntimeError("the embedded cluster was closed; make a new one")
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return self._thread.run(coroutine, _CALL_TIMEOUT_S)
        except RequestTimeout:
            raise TimeoutError(
                f"the embedded cluster's thread was busy for {_CALL_TIMEOUT_S:g} s; does a fault wait there?"
            ) from None

    def _runs_here(self) -> bool:
        """Return whether the caller runs on the cluster's loop, so that calls need no hand-over."""
        if not self._name_servers:
            raise RuntimeError("the embedded cluster is not running; call start(), or use it in a with statement")
        return self._thread is None or self._thread.is_current

    def _failed(self, address: str, error: BaseException) -> None:
        self._failures.append(f"{address}: " + "".join(traceback.format_exception(error)))

    # --- nodes

    @property
    def name_server(self) -> str:
        """The address for clients; several addresses are joined by ";"."""
        return ";".join(name_server.address for name_server in self.name_server_nodes)

    @property
    def name_server_node(self) -> EmbeddedNameServer:
        """The (first) name server, for faults and recorded requests."""
        return self.name_server_nodes[0]

    @property
    def name_server_nodes(self) -> list[EmbeddedNameServer]:
        """All name servers, for faults and recorded requests."""
        self._runs_here()
        return list(self._name_servers)

    def broker(self, name: str) -> EmbeddedBroker:
        """Return the master of a broker name ("broker-a"), or its slave with an id ("broker-a-1").

        Raises:
            ConfigError: the cluster has no such broker.
        """
        labels = {
            broker.name if broker.broker_id == 0 else f"{broker.name}-{broker.broker_id}": broker
            for broker in self.nodes
        }
        check_choice("broker", name, sorted(labels))
        return labels[name]

    @property
    def brokers(self) -> list[EmbeddedBroker]:
        """The masters, by name."""
        return [self.broker(name) for name in self._names]

    @property
    def nodes(self) -> list[EmbeddedBroker]:
        """All brokers, including slaves."""
        self._runs_here()
        return [broker for name in self._names for broker in self._brokers[name]]

    def stop_name_server(self) -> None:
        """Stop every name server."""
        for name_server in self.name_server_nodes:
            name_server.stop()

    def start_name_server(self, *, register: bool = True) -> None:
        """Start every name server again; see `EmbeddedNameServer.start`."""
        for name_server in self.name_server_nodes:
            name_server.start(register=register)

    def switch_master(self, name: str) -> EmbeddedBroker:
        """Make the first slave of a broker name its master, and the master a slave; return the new master.

        Messages that were not replicated, and offsets that were not synced, are lost.
        """
        return self.call(lambda: self._switch_master(name))

    def _switch_master(self, name: str) -> EmbeddedBroker:
        if not self._slaves:
            raise ConfigError(f"{name} has no slave that could be its master; make the cluster with slaves=1")
        old, new = self.broker(name), sorted(self._brokers[name], key=lambda broker: broker.broker_id)[1]
        for broker in (old, new):
            self.unregister(broker)
        new.core.take_over(old.core)
        slaves = [broker.core for broker in self._brokers[name] if broker is not new]
        new.core.store.replicas = [slave.store for slave in slaves]
        for slave in slaves:
            slave.master = new.core
        for broker in (new, old):
            if broker.running:
                self.register(broker)
        self.changes.notify()
        return new

    # --- registration, on the loop's thread

    def _topics_changed(self, broker: EmbeddedBroker) -> None:
        if broker.running:
            self.register(broker)

    def register(self, broker: EmbeddedBroker) -> None:
        """Register a broker and its topics at the running name servers."""
        for name_server in self._name_servers:
            if name_server.running:
                name_server.core.register(broker.core)

    def register_brokers(self) -> None:
        """Register every running broker at the name servers."""
        for broker in self.nodes:
            if broker.running:
                self.register(broker)

    def unregister(self, broker: EmbeddedBroker) -> None:
        """Remove a broker from all routes, as name servers do when its connection ends."""
        for name_server in self._name_servers:
            name_server.core.unregister(broker.name, broker.address)

    # --- topics and messages

    def create_topic(
        self,
        name: str,
        queues: int = 4,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = READ_WRITE,
        brokers: Sequence[str] | None = None,
        order: bool = False,
    ) -> None:
        """Create a topic, or change it, with `queues` queues on each master (or on the named ones).

        Raises:
            ConfigError: brokers do not accept the name, or a number is out of range. `queues` is 1 to 65535,
                `read_queues` and `write_queues` are 0 to 65535, and `perm` is 0 to 7. Or there is no such broker.
        """
        check_topic(name)
        check_int("queues", queues, 1, _MOST_QUEUES)
        for what, number in (("read_queues", read_queues), ("write_queues", write_queues)):
            if number is not None:
                check_int(what, number, 0, _MOST_QUEUES)
        check_int("perm", perm, 0, 7)
        check_bool("order", order)
        named = None if brokers is None else check_names("brokers", brokers)

        def create() -> None:
            for broker in self.brokers if named is None else [self.broker(each) for each in named]:
                config = TopicConfig(
                    name,
                    queues if read_queues is None else read_queues,
                    queues if write_queues is None else write_queues,
                    perm,
                    order=order,
                )
                broker.core.topics.put(config)
                for slave in self._brokers[broker.name]:
                    slave.core.sync_with_master()
            self.changes.notify()

        self.call(create)

    def delete_topic(self, name: str) -> None:
        """Delete a topic on all nodes, including its route."""
        check_topic(name)

        def delete() -> None:
            for broker in self.nodes:
                broker.core.admin.drop_topic(name)
            for name_server in self._name_servers:
                name_server.core.forget_topic(name)
            self.changes.notify()

        self.call(delete)

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
        stored_at_ms: int | None = None,
    ) -> list[Sent]:
        """Store `count` messages as if a producer had sent them, and wake the pulls that wait for them.

        `body` may be a function of the message's number. Without `queue_id`, the cluster stores messages in the topic's
        writable queues one after the other, broker by broker. It creates a missing topic with 4 queues, if topics are
        created on demand. `stored_at_ms` sets the store time, which must not be older than that of earlier messages.

        Raises:
            ConfigError: an argument is not allowed, the topic does not exist and may not be created, or there is no
                such broker.
        """
        check_topic(topic)
        if not callable(body):
            body = check_body(body)
        check_int("count", count, 0, 2**31 - 1)
        if broker_name is not None:
            check_names("broker_name", [broker_name])
        for what, number in (("queue_id", queue_id), ("stored_at_ms", stored_at_ms)):
            if number is not None:
                check_int(what, number, 0, 2**31 - 1 if what == "queue_id" else 2**63 - 1)
        check_int("delay_level", delay_level, 0, 2**31 - 1)
        wanted = make_properties(tags, keys, properties)
        if delay_level:
            wanted[PropertyName.DELAY] = str(delay_level)

        def put() -> list[Sent]:
            brokers = self.brokers if broker_name is None else [self.broker(broker_name)]
            sent = self._feed.send(brokers, topic, body, count, wanted, queue_id, stored_at_ms)
            self.changes.notify()
            return sent

        return self.call(put)

    def messages(self, topic: str) -> list[Message]:
        """Return the messages of a topic on all masters, by broker, queue and offset."""
        return [message for broker in self.brokers for message in broker.messages(topic)]

    # --- groups

    def committed(self, group: str, topic: str, broker_name: str | None = None) -> dict[int, int]:
        """Return the offsets that a group committed at one broker (the first), by queue id, as they are stored."""
        return self.broker(broker_name or self._names[0]).committed(group, topic)

    def members(self, group: str, broker_name: str | None = None) -> list[str]:
        """Return the client ids of a group's members, sorted, as one broker (the first) knows them."""
        return self.broker(broker_name or self._names[0]).members(group)

    # --- waiting

    def wait_until(self, predicate: Callable[[], object], timeout_s: float = 30) -> bool:
        """Wait until `predicate()` is true, and return True.

        It is called after each action of a node, at least every 50 ms, and once more at the end. An exception that it
        raises ends the wait.

        Raises:
            TimeoutError: it was not true within `timeout_s` seconds; the text quotes it.
        """
        if not self.changes.wait_until(predicate, timeout_s):
            raise TimeoutError(f"did not come true within {timeout_s:g} s: {describe(predicate)}")
        return True


def _check_account(account: object) -> tuple[str, str]:
    """Return an access key and its secret key. Errors never contain them."""
    if not isinstance(account, tuple) or len(account) != 2:
        raise ConfigError("account must be a pair of texts, (access key, secret key)")
    return check_secret("account's access key", account[0]), check_secret("account's secret key", account[1])


def _broker_names(brokers: object) -> list[str]:
    if isinstance(brokers, int) and not isinstance(brokers, bool):
        if not 1 <= brokers <= 26:
            raise ConfigError(f"brokers={brokers}; give 1 to 26, or their names")
        return [f"broker-{chr(ord('a') + index)}" for index in range(brokers)]
    names = check_names("brokers", brokers)
    if isinstance(brokers, str) or not names or len(set(names)) != len(names):
        raise ConfigError(f"brokers={brokers!r}; give a number, or different names such as ['broker-a', 'broker-b']")
    return names


async def _finish_accepting(servers: Sequence[Server]) -> None:
    for server in servers:
        server.stop_accepting()
    for _ in range(5):
        await asyncio.sleep(0)


async def _close_accepted(servers: Sequence[Server]) -> None:
    """Let connections end in the loop's next iterations, including those that were being accepted."""
    for _ in range(100):
        for _ in range(5):
            await asyncio.sleep(0)
        resting = [server.abort_rest() for server in servers]
        if not any(resting):
            return
