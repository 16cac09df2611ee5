"""Java clients of a release, for tests of interoperability. They work with any name server."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyrocket_consumer.model import MessageQueue
from tests.real_brokers.process import ControlledClient, Program

_UNSOLICITED = ("message", "queues")
"""Events that are not results of commands."""


@dataclass(frozen=True, slots=True)
class JavaMessage:
    """A message that a Java consumer received. `consumed` is the result of its listener."""

    queue: MessageQueue
    queue_offset: int
    body: bytes
    message_id: str
    tags: str | None
    keys: str | None
    reconsume_times: int
    consumed: bool
    flag: int
    sys_flag: int
    properties: Mapping[str, str] = field(hash=False)


class JavaMachine:
    """A Java virtual machine with many clients of a release, because each machine takes seconds to start."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.program = Program(version, "Clients", {})
        self._names = itertools.count(1)
        self.program.wait_for("started")

    @property
    def running(self) -> bool:
        return self.program.process.running

    @property
    def offsets_directory(self) -> Path:
        """The directory of broadcasting consumers' offsets, in `<client id>/<group>/offsets.json` below it."""
        return self.program.directory / "offsets"

    def producer(self, name_server: str, **options: object) -> JavaProducer:
        """Return a started producer; see JavaProducer for the options."""
        return JavaProducer(self, nameServer=name_server, group="java-producer", **options)

    def consumer(self, name_server: str, group: str, topic: str, **options: Any) -> JavaConsumer:
        """Return a started consumer; see JavaConsumer for the options.

        It sends a heartbeat every second. A 5.x consumer does not send a new subscription version while another
        heartbeat is in progress, and brokers refuse its pulls until the next heartbeat.
        """
        names = {"nameServer": name_server, "group": group, "topic": topic, "heartbeatIntervalMs": 1000}
        return JavaConsumer(self, **{**names, **options})

    def mqadmin(self, name_server: str, command: str, *arguments: str) -> str:
        """Run a command of Java's `mqadmin` and return its output, including exceptions."""
        whole = "\n".join([command, "-n", name_server, *arguments])
        text: str = JavaClient(self).run_command({"do": "mqadmin", "arguments": whole})["text"]
        return "\n".join(line for line in text.splitlines() if " |-" not in line)  # logback reports its own start

    def new_name(self) -> str:
        """Return the name of the next client."""
        return f"client-{next(self._names)}"

    def close(self) -> None:
        """Halt the machine with all its clients."""
        self.program.close()


