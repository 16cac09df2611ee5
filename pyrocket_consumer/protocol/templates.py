"""Prepared pull and send requests, because these are the most frequent ones. Only a few numbers and texts change."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import orjson

from pyrocket_consumer.protocol.codes import CLIENT_VERSION, LanguageCode, RequestCode
from pyrocket_consumer.protocol.command import SendMessageHeader
from pyrocket_consumer.protocol.frame import MAX_HEADER_BYTES, ONEWAY_FLAG, RemotingCommand


def _prepare(code: int, fixed: Mapping[str, str], changing: bytes) -> bytes:
    """Return a header with placeholders: those of the fields in `changing`, and one for the opaque number."""
    head = b'{"code":%d,"extFields":{%b' % (code, orjson.dumps(fixed)[1:-1])
    tail = b'},"flag":0,"language":"%b","opaque":' % LanguageCode.PYTHON.name.encode()
    end = b',"serializeTypeCurrentRPC":"JSON","version":%d}' % CLIENT_VERSION
    # Escape % in names, such as those of retry topics, because only the template's own % are placeholders.
    return head.replace(b"%", b"%%") + changing + tail + b"%d" + end


class PullTemplate:
    """A prepared pull request of one queue, in which only the offset and the opaque change.

    `fields` are those of a PullMessageHeader, which must not contain PullFlag.COMMIT.
    """

    __slots__ = ("_fields", "_header")

    _PREFIX: Final = struct.Struct(">II")

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = {name: value for name, value in fields.items() if name != "queueOffset"}
        self._header = _prepare(RequestCode.PULL_MESSAGE, self._fields, b',"queueOffset":"%d"')

    def encode(self, queue_offset: int, opaque: int) -> bytes:
        """Return the whole frame of one pull."""
        header = self._header % (queue_offset, opaque)
        size = len(header)
        return self._PREFIX.pack(size + 4, size) + header

    def command(self, queue_offset: int) -> RemotingCommand:
        """Return one pull as a command, for a connection that signs requests."""
        return RemotingCommand(RequestCode.PULL_MESSAGE, {**self._fields, "queueOffset": str(queue_offset)})


class SendTemplate:
    """A prepared send request to one queue; only the message changes. It has the fields of SendMessageHeader."""

    __slots__ = ("_code", "_fields", "_header")

    _PREFIX: Final = struct.Struct(">II")

    def __init__(self, group: str, topic: str, queue_id: int, broker_name: str | None, is_batch: bool = False) -> None:
        self._code = int(RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2)
        self._fields = SendMessageHeader(
            group, topic, queue_id=queue_id, batch=is_batch, broker_name=broker_name
        ).to_fields()
        fixed = {name: value for name, value in self._fields.items() if name not in ("f", "g", "h", "i")}
        self._header = _prepare(self._code, fixed, b',"f":"%d","g":"%d","h":"%d"%b')

    def request(
        self, body: bytes, properties: str, sys_flag: int, flag: int, born_at_ms: int, is_oneway: bool = False
    ) -> RemotingCommand:
        """Return the request that stores one message or one batch; `properties` is a text, "" without any."""
        fields = self._fields.copy()
        fields["f"], fields["g"], fields["h"] = str(sys_flag), str(born_at_ms), str(flag)
        if properties:
            fields["i"] = properties
        return RemotingCommand(self._code, fields, body, flag=ONEWAY_FLAG if is_oneway else 0)

    def encode(
        self, opaque: int, body: bytes, properties: str, sys_flag: int, flag: int, born_at_ms: int, max_frame_bytes: int
    ) -> bytes | None:
        """Return the whole frame of `request`, None if it cannot be sent; `encode_command` then raises the reason."""
        try:
            item = b',"i":%b' % orjson.dumps(properties) if properties else b""
        except orjson.JSONEncodeError:
            return None
        header = self._header % (sys_flag, born_at_ms, flag, item, opaque)
        header_bytes, body_bytes = len(header), len(body)
        if header_bytes > MAX_HEADER_BYTES or self._PREFIX.size + header_bytes + body_bytes > max_frame_bytes:
            return None
        return self._PREFIX.pack(4 + header_bytes + body_bytes, header_bytes) + header + body
