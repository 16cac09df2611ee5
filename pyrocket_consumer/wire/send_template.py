"""The send request, when there are many to one queue."""

from __future__ import annotations

from pyrocket_consumer.wire.codes import RequestCode
from pyrocket_consumer.wire.command import SendMessageHeader
from pyrocket_consumer.wire.frame import ONEWAY_FLAG, RemotingCommand


class SendTemplate:
    """The send request for one queue, prepared: only the message changes. Its fields are those of SendMessageHeader."""

    __slots__ = ("_code", "_fields")

    def __init__(self, group: str, topic: str, queue_id: int, broker_name: str | None, is_batch: bool = False) -> None:
        self._code = int(RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2)
        self._fields = SendMessageHeader(
            group, topic, queue_id=queue_id, batch=is_batch, broker_name=broker_name
        ).to_fields()

    def request(
        self, body: bytes, properties: str, sys_flag: int, flag: int, born_at_ms: int, is_oneway: bool = False
    ) -> RemotingCommand:
        """Return the request that stores one message, or one batch; `properties` are text, "" for none."""
        fields = self._fields.copy()
        fields["f"], fields["g"], fields["h"] = str(sys_flag), str(born_at_ms), str(flag)
        if properties:
            fields["i"] = properties
        return RemotingCommand(self._code, fields, body, flag=ONEWAY_FLAG if is_oneway else 0)
