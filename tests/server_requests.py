"""Requests of an embedded server to its clients, including those that real servers never send."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

from pyrocket_consumer.protocol.frame import ONEWAY_FLAG, RemotingCommand, encode_command
from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster
from pyrocket_consumer.testing.embedded_node import EmbeddedNode

TIMEOUT_S = 30.0


class RequestSender:
    """Sends requests to the clients that are connected to a node."""

    def __init__(self, node: EmbeddedNode) -> None:
        self._node = node
        self._cluster: EmbeddedCluster = node.cluster

    def call(self, code: int, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
        """Send a request to the client that connected first, and return its response."""
        return next(self.call_each(code, [fields], body))

    def call_each(self, code: int, fields: Sequence[dict[str, str]], body: bytes = b"") -> Iterator[RemotingCommand]:
        """Send requests together to the client that connected first, and yield the responses as they arrive."""
        answers: queue.SimpleQueue[RemotingCommand | None] = queue.SimpleQueue()

        def send() -> None:
            connection = next(iter(self._connections()))
            for each in fields:
                request = RemotingCommand(code, dict(each), body, language="JAVA")
                connection.call(request, TIMEOUT_S, answers.put)

        self._cluster.call(send)
        for _ in fields:
            answer = answers.get(timeout=2 * TIMEOUT_S)
            assert answer is not None, f"a request {code} got no response"
            yield answer

    def oneway(self, code: int, fields: dict[str, str], body: bytes = b"", times: int = 1) -> None:
        """Send a one-way request `times` times to every client, in one write."""
        self.write(encode_command(RemotingCommand(code, fields, body, 1, ONEWAY_FLAG, language="JAVA")) * times)

    def write(self, data: bytes) -> None:
        """Send bytes to every client."""

        def send() -> None:
            for connection in self._connections():
                connection.write(data)

        self._cluster.call(send)

    def _connections(self) -> Any:
        return list(self._node._server.connections)


def stored(broker: EmbeddedBroker, topic: str) -> bytes:
    """Return the stored record of the last message of a topic."""
    message = broker.messages(topic)[-1]
    found = broker.cluster.call(lambda: broker.core.store.record_at(message.commit_log_offset))
    assert found is not None
    return bytes(found[1])


def directly(group: str, **fields: str) -> dict[str, str]:
    """Return the fields of a CONSUME_MESSAGE_DIRECTLY request."""
    return {"consumerGroup": group, "clientId": "any", "msgId": "any", "brokerName": "broker-a", **fields}
