"""A pull request that is encoded once, because it is sent for every response."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import orjson

from pyrocket_consumer.protocol.codes import CLIENT_VERSION, LanguageCode, RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand


class PullTemplate:
    """A prepared pull request of one queue, in which only the offset and the opaque change.

    `fields` are those of a PullMessageHeader, which must not contain PullFlag.COMMIT.
    """

    __slots__ = ("_fields", "_header")

    _PREFIX: Final = struct.Struct(">II")

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = {name: value for name, value in fields.items() if name != "queueOffset"}
        head = b'{"code":%d,"extFields":{' % RequestCode.PULL_MESSAGE
        names = orjson.dumps(self._fields)[1:-1]
        tail = b'},"flag":0,"language":"%s","opaque":' % LanguageCode.PYTHON.name.encode()
        end = b',"serializeTypeCurrentRPC":"JSON","version":%d}' % CLIENT_VERSION
        self._header = (  # escape % in names, such as retry topics, because only the template's own % are placeholders
            (head + names).replace(b"%", b"%%") + b',"queueOffset":"%d"' + tail + b"%d" + end
        )

    def encode(self, queue_offset: int, opaque: int) -> bytes:
        """Return the whole frame of one pull."""
        header = self._header % (queue_offset, opaque)
        size = len(header)
        return self._PREFIX.pack(size + 4, size) + header

    def command(self, queue_offset: int) -> RemotingCommand:
        """Return one pull as a command, for a connection that signs requests."""
        return RemotingCommand(RequestCode.PULL_MESSAGE, {**self._fields, "queueOffset": str(queue_offset)})
