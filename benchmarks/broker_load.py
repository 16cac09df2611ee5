"""Messages for consumers under test: a backlog written as fast as the broker accepts it, or a steady flow.

As a program: python -m benchmarks.broker_load ADDRESS TOPIC QUEUES RATE SECONDS sends the steady flow.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import SendMessageHeader
from pyrocket_consumer.protocol.frame import FrameBuffer, RemotingCommand, encode_command
from pyrocket_consumer.protocol.ids import UniqueIds
from pyrocket_consumer.protocol.message import BatchItem, encode_batch, encode_properties

BODY_BYTES = 1024
BATCH_MESSAGES = 256
BATCHES_UNDER_WAY = 4
FLOW_BODY = struct.Struct(f">q{BODY_BYTES - 8}x")
"""The body in the steady flow: the send time (nanoseconds since the epoch), then padding."""


class Sender:
    """Sends to one broker over one connection. It counts responses, but does not wait for each."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = FrameBuffer()
        self.under_way = 0

    def send(self, topic: str, queue_id: int, body: bytes, properties: str, *, batch: bool = False) -> None:
        """Write one request. The body of a batch comes from `encode_batch`."""
        code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
        header = SendMessageHeader(
            "pyrocket-bench",
            topic,
            queue_id=queue_id,
            born_timestamp=time.time_ns() // 1_000_000,
            properties=properties,
            batch=batch,
        )
        self._socket.sendall(encode_command(RemotingCommand(code, header.to_fields(), body, self.under_way + 1)))
        self.under_way += 1

    def read_responses(self, *, wait: bool) -> None:
        """Read the responses that have arrived; with `wait` at least one.

        Raises:
            ConnectionError: the broker closed the connection or refused a message.
        """
        self._socket.settimeout(30.0 if wait else 0.0)
        try:
            received = self._socket.recv_into(self._frames.space())
        except BlockingIOError:
            return
        finally:
            self._socket.settimeout(30.0)
        if not received:
            raise ConnectionResetError("the broker closed the connection")
        for answer in self._frames.read_commands(received):
            if answer.code != 0:
                raise ConnectionAbortedError(f"the broker answered a send with {answer.code}: {answer.remark}")
            self.under_way -= 1

    def close(self) -> None:
        while self.under_way:
            self.read_responses(wait=True)
        self._socket.close()


def fill(address: str, topic: str, queues: int, messages: int, keys: int = 0) -> None:
    """Store `messages` messages of BODY_BYTES with five properties, evenly over the queues, and wait for the responses.

    Each queue has its share of `keys` sharding keys. With 0, messages have no key.
    """
    sender = Sender(address)
    per_queue, rest = divmod(messages, queues)
    left = [per_queue + (queue_id < rest) for queue_id in range(queues)]
    wholes = [encode_batch(_items(BATCH_MESSAGES, _keys_of(queue_id, queues, keys))) for queue_id in range(queues)]
    properties = encode_properties({"UNIQ_KEY": "0" * 32, "WAIT": "true"})
    while any(left):
        for queue_id in range(queues):
            count = min(left[queue_id], BATCH_MESSAGES)
            if count:
                is_whole = count == BATCH_MESSAGES
                some = _keys_of(queue_id, queues, keys)
                body = wholes[queue_id] if is_whole else encode_batch(_items(count, some))
                sender.send(topic, queue_id, body, properties, batch=True)
                left[queue_id] -= count
            while sender.under_way >= BATCHES_UNDER_WAY:
                sender.read_responses(wait=True)
    sender.close()


def _keys_of(queue_id: int, queues: int, keys: int) -> list[str]:
    return [f"key-{number}" for number in range(queue_id, keys, queues)]


def _items(count: int, keys: Sequence[str] = ()) -> Iterator[BatchItem]:
    ids = UniqueIds("127.0.0.1", 1)
    body = bytes(range(256)) * (BODY_BYTES // 256)
    for number in range(count):
        properties = {
            "UNIQ_KEY": ids.next(),
            "KEYS": f"order-{number}",
            "TAGS": "paid",
            "region": "eu",
            "customer": f"{number:08d}",
        }
        if keys:
            properties["__SHARDINGKEY"] = keys[number % len(keys)]
        yield BatchItem(body, properties)


def flow(address: str, topic: str, queues: int, rate: float, seconds: float) -> int:
    """Send `rate` messages a second, one by one, round-robin over the queues. Return their number."""
    sender = Sender(address)
    count = round(rate * seconds)
    began = time.perf_counter()
    for number in range(count):
        ahead_s = began + number / rate - time.perf_counter()
        if ahead_s > 0:
            time.sleep(ahead_s)
        sender.send(topic, number % queues, FLOW_BODY.pack(time.time_ns()), encode_properties({"TAGS": "paid"}))
        sender.read_responses(wait=False)
    sender.close()
    return count


if __name__ == "__main__":
    flow(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
