"""The minimum of a Python client that gets messages: pull, and count the records by their lengths."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import orjson

from pyrocket_consumer.cluster.pull_core import PullTemplate, pull_header
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.frame import MAX_FRAME_BYTES

_PREFIX = struct.Struct(">II")
_LENGTH = struct.Struct(">I")


def raw_pull(
    address: str,
    broker_name: str,
    group: str,
    topic: str,
    queues: int,
    pull_batch: int,
    total: int,
    on_count: Callable[[int], object],
    timeout_s: float = 30.0,
) -> None:
    """Pull `total` messages from the first offset on over one connection, with one pull in progress per queue.

    `on_count` is called with the number of messages so far, about a hundred times.

    Raises:
        TimeoutError: no response arrived for `timeout_s`, because the topic has fewer messages.
        ConnectionError: the broker closed the connection or refused a pull.
    """
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pulls = [
        PullTemplate(pull_header(group, queue, 0, pull_batch, Subscription(topic)).to_fields()).encode
        for queue in (MessageQueue(topic, broker_name, queue_id) for queue_id in range(queues))
    ]
    # The opaque is the queue id, because one pull of each queue is in progress.
    connection.sendall(b"".join(pull(0, queue_id) for queue_id, pull in enumerate(pulls)))
    buffer = bytearray(2 * MAX_FRAME_BYTES)
    view, start, end = memoryview(buffer), 0, 0
    count, next_look, step = 0, 0, max(total // 100, 1)
    prefix, length_at, load = _PREFIX.unpack_from, _LENGTH.unpack_from, orjson.loads
    while count < total:
        received = connection.recv_into(view[end : end + 1024 * 1024])
        if not received:
            raise ConnectionResetError("the broker closed the connection")
        end += received
        bodies, again = [], []
        while end - start >= 8:
            size, word = prefix(buffer, start)
            stop = start + 4 + size
            if stop > end:
                break
            body = start + 8 + (word & 0xFFFFFF)
            answer = load(view[start + 8 : body])
            if answer["code"] == ResponseCode.SUCCESS:
                queue_id, following = answer["opaque"], int(answer["extFields"]["nextBeginOffset"])
                again.append(pulls[queue_id](following, queue_id))
                bodies.append((body, stop))
            elif answer["code"] != ResponseCode.PULL_NOT_FOUND:  # it is the end of that queue
                raise ConnectionAbortedError(f"a pull was answered {answer['code']}: {answer.get('remark')}")
            start = stop
        if again:
            connection.sendall(b"".join(again))
        for place, stop in bodies:
            while place < stop:
                place += length_at(buffer, place)[0]
                count += 1
        if start == end:
            start = end = 0
        elif end > MAX_FRAME_BYTES:
            view[: end - start] = bytes(view[start:end])
            start, end = 0, end - start
        if count >= next_look:
            on_count(count)
            next_look = count + step
    on_count(count)
    connection.close()
