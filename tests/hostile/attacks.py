"""Attacks of a malicious server, one class each, by name in `ATTACKS`."""

from __future__ import annotations

import asyncio
import json
import struct
from functools import cache

from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.protocol.compression import Compression, compress
from pyrocket_consumer.protocol.frame import RESPONSE_FLAG, RemotingCommand, encode_command
from pyrocket_consumer.protocol.message import BatchItem, StoredMessage, encode_batch, encode_message
from tests.hostile.server import Attack, Peer, Response, found_nothing, now_ms, pulled, queue_data, route

PAUSE_S = 0.02
PULLS = (RequestCode.PULL_MESSAGE,)
MiB = 1 << 20

GROUP = "hostile-group"
TOPIC = "hostile-topic"


def frame(header: bytes, body: bytes = b"", header_type: int = 0) -> bytes:
    """Return a frame around any bytes."""
    return struct.pack(">II", 4 + len(header) + len(body), header_type << 24 | len(header)) + header + body


def raw_response(command: RemotingCommand, ext_fields: bytes, code: int = 0) -> bytes:
    header = b'{"code":%d,"flag":1,"language":"JAVA","opaque":%d,"version":401,"extFields":' % (code, command.opaque)
    return frame(header + ext_fields + b"}")


def record(offset: int, body: bytes, flags: int = 0, topic: str = TOPIC, queue_id: int = 0) -> bytes:
    return encode_message(
        StoredMessage(topic, body, {"TAGS": "A"}, queue_id=queue_id, queue_offset=offset, sys_flag=flags)
    )


# --- headers and bodies


