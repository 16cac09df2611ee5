"""One broker: its state, and the parts that handle its requests. Source: BrokerController, PlainAccessValidator."""

from __future__ import annotations

import hmac
import random
from collections.abc import Callable
from dataclasses import replace

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.bodies import SubscriptionGroupConfig
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.frame import ACCESS_KEY, SIGNATURE, RemotingCommand, signature
from pyrocket_consumer.protocol.ids import UniqueIds, encode_host
from pyrocket_consumer.testing.admin_requests import AdminRequests
from pyrocket_consumer.testing.config import BrokerConfig, Release, Timing, Topics, name_defect
from pyrocket_consumer.testing.intake import Intake, Transactions
from pyrocket_consumer.testing.membership import Members, Membership, QueueLocks
from pyrocket_consumer.testing.message_store import MessageStore
from pyrocket_consumer.testing.node import Clock, Connection, Node, Refused, Timer
from pyrocket_consumer.testing.offsets import ConsumerOffsets, OffsetRequests
from pyrocket_consumer.testing.pulls import Pulls
from pyrocket_consumer.testing.sends import Sends

_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
_SIGNS_WITHOUT_UNTIL = 399


class Broker(Node):
    """A master or slave. Everything runs on the clock's loop.

    A handler returns the response, or returns None and responds later through the connection (held pulls, relays).
    `start` and `stop` act like a process on the same "disk". Topics, groups, messages and offsets survive a stop;
    members, locks and reset marks do not.
    """

    def __init__(
        self,
        config: BrokerConfig,
        timing: Timing,
        release: Release,
        clock: Clock,
        address: str,
        *,
        seed: int = 0,
        account: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(release)
        self.on_topics_changed: Callable[[], None] = lambda: None  # updates the routes
        self.on_timer: Callable[[], None] = lambda: None  # called after changes that no request caused
        self.config = config
        self.timing = timing
        self.clock = clock
        self.address = address
        self.master: Broker | None = None
        self.running = False
        self.random = random.Random(seed)  # chooses queues; it protects nothing
        self.topics = Topics(config, lambda: self.on_topics_changed())
        self.groups: dict[str, SubscriptionGroupConfig] = {}
        self.store = MessageStore()
        self.offsets = ConsumerOffsets()
        self.members = Members()
        self.locks = QueueLocks(clock.monotonic_s, timing.lock_expiry_s)
        pid, value = self.random.getrandbits(16), self.random.getrandbits(32)
        self.ids = UniqueIds("127.0.0.1", pid, value, lambda: clock.now_ms() / 1000)
        self.suggest_broker_id = 0
        self.on_disk = False  # if True, messages count as no longer in memory (smaller pulls, no zero rule)
        self._account = account
        self._id_prefix = encode_host(address).hex().upper()
        self.pulls = Pulls(self)
        self.intake = Intake(self)
        self.membership = Membership(self)
        self.transactions = Transactions(self)
        self.admin = AdminRequests(self)
        others = (Sends(self), OffsetRequests(self))
        for part in (self.pulls, self.membership, self.transactions, self.admin, *others):
            self._handlers |= part.handlers()
        self._timers = [
            self._timer(lambda: config.flush_consumer_offset_interval / 1000, self.offsets.flush),
            self._timer(lambda: timing.scan_interval_s, self.membership.expire),
            self._timer(lambda: config.transaction_check_interval / 1000, self.transactions.check),
            self._timer(lambda: timing.slave_sync_s, self.sync_with_master),
        ]

    def _timer(self, interval_s: Callable[[], float], action: Callable[[], None]) -> Timer:
        def fire() -> None:
            action()
            self.on_timer()

        return Timer(self.clock, interval_s, fire)

    @property
    def name(self) -> str:
        return self.config.broker_name

    @property
    def is_slave(self) -> bool:
        return self.config.broker_id != 0

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self.name, queue_id)

    def offset_message_id(self, commit_log_offset: int) -> str:
        return f"{self._id_prefix}{commit_log_offset:016X}"

    def group(self, name: str) -> SubscriptionGroupConfig | None:
        """Return a group's settings. Create the group on demand if that is allowed, else return None."""
        known = self.groups.get(name)
        if known is None and (self.config.auto_create_subscription_group or name.startswith("CID_RMQ_SYS_")):
            if self.release.checks_group_names and name_defect("group", name, self.release.longest_group, self.release):
                return None
            known = self.groups[name] = SubscriptionGroupConfig(name)
        return known

    def group_or_refuse(self, name: str, remark: str) -> SubscriptionGroupConfig:
        group = self.group(name)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark + self.release.faq)
        return group

    def check_account(self, command: RemotingCommand) -> None:
        """Refuse a request without the account's signature. The account may do everything."""
        if self._account is None:
            return
        known_key, secret_key = self._account
        access_key, signed = command.fields.get(ACCESS_KEY), command.fields
        old = self.release.number < (5, 3, 3)
        if not self.release.is_v5 or old and command.version <= _SIGNS_WITHOUT_UNTIL:
            signed = {name: value for name, value in signed.items() if name != _UNIQUE_KEY_QUERY}
        if access_key is None:
            remark = "No accessKey is configured" if old else "username cannot be null."
        elif access_key != known_key:
            remark = f"No acl config for {access_key}" if old else f"User:{access_key} is not found."
        elif not hmac.compare_digest(signature(signed, command.body, secret_key), command.fields.get(SIGNATURE, "")):
            remark = f"Check signature failed for accessKey={access_key}" if old else "check signature failed."
        else:
            return
        remark = f"org.apache.rocketmq.acl.common.AclException: {remark}, null" if old else remark
        raise Refused(self.release.refused_by_acl, remark)

    def lost(self, connection: Connection) -> None:
        """Remove the members and held pulls of a connection that ended."""
        self.pulls.lost(connection)
        if self.running:
            self.membership.lost(connection)

    def start(self) -> None:
        self.running = True
        self.pulls.start()
        self.intake.schedule.start()
        self.sync_with_master()
        for timer in self._timers:
            timer.start()

    def stop(self, *, lose_unflushed: bool = False) -> None:
        """Stop. A killed broker may lose the offsets that were not flushed. It always loses the rest of its memory."""
        self.running = False
        self.pulls.stop()
        self.intake.schedule.stop()
        for timer in self._timers:
            timer.stop()
        if not lose_unflushed:
            self.offsets.flush()
        self.offsets.restart(lose_unflushed)
        self.members.clear()
        self.locks.clear()

    def take_over(self, old: Broker) -> None:
        """Become the master in place of `old`, which becomes a slave with this id."""
        self.config.broker_id, old.config.broker_id = 0, self.config.broker_id
        self.master, old.master = None, self
        self.store.promote()
        self.intake.schedule.take_over(old.intake.schedule)
        self.transactions.take_over(old.transactions)
        old.store.replicas = []
        old.store.copy_from(self.store)
        old.sync_with_master()

    def sync_with_master(self) -> None:
        """Copy the master's topics, groups and offsets. The store replicates messages separately."""
        master = self.master
        if master is not None and self.is_slave:
            self.topics.copy_from(master.topics)
            self.groups = {name: replace(group) for name, group in master.groups.items()}
            self.offsets.copy_from(master.offsets)
