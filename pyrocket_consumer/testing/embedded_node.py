"""The public interface of an embedded name server or broker: faults, recorded requests, start and stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pyrocket_consumer.config import check_group, check_int, check_topic
from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.bodies import decode_subscription_group
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import Message, decode_messages
from pyrocket_consumer.testing.broker import Broker
from pyrocket_consumer.testing.faults import Fault
from pyrocket_consumer.testing.name_server import NameServer
from pyrocket_consumer.testing.server import Recorded, Server

if TYPE_CHECKING:
    from pyrocket_consumer.testing.cluster import EmbeddedCluster


class EmbeddedNode:
    """One server process of the cluster. Safe to use from any thread."""

    def __init__(self, cluster: EmbeddedCluster, server: Server) -> None:
        self.cluster = cluster
        self._server = server

    @property
    def address(self) -> str:
        """The "host:port" of the node; a restart does not change it."""
        return self._server.address

    @property
    def running(self) -> bool:
        """Whether the node accepts connections."""
        return self._server.is_open

    # --- faults

    def on(
        self,
        code: int | None,
        fault: Fault,
        times: int | None = 1,
        when: Callable[[RemotingCommand], bool] | None = None,
    ) -> None:
        """Do `fault` instead of handling the next `times` requests of `code`; always, if `times` is None.

        With code None every request counts: `on(None, delay(0.5), times=None)` makes a slow node, `on(None, drop,
        times=None)` a silent one. With `when`, only requests for which it is true count. Faults apply in the order in
        which they were given.

        Raises:
            ConfigError: an argument is not allowed, `times=0` for example.
        """
        self._server.faults.add(code, fault, times, when)

    def clear_faults(self, code: int | None = None) -> None:
        """Remove the faults of one code, or all."""
        self._server.faults.clear(code)

    # --- recorded requests

    def requests(self, code: int | None = None) -> list[Recorded]:
        """Return the received requests, of one code or all, oldest first."""
        return self._server.log.requests(code)

    def wait_for(
        self,
        code: int,
        count: int = 1,
        timeout_s: float = 30,
        when: Callable[[RemotingCommand], bool] | None = None,
    ) -> list[Recorded]:
        """Return the requests of `code` (for which `when` holds) as soon as there are `count` of them.

        A request counts once it is handled, so that its effect is visible. Earlier requests count, too;
        `forget_requests()` removes them.

        Raises:
            TimeoutError: the node received fewer within `timeout_s` seconds.
        """
        return self._server.log.wait_for(code, count, timeout_s, when)

    def forget_requests(self) -> None:
        """Remove the requests recorded so far."""
        self._server.log.forget()

    # --- connections

    @property
    def connections(self) -> list[str]:
        """The addresses of the connected clients."""
        return self.cluster.call(lambda: sorted(each.address for each in self._server.connections))

    def close_connections(self, abrupt: bool = True) -> None:
        """End every connection, while the node keeps running. With `abrupt`, reset them."""

        def close() -> None:
            for connection in list(self._server.connections):
                connection.close(abrupt)

        self.cluster.call(close)


class EmbeddedNameServer(EmbeddedNode):
    """A name server of the cluster."""

    def __init__(self, cluster: EmbeddedCluster, server: Server, name_server: NameServer) -> None:
        super().__init__(cluster, server)
        self.core = name_server

    def stop(self) -> None:
        """Stop the name server. It loses its routes and keeps its settings."""
        self.cluster.end([self._server], self.stop_now)

    def stop_now(self) -> None:
        """Do what `stop` does, from the cluster's own loop."""
        self._server.close()
        self.core.forget()

    def start(self, *, register: bool = True) -> None:
        """Start the name server again on its port.

        Brokers register at once; real ones take up to 30 s, and `register=False` leaves it to `register()`.
        """
        self.cluster.run(self.open(register=register))

    async def open(self, *, register: bool = True) -> None:
        """Start it from the cluster's own loop."""
        await self._server.open()
        if register:
            self.cluster.register_brokers()

    def register(self) -> None:
        """Let every running broker register."""
        self.cluster.call(self.cluster.register_brokers)


