"""Java clients of a release, for tests of how ours get along with them. They work with any name server."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from pyrocket_consumer.model import MessageQueue
from tests.real_brokers.process import Program

T = TypeVar("T")

_TOLD_ANY_TIME = ("message", "queues")
"""Events that answer no command."""

LOST, STARTS = "RemotingSendRequestException", 3
"""What ends a Java client whose connection is lost while it starts, as on a busy machine, and how often it may try."""


@dataclass(frozen=True, slots=True)
class JavaMessage:
    """What a Java consumer was given. `consumed` is what its listener answered."""

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
    """A Java virtual machine with many clients of a release: starting one of its own for each takes seconds."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._program = Program(version, "Clients", {})
        self._names = itertools.count(1)
        self._program.wait_for("started")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self._program.process.running

    @property
    def offsets_directory(self) -> Path:
        """Where broadcasting consumers keep their offsets: `<client id>/<group>/offsets.json` below it."""
        return self._program.directory / "offsets"

    def producer(self, name_server: str, group: str = "java-producer", **options: object) -> JavaProducer:
        """Return a started producer; see JavaProducer for the options."""
        return JavaProducer(self.version, name_server, group, machine=self, **options)

    def consumer(self, name_server: str, group: str, topic: str | Iterable[str], **options: Any) -> JavaConsumer:
        """Return a started consumer; see JavaConsumer for the options.

        It sends a heartbeat a second: one of 5.x whose new subscription version is to be told while another heartbeat
        is under way does not tell it, and its pulls are refused until the next.
        """
        options = {"heartbeatIntervalMs": 1000, **options}
        return JavaConsumer(self.version, name_server, group, topic, machine=self, **options)

    def mqadmin(self, name_server: str, *arguments: str, timeout_s: float = 60) -> str:
        """Run a command of Java's `mqadmin` and return what it prints, exceptions included.

        Raises:
            AssertionError: it did not end in time.
        """
        command, *rest = arguments
        whole = "\n".join([command, "-n", name_server, *rest])
        text: str = self.new_client().ask({"do": "mqadmin", "arguments": whole}, timeout_s)["text"]
        return "\n".join(line for line in text.splitlines() if " |-" not in line)  # logback tells of its start

    def new_client(self) -> _Part:
        """Return the way to speak with one more client."""
        return _Part(self._program, f"client-{next(self._names)}")

    def close(self) -> None:
        """Halt the machine with everything in it."""
        self._program.close()


class _Part:
    """One client of a machine, to be spoken with as if it were a program."""

    def __init__(self, program: Program, name: str) -> None:
        self._program, self._name = program, name

    @property
    def directory(self) -> Path:
        return self._program.directory

    def of_kind(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self._program.of_kind(event) if each.get("client") == self._name]

    def wait_until(self, ready: Callable[[], T], what: str, timeout_s: float = 60) -> T:
        return self._program.wait_until(ready, what, timeout_s)

    def wait_for(self, event: str, count: int = 1, timeout_s: float = 60) -> dict[str, Any]:
        return self.wait_until(lambda: self.of_kind(event)[count - 1 : count], f"event {event} {count}", timeout_s)[0]

    def ask(self, command: Mapping[str, object], timeout_s: float = 60) -> dict[str, Any]:
        """Give a command and return the event that answers it. One at a time."""
        told = len(self._answers())
        self._program.tell({**command, "client": self._name})
        answer = self.wait_until(lambda: self._answers()[told : told + 1], f"answer to {dict(command)}", timeout_s)[0]
        assert answer["event"] != "failed", answer["error"]
        return answer

    def _answers(self) -> list[dict[str, Any]]:
        events = list(self._program.events)
        return [each for each in events if each.get("client") == self._name and each["event"] not in _TOLD_ANY_TIME]

    def kill(self) -> None:
        raise AssertionError("a client that shares a machine cannot be killed; give it one of its own")

    def close(self) -> None:
        self.ask({"do": "close"})


def _started(version: str, main: str, options: Mapping[str, object], machine: JavaMachine | None) -> Program | _Part:
    """Start a program in a machine of its own, or in one that runs, and wait until it says that it has."""
    if machine is not None:
        client = machine.new_client()
        client.ask({**options, "do": main})
        client.wait_for("started")
        return client
    tries = 0
    while True:
        program, tries = Program(version, main, options), tries + 1
        try:
            program.wait_for("started")
            return program
        except AssertionError as error:
            program.close()
            if tries == STARTS or LOST not in str(error):
                raise


