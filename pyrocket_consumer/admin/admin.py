"""The blocking interface of administration."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from pyrocket_consumer.admin import groups, topics
from pyrocket_consumer.admin.groups import check_settings
from pyrocket_consumer.admin.lag import GroupLag, group_lag
from pyrocket_consumer.admin.resets import execute_plan, forget_reset, plan_reset
from pyrocket_consumer.admin.resets.plan import ResetPlan, ResetProgress, ResetResult
from pyrocket_consumer.admin.topics import MAX_QUEUES, OffsetRange, check_attributes, check_perm, check_targets
from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.cluster.client import NotCopied
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.cluster.offset_lookup import To, check_to
from pyrocket_consumer.config import (
    ClientConfig,
    ClientOptions,
    NameServers,
    check_bool,
    check_choice,
    check_config,
    check_group,
    check_int,
    check_names,
    check_queues,
    check_range,
    check_text,
    check_topic,
)
from pyrocket_consumer.errors import ClientClosed, ConfigError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageModel, MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.text import safe_repr_unless_secret
from pyrocket_consumer.transport.forks import renew_locks_in_children

_SLOW_TIMEOUT_S = 180.0  # a few members get requests at a time, and a silent one takes 10 s

P = ParamSpec("P")
T = TypeVar("T")


class Admin(NotCopied):
    """Manages topics, groups and their offsets. It starts with the first call, or with `with`.

        with Admin(name_server="127.0.0.1:9876") as admin:
            admin.create_topic("orders", queues=8)
            print(admin.topics())

    Each call ends within `timeout_s`. Any thread may call, and a call can be repeated: creating a topic that exists,
    or deleting one that does not, is no error.

    Every method may raise these errors:

    * ConnectError: a name server or broker is unreachable.
    * ConnectionLost: a connection ended during the call.
    * BrokerError: a broker refused the request. For PermissionDenied, check the access key.
    * RequestTimeout: a server did not respond.
    * ConfigError: an argument is not allowed.
    * ClientClosed: the Admin is closed, or was used before a fork.
    """

    def __init__(
        self,
        *,
        name_server: NameServers | None = None,
        config: ClientConfig | None = None,
        timeout_s: float = 30.0,
        **options: Unpack[ClientOptions],
    ) -> None:
        """Check the options. The first call connects.

        Args:
            config (–; a ClientConfig): all options in one, instead of single ones
            timeout_s (30; 0.01–3600 s): how long a call may take
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
            ConfigError: an option is unknown, or its value is not allowed; the text has the allowed values.
        """
        if config is None:
            config = ClientConfig.from_options({"name_server": name_server, **options})
        else:
            config = check_config(ClientConfig, config, name_server, options)
        check_range("timeout_s", timeout_s, 0.01, 3600)
        self.config = config
        self._timeout_s = timeout_s
        self.renew_locks()
        renew_locks_in_children(self)
        self._cluster: Cluster | None = None
        self._connecting: Cluster | None = None
        self._closed = False
        self._seen: dict[str, frozenset[MessageQueue]] = {}  # by topic; confined to the I/O thread

    def __repr__(self) -> str:
        state = "closed" if self._closed else "created" if self._cluster is None else "running"
        return f"{type(self).__name__}(state={state!r}, name_server={';'.join(self.config.name_servers)!r})"

    # --- life

    def start(self) -> None:
        """Connect to a name server. Any call does it, too.

        Raises:
            ConnectError: no name server responds. The Admin can be started again.
            ClientClosed: the Admin is closed, perhaps during the start.
        """
        self._started()

    def renew_locks(self) -> None:
        """Make a new lock, which no thread holds. A forked child calls it."""
        self._start_lock = threading.RLock()  # one start at a time; reentrant, so that a signal handler cannot stall it

    def _started(self) -> Cluster:
        with self._start_lock:
            self._check_open()
            if self._cluster is None:
                self._connecting = cluster = Cluster(self.config, make_client_id(self.config))
                cluster.start()
                self._cluster = self._cluster or cluster
                if self._closed or self._cluster is not cluster:  # a signal handler has started another one
                    cluster.close()
            self._check_open()
            assert self._cluster is not None
            return self._cluster

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this Admin is closed; make a new one")

    def close(self) -> None:
        """Disconnect. A second close does nothing."""
        self._closed = True
        for cluster in (self._cluster, self._connecting):
            if cluster is not None:
                cluster.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._cluster is not None:
            self._cluster.warn_unclosed(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, work: Callable[Concatenate[Cluster, P], Coroutine[Any, Any, T]], *args: P.args, **options: P.kwargs
    ) -> T:
        cluster = self._started()
        return cluster.run(work(cluster, *args, **options), self._timeout_s)

    # --- topics

    def create_topic(
        self,
        name: str,
        queues: int = 8,
        *,
        perm: str = "rw",
        order: bool = False,
        attributes: Mapping[str, str] | None = None,
        brokers: Iterable[str] | None = None,
        cluster: str | None = None,
    ) -> None:
        """Create a topic with `queues` queues on every master, and return when every name server has its route.

        A topic that exists is changed. If two clients change its queues at the same time, the later one wins, and the
        other gets an error with the current number. `brokers` or `cluster` (names) select fewer masters. `perm` is the
        permission of clients: "rw", "r" or "w". `attributes`, like {"message.type": "FIFO"}, need brokers from 5.0 on.
        """
        check_topic(name)
        check_int("queues", queues, 1, MAX_QUEUES)
        check_perm(perm)
        check_bool("order", order)
        check_attributes(attributes)
        named = check_targets(brokers, cluster)
        self._run(
            topics.create_topic,
            name,
            queues=queues,
            perm=perm,
            order=order,
            attributes=attributes or {},
            brokers=named,
            cluster_name=cluster,
        )

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its messages on all brokers, and return when no name server has its route.

        Brokers before 5.0 keep the offsets of groups. If you create the topic again, it starts at 0, and the old
        offsets are beyond its end.
        """
        check_topic(name)
        self._run(topics.delete_topic, name)

    def topics(self, *, include_system: bool = False) -> list[str]:
        """Return all topics, sorted. System, retry and dead-letter topics need `include_system`."""
        check_bool("include_system", include_system)
        return self._run(topics.list_topics, include_system=include_system)

    def topic_offsets(self, topic: str) -> dict[MessageQueue, OffsetRange]:
        """Return the smallest and largest offsets of each queue of a topic.

        Raises:
            RouteNotFound: the topic does not exist.
        """
        check_topic(topic)
        return self._run(topics.topic_offsets, topic)

    # --- groups

    def create_group(self, name: str, **settings: Any) -> None:
        """Create a consumer group on every master, or change one that exists.

        `settings` are those of RocketMQ in snake_case: `consume_enable`, `consume_broadcast_enable`, `retry_max_times`,
        `retry_queue_nums` and so on. The others take the defaults of the broker, even if the group exists.
        """
        check_group(name)
        check_settings(settings)
        self._run(groups.create_group, name, settings)

    def delete_group(self, name: str, *, remove_offsets: bool = True, remove_dead_letters: bool = False) -> None:
        """Delete a consumer group, its retry topic, and its committed offsets unless `remove_offsets` is False.

        Its dead letters stay in the %DLQ% topic, unless `remove_dead_letters` is True. A running member creates the
        group again. Brokers 5.5.0 do so, too, if offsets are kept and groups are created on demand; the group then has
        default settings.
        """
        check_group(name)
        check_bool("remove_offsets", remove_offsets)
        check_bool("remove_dead_letters", remove_dead_letters)
        self._run(groups.delete_group, name, remove_offsets=remove_offsets, remove_dead_letters=remove_dead_letters)

    def groups(self, *, include_system: bool = False) -> list[str]:
        """Return the consumer groups that brokers know, sorted, also those without online members."""
        check_bool("include_system", include_system)
        return self._run(groups.list_groups, include_system=include_system)

    # --- offsets

    def lag(self, group: str, *, brokers: Iterable[str] = (), store: DatabaseOffsets | None = None) -> GroupLag:
        """Return the committed offsets and the lag of a group, in every queue of its topics.

        The brokers have the offsets of a clustering group. Each online member of a broadcasting group reports its own;
        members that do not respond are in `unreached`. `missing` has the brokers that do not respond, refuse a request,
        or have no master. Name servers forget stopped brokers. So `missing` also has those in `brokers`, which must
        exist, and those whose queues this Admin has seen before.

        For a group with offsets in a database, pass its `store`. Its offsets at the brokers may be old.

        Raises:
            ConfigError: no broker knows the group, and `store` has no row of it.
            DatabaseError: the store cannot be read.
            ConnectError, RequestTimeout, BrokerError: no broker responds.
        """
        return self._lag(group, None, brokers, store)

    def offsets(
        self, group: str, topic: str, *, brokers: Iterable[str] = (), store: DatabaseOffsets | None = None
    ) -> GroupLag:
        """Return the committed offsets and the lag of a group in one topic; see `lag`.

        Raises:
            RouteNotFound: the topic does not exist.
            ConfigError: no broker knows the group, and `store` has no row of it.
            DatabaseError: the store cannot be read.
        """
        check_topic(topic)
        return self._lag(group, topic, brokers, store)

    def _lag(self, group: str, topic: str | None, brokers: Iterable[str], store: DatabaseOffsets | None) -> GroupLag:
        check_group(group)
        expected = check_names("brokers", brokers)
        cluster = self._started()
        _check_store(store)
        stored = None
        if store is not None:
            stored = {row.queue: row for row in store.offsets(wrap(cluster.config.namespace, group))}
        return cluster.run(group_lag(cluster, group, topic, expected, self._seen, stored), _SLOW_TIMEOUT_S)

    def plan_reset(
        self,
        group: str,
        topic: str,
        to: To,
        queues: Iterable[MessageQueue] | None = None,
        *,
        model: str | None = None,
        member: str | None = None,
        store: DatabaseOffsets | None = None,
        wait_s: float = 30.0,
    ) -> ResetPlan:
        """Return the plan of a reset. Only `execute()` of the plan changes offsets.

            plan = admin.plan_reset("orders-app", "orders", to="earliest")
            print(plan)
            result = plan.execute()

        `to` is "earliest" (or "first"), "latest" (or "last"), {queue: offset}, or an aware datetime or its text. A time
        selects the first message stored then or later.

        `queues` limits the reset to these queues, and `member` (a client id) to one member of a broadcasting group.
        `model` ("clustering" or "broadcasting") is for a group without online members, if brokers do not show its
        model. Members have `wait_s` seconds to report their offsets.

        For a group with offsets in a database, pass its `store`. The reset then changes the database, even while
        members run. Queues of its retry topic without a row there start at the offsets of the brokers.

        Raises:
            RouteNotFound: the topic does not exist.
            ConfigError: the group, a queue or an online member does not exist, or `to` is not allowed.
            DatabaseError: the store cannot be read.
        """
        check_group(group)
        check_topic(topic)
        where = check_to(to)
        wanted = None if queues is None else check_queues("queues", queues)
        if model is not None:
            check_choice("model", model, [each.value for each in MessageModel])
        check_text("member", member)
        check_range("wait_s", wait_s, 0, 120)
        _check_store(store)
        if store is not None and member is not None:
            raise ConfigError(f"member={member!r} cannot be reset alone, because a group in a database shares offsets")
        cluster = self._started()
        planning = plan_reset(cluster, group, topic, where, wanted, model, member, wait_s, store)
        plan = cluster.run(planning, _SLOW_TIMEOUT_S)
        return replace(plan, _execute=self._execute)

    def forget_reset(self, group: str, topic: str) -> bool:
        """Remove the resets that brokers have recorded for a broadcasting group. It is never necessary.

        Returns whether a reset was recorded. Members that were offline then continue at their own offsets, instead of
        those of the last reset.

        Raises:
            RouteNotFound: the topic does not exist.
            ConfigError: no broker knows the group.
        """
        check_group(group)
        check_topic(topic)
        return self._run(forget_reset, group, topic)

    def _execute(
        self, plan: ResetPlan, progress: Callable[[ResetProgress], None] | None, partial: bool, wait_s: float
    ) -> ResetResult:
        """Execute a plan, and call `progress` on this thread."""
        cluster = self._started()
        steps: SimpleQueue[ResetProgress | None] = SimpleQueue()

        async def run() -> ResetResult:
            async with asyncio.timeout(_SLOW_TIMEOUT_S):
                return await execute_plan(cluster, plan, steps.put, partial, wait_s)

        future = cluster.submit(run())
        future.add_done_callback(lambda done: steps.put(None))
        try:
            while (step := steps.get(timeout=_SLOW_TIMEOUT_S + self._timeout_s)) is not None:
                if progress is not None:
                    progress(step)
            return future.result(0)
        except (RocketError, CancelledError) as error:
            if self._closed and not isinstance(error, ClientClosed):
                raise ClientClosed("this Admin was closed during the reset; make a new one, and repeat it") from error
            raise
        except (TimeoutError, Empty) as error:
            raise RequestTimeout("the reset", f"group {plan.group}", _SLOW_TIMEOUT_S) from error
        finally:
            future.cancel()


def _check_store(store: object) -> None:
    if store is not None and not isinstance(store, DatabaseOffsets):
        raise ConfigError(
            f"store={safe_repr_unless_secret(store)} is not allowed; it must be a DatabaseOffsets, or None, "
            "because brokers and members report the offsets of all other groups"
        )
