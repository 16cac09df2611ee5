"""Releases of brokers, and the settings and topics of one broker, with the differences that a client can observe.

Settings have the names and defaults of real brokers. Tests also change times that real brokers do not let them change.
Source: TopicConfigManager, TopicValidator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from pyrocket_consumer.config import check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import DLQ_PREFIX, PERM_READ, PERM_WRITE, RETRY_PREFIX
from pyrocket_consumer.protocol.codes import ResponseCode, version_ordinal
from pyrocket_consumer.text import safe_repr

DEFAULT_RELEASE: Final = "5.5.0"


class Release:
    """A RocketMQ release, for example "4.9.7" or "5.5.0", and its behaviour.

    Source: observed on real brokers 4.9.7, 5.1.4, 5.3.3 and 5.5.0.
    """

    def __init__(self, name: str) -> None:
        found = re.fullmatch(r"(\d)\.(\d)\.(\d)", name) if isinstance(name, str) else None
        number = tuple(int(part) for part in found.groups()) if found else ()
        if len(number) != 3 or not (4, 9, 4) <= number <= (5, 5, 9):
            raise ConfigError(f"version {name!r} is not a release from 4.9.4 to 5.5.x, such as '4.9.7' or '5.5.0'")
        self.name = name
        self.number = number
        self.ordinal = version_ordinal(*number)

        v5 = number >= (5, 0, 0)
        self.is_v5 = v5
        self.faq = (
            "\nSee "
            + ("https://rocketmq.apache.org/docs/bestPractice/06FAQ" if v5 else "http://rocketmq.apache.org/docs/faq/")
            + " for further details."
        )
        # frames, texts and name server
        self.mirrors_header_type = not v5  # responds to a binary header with a binary one, unless the pull was held
        self.names_bad_topics = number >= (5, 5, 0)
        self.name_server_refuses_unknown_code = v5
        self.routes_have_acting_master = v5
        # membership
        self.heartbeat_v2 = number >= (5, 1, 3)
        self.skips_members_of_unknown_groups = number >= (5, 1, 4)
        self.notifies_broadcasting_groups = number < (5, 3, 1)
        self.longest_group = 120 if number >= (5, 5, 0) else 255
        # pulls
        self.lite_pull = v5
        self.pull_returns_sys_flags = v5
        self.negative_pull_is_error = not v5
        self.bad_queue_id = ResponseCode.INVALID_PARAMETER if number >= (5, 3, 2) else ResponseCode.SYSTEM_ERROR
        self.bad_topic_name = self.bad_queue_id
        self.slave_refuses_pulls = v5  # when slaveReadEnable=false
        self.slave_stores_commit_bit = v5
        # offsets
        self.zero_for_empty_queues = number < (5, 1, 0)
        self.set_zero_if_not_found = v5
        self.commit_checks_topic = number >= (5, 1, 0)
        self.commit_checks_group = number >= (5, 3, 0)
        self.commit_missing_field = self.bad_queue_id
        self.searches_nearest_time = number < (5, 1, 1)
        self.boundary_type = number >= (5, 1, 4)
        self.deletes_offsets_with_topic = v5
        # resets
        self.has_server_side_reset = number >= (5, 1, 0)
        self.server_side_reset_by_default = number >= (5, 2, 0)
        self.reset_always_commits = number >= (5, 3, 2)
        self.reset_unknown_topic = ResponseCode.TOPIC_NOT_EXIST if number >= (5, 3, 2) else ResponseCode.SYSTEM_ERROR
        # sends
        self.adds_own_properties = number >= (5, 1, 0)  # MSG_REGION, TRACE_ON, WAIT and a missing UNIQ_KEY
        self.ends_properties = number >= (5, 2, 0)  # the last property is followed by 0x02, too
        self.returns_transaction_id = v5
        self.refuses_empty_body = number >= (5, 1, 0)
        self.slave_refuses_sends_as_busy = v5
        self.batch_properties_in_items = number < (5, 5, 0)
        self.locked_groups_retry_to_dlq = number >= (5, 1, 4)
        self.retry_send_beyond_max = v5  # dead letter when times > max; before: times >= max
        self.long_retry_topics = number >= (5, 1, 0)
        self.retry_keeps_store_host = not v5
        self.committed_keeps_real_topic = number < (5, 5, 0)
        self.timers = v5
        self.recall_handle = number >= (5, 3, 2)
        # administration
        self.returns_pull_offset = v5
        self.topic_stats_cover_read_queues = number >= (5, 3, 0)
        self.topic_stats_put_tps = number >= (5, 3, 0)
        self.lists_topic_as_group = number == (5, 3, 3)
        self.query_assignment = v5
        self.clean_offset_field = "cleanOffset" if v5 else "removeOffset"
        self.checks_group_names = number >= (5, 5, 0)
        self.black_list = (
            frozenset(("brokerConfigPath", "rocketmqHome", "configBlackList"))
            if (number >= (5, 2, 0))
            else frozenset(("brokerConfigPath", "configBlackList"))
            if v5
            else frozenset[str]()
        )
        self.refused_by_acl = ResponseCode.NO_PERMISSION if number >= (5, 3, 3) else ResponseCode.SYSTEM_ERROR

    def __repr__(self) -> str:
        return f"Release({self.name!r})"


DEFAULT_TOPIC = "TBW102"
LONGEST_S = 366 * 86400.0
DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(slots=True)
class BrokerConfig:
    """Settings of a real broker: GET_BROKER_CONFIG returns them, UPDATE_BROKER_CONFIG changes them.

    An attribute's name in camelCase is the setting's name: `broker_permission` is `brokerPermission`.
    Source: BrokerConfig, MessageStoreConfig.
    """

    broker_name: str = "broker-a"
    broker_cluster_name: str = "DefaultCluster"
    broker_id: int = 0
    listen_port: int = 0
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    broker_permission: int = 6
    default_topic_queue_nums: int = 8
    enable_property_filter: bool = False
    flush_consumer_offset_interval: int = 5000
    channel_expired_timeout: int = 120_000
    lite_pull_message_enable: bool = True
    long_polling_enable: bool = True
    max_message_size: int = 4 * 1024 * 1024
    max_transfer_bytes_on_message_in_memory: int = 256 * 1024
    max_transfer_count_on_message_in_memory: int = 32
    message_delay_level: str = DELAY_LEVELS
    notify_consumer_ids_changed_enable: bool = True
    offset_check_in_slave: bool = False
    reject_pull_consumer_enable: bool = False
    reject_transaction_message: bool = False
    short_polling_time_mills: int = 1000
    slave_read_enable: bool = True  # false on real brokers, but a test needs slaves that serve pulls
    timer_max_delay_sec: int = 3 * 24 * 3600
    timer_wheel_enable: bool = True
    trace_topic_enable: bool = False
    transaction_check_interval: int = 30_000
    transaction_check_max: int = 15
    transaction_time_out: int = 6_000
    transfer_msg_by_heap: bool = True
    use_server_side_reset_offset: bool = False

    def properties(self, release: Release) -> dict[str, str]:
        """Return all settings of a broker of `release`, by their Java names."""
        known = {_camel(each.name): _text(getattr(self, each.name)) for each in fields(self)}
        if not release.has_server_side_reset:
            del known["useServerSideResetOffset"]
        if not release.timers:
            del known["timerMaxDelaySec"], known["timerWheelEnable"]
        return dict(sorted(known.items()))

    def update(self, name: str, value: str) -> bool:
        """Change one setting and return True. Ignore an unknown name or a value of the wrong type, as brokers do."""
        for each in fields(self):
            if _camel(each.name) == name:
                try:
                    parsed = _parsed(value, type(getattr(self, each.name)))
                    if each.name == "message_delay_level":
                        _delays_s(value)
                except (ValueError, LookupError):
                    return False
                setattr(self, each.name, parsed)
                return True
        return False

    def change(self, settings: Mapping[str, object]) -> None:
        """Change settings by their Java names.

        Raises:
            ConfigError: a name is unknown, or a value of the wrong type.
        """
        for name, value in settings.items():
            if not self.update(name, _text(value)):
                raise ConfigError(
                    f"broker setting {name}={safe_repr(value)} is unknown or of the wrong type; "
                    f"there are {', '.join(_camel(each.name) for each in fields(self))}"
                )

    def delay_levels_s(self) -> list[float]:
        """Return the delays of levels 1, 2, … in seconds."""
        return _delays_s(self.message_delay_level)


@dataclass(slots=True)
class Timing:
    """Times and limits that tests shorten. Real brokers have the defaults."""

    delay_scale: float = 1.0
    """Factor of the times of delay levels and timers."""
    long_poll_tick_s: float = 5.0
    lock_expiry_s: float = 60.0
    scan_interval_s: float = 10.0
    relay_timeout_s: float = 10.0
    status_timeout_s: float = 5.0
    slave_sync_s: float = 10.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            check_range(each.name, value, 0, LONGEST_S)
            if value == 0 and each.name != "delay_scale":
                raise ConfigError(f"{each.name}=0 is not allowed; give a number above 0 (delay_scale may be 0)")


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _delays_s(levels: str) -> list[float]:
    return [int(level[:-1]) * _UNIT_S[level[-1]] for level in levels.split()]


def _parsed(value: str, kind: type) -> object:
    if kind is bool:
        return value.strip().lower() == "true"
    return int(value) if kind is int else value


# --- topics

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
TIMER_TOPIC = "rmq_sys_wheel_timer"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
CHECKED_TOO_OFTEN_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"

PERM_INHERIT = 1
READ_WRITE = PERM_READ | PERM_WRITE
LONGEST_TOPIC = 127

_SYSTEM_TOPICS = frozenset(
    (
        DEFAULT_TOPIC,
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        TRACE_TOPIC,
        CHECKED_TOO_OFTEN_TOPIC,
        "BenchmarkTest",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    )
)
_NO_SENDS = frozenset((SCHEDULE_TOPIC, HALF_TOPIC, CHECKED_TOO_OFTEN_TOPIC, "RMQ_SYS_TRANS_OP_HALF_TOPIC", TIMER_TOPIC))
_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+")


def is_system_topic(topic: str) -> bool:
    return topic in _SYSTEM_TOPICS or topic.startswith("rmq_sys_")


def refuses_sends(topic: str) -> bool:
    """Return whether brokers refuse sends of clients to this system topic."""
    return topic in _NO_SENDS


def name_defect(kind: str, name: str, longest: int, release: Release) -> str | None:
    """Return a broker's error text for the name of a topic or group; None if the name is valid."""
    if not name.strip():
        return f"The specified {kind} is blank."
    if not _LEGAL.fullmatch(name):
        quoted_name = f": {name}," if release.names_bad_topics else ""
        return f"The specified {kind}{quoted_name} contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(name) > longest:
        return f"The specified {kind} is longer than {kind} max length."
    return None


