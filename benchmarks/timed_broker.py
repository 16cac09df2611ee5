"""A name server and a broker in one process with any number of small messages, which it makes when they are pulled.

As a program: python -m benchmarks.timed_broker MESSAGES_PER_QUEUE STEP_MS prints its address and serves until its
standard input ends. Every queue of every topic has a message each `STEP_MS` milliseconds from FIRST_MS on.
`topic-16` has 16 queues.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.recorded_broker import OFFSET_FIELDS, RecordedBroker, frame
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.message import StoredMessage, encode_message

FIRST_MS = 1_767_225_600_000
"""The store time of the first message of each queue."""

MAX_PER_PULL = 32
"""The default of brokers."""

_QUEUE_OFFSET, _STORED_AT = 20, 56  # their positions in a record


class TimedBroker(RecordedBroker):
    """Serves one port from one thread."""

    def __init__(self, per_queue: int, step_ms: int) -> None:
        super().__init__((), MAX_PER_PULL)
        self._per_queue, self._step_ms = per_queue, step_ms
        record = encode_message(
            StoredMessage(
                topic="orders",
                body=b"a small body",
                properties="TAGS\x01paid\x02",
                queue_offset=0,
                commit_log_offset=0,
                born_at_ms=FIRST_MS,
                born_host="10.0.0.1:50000",
                stored_at_ms=0,
                store_host="10.0.0.9:10911",
                body_crc=0,
            )
        )
        self._records = np.tile(np.frombuffer(record, np.uint8), (MAX_PER_PULL, 1))

    def _last(self, topic: str) -> int:
        return self._per_queue

    def _answer(self, code: int, fields: dict[str, str], opaque: int) -> tuple[bytes | memoryview, ...]:
        if code == RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
            place = -(-(int(fields["timestamp"]) - FIRST_MS) // self._step_ms)
            return frame(opaque, b'"offset":"%d"' % min(max(place, 0), self._per_queue))
        return super()._answer(code, fields, opaque)

    def _pulled(self, fields: dict[str, str], opaque: int) -> tuple[bytes | memoryview, ...]:
        offset, last = int(fields["queueOffset"]), self._per_queue
        end = min(offset + min(int(fields["maxMsgNums"]), MAX_PER_PULL), last)
        if offset >= last:
            return frame(opaque, OFFSET_FIELDS % (last, last), code=ResponseCode.PULL_NOT_FOUND)
        offsets, records = np.arange(offset, end), self._records[: end - offset]
        for place, values in ((_QUEUE_OFFSET, offsets), (_STORED_AT, FIRST_MS + offsets * self._step_ms)):
            records[:, place : place + 8] = values.astype(">i8").view(np.uint8).reshape(-1, 8)
        return frame(opaque, OFFSET_FIELDS % (end, last), records.tobytes(), remark=b"FOUND")


def main() -> None:
    broker = TimedBroker(int(sys.argv[1]), int(sys.argv[2]))
    print(broker.address, flush=True)
    broker.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
