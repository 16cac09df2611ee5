"""The options as keyword arguments. Made by `python -m tests.options --write`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from ssl import SSLContext
from typing import Literal, TypedDict

from pyrocket_consumer.config.consumer import Allocation, OrderBy, PerTopic
from pyrocket_consumer.model import ClaimedOffsets, ConsumerEvent, MessageModel, OffsetStore


class ClientOptions(TypedDict, total=False):
    """The fields of `ClientConfig` as keyword arguments."""

    client_ip: str | None
    instance_name: str
    unit_name: str | None
    namespace: str | None
    access_key: str | None
    secret_key: str | None
    security_token: str | None
    tls: bool | SSLContext
    allowed_addresses: str | Iterable[str] | None
    call_timeout_s: float
    connect_timeout_s: float
    heartbeat_interval_s: float
    route_refresh_interval_s: float
    max_frame_bytes: int


class ConsumerOptions(ClientOptions, total=False):
    """The fields of `ConsumerConfig` as keyword arguments."""

    message_model: MessageModel | Literal["clustering", "broadcasting"]
    orderly: bool
    order_by: OrderBy | None
    consume_from: Literal["first", "earliest", "last", "latest"] | str | datetime
    consume_threads: int
    listener_batch_size: int
    pull_batch_size: PerTopic
    max_cached_messages: PerTopic
    max_cached_bytes: PerTopic
    max_body_bytes: int
    max_span: int
    commit_interval_s: float
    rebalance_interval_s: float
    max_reconsume_times: int | None
    auto_commit: bool
    consume_timeout_s: float
    start_wait_s: float
    shutdown_timeout_s: float
    pull_hold_s: float
    pull_retry_delay_s: float
    allocation: Allocation
    offset_store: OffsetStore | ClaimedOffsets | None
    offset_store_dir: str | Path | None
    durability: Literal["fsync", "process", "checkpoint"]
    on_unreadable_store: Literal["raise", "backup", "start_over"]
    remote_reset: Literal["accept", "refuse"]
    reset_record_interval_s: float
    server_messages: bool
    on_event: Callable[[ConsumerEvent], None] | None


class ProducerOptions(ClientOptions, total=False):
    """The fields of `ProducerConfig` as keyword arguments."""

    send_timeout_s: float
    send_attempts: int
    compress_above_bytes: int
    compression: Literal["zlib", "lz4", "zstd"]
    max_message_bytes: int
    max_in_flight_messages: int
    max_in_flight_bytes: int
    auto_create_topic: bool
    accept_degraded: bool
