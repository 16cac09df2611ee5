"""A blocking client over one socket, without any of the consumer's code."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Mapping
from typing import Any, Self

from pyrocket_consumer.protocol import frame
from pyrocket_consumer.protocol.bodies import ConsumerData, HeartbeatData, encode_heartbeat
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.command import Header, request
from pyrocket_consumer.protocol.frame import JSON_HEADER, ONEWAY_FLAG, FrameBuffer, RemotingCommand, encode_command
from pyrocket_consumer.protocol.message import encode_properties
from pyrocket_consumer.protocol.subscription import parse_subscription

TIMEOUT_S = 30.0


class RawClient:
    """Sends requests, reads responses, and records the requests of the server."""

    def __init__(self, address: str, client_id: str = "c1") -> None:
        self.client_id = client_id
        self.received: list[RemotingCommand] = []
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._frames = FrameBuffer()
        self._opaques = itertools.count(1)
        self._answers: dict[int, list[RemotingCommand]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        self._socket.close()

    def end(self) -> None:
        """Shut the connection down; a reading thread sees the server close it."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, command: RemotingCommand, header_type: int = JSON_HEADER) -> int:
        """Send a request or a response, and return its opaque."""
        if not command.is_response:
            command.opaque = next(self._opaques)
        self._socket.sendall(encode_command(command, header_type))
        return command.opaque

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def call(self, *what: Any, timeout_s: float = TIMEOUT_S, **options: Any) -> RemotingCommand:
        """Send a request and return its response. Takes the arguments of `post`."""
        return self.answer(self.post(*what, **options), timeout_s)

    def post(
        self,
        what: Header | int,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        version: int = 401,
        language: str = "PYTHON",
        header_type: int = JSON_HEADER,
        oneway: bool = False,
    ) -> int:
        """Send a request without waiting; return its opaque."""
        if isinstance(what, Header):
            command = request(what, body)
        else:
            command = RemotingCommand(int(what), {name: _text(value) for name, value in (fields or {}).items()}, body)
        command.version, command.language = version, language
        if oneway:
            command.flag = ONEWAY_FLAG
        return self.send(command, header_type)

    def answer(self, opaque: int, timeout_s: float = TIMEOUT_S) -> RemotingCommand:
        """Return the response to an earlier request."""
        deadline = time.monotonic() + timeout_s
        while not self._answers.get(opaque):
            self._read(deadline)
        return self._answers[opaque].pop(0)

    def wait_received(self, code: int, count: int = 1, timeout_s: float = TIMEOUT_S) -> list[RemotingCommand]:
        """Return the server's requests of `code` once there are `count`."""
        deadline = time.monotonic() + timeout_s
        while len(found := [command for command in self.received if command.code == code]) < count:
            self._read(deadline)
        return found

    def is_silent(self, for_s: float = 0.2) -> bool:
        """Return whether no byte arrives for a while."""
        before = self._count()
        try:
            self._read(time.monotonic() + for_s)
        except TimeoutError:
            return True
        return before == self._count()

    def _count(self) -> int:
        return sum(map(len, self._answers.values())) + len(self.received)

    def wait_closed(self, timeout_s: float = TIMEOUT_S) -> str:
        """Wait until the server ends the connection; return "closed" or "reset"."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._read(deadline)
            except ConnectionResetError as error:
                return "reset" if error.errno is not None else "closed"

    def _read(self, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        count = self._socket.recv_into(self._frames.space())
        if not count:
            raise ConnectionResetError("the server closed the connection")
        for command in self._frames.read_commands(count):
            if command.is_response:
                self._answers.setdefault(command.opaque, []).append(command)
            else:
                self.received.append(command)

    # --- frequent requests

    def heartbeat(
        self,
        group: str,
        *topics: str,
        model: str = "CLUSTERING",
        version: int = 401,
        expression: str = "*",
        sub_version: int = 1,
    ) -> RemotingCommand:
        """Join a group with subscriptions to `topics` (and its retry topic, when clustering)."""
        retry = [f"%RETRY%{group}"] if model == "CLUSTERING" else []
        subscriptions = tuple(
            parse_subscription(topic, "*" if topic.startswith("%") else expression, sub_version)
            for topic in (*topics, *retry)
        )
        data = HeartbeatData(self.client_id, (ConsumerData(group, message_model=model, subscriptions=subscriptions),))
        return self.call(RequestCode.HEART_BEAT, body=encode_heartbeat(data), version=version)

    def pull(self, topic: str, queue_id: int, offset: int, **others: object) -> RemotingCommand:
        """Pull with a subscription in the request and without waiting, unless `others` change that."""
        return self.answer(self.post_pull(topic, queue_id, offset, **others))

    def post_pull(
        self, topic: str, queue_id: int, offset: int, *, code: int = RequestCode.PULL_MESSAGE, **others: object
    ) -> int:
        fields: dict[str, object] = {
            "consumerGroup": "G",
            "topic": topic,
            "queueId": queue_id,
            "queueOffset": offset,
            "maxMsgNums": 32,
            "sysFlag": 4,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": "*",
            "subVersion": 0,
            **others,
        }
        return self.post(code, {name: value for name, value in fields.items() if value is not None})

    def produce(
        self,
        topic: str,
        body: bytes = b"x",
        *,
        queue_id: int = 0,
        properties: Mapping[str, str] | None = None,
        code: int = RequestCode.SEND_MESSAGE,
        version: int = 401,
        **others: object,
    ) -> RemotingCommand:
        """Send a message under the long field names."""
        fields: dict[str, object] = {
            "producerGroup": "P",
            "topic": topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 4,
            "queueId": queue_id,
            "sysFlag": 0,
            "bornTimestamp": 1700000000000,
            "flag": 0,
            "properties": encode_properties(properties or {}),
            "reconsumeTimes": 0,
            "unitMode": "false",
            "batch": "false",
            **others,
        }
        return self.call(code, fields, body, version=version)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> RemotingCommand:
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id, "commitOffset": offset}
        return self.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    def query(self, group: str, topic: str, queue_id: int, **others: object) -> RemotingCommand:
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id, **others}
        return self.call(RequestCode.QUERY_CONSUMER_OFFSET, fields)

    def reply(
        self,
        question: RemotingCommand,
        code: int = 0,
        body: bytes = b"",
        remark: str | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """Respond to a request of the server."""
        self.send(RemotingCommand(code, dict(fields or {}), body, question.opaque, frame.RESPONSE_FLAG, remark))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(int(value)) if isinstance(value, int) else str(value)
