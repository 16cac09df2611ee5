"""A broker that stores nothing. It repeats one recorded response to every send, so that only the sender is measured.

An embedded cluster behind it serves all other requests. As a program:
python -m benchmarks.send_replies TOPIC QUEUES
prints the address of the name server, and runs until standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
import threading

import orjson

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import SendMessageHeader
from pyrocket_consumer.protocol.frame import RemotingCommand, decode_command, encode_command
from pyrocket_consumer.testing import EmbeddedCluster
from tests.real_brokers.remoting import Peer

SEND = int(RequestCode.SEND_MESSAGE_V2)
_OPAQUE_MARKER = 4_200_000_042  # the placeholder for the opaque in the recorded response


class Replies(asyncio.Protocol):
    """One connection. `behind` serves all requests except sends. Routes get the address of this server."""

    def __init__(self, behind: Peer, recorded: tuple[bytes, bytes], replace: tuple[bytes, bytes]) -> None:
        self._behind, self._recorded, self._replace = behind, recorded, replace
        self._buffer = bytearray()
        self.sends = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer, (head, tail), at, answers = self._buffer, self._recorded, 0, list[bytes]()
        buffer += data
        while len(buffer) - at >= 8:
            end = at + 4 + int.from_bytes(buffer[at : at + 4])
            if end > len(buffer):
                break
            header = orjson.loads(buffer[at + 8 : at + 8 + int.from_bytes(buffer[at + 5 : at + 8])])
            if header["code"] == SEND:
                answer = b"%b%d%b" % (head, header["opaque"], tail)
                answers.append((len(answer) + 4).to_bytes(4) + len(answer).to_bytes(4) + answer)
            elif not header.get("flag", 0) & 2:
                answers.append(self._ask(decode_command(bytes(buffer[at:end]))))
            at = end
        del buffer[:at]
        if answers:
            self._transport.write(b"".join(answers))

    def _ask(self, request: RemotingCommand) -> bytes:
        answer = self._behind.call(request.code, request.fields, request.body, accept=range(1 << 16))
        body = answer.body.replace(*self._replace)
        return encode_command(
            RemotingCommand(answer.code, answer.fields, body, request.opaque, flag=1, remark=answer.remark)
        )


def record(broker: Peer, topic: str) -> tuple[bytes, bytes]:
    """Return the header of the response to a real send, before and after the opaque."""
    header = SendMessageHeader("bench", topic, queue_id=0, born_timestamp=1, properties="UNIQ_KEY\x01A\x02")
    answer = broker.call(SEND, header.to_fields(), b"-")
    frame = encode_command(RemotingCommand(answer.code, answer.fields, b"", _OPAQUE_MARKER, flag=1))
    head, _, tail = frame[8:].partition(str(_OPAQUE_MARKER).encode())
    assert tail, "the recorded answer has no opaque"
    return head, tail


async def serve(cluster: EmbeddedCluster, topic: str, ended: threading.Event) -> None:
    broker = cluster.brokers[0]
    recorded = record(Peer(broker.address), topic)
    loop, replace = asyncio.get_running_loop(), [broker.address.encode()]
    sends = await loop.create_server(
        lambda: Replies(Peer(broker.address), recorded, (replace[0], replace[0])), "127.0.0.1", 0
    )
    replace.append(b"127.0.0.1:%d" % sends.sockets[0].getsockname()[1])
    names = await loop.create_server(
        lambda: Replies(Peer(cluster.name_server), recorded, (replace[0], replace[1])), "127.0.0.1", 0
    )
    sys.stdout.write(f"127.0.0.1:{names.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(ended.wait)
    sends.close()
    names.close()


def main(topic: str, queues: str) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with EmbeddedCluster(record_limit=0) as cluster:
        cluster.create_topic(topic, queues=int(queues))
        asyncio.run(serve(cluster, topic, ended))


if __name__ == "__main__":
    main(*sys.argv[1:])