class JavaClient(ControlledClient):
    """One client of a machine, with the events that name it and the commands to it. It runs in a `with` block."""

    def __init__(self, machine: JavaMachine) -> None:
        self._program, self._name, self._closed = machine.program, machine.new_name(), False
        self.wait_until = self._program.wait_until

    def all_events(self) -> list[dict[str, Any]]:
        return [each for each in list(self._program.events) if each.get("client") == self._name]

    def results(self) -> list[dict[str, Any]]:
        return [each for each in self.all_events() if each["event"] not in _UNSOLICITED]

    def send_command(self, command: Mapping[str, object]) -> None:
        self._program.send_command({**command, "client": self._name})

    def close(self) -> None:
        """Shut the client down and wait for that. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self.run_command({"do": "close"})


class JavaProducer(JavaClient):
    """A Java producer. Options: instanceName, compressAbove, compression (ZLIB, LZ4, ZSTD), accessKey, secretKey."""

    def __init__(self, machine: JavaMachine, **options: object) -> None:
        super().__init__(machine)
        self.run_command({**options, "do": "Produce"})

    def send(
        self,
        topic: str,
        body: bytes = b"-",
        *,
        count: int = 1,
        batch: bool = False,
        tags: str | None = None,
        keys: Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        delay_level: int | None = None,
        deliver_at_ms: int | None = None,
    ) -> list[dict[str, Any]]:
        """Send messages one after the other, or all in one batch.

        Returns for each (or for the batch): status, messageId, offsetMessageId, brokerName, queueId, queueOffset.
        """
        command: dict[str, object] = {
            "do": "send",
            "topic": topic,
            "body": base64.b64encode(body).decode(),
            "count": count,
            "batch": batch,
            "tags": tags,
            "keys": " ".join(keys) or None,
            "shardingKey": sharding_key,
            "delayLevel": delay_level,
            "deliverMs": deliver_at_ms,
            **{f"property.{name}": value for name, value in (properties or {}).items()},
        }
        messages: list[dict[str, Any]] = self.run_command(command, timeout_s=60 + count)["messages"]
        return messages


class JavaConsumer(JavaClient):
    """A Java push consumer, with its consumed messages and held queues."""

    def __init__(
        self, machine: JavaMachine, *, broadcasting: bool = False, pause_s: float = 0, **options: object
    ) -> None:
        """Start the consumer, and return when it has started, even without queues.

        A message is asked for again while its reconsume times are below `fail`. Further options: orderly, selector,
        sql, strategy (AVG, AVG_BY_CIRCLE, CONSISTENT_HASH), clientIp, instanceName, threads, pullBatchSize,
        consumeBatchSize, delayLevel (of failed messages), maxReconsumeTimes, persistIntervalMs, heartbeatIntervalMs,
        routeIntervalMs, accessKey and secretKey.
        """
        super().__init__(machine)
        model = "BROADCASTING" if broadcasting else "CLUSTERING"
        started = self.run_command({**options, "do": "Consume", "model": model, "pauseMs": int(pause_s * 1000)})
        self.client_id: str = started["clientId"]

    @property
    def messages(self) -> list[JavaMessage]:
        """The messages consumed so far, oldest first."""
        return [
            JavaMessage(
                MessageQueue(each["topic"], each["brokerName"], each["queueId"]),
                each["queueOffset"],
                base64.b64decode(each["body"]),
                each["messageId"],
                each["tags"],
                each["keys"],
                each["reconsumeTimes"],
                each["consumed"],
                each["flag"],
                each["sysFlag"],
                each["properties"],
            )
            for each in self.of_kind("message")
        ]

    def queues(self, topic: str) -> set[MessageQueue]:
        """Return the queues of a topic that are held now."""
        held = [MessageQueue(*queue) for each in self.of_kind("queues")[-1:] for queue in each["queues"]]
        return {queue for queue in held if queue.topic == topic}

    def wait_for_messages(self, count: int, timeout_s: float = 60) -> list[JavaMessage]:
        """Wait for `count` messages, and return them."""
        self.wait_for("message", count, timeout_s)
        return self.messages[:count]

    def wait_for_queues(self, topic: str, count: int, timeout_s: float = 60) -> set[MessageQueue]:
        """Wait for `count` queues of a topic, and return them."""
        self.wait_until(lambda: len(self.queues(topic)) == count, f"{count} queues of {topic}", timeout_s)
        return self.queues(topic)


class JavaOffsetStore(Program):
    """The Java client's own LocalFileOffsetStore."""

    def __init__(self, version: str, group: str) -> None:
        super().__init__(version, "OffsetFile", {"group": group, "clientIp": "127.0.0.1", "instanceName": "DEFAULT"})
        self.client_id: str = self.wait_for("started")["clientId"]
        self.path = self.directory / "offsets" / self.client_id / group / "offsets.json"

    def load(self) -> None:
        self._do("load")

    def update_offset(self, queue: MessageQueue, offset: int) -> None:
        self._do("update", [queue], offset=offset, increaseOnly=False)

    def read_offset(self, queue: MessageQueue, read_type: str = "MEMORY_FIRST_THEN_STORE") -> int:
        """Return Java's result: an offset, -1 without an offset, or -2 after an error."""
        return int(self._do("read", [queue], type=read_type)["offset"])

    def persist_all(self, queues: Iterable[MessageQueue]) -> None:
        self._do("persistAll", queues)

    def clone_offset_table(self, topic: str = "") -> dict[MessageQueue, int]:
        return {MessageQueue(*queue): offset for *queue, offset in self._do("table", topic=topic)["table"]}

    def _do(self, operation: str, queues: Iterable[MessageQueue] = (), **values: object) -> dict[str, Any]:
        names = " ".join(f"{queue.topic},{queue.broker_name},{queue.queue_id}" for queue in queues)
        return self.run_command({"do": operation, "queues": names, **values})