@dataclass(slots=True)
class TopicConfig:
    """One topic on one broker."""

    name: str
    read_queues: int = 4
    write_queues: int = 4
    perm: int = READ_WRITE
    sys_flag: int = 0
    order: bool = False
    filter_type: str = "SINGLE_TAG"
    attributes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        perm = ("R" if self.perm & PERM_READ else "-") + ("W" if self.perm & PERM_WRITE else "-")
        perm += "X" if self.perm & PERM_INHERIT else "-"
        return (
            f"TopicConfig [topicName={self.name}, readQueueNums={self.read_queues}, "
            f"writeQueueNums={self.write_queues}, perm={perm}, topicFilterType={self.filter_type}, "
            f"topicSysFlag={self.sys_flag}, order={str(self.order).lower()}]"
        )


class Topics:
    """The topics of one broker. It calls `changed` after each change, to register them at the name servers."""

    def __init__(self, config: BrokerConfig, changed: Callable[[], None]) -> None:
        self._config = config
        self._changed = changed
        self._topics: dict[str, TopicConfig] = {}
        for name, queues, perm in (
            (DEFAULT_TOPIC, config.default_topic_queue_nums, READ_WRITE | PERM_INHERIT),
            (SCHEDULE_TOPIC, len(config.delay_levels_s()), READ_WRITE),
            (HALF_TOPIC, 1, READ_WRITE),
            ("SELF_TEST_TOPIC", 1, READ_WRITE),
            ("OFFSET_MOVED_EVENT", 1, READ_WRITE),
            (config.broker_name, 1, PERM_INHERIT),
            (config.broker_cluster_name, 16, PERM_INHERIT | PERM_READ),
        ):
            if name != DEFAULT_TOPIC or config.auto_create_topic_enable:
                self._topics[name] = TopicConfig(name, queues, queues, perm)

    def __iter__(self) -> Iterator[TopicConfig]:
        return iter(list(self._topics.values()))

    def get(self, name: str) -> TopicConfig | None:
        return self._topics.get(name)

    def put(self, topic: TopicConfig) -> TopicConfig:
        """Create or change a topic."""
        self._topics[topic.name] = topic
        self._changed()
        return topic

    def delete(self, name: str) -> bool:
        known = self._topics.pop(name, None) is not None
        if known:
            self._changed()
        return known

    def copy_from(self, other: Topics) -> None:
        """Copy another broker's topics, as a slave does. The topic of its own name stays."""
        self._topics = dict(other._topics)
        self._changed()

    def for_send(self, name: str, template: str, max_queues: int) -> TopicConfig | None:
        """Return the topic of a send. Create a missing one from the template if that is allowed, else return None."""
        known = self._topics.get(name)
        if known is not None:
            return known
        base = self._topics.get(template)
        if template == DEFAULT_TOPIC and not self._config.auto_create_topic_enable:
            base = None
        if base is not None and base.perm & PERM_INHERIT:
            queues = max(0, min(max_queues, base.write_queues))
            return self.put(TopicConfig(name, queues, queues, base.perm & ~PERM_INHERIT, base.sys_flag))
        if name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            return self.for_group(name, 1)
        return None

    def for_group(self, name: str, queues: int) -> TopicConfig:
        """Return a retry or dead-letter topic, and create it if it is missing."""
        known = self._topics.get(name)
        return known if known is not None else self.put(TopicConfig(name, queues, queues))
