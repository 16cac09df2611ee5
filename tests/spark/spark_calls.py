"""Call readers as Spark calls them, in the recorded order of its releases, but without Spark."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.data_source import RocketMQDataSource, project_schema
from pyrocket_consumer.spark.stream_reader import ReadAllAvailable, StreamReader
from pyrocket_consumer.testing import EmbeddedCluster, Fault

FROM_FIRST = {"subscribe": "orders", "startingOffsets": "earliest"}

Row = tuple[MessageQueue, int]
"""A read message: its queue and offset."""


def set_fault_on_all_brokers(cluster: EmbeddedCluster, code: int | None, fault: Fault, **how: Any) -> None:
    """Set a fault on every broker."""
    for broker in cluster.brokers:
        broker.on(code, fault, **how)


@contextmanager
def stored_at(
    times_ms: Sequence[int], topics: Sequence[str] = ("orders",), **options: Any
) -> Iterator[EmbeddedCluster]:
    """Yield a cluster with one queue for each topic, which has a message of each store time."""
    with EmbeddedCluster(**options) as cluster:
        for topic in topics:
            cluster.create_topic(topic, queues=1)
            for at_ms in times_ms:
                cluster.send(topic, stored_at_ms=at_ms)
        yield cluster


def with_options(builder: Any, cluster: Any, **options: object) -> Any:
    """Set the options of a reader or writer of Spark as a user does; None removes an option."""
    given = {"nameServer": cluster.name_server, **options}
    return builder.format("rocketmq").options(**{name: value for name, value in given.items() if value is not None})


def data_source(cluster: EmbeddedCluster, **options: object) -> RocketMQDataSource:
    """Return the data source with quick retries; options as a user writes them, None for the default.

    It reads the topic `orders` unless they say otherwise.
    """
    if not options.keys() & {"subscribe", "subscribePattern", "assign"}:
        options["subscribe"] = "orders"
    texts = {"nameServer": cluster.name_server, "requestTimeoutMs": "2000", "planningIntervalMs": "0", "retries": "2"}
    texts |= {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    texts = {name: value for name, value in texts.items() if options.get(name, "") is not None}
    return RocketMQDataSource({name.lower(): value for name, value in texts.items()})


def rows(reader: Any, partitions: Any) -> list[Row]:
    """Return the messages that tasks read, each with a pickled copy of the reader, as on executors."""
    found = []
    for partition in pickle.loads(pickle.dumps(partitions)):
        copy = pickle.loads(pickle.dumps(type(reader)(reader._options, reader._schema)))
        for batch in copy.read(partition):
            columns = (batch.column(name).to_pylist() for name in ("topic", "brokerName", "queueId", "queueOffset"))
            found += [(MessageQueue(*queue), offset) for *queue, offset in zip(*columns, strict=True)]
    return found


@contextmanager
def planning_reader(cluster: EmbeddedCluster, **options: object) -> Iterator[Any]:
    """Yield the reader of a stream, for calls that plan."""
    reader = data_source(cluster, **options).streamReader(project_schema(None))
    try:
        yield reader
    finally:
        reader.stop()


def start_offsets(cluster: EmbeddedCluster, **options: object) -> dict[str, int]:
    """Return the start offsets of a new query, by `topic/broker/queue id`."""
    with planning_reader(cluster, **options) as reader:
        return flatten(reader.initialOffset())


def read_batch(cluster: EmbeddedCluster, **options: object) -> list[Row]:
    """Return the messages that a batch reads."""
    reader = data_source(cluster, **options).reader(project_schema(None))
    return rows(reader, reader.partitions())


@dataclass
class Checkpoint:
    """The state that Spark stores of a query: the planned end of each batch as text, and the count of finished ones."""

    ends: list[str] = field(default_factory=list)
    finished: int = 0


class CrashError(Exception):
    """Ends a run in the middle of a batch."""


class Run:
    """One run of a query from a checkpoint. It makes the calls of Spark between start and stop, batch by batch.

    `release` is that of Spark; `trigger` "processing", "available" or "once".
    """

    def __init__(
        self, reader: StreamReader, checkpoint: Checkpoint, release: str = "4.3", trigger: str = "processing"
    ) -> None:
        self.reader = reader
        self.checkpoint = checkpoint
        self._old = release in ("4.0", "4.1")
        self._limit = None if self._old else reader.getDefaultReadLimit()
        if trigger == "once":
            self._limit = ReadAllAvailable()
        if trigger == "available" and not self._old:
            reader.prepareForTriggerAvailableNow()
        self._restarted = bool(checkpoint.ends)

    def batch(self, *, crash: bool = False) -> list[Row] | None:
        """Run the next batch and return its messages; None if there is nothing new.

        With `crash` it ends after the plan of the batch is stored.
        """
        ends, finished = self.checkpoint.ends, self.checkpoint.finished
        if len(ends) > finished:
            return self._run(crash)  # it was planned before the restart
        if self._old and self._restarted:
            self.reader.partitions(json.loads(ends[-1]), json.loads(ends[-1]))
        self._restarted = False
        end = json.dumps(self._latest(ends[-1] if ends else None))
        if ends and end == ends[-1]:
            return None
        if ends and not self._old:
            self.reader.commit(json.loads(ends[-1]))
        ends.append(end)
        return self._run(crash)

    def _latest(self, before: str | None) -> dict[str, Any]:
        if self._old:
            return self.reader.latestOffset()
        start = self.reader.initialOffset() if before is None else json.loads(before)
        end = self.reader.latestOffset(json.loads(json.dumps(start)), self._limit)
        json.dumps(self.reader.reportLatestOffset())
        return end

    def _run(self, crash: bool) -> list[Row]:
        ends, number = self.checkpoint.ends, self.checkpoint.finished
        start = ends[number - 1] if number else json.dumps(self.reader.initialOffset())
        partitions = self.reader.partitions(json.loads(start), json.loads(ends[number]))
        if crash:
            raise CrashError
        found = rows(self.reader, partitions)
        self.checkpoint.finished += 1
        self._restarted = False
        return found

    def planned_ends(self, name: str = "queues") -> dict[str, int]:
        """Return the last planned end of each queue, by its name."""
        return flatten(json.loads(self.checkpoint.ends[-1]), name)


def flatten(offset: dict[str, Any], name: str = "queues") -> dict[str, int]:
    """Return the offsets in an encoded offset, by `topic/broker/queue id`."""
    return {
        f"{topic}/{broker}/{queue_id}": offset
        for topic, brokers in offset.get(name, {}).items()
        for broker, queues in brokers.items()
        for queue_id, offset in queues.items()
    }


@contextmanager
def running(
    cluster: EmbeddedCluster,
    checkpoint: Checkpoint | None = None,
    release: str = "4.3",
    trigger: str = "processing",
    **options: object,
) -> Iterator[Run]:
    """Yield a run of a query with its own reader, and stop the reader."""
    with planning_reader(cluster, **options) as reader:
        yield Run(reader, Checkpoint() if checkpoint is None else checkpoint, release, trigger)


def first_checkpoint(cluster: EmbeddedCluster, **options: object) -> Checkpoint:
    """Return the checkpoint of a query that ran its first batch and was stopped."""
    with running(cluster, **options) as run:
        run.batch()
        return run.checkpoint


def all_batches(run: Run) -> list[Row]:
    """Return the messages of all batches until there is nothing new."""
    return [row for batch in iter(run.batch, None) for row in batch]
