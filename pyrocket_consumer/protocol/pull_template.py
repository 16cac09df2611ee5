"""A prepared pull request, because pulls are the most frequent requests."""

from __future__ import annotations

import struct
from typing import Final

import orjson

from pyrocket_consumer.protocol.codes import CLIENT_VERSION, LanguageCode, RequestCode


class PullTemplate:
    """A prepared pull request of one queue, in which only three numbers change.

    It has the fields of PullMessageHeader. `hold_ms` is how long the broker may wait for messages.
    """

    __slots__ = ("_header",)

    _PREFIX: Final = struct.Struct(">II")

    def __init__(
        self,
        group: str,
        topic: str,
        queue_id: int,
        max_messages: int,
        hold_ms: int,
        sub_version: int,
        broker_name: str | None,
        expression: str | None = None,
        expression_type: str = "TAG",
    ) -> None:
        fixed = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": str(queue_id),
            "maxMsgNums": str(max_messages),
            "suspendTimeoutMillis": str(hold_ms),
            "subVersion": str(sub_version),
            "expressionType": expression_type,
        }
        if expression is not None:
            fixed["subscription"] = expression
        if broker_name is not None:
            fixed["bname"] = broker_name
        head = b'{"code":%d,"extFields":{' % RequestCode.PULL_MESSAGE
        names = orjson.dumps(fixed)[1:-1]
        tail = b'},"flag":0,"language":"%s","opaque":' % LanguageCode.PYTHON.name.encode()
        end = b',"serializeTypeCurrentRPC":"JSON","version":%d}' % CLIENT_VERSION
        self._header = (  # escape % in names, such as retry topics, because only the template's own % are placeholders
            (head + names).replace(b"%", b"%%")
            + b',"queueOffset":"%d","commitOffset":"0","sysFlag":"%d"'
            + tail
            + b"%d"
            + end
        )

    def encode(self, opaque: int, queue_offset: int, sys_flag: int) -> bytes:
        """Return the whole frame of one pull. `sys_flag` must not contain PullFlag.COMMIT."""
        header = self._header % (queue_offset, sys_flag, opaque)
        size = len(header)
        return self._PREFIX.pack(size + 4, size) + header