class DeepHeader(Attack):
    """JSON nested a thousand times in the header of every response."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return raw_response(command, b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}")


class DeeperHeader(Attack):
    """The same, never closed, and longer."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return frame(b'{"code":0,"extFields":{"a":' + b"[" * 200_000)


class DeepBody(Attack):
    """Deeply nested JSON in every response body."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return command.make_response(body=b'{"consumerIdList":' * 300 + b"[" * 900)


class SlowJson(Attack):
    """6 MB of a JSON dialect that only the slow reader accepts, as a response and as a request."""

    BODY = b"{" + b'{"brokerName":"b","queueId":1,"topic":"T"}:1,' * 130_000 + b"0:1}"

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        honest = command.code in (RequestCode.PULL_MESSAGE, RequestCode.HEART_BEAT)
        return NotImplemented if honest else command.make_response(body=self.BODY)

    async def act_on(self, peer: Peer) -> None:
        while True:
            body = b'{"offsetTable":' + self.BODY + b"}"
            peer.ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, reset_fields(), body, flag=2)
            await asyncio.sleep(2)


class Garbage(Attack):
    """Bytes that are not a frame."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10


class LongLength(Attack):
    """A frame with a length of 16 MiB, sent in small parts with long pauses."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return None

    async def act_on(self, peer: Peer) -> None:
        peer.send(struct.pack(">II", 16 * MiB - 8, 200) + b"{")
        while True:
            peer.send(b" " * 100)
            await asyncio.sleep(0.2)


class LongRemarks(Attack):
    """Errors of 200 KB that look like coloured log lines."""

    REMARK = "no\r\n2026-01-01 ERROR pyrocket_consumer forged line \x1b[2J\x9b31m" * 3500

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return command.make_response(ResponseCode.SYSTEM_ERROR, self.REMARK)


class Silence(Attack):
    """No response to any request."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return None


class Twice(Attack):
    """Every response three times, and responses without a request."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        if command.code == RequestCode.PULL_MESSAGE:
            one = encode_command(found_nothing(command))
        else:
            one = encode_command(command.make_response(fields={"offset": "0"}, body=b'{"consumerIdList":[]}'))
        unasked = (RemotingCommand(0, {}, b"x" * 1000, number, RESPONSE_FLAG) for number in range(9000, 9100))
        return [one, one, one, *map(encode_command, unasked)]


# --- responses to pulls


class NextOffset(Attack):
    """A next offset outside the range of queues."""

    VALUES = (2**63, 2**64, -1, -(2**63), 2**63 - 1, 10**30, 100_000)
    CODES = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_RETRY_IMMEDIATELY)
    codes = PULLS

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        value = self.VALUES[self.turn % len(self.VALUES)]
        return pulled(command, self.CODES[self.turn % 3], nextBeginOffset=value)


class AbsurdOffsets(Attack):
    """Committed, first and last offsets outside the range of queues."""

    codes = (RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET)

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return command.make_response(fields={"offset": str((2**63, -5, 10**25)[command.opaque % 3])})


class Moved(Attack):
    """Every pull response moves the offset further."""

    codes = PULLS

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        here = int(command.fields["queueOffset"])
        return pulled(command, ResponseCode.PULL_OFFSET_MOVED, nextBeginOffset=here + 1, maxOffset=here + 1000)


class ResetEndlessly(Attack):
    """Every pull response reports a reset."""

    codes = PULLS

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        moved = ResponseCode.PULL_OFFSET_MOVED
        return pulled(command, moved, remark="OFFSET_RESET", nextBeginOffset=command.opaque % 10)


class NothingAtOnce(Attack):
    """Pulls return at once without messages."""

    codes = PULLS

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return found_nothing(command)


class FoundNothing(Attack):
    """The header reports found messages, but the body is empty and the next offset unchanged."""

    codes = PULLS

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return pulled(command, 0)


class Found(Attack):
    """Responds to pulls with records."""

    codes = PULLS

    def records(self, offset: int, queue_id: int) -> bytes:
        raise NotImplementedError

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        here = int(command.fields["queueOffset"])
        body = self.records(here, int(command.fields["queueId"]))
        return pulled(command, 0, body, nextBeginOffset=here + 32, maxOffset=here + 1_000_000)


@cache
def bomb(mebibytes: int) -> tuple[bytes, int]:
    body, flags = compress(bytes(mebibytes * MiB), Compression.ZSTD)
    return body, int(flags)


class Bombs(Found):
    """32 messages of a few KB, each 60 MiB when decompressed."""

    unpacked = 60

    def records(self, offset: int, queue_id: int) -> bytes:
        body, flags = bomb(self.unpacked)
        return b"".join(record(offset + number, body, flags, queue_id=queue_id) for number in range(32))


class LargerBombs(Bombs):
    """The same, each of 200 MiB, which is above the limit of a body."""

    unpacked = 200


@cache
def inner(items: int) -> tuple[bytes, int]:
    one = encode_batch([BatchItem(b"", {})])
    body, flags = compress(one * items, Compression.ZSTD)
    return body, int(flags | SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)


class InnerBatches(Found):
    """8 records of 3 KB that contain 610 000 messages each."""

    def records(self, offset: int, queue_id: int) -> bytes:
        body, flags = inner(610_000)
        return b"".join(record(offset + number, body, flags, queue_id=queue_id) for number in range(8))


class ManyRecords(Found):
    """15 MiB of the smallest records."""

    ONE = encode_message(StoredMessage(TOPIC, b"", {}, queue_offset=0))

    def records(self, offset: int, queue_id: int) -> bytes:
        return self.ONE * (15 * MiB // len(self.ONE))


class StrangeRecords(Found):
    """Records of other queues and topics, at absurd offsets, twice, backwards."""

    def records(self, offset: int, queue_id: int) -> bytes:
        return b"".join(
            record(index, b"x", topic=topic, queue_id=queue)
            for index in (2**63 - 1, -(2**63), offset, offset, 0, 2**62)
            for topic in (TOPIC, "other")
            for queue in (queue_id, -1, 2**31 - 1)
        )


class DamagedRecords(Found):
    """Records with wrong lengths."""

    def records(self, offset: int, queue_id: int) -> bytes:
        good = bytearray(record(offset, b"x" * 100, queue_id=queue_id))
        good[84:88] = b"\x7f\xff\xff\xff"
        return bytes(good) * 10


# --- requests of a server


def reset_fields(topic: str = TOPIC) -> dict[str, str]:
    return {"topic": topic, "group": GROUP, "timestamp": "0", "isForce": "true"}


class Flood(Attack):
    """An endless stream of all kinds of requests that servers may send."""

    async def act_on(self, peer: Peer) -> None:
        number = 0
        body = json.dumps({"offsetTable": {}}).encode()
        while True:
            for _ in range(200):
                number += 1
                peer.ask(40, {"consumerGroup": GROUP}, flag=2 * (number & 1))
                peer.ask(220, reset_fields(), body)
                peer.ask(221, {"topic": TOPIC, "group": GROUP})
                peer.ask(307, {"consumerGroup": GROUP, "clientId": peer.client_id, "jstackEnable": "true"})
                peer.ask(309, {"consumerGroup": GROUP, "clientId": peer.client_id}, record(0, b"not a message"))
                peer.ask(39, {"tranStateTableOffset": "0", "commitLogOffset": "0"}, record(0, b"x"))
                peer.ask(29_999, {"x": "y"})
            await asyncio.sleep(PAUSE_S)


class LongRequests(Attack):
    """Requests of megabytes."""

    async def act_on(self, peer: Peer) -> None:
        while True:
            for code in (220, 307, 309, 40):
                fields = reset_fields() | {"consumerGroup": GROUP, "clientId": peer.client_id, "pyrocketOp": "reset"}
                peer.ask(code, fields, b"[" * (12 * MiB))
            await asyncio.sleep(1)


class Plans(Attack):
    """Reset plans with absurd epochs, foreign topics, and queues that do not exist."""

    async def act_on(self, peer: Peer) -> None:
        turn = 0
        while True:
            for epoch in (2**63 - 1, 2**62, now_ms() * 1000, 1):
                turn += 1
                topic = (TOPIC, "never-heard-of", "%RETRY%" + GROUP)[turn % 3]
                targets = {"broker-x": {str(each): 7 for each in range(3000)}}
                body = json.dumps({"topic": topic, "epoch": epoch, "targets": targets}).encode()
                fields = {
                    "consumerGroup": GROUP,
                    "clientId": peer.client_id,
                    "pyrocketOp": "reset",
                    "pyrocketId": str(turn),
                    "pyrocketV": "1",
                    "jstackEnable": "false",
                }
                peer.ask(307, fields, body)
                peer.ask(307, fields | {"pyrocketOp": "status"}, body)
            await asyncio.sleep(PAUSE_S)


class Resets(Attack):
    """Resets of queues that do not exist, to impossible offsets."""

    async def act_on(self, peer: Peer) -> None:
        while True:
            table = ",".join(
                f'{{"brokerName":"{broker}","queueId":{queue},"topic":"{TOPIC}"}}:{offset}'
                for broker in ("broker-hostile", "elsewhere")
                for queue in (0, 99, -1)
                for offset in (2**63, -1, 2**62)
            )
            peer.ask(220, reset_fields(), b'{"offsetTable":{' + table.encode() + b"}}", flag=2)
            await asyncio.sleep(PAUSE_S)


# --- routes and members


class Routes(Attack):
    """Routes with very many queues, and with invalid addresses."""

    at_name_server = True
    codes = (RequestCode.GET_ROUTEINFO_BY_TOPIC,)

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        strange = "file:///etc/passwd", "127.0.0.1:99999999", "\x1b[2J:1", "x" * MiB + ":1", "169.254.169.254:80", ""
        address = strange[self.turn % len(strange)]
        brokers = [{"cluster": "c", "brokerName": "b", "brokerAddrs": {"0": address}}] * 1000
        return command.make_response(body=route([queue_data("b", 2**31 - 1)], brokers))


class Members(Attack):
    """A list of a hundred thousand members that do not exist."""

    BODY = json.dumps({"consumerIdList": [f"10.0.0.{number}@{'x' * 50}" for number in range(100_000)]}).encode()
    codes = (RequestCode.GET_CONSUMER_LIST_BY_GROUP,)

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        return command.make_response(body=self.BODY)


class MembersThatChange(Attack):
    """A different member list in every response: the member alone, twice, with others, missing."""

    codes = (RequestCode.GET_CONSUMER_LIST_BY_GROUP,)

    async def act_on(self, peer: Peer) -> None:
        while True:
            peer.ask(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": GROUP}, flag=2)
            await asyncio.sleep(PAUSE_S)

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        me, other = peer.client_id, "0" if self.turn & 1 else "\U0010ffff"
        strange = [me, None, 5, [], {}]
        lists: tuple[object, ...] = ([me], [me, me, other], [other], [], strange, None, [other, me, "\n\0"])
        return command.make_response(body=json.dumps({"consumerIdList": lists[self.turn % len(lists)]}).encode())


class RoutesThatChange(Attack):
    """A different route in every response: queues and addresses of brokers change, and two brokers have one name."""

    at_name_server = True
    codes = (RequestCode.GET_ROUTEINFO_BY_TOPIC,)

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        names = ("\n\x1b[2J", "b" * 65_536, "..", "/etc/passwd", "\0", "\u202e", "a@b%DLQ%")
        name = names[self.turn % len(names)]
        datas = [queue_data(name, queues) for queues in (4, self.turn % 9)]
        brokers = [
            {"cluster": name, "brokerName": name, "brokerAddrs": {str(number): f"127.0.0.1:{number + 1}"}}
            for number in (0, self.turn % 50, -1, 2**63)
        ]
        return command.make_response(body=route(datas, brokers))


class OneResponse(Attack):
    """Each connection is closed after one response."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        asyncio.get_running_loop().call_later(PAUSE_S, peer.writer.close)
        return NotImplemented


class Drops(Attack):
    """Responses are sent one byte at a time."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        whole = encode_command(found_nothing(command))

        async def drop() -> None:
            for index in range(len(whole)):
                peer.send(whole[index : index + 1])
                await asyncio.sleep(0)

        self.task = asyncio.get_running_loop().create_task(drop())
        return None


class LongNames(Attack):
    """Control characters in all fields of all responses, and long texts of them in bodies."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        text = "\n\r\x1b[2J\0\u202e\u2028" * 8192
        names = ("offset", "nextBeginOffset", "minOffset", "maxOffset", "suggestWhichBrokerId", "msgId", text[:2000])
        body = json.dumps({text: text, "consumerIdList": [text]}).encode()
        return command.make_response(0, text[:8000], dict.fromkeys(names, text[:2000]), body)


class StrangeCommits(Attack):
    """Offsets that jump in every response."""

    codes = (RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.GET_MAX_OFFSET)

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        offsets = ("0", "9", "5", str(2**62), "-1", "1e5", " 7 ", "\u0667")
        return command.make_response(fields={"offset": offsets[self.turn % len(offsets)]})


class FarTimes(Found):
    """Records with extreme store and born times, and with properties that name other queues."""

    def records(self, offset: int, queue_id: int) -> bytes:
        far = (2**63 - 1, -(2**63), 0, 253402300800_000)
        abuse = {
            "RETRY_TOPIC": "\n\0../..",
            "RECONSUME_TIME": str(2**31),
            "ORIGIN_MESSAGE_ID": "x" * 9000,
            "DELAY": "99",
            "UNIQ_KEY": "\x1b[2J",
            "REAL_TOPIC": "%DLQ%x",
            "REAL_QID": "-1",
            "CONSUME_START_TIME": "x",
            "MAX_RECONSUME_TIMES": str(-(2**63)),
            "TAGS": "A",
            "__SHARDINGKEY": "\n",
            "INSTANCE_ID": "%%",
        }
        return b"".join(
            encode_message(
                StoredMessage(
                    TOPIC,
                    b"",
                    abuse,
                    queue_id=queue_id,
                    queue_offset=offset + number,
                    born_at_ms=far[number % 4],
                    stored_at_ms=far[(number + 1) % 4],
                    reconsume_times=(2**31 - 1, -(2**31), 0)[number % 3],
                )
            )
            for number in range(32)
        )


KINDS = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, Attack)]
OF_NAME_SERVERS = [
    type(f"{kind.__name__}OfNameServer", (kind,), {"at_name_server": True})
    for kind in (DeepBody, DeepHeader, SlowJson, LongRemarks, Flood, Silence)
]
"""The attacks of brokers above, by name servers."""

ATTACKS: dict[str, type[Attack]] = {kind.__name__: kind for kind in [*KINDS, *OF_NAME_SERVERS]}
del ATTACKS["Attack"], ATTACKS["Found"]  # base classes
