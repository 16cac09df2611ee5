"""A broker's topics: numbers of queues, permissions, and creation on demand.

Source: TopicConfigManager, TopicValidator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pyrocket_consumer.model import DLQ_PREFIX, PERM_READ, PERM_WRITE, RETRY_PREFIX
from pyrocket_consumer.testing.config import DEFAULT_TOPIC, BrokerConfig, Release

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
