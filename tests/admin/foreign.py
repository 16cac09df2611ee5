"""A member of another client. It responds to relayed requests as Java does, and knows no requests of this package."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Self

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.bodies import (
    ConsumerData,
    HeartbeatData,
    RunningInfo,
    decode_offset_table,
    encode_consumer_status,
    encode_heartbeat,
    encode_running_info,
)
from pyrocket_consumer.protocol.codes import RequestCode, version_ordinal
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.subscription import parse_subscription
from tests.testing.raw_client import RawClient


class ForeignMember:
    """Joins a group, reports its offsets, and obeys request 220 if its `version` does. `silent`: it never responds."""

    def __init__(
        self,
        cluster: object,
        group: str,
        topic: str,
        offsets: Mapping[MessageQueue, int],
        *,
        client_id: str = "10.0.0.9@java",
        model: str = "BROADCASTING",
        version: tuple[int, int, int] = (5, 5, 0),
        language: str = "JAVA",
        obeys: bool = True,
        silent: bool = False,
    ) -> None:
        self.client_id = client_id
        self.offsets = dict(offsets)
        self.resets: list[dict[MessageQueue, int]] = []
        self._obeys, self._silent = obeys, silent
        self._client = RawClient(cluster.broker("broker-a").address, client_id)
        data = HeartbeatData(
            client_id, (ConsumerData(group, message_model=model, subscriptions=(parse_subscription(topic, "*"),)),)
        )
        self._client.call(
            RequestCode.HEART_BEAT, body=encode_heartbeat(data), version=version_ordinal(*version), language=language
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.end()
        self._thread.join(30)
        self._client.close()

    def _run(self) -> None:
        answered = 0
        while True:
            try:
                self._client.is_silent(60)
            except ConnectionError:
                return
            for command in self._client.received[answered:]:
                answered += 1
                self._answer(command)

    def _answer(self, command: RemotingCommand) -> None:
        if self._silent:
            return
        if command.code == RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
            self._client.reply(command, body=encode_consumer_status(self.offsets))
        elif command.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
            self._client.reply(command, body=encode_running_info(RunningInfo()))
        elif command.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
            table = decode_offset_table(command.body)
            self.resets.append(table)
            if self._obeys:
                self.offsets.update(table)
