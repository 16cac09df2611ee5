"""A broker's settings: those of a real broker under the same names, and times that only tests change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from pyrocket_consumer.config import check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.testing.release import Release
from pyrocket_consumer.text import safe_repr

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
