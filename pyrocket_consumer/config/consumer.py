"""The options of a push consumer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pyrocket_consumer.config.checks import check_choice, check_function, check_group, check_offset_spec
from pyrocket_consumer.config.client import ClientConfig
from pyrocket_consumer.config.option import MIB, flag, one_of, option, per_topic, seconds, whole
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import ClaimedOffsets, ConsumerEvent, MessageModel, MessageQueue, OffsetStore
from pyrocket_consumer.text import safe_repr, safe_repr_unless_secret

DEFAULT_MAX_RECONSUME_TIMES = 16

Allocation = (
    Literal["average", "circle", "hash"]
    | Callable[[str, str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
)
"""A strategy's name, or a callable (group, own client id, all queues, all client ids) -> own queues."""

OrderBy = Literal["sharding_key"] | Callable[[Any], Hashable]
"""The source of a message's key: its sharding key, or a function (message) -> key."""

PerTopic = int | Mapping[str, int]
"""One number for every topic, or a mapping topic -> number (others take the default)."""

_STORE_METHODS = [name for name in vars(OffsetStore) if inspect.isfunction(vars(OffsetStore)[name]) and name[0] != "_"]


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(ClientConfig):
    """The options of a push consumer; see `PushConsumer`."""

    group: str = option("", "the consumer group", shown="–", allowed="1–120 of `a-zA-Z0-9_-%|`")
    message_model: MessageModel | Literal["clustering", "broadcasting"] = option(
        MessageModel.CLUSTERING,
        "give each message to one member, or to every member",
        shown='`"clustering"`',
        allowed='`"broadcasting"`',
    )
    orderly: bool = option(False, "run one listener call of a queue at a time, in the order of offsets", flag())
    order_by: OrderBy | None = option(
        None,
        "order by key instead. Messages of one key run one at a time, in the order of offsets, and other keys run at "
        "the same time. A callable takes a message and returns a hashable key; see [order](order.md)",
        allowed='`"sharding_key"`, a callable; orderly only',
    )
    consume_from: Literal["first", "earliest", "last", "latest"] | str | datetime = option(
        "last",
        "where a group begins that has no offset for a queue",
        allowed='`"first"`, an aware `datetime` or its text',
    )
    consume_threads: int = option(
        20, "the number of workers for plain listeners, and of concurrent calls for `async def` ones", whole(1, 1000)
    )
    listener_batch_size: int = option(
        1,
        "above 1 the listener takes a list of at most that many messages of one pull. An orderly queue fills the list "
        "from all its waiting messages",
        whole(1, 1024),
    )
    pull_batch_size: PerTopic = option(
        32, "the most messages of one pull. Brokers return at most 32, and 256 KiB, by default", per_topic(1, 1024)
    )
    max_cached_messages: PerTopic = option(
        1000, "the number of unfinished messages of a queue at which pulling pauses", per_topic(1, 1_000_000)
    )
    max_cached_bytes: PerTopic = option(
        100 * MIB,
        "the memory for unfinished messages of the whole consumer, or of a topic. A queue is pulled while it "
        "has fewer unfinished bytes than are free, or while it has none and its turn is next. Running listener calls "
        "decompress at most as many bytes again, or one body",
        per_topic(1, 1 << 40),
        allowed="bytes, or `{topic: n}`",
    )
    max_body_bytes: int = option(
        64 * MIB,
        "the largest body after decompression. A message with a larger one moves to `%DLQ%` at once",
        whole(1024, 1 << 30, ", bytes"),
    )
    max_span: int = option(
        2000,
        "the largest distance between the oldest unfinished offset and the newest pulled one. It does not apply to "
        "orderly consumption, except with `order_by`",
        whole(1, 65535),
    )
    commit_interval_s: float = option(5.0, "the time between two commits of offsets", seconds(0.01, 3600))
    rebalance_interval_s: float = option(
        20.0, "the time between two checks of the assignment, if no member comes or goes", seconds(0.05, 3600)
    )
    max_reconsume_times: int | None = option(
        None,
        "the number of failed retries after which a message moves to `%DLQ%`",
        shown="16; orderly: no limit",
        allowed="0–2³¹−1",
    )
    auto_commit: bool = option(
        True,
        "with `False` only `ConsumeResult.COMMIT` commits, and `ROLLBACK` redelivers the messages since then. Commit "
        "well before `max_cached_messages` wait for it",
        flag("orderly only"),
    )
    consume_timeout_s: float = option(
        900.0,
        "the time after which a running listener call is reported as stuck. Its message is sent back, unless the "
        "consumer is orderly or broadcasting",
        seconds(0.05, 7 * 86400),
    )
    start_wait_s: float = option(
        5.0, "how long `start()` waits for queues with slow brokers. Such queues begin later", seconds(0, 600)
    )
    shutdown_timeout_s: float = option(20.0, "how long `close()` waits for listener calls", seconds(0, 86400))
    pull_hold_s: float = option(15.0, "how long a broker may hold a pull that finds no message", seconds(0.05, 300))
    pull_retry_delay_s: float = option(1.0, "the pause after a failed pull", seconds(0.001, 300))
    allocation: Allocation = option(
        "average",
        "the strategy that divides the queues. All members of a group must use the same one",
        allowed='`"circle"`, `"hash"`, `in_machine_rooms(…)`, a callable',
    )
    offset_store: OffsetStore | ClaimedOffsets | None = option(
        None,
        "where offsets are kept. The default is brokers for clustering, and the local file for broadcasting",
        shown="by model",
        allowed="an `OffsetStore`, a `DatabaseOffsets`",
    )
    offset_store_dir: str | Path | None = option(
        None,
        "the parent directory of the local file, which is `<dir>/<client id>/<group>/offsets.json`",
        shown="`ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR`, `~/.rocketmq_offsets`",
        allowed="a directory",
    )
    durability: Literal["fsync", "process", "checkpoint"] = option(
        "fsync",
        'the events that a stored offset of the local file survives. With `"fsync"` and `"checkpoint"` it survives a '
        'power failure, and with `"process"` the end of the process. Java clients can read each offset of '
        '`"checkpoint"`',
        one_of("fsync", "process", "checkpoint"),
    )
    on_unreadable_store: Literal["raise", "backup", "start_over"] = option(
        "backup",
        'the reaction to a damaged local file. With `"backup"` the store reads `offsets.json.bak`, and raises if that '
        'is damaged, too. With `"start_over"` it then begins with the journal only. With `"raise"` it raises at once',
        one_of("raise", "backup", "start_over"),
    )
    remote_reset: Literal["accept", "refuse"] = option(
        "accept",
        "whether brokers, admins and other members may move the offsets of this member; see [resets](resets.md)",
        one_of("accept", "refuse"),
    )
    reset_record_interval_s: float = option(
        60.0,
        "broadcasting: the time between two checks for a recorded reset that did not reach this member",
        seconds(0.05, 86400),
    )
    server_messages: bool = option(
        True,
        "whether an admin may have a message consumed by a listener of this member, through a broker",
        flag(),
    )
    on_event: Callable[[ConsumerEvent], None] | None = option(
        None, "receives every `ConsumerEvent`, on a thread of its own; see [events](events.md)", allowed="a callable"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
        try:
            self._replace(message_model=MessageModel(self.message_model))
        except ValueError:
            check_choice("message_model", self.message_model, [model.value for model in MessageModel])
        self._replace(consume_from=check_offset_spec("consume_from", self.consume_from))
        if self.max_reconsume_times is not None:
            whole(0, 2**31 - 1).apply("max_reconsume_times", self.max_reconsume_times)
        if not self.auto_commit and not self.orderly:
            raise ConfigError("auto_commit=False works with orderly=True only; leave it out, or consume orderly")
        self._check_order_by()
        if not callable(self.allocation) and self.allocation not in ("average", "circle", "hash"):
            raise ConfigError(
                f"allocation={safe_repr(self.allocation)} is not allowed; use 'average', 'circle', 'hash', a function, "
                "or pyrocket_consumer.in_machine_rooms('room1', 'room2') with the names of your rooms"
            )
        if callable(self.allocation):
            names = ("group", "client_id", "queues", "client_ids")
            check_function("allocation", self.allocation, *names, may_yield=True)
        self._check_offset_store()
        if self.on_event is not None:
            if not callable(self.on_event):
                raise ConfigError(
                    f"on_event={safe_repr(self.on_event)} is not callable; pass a function of one ConsumerEvent"
                )
            check_function("on_event", self.on_event, "event")

    def _check_order_by(self) -> None:
        key_of = self.order_by
        if key_of is None:
            return
        shown_by = f"order_by={safe_repr(key_of)}"
        if not callable(key_of) and not (isinstance(key_of, str) and key_of == "sharding_key"):
            raise ConfigError(
                f"{shown_by} is not allowed; use 'sharding_key', or a function that returns the key of a message"
            )
        if isinstance(key_of, type):
            raise ConfigError(
                f"{shown_by} is a class, whose objects are mostly all different keys; pass a function that returns the "
                "key of a message"
            )
        if callable(key_of):
            check_function("order_by", key_of, "message")
        if not self.orderly:
            raise ConfigError(f"{shown_by} works with orderly=True only; leave it out, or consume orderly")
        if not self.auto_commit:
            raise ConfigError(
                f"{shown_by} does not work with auto_commit=False, which commits what is consumed of a whole queue; "
                "leave one of them out"
            )

    def _check_claimed_offsets(self) -> None:
        store = safe_repr(self.offset_store)
        if self.order_by is not None:
            raise ConfigError(
                f"order_by={safe_repr(self.order_by)} does not work with offset_store={store}: its order is the "
                "queue's; leave order_by out, or keep offsets at the broker"
            )
        if self.broadcasting:
            raise ConfigError(
                f"offset_store={store} works in a clustering group only, where each queue has one owner; leave "
                "message_model out"
            )
        if not self.orderly or not self.auto_commit:
            raise ConfigError(
                f"offset_store={store} needs orderly=True, with auto_commit: one listener call of a queue at a time, "
                "whose transaction moves the offset"
            )

    def _check_offset_store(self) -> None:
        lacking = [name for name in _STORE_METHODS if not callable(getattr(self.offset_store, name, None))]
        if isinstance(self.offset_store, ClaimedOffsets):
            self._check_claimed_offsets()
        elif self.offset_store is not None and lacking:
            raise ConfigError(
                f"offset_store={safe_repr_unless_secret(self.offset_store)} is not allowed: it has no "
                f"{', '.join(lacking)}; see OffsetStore"
            )
        where = self.offset_store_dir
        if not isinstance(where, str | Path | None) or where == "" or "\0" in str(where):
            raise ConfigError(
                f"offset_store_dir={safe_repr(where, 200)} is not allowed; it must be the path of a directory"
            )

    def for_topic(self, name: str, topic: str) -> int:
        """Return option `name` (one of the per-topic ones) as it holds for `topic`."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            default = next(each.default for each in fields(self) if each.name == name)
            return int(value.get(topic, default))
        return int(value)

    @property
    def most_attempts(self) -> int | None:
        """How often a message may fail before it is given up: 16, or without limit when orderly, unless set."""
        if self.max_reconsume_times is None:
            return None if self.orderly else DEFAULT_MAX_RECONSUME_TIMES
        return self.max_reconsume_times

    @property
    def broadcasting(self) -> bool:
        """Whether every member gets every message."""
        return self.message_model is MessageModel.BROADCASTING
