"""The state of one broker, which its parts (sends, pulls, membership …) read and change."""

from __future__ import annotations

import random
from collections.abc import Callable

from pyrocket_consumer.model import DLQ_PREFIX, RETRY_PREFIX, dlq_topic, retry_topic
from pyrocket_consumer.protocol.bodies import SubscriptionGroupConfig
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.ids import UniqueIds, encode_host
from pyrocket_consumer.testing.clock import Clock
from pyrocket_consumer.testing.config import BrokerConfig, Timing
from pyrocket_consumer.testing.consumer_offsets import ConsumerOffsets
from pyrocket_consumer.testing.members import Members
from pyrocket_consumer.testing.message_store import MessageStore
from pyrocket_consumer.testing.queue_locks import QueueLocks
from pyrocket_consumer.testing.release import Release
from pyrocket_consumer.testing.topics import Topics, name_defect

__all__ = ["BrokerState", "Refused", "dlq_topic", "retry_topic"]


class Refused(Exception):
    """The broker responds to a request with an error: code, remark and, rarely, fields."""

    def __init__(self, code: int, remark: str, fields: dict[str, str] | None = None) -> None:
        super().__init__(code, remark)
        self.code, self.remark, self.fields = code, remark, fields or {}


class BrokerState:
    """State of one broker: settings, topics, messages, groups, offsets, members, locks."""

    def __init__(
        self,
        config: BrokerConfig,
        timing: Timing,
        release: Release,
        clock: Clock,
        address: str,
        *,
        seed: int = 0,
        topics_changed: Callable[[], None],
    ) -> None:
        self.config = config
        self.timing = timing
        self.release = release
        self.clock = clock
        self.address = address
        self.random = random.Random(seed)  # chooses queues; it protects nothing
        self.config_changed = topics_changed  # routes show the broker's own permission
        self.topics = Topics(config, len(config.delay_levels_s()), topics_changed)
        self.groups: dict[str, SubscriptionGroupConfig] = {}
        self.store = MessageStore()
        self.offsets = ConsumerOffsets()
        self.members = Members()
        self.locks = QueueLocks(clock.monotonic_s, timing.lock_expiry_s)
        pid, value = self.random.getrandbits(16), self.random.getrandbits(32)
        self.ids = UniqueIds("127.0.0.1", pid, value, lambda: clock.now_ms() / 1000)
        self.suggest_broker_id = 0
        self.on_disk = False  # if True, messages count as no longer in memory (smaller pulls, no zero rule)
        self._id_prefix = encode_host(address).hex().upper()

    @property
    def is_slave(self) -> bool:
        return self.config.broker_id != 0

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


def group_of(topic: str) -> str:
    """Return the group a retry or dead-letter topic belongs to."""
    return topic.removeprefix(RETRY_PREFIX).removeprefix(DLQ_PREFIX)