class EmbeddedBroker(EmbeddedNode):
    """A broker of the cluster, master or slave."""

    def __init__(self, cluster: EmbeddedCluster, server: Server, broker: Broker) -> None:
        super().__init__(cluster, server)
        self.core = broker

    @property
    def name(self) -> str:
        """The broker name, which its slaves share."""
        return self.core.name

    @property
    def broker_id(self) -> int:
        """0 for the master, a higher number for a slave."""
        return self.core.config.broker_id

    # --- start and stop

    def stop(self, *, keep_route: bool = False) -> None:
        """Stop the broker as SIGTERM does: close connections, drop held pulls, and flush offsets.

        With `keep_route`, name servers keep the broker in their routes.
        """
        self.cluster.end([self._server], lambda: self.stop_now(keep_route=keep_route))

    def stop_now(self, *, keep_route: bool = False) -> None:
        """Do what `stop` does, from the cluster's own loop."""
        self._server.close()
        self._ended(lose_unflushed=False, keep_route=keep_route)

    def kill(self, *, lose_commits: bool = False, keep_route: bool = False) -> None:
        """Kill the broker and reset connections. With `lose_commits`, offsets return to the last flush (every 5 s)."""

        def kill() -> None:
            self._server.close(abrupt=True)
            self._ended(lose_unflushed=lose_commits, keep_route=keep_route)

        self.cluster.end([self._server], kill)

    def _ended(self, *, lose_unflushed: bool, keep_route: bool) -> None:
        if self.core.running:
            self.core.stop(lose_unflushed=lose_unflushed)
        if not keep_route:
            self.cluster.unregister(self)

    def start(self) -> None:
        """Start the broker again, on its port and with its data."""
        self.cluster.run(self.open())

    async def open(self) -> None:
        """Start it from the cluster's own loop."""
        await self._server.open()
        self.core.start()
        self.cluster.register(self)

    def restart(self) -> None:
        """Stop it and start it again."""
        self.stop()
        self.start()

    # --- data

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets that a group committed here, by queue id, as they are stored."""
        return self.cluster.call(lambda: self.core.offsets.table(topic, group))

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Store offsets by queue id, without a check of their range.

        Raises:
            ConfigError: they are not numbers, or brokers do not accept the name of the group or topic.
        """
        check_group(group)
        check_topic(topic)
        if not isinstance(offsets, Mapping) or not all(
            type(number) is int for item in offsets.items() for number in item
        ):
            raise ConfigError(f"offsets={offsets!r} is not allowed; give {{queue id: offset}}, for example {{0: 5}}")

        def store() -> None:
            for queue_id, offset in offsets.items():
                self.core.offsets.commit(topic, group, queue_id, offset)

        self._change(store)

    def flush_offsets(self) -> None:
        """Write the offsets to "disk" now: a kill loses only later commits."""
        self._change(self.core.offsets.flush)

    def messages(self, topic: str, queue_id: int | None = None) -> list[Message]:
        """Return the messages of a topic on this broker, by queue and offset."""

        def read() -> list[Message]:
            store, found = self.core.store, []
            for each in sorted(store.queue_ids(topic)) if queue_id is None else [queue_id]:
                queue = store.queue(topic, each)
                if queue is not None:
                    found += decode_messages(b"".join(queue.records), self.core.queue(topic, each))
            return found

        return self.cluster.call(read)

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the oldest message in a queue."""
        return self.cluster.call(lambda: self.core.store.min_offset(topic, queue_id))

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the next message of a queue."""
        return self.cluster.call(lambda: self.core.store.max_offset(topic, queue_id))

    def delete_before(self, topic: str, queue_id: int, offset: int) -> None:
        """Delete a queue's older messages, as the expiry of files does. Its min offset becomes `offset`."""
        check_int("offset", offset, 0, 2**63 - 1)
        self._change(lambda: self.core.store.delete_before(topic, queue_id, offset))

    def truncate(self, topic: str, queue_id: int, offset: int) -> None:
        """Lose a queue's newest messages, as a crash can. Its max offset becomes `offset`."""
        check_int("offset", offset, 0, 2**63 - 1)
        self._change(lambda: self.core.store.truncate(topic, queue_id, offset))

    def lose_data(self, *, messages: bool = True, offsets: bool = True) -> None:
        """Lose all messages (every queue starts at 0 again), all committed offsets, or both. Keep topics and groups."""

        def lose() -> None:
            if messages:
                self.core.store.clear()
                self.core.intake.schedule.clear()
            if offsets:
                self.core.offsets.clear()

        self._change(lose)

    # --- groups and members

    def members(self, group: str) -> list[str]:
        """Return the client ids online in a group, sorted."""

        def read() -> list[str]:
            online = self.core.members.group(group)
            return sorted(online.client_ids()) if online is not None else []

        return self.cluster.call(read)

    def subscriptions(self, group: str) -> dict[str, Subscription]:
        """Return the subscriptions of an online group, by topic."""

        def read() -> dict[str, Subscription]:
            online = self.core.members.group(group)
            return dict(online.subscriptions) if online is not None else {}

        return self.cluster.call(read)

    def create_group(self, group: str, **settings: object) -> None:
        """Create a subscription group, or change it: `create_group("app", consumeEnable=False)`.

        Settings have their Java names and Java's defaults.

        Raises:
            ConfigError: brokers do not accept the name, or a setting has the wrong type.
        """
        check_group(group)
        try:
            config = decode_subscription_group(fastjson.dumps({"groupName": group, **settings}))
        except (ProtocolError, TypeError) as error:
            raise ConfigError(f"settings of group {group} are not allowed: {error}") from error
        self._change(lambda: self.core.groups.__setitem__(group, config))

    def locks(self, group: str) -> dict[MessageQueue, str]:
        """Return the locked queues of a group, and the client id that holds each lock."""
        return self.cluster.call(lambda: self.core.locks.held(group))

    def expire_locks(self) -> None:
        """Let every lock expire now."""
        self._change(self.core.locks.clear)

    def held_pulls(self, topic: str | None = None) -> int:
        """Return how many pulls wait for messages."""
        return self.cluster.call(lambda: self.core.pulls.held(topic))

    def tick(self) -> None:
        """Check the held pulls now, as the broker does every `long_poll_tick_s` seconds."""
        self._change(self.core.pulls.tick)

    # --- settings

    def update_config(self, **settings: object) -> None:
        """Change settings while the broker runs, under their Java names: `update_config(brokerPermission=2)`.

        Raises:
            ConfigError: the embedded broker has no such setting, or the value has the wrong type.
        """

        def change() -> None:
            self.core.config.change(settings)
            self.core.on_topics_changed()

        self._change(change)

    def suggest_broker(self, broker_id: int) -> None:
        """Suggest this broker id for the next pull, in every pull response."""
        self._change(lambda: setattr(self.core, "suggest_broker_id", broker_id))

    def count_as_on_disk(self, on_disk: bool = True) -> None:
        """Treat messages as on disk only: pulls return 8 messages or 64 KiB, and no group starts at offset 0."""
        self._change(lambda: setattr(self.core, "on_disk", on_disk))

    def pause_replication(self) -> None:
        """Stop replication from the master, at a slave."""
        self._change(self.core.store.pause_replication)

    def resume_replication(self) -> None:
        """Resume replication, at a slave, with the messages that the master stored meanwhile."""
        self._change(self.core.store.resume_replication)

    def sync_with_master(self) -> None:
        """Copy the master's topics, groups and offsets to a slave now, not at the next timer."""
        self._change(self.core.sync_with_master)

    def _change(self, action: Callable[[], object]) -> None:
        self.cluster.call(action)
        self.cluster.changes.notify()
