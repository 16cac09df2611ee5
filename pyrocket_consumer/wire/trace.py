"""The text of message trace records, which are ordinary messages to the trace topic. Source: TraceDataEncoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
TRACE_PRODUCER_GROUP = "_INNER_TRACE_PRODUCER"

SUCCESS, TIME_OUT, EXCEPTION, RETURN_NULL, FAILED = range(5)
"""Context codes: how consuming ended."""


class TracedMessage(NamedTuple):
    """What a trace tells of one message; `keys` are joined by spaces."""

    message_id: str
    keys: str = ""
    reconsume_times: int = 0


def encode_sub_before(
    messages: Iterable[TracedMessage], *, request_id: str, group: str, region: str, timestamp_ms: int
) -> str:
    """Return the records that say consuming begins. `request_id` is fresh per call of a listener."""
    return "".join(
        _record(
            "SubBefore", timestamp_ms, region, group, request_id, each.message_id, each.reconsume_times, _keys(each)
        )
        for each in messages
    )


def encode_sub_after(
    messages: Sequence[TracedMessage],
    *,
    request_id: str,
    group: str,
    elapsed_ms: int,
    success: bool,
    context_code: int,
    timestamp_ms: int,
) -> str:
    """Return the records that say consuming ended; the time taken is shared among the messages."""
    cost_ms = elapsed_ms // max(len(messages), 1)
    outcome = "true" if success else "false"
    return "".join(
        _record(
            "SubAfter", request_id, each.message_id, cost_ms, outcome, _keys(each), context_code, timestamp_ms, group
        )
        for each in messages
    )


def _keys(message: TracedMessage) -> str:
    return message.keys or "null"  # readers drop a trailing empty field and then index by position


def _record(*parts: str | int) -> str:
    return "\x01".join(map(str, parts)) + "\x02"