class _JavaClient:
    """A program that runs from `with` to its end."""

    _program: Program | _Part
    _closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """Where the program keeps its files; removed when it is closed."""
        return self._program.directory

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._program.kill()

    def close(self) -> None:
        """Shut it down in order, and wait. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self._program.close()


class JavaProducer(_JavaClient):
    """A Java producer."""

    def __init__(
        self,
        version: str,
        name_server: str,
        group: str = "java-producer",
        *,
        machine: JavaMachine | None = None,
        **options: object,
    ) -> None:
        """Options: instanceName, compressAbove, compression (ZLIB, LZ4, ZSTD), accessKey and secretKey."""
        settings = {"nameServer": name_server, "group": group, **options}
        self._program = _started(version, "Produce", settings, machine)

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
        queue: MessageQueue | None = None,
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
        if queue is not None:
            command |= {"brokerName": queue.broker_name, "queueId": queue.queue_id}
        messages: list[dict[str, Any]] = self._program.ask(command, timeout_s=60 + count)["messages"]
        return messages


class JavaConsumer(_JavaClient):
    """A Java push consumer: what it consumes and which queues it holds."""

    def __init__(
        self,
        version: str,
        name_server: str,
        group: str,
        topic: str | Iterable[str],
        *,
        selector: str = "*",
        sql: str | None = None,
        broadcasting: bool = False,
        orderly: bool = False,
        strategy: str = "AVG",
        consume_from: str = "CONSUME_FROM_FIRST_OFFSET",
        fail: int = 0,
        pause_s: float = 0,
        machine: JavaMachine | None = None,
        **options: object,
    ) -> None:
        """Start it, and return once it has started (not: once it has queues).

        A message is asked for again while its reconsume times are below `fail`. Strategies: AVG, AVG_BY_CIRCLE,
        CONSISTENT_HASH. Further options: clientIp, instanceName, threads, pullBatchSize, consumeBatchSize,
        delayLevel (of failed messages), maxReconsumeTimes, persistIntervalMs, heartbeatIntervalMs, routeIntervalMs,
        accessKey and secretKey.
        """
        settings = {
            "nameServer": name_server,
            "group": group,
            "topic": topic if isinstance(topic, str) else ",".join(topic),
            "selector": selector,
            "sql": sql,
            "model": "BROADCASTING" if broadcasting else "CLUSTERING",
            "orderly": orderly,
            "strategy": strategy,
            "consumeFrom": consume_from,
            "fail": fail,
            "pauseMs": int(pause_s * 1000),
            **options,
        }
        self._program = _started(version, "Consume", settings, machine)
        self.client_id: str = self._program.wait_for("started")["clientId"]

    @property
    def messages(self) -> list[JavaMessage]:
        """What was consumed so far, oldest first."""
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
            for each in self._program.of_kind("message")
        ]

    @property
    def assignments(self) -> list[frozenset[MessageQueue]]:
        """The sets of queues held, one after the other; the retry topic's are among them."""
        return [
            frozenset(MessageQueue(*queue) for queue in each["queues"]) for each in self._program.of_kind("queues")
        ]

    def queues(self, topic: str) -> set[MessageQueue]:
        """Return the queues of a topic that are held now."""
        return {queue for queue in (self.assignments or [frozenset()])[-1] if queue.topic == topic}

    def wait_for_messages(self, count: int, timeout_s: float = 60) -> list[JavaMessage]:
        """Return the first `count` messages, waiting for them.

        Raises:
            AssertionError: fewer came.
        """
        self._program.wait_for("message", count, timeout_s)
        return self.messages[:count]

    def wait_for_queues(self, topic: str, count: int, timeout_s: float = 60) -> set[MessageQueue]:
        """Return the queues of a topic once there are `count` of them.

        Raises:
            AssertionError: another number was held all the time.
        """
        self._program.wait_until(lambda: len(self.queues(topic)) == count, f"{count} queues of {topic}", timeout_s)
        return self.queues(topic)


class JavaOffsetStore(_JavaClient):
    """The Java client's own LocalFileOffsetStore."""

    def __init__(
        self, version: str, group: str, *, client_ip: str = "127.0.0.1", instance_name: str = "DEFAULT"
    ) -> None:
        options = {"group": group, "clientIp": client_ip, "instanceName": instance_name}
        self._program = Program(version, "OffsetFile", options)
        self.client_id: str = self._program.wait_for("started")["clientId"]
        self.path = self.directory / "offsets" / self.client_id / group / "offsets.json"

    def load(self) -> None:
        self._do("load")

    def update_offset(self, queue: MessageQueue, offset: int, increase_only: bool = False) -> None:
        self._do("update", [queue], offset=offset, increaseOnly=increase_only)

    def read_offset(self, queue: MessageQueue, read_type: str = "MEMORY_FIRST_THEN_STORE") -> int:
        """Return what Java returns: an offset, -1 for none, -2 for an error."""
        return int(self._do("read", [queue], type=read_type)["offset"])

    def persist(self, queue: MessageQueue) -> None:
        self._do("persist", [queue])

    def persist_all(self, queues: Iterable[MessageQueue]) -> None:
        self._do("persistAll", queues)

    def remove_offset(self, queue: MessageQueue) -> None:
        self._do("remove", [queue])

    def clone_offset_table(self, topic: str = "") -> dict[MessageQueue, int]:
        table = self._do("table", topic=topic)["table"]
        return {MessageQueue(name, broker_name, queue_id): offset for name, broker_name, queue_id, offset in table}

    def _do(self, operation: str, queues: Iterable[MessageQueue] = (), **values: object) -> dict[str, Any]:
        names = " ".join(f"{queue.topic},{queue.broker_name},{queue.queue_id}" for queue in queues)
        return self._program.ask({"do": operation, "queues": names, **values})
