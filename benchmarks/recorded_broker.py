"""A name server and a broker in one process that serve pulls from memory, so that the client is the limit.

As a program: python -m benchmarks.recorded_broker MESSAGES_PER_QUEUE MAX_PER_PULL prints its address and serves until
its standard input ends. Every queue of every topic holds the same records; `topic-16` has 16 queues. A topic whose name
begins with `flow-` gets one more message with each request for its last offset.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import orjson

from benchmarks.broker_load import BODY_BYTES
from pyrocket_consumer.model import MASTER_ID, BrokerData, QueueData, TopicRoute
from pyrocket_consumer.protocol.bodies import encode_route
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.ids import UniqueIds
from pyrocket_consumer.protocol.message import StoredMessage, encode_message

BROKER_NAME = "broker-a"
FLOW = "flow-"

_PREFIX = struct.Struct(">II")
_HEADER = (
    b'{"code":%d,"extFields":{%b},"flag":1,"language":"JAVA","opaque":%d,"remark":"%b",'
    b'"serializeTypeCurrentRPC":"JSON","version":513}'
)
OFFSET_FIELDS = b'"nextBeginOffset":"%d","maxOffset":"%d","minOffset":"0","suggestWhichBrokerId":"0"'
_MAX_PARTS = 512  # of one sendmsg; the system allows 1024


def recorded(count: int) -> list[bytes]:
    """Return `count` records with bodies of BODY_BYTES and seven properties, in the format of a queue."""
    ids = UniqueIds("127.0.0.1", 1)
    body = bytes(range(256)) * (BODY_BYTES // 256)
    return [
        encode_message(
            StoredMessage(
                topic="orders",
                body=body,
                properties=(
                    f"UNIQ_KEY\x01{ids.next()}\x02KEYS\x01order-{number}\x02TAGS\x01paid\x02region\x01eu\x02"
                    f"customer\x01{number:08d}\x02WAIT\x01true\x02CLUSTER\x01DefaultCluster"
                ),
                queue_offset=number,
                commit_log_offset=number * 1300,
                born_at_ms=1_700_000_000_000 + number,
                born_host=f"10.0.0.{number % 4 + 1}:50000",
                stored_at_ms=1_700_000_000_005 + number,
                store_host="10.0.0.9:10911",
                body_crc=0,
            )
        )
        for number in range(count)
    ]


class RecordedBroker:
    """Serves one port from one thread."""

    def __init__(self, records: Iterable[bytes], max_per_pull: int) -> None:
        records = list(records)
        self._ends = list(itertools.accumulate(map(len, records), initial=0))
        self._log = memoryview(b"".join(records))
        self._most_per_pull = max_per_pull
        self._flow: dict[str, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self, until: socket.socket | int) -> None:
        """Serve until `until` is readable."""
        self._selector.register(until, selectors.EVENT_READ)
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._listener:
                    peer, _ = self._listener.accept()
                    peer.setblocking(False)
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
                    self._selector.register(peer, selectors.EVENT_READ, _Peer(peer))
                elif key.data is None:
                    return
                else:
                    self._attend(key.data, events)

    def _attend(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for code, fields, opaque in peer.requests():
                    peer.out += self._answer(code, fields, opaque)
            peer.send()
        except OSError:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if wanted != peer.events:
            peer.events = wanted
            self._selector.modify(peer.socket, wanted, peer)

    def _answer(self, code: int, fields: dict[str, str], opaque: int) -> tuple[bytes | memoryview, ...]:
        if code == RequestCode.PULL_MESSAGE:
            return self._pulled(fields, opaque)
        if code == RequestCode.GET_MAX_OFFSET:
            return frame(opaque, b'"offset":"%d"' % self._last(fields["topic"]))
        if code == RequestCode.GET_MIN_OFFSET:
            return frame(opaque, b'"offset":"0"')
        if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            topic = fields["topic"]
            broker = BrokerData("DefaultCluster", BROKER_NAME, {MASTER_ID: self.address})
            count = topic.rpartition("-")[2]
            if not count.isdecimal():
                return frame(opaque, code=ResponseCode.TOPIC_NOT_EXIST)
            queues = int(count)
            route = TopicRoute(topic, (QueueData(BROKER_NAME, queues, queues),), (broker,))
            return frame(opaque, body=encode_route(route))
        return frame(opaque)

    def _last(self, topic: str) -> int:
        if topic.startswith(FLOW):
            self._flow[topic] = self._flow.get(topic, 0) + 1
            return self._flow[topic]
        return len(self._ends) - 1

    def _pulled(self, fields: dict[str, str], opaque: int) -> tuple[bytes | memoryview, ...]:
        offset, last = int(fields["queueOffset"]), len(self._ends) - 1
        end = min(offset + min(int(fields["maxMsgNums"]), self._most_per_pull), last)
        if offset >= last:
            return frame(opaque, OFFSET_FIELDS % (last, last), code=ResponseCode.PULL_NOT_FOUND)
        body = self._log[self._ends[offset] : self._ends[end]]
        return frame(opaque, OFFSET_FIELDS % (end, last), body, remark=b"FOUND")


class _Peer:
    """One connection, with the received part of a request and the unsent part of responses."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.events = selectors.EVENT_READ
        self.out: deque[bytes | memoryview] = deque()
        self._came = bytearray()

    def requests(self) -> list[tuple[int, dict[str, str], int]]:
        """Return code, fields and opaque of the received requests.

        Raises:
            ConnectionError: the client has closed the connection.
        """
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError
        self._came += data
        found, place = [], 0
        while len(self._came) - place >= 8:
            size, word = _PREFIX.unpack_from(self._came, place)
            if len(self._came) - place < 4 + size:
                break
            command = orjson.loads(self._came[place + 8 : place + 8 + (word & 0xFFFFFF)])
            found.append((command["code"], command.get("extFields") or {}, command["opaque"]))
            place += 4 + size
        del self._came[:place]
        return found

    def send(self) -> None:
        """Send as much as possible."""
        out = self.out
        while out:
            try:
                sent = self.socket.sendmsg(list(itertools.islice(out, _MAX_PARTS)))
            except BlockingIOError:
                return
            while sent:
                if sent >= len(out[0]):
                    sent -= len(out.popleft())
                else:
                    out[0], sent = memoryview(out[0])[sent:], 0


def frame(
    opaque: int, fields: bytes = b"", body: bytes | memoryview = b"", *, code: int = 0, remark: bytes = b""
) -> tuple[bytes | memoryview, ...]:
    header = _HEADER % (code, fields, opaque, remark)
    start = _PREFIX.pack(4 + len(header) + len(body), len(header)) + header
    return (start, body) if body else (start,)


def main() -> None:
    broker = RecordedBroker(recorded(int(sys.argv[1])), int(sys.argv[2]))
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_bytes(b"".join(recorded(2048)))
    print(broker.address, flush=True)
    broker.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
