"""The options of a producer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyrocket_consumer.config.checks import check_group
from pyrocket_consumer.config.client import ClientConfig
from pyrocket_consumer.config.option import MIB, flag, one_of, option, seconds, whole

MAX_MESSAGE_BYTES = 16 * MIB - 128 * 1024  # a frame has 16 MiB


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(ClientConfig):
    """The options of a producer; see `Producer`."""

    group: str = option("DEFAULT_PRODUCER", "the producer group", allowed="1–120 of `a-zA-Z0-9_-%|`")
    send_timeout_s: float = option(3.0, "the deadline of one send with all its attempts", seconds(0.01, 600))
    send_attempts: int = option(
        3,
        "how often a message may reach a broker. A refused attempt does not count. An attempt without a response "
        "counts, because the broker may have stored the message",
        whole(1, 100),
    )
    compress_above_bytes: int = option(
        4096, "bodies of at least this size are compressed", whole(1, 2**31 - 1), allowed="bytes"
    )
    compression: Literal["zlib", "lz4", "zstd"] = option(
        "zlib", "the compression; the others need the extra of the same name", one_of("zlib", "lz4", "zstd")
    )
    max_message_bytes: int = option(
        4 * MIB,
        "the largest body. The producer refuses larger ones",
        whole(1, MAX_MESSAGE_BYTES),
        allowed="bytes, up to 15.875 MiB",
    )
    max_in_flight_messages: int = option(
        4096, "the number of unfinished sends at which `send_async` waits", whole(1, 10_000_000), allowed="messages"
    )
    max_in_flight_bytes: int = option(
        64 * MIB, "the size of unfinished sends at which `send_async` waits", whole(1, 1 << 40), allowed="bytes"
    )
    auto_create_topic: bool = option(
        False, "send to a topic that does not exist yet, if brokers create topics on demand", flag()
    )
    accept_degraded: bool = option(
        True,
        'count "stored, but not flushed or replicated in time" as stored; `SendResult.status` shows it. With `False` '
        "the producer tries another broker, or raises `SendError`, and the message may be stored twice",
        flag(),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
