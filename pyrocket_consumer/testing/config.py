"""Releases of brokers and the settings of one broker, with the differences that a client can observe.

Settings have the names and defaults of real brokers. Tests also change times that real brokers do not let them change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from pyrocket_consumer.config import check_range
from pyrocket_consumer.errors import ConfigError
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
