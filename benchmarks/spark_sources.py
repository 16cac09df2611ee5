"""The other sources of benchmarks/spark_read.py, in a module of their own, because workers of Spark import it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.columns import PulledRecords, record_batches
from pyrocket_consumer.protocol.frame import BufferSlice
from pyrocket_consumer.protocol.message import MAX_RECORDS, Message
from pyrocket_consumer.spark.data_source import project_schema
from pyrocket_consumer.spark.task_reader import arrow_schema

_ready: dict[str, pa.RecordBatch] = {}


class ReadySource(DataSource):
    """Yields batches made before, once per worker, to show the limit of Spark. Options: records, queues, messages."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> StructType:
        return project_schema(None)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _ReadyReader(self.options, schema)


class _ReadyReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._records = options["records"]
        self._queues, self._messages = int(options["queues"]), int(options["messages"])
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(queue_id) for queue_id in range(self._queues)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        columns = arrow_schema(self._schema)
        key = f"{self._records} {columns.names}"
        if key not in _ready:
            queue = MessageQueue("t", "broker-a", 0)
            records = _answers(Path(self._records).read_bytes())
            (_ready[key],) = record_batches([PulledRecords(queue, each, 0, 1 << 60) for each in records], columns)
        batch, left = _ready[key], self._messages
        while left > 0:
            yield batch if left >= batch.num_rows else batch.slice(0, left)
            left -= batch.num_rows


def _answers(data: bytes) -> list[BufferSlice]:
    """Return the records in pull responses, with at most the number of messages of a pull in each."""
    places, place = list[int](), 0
    while place < len(data):
        places.append(place)
        place += int.from_bytes(data[place : place + 4], "big")
    starts = places[::MAX_RECORDS]
    return [BufferSlice(data, start, stop) for start, stop in pairwise([*starts, len(data)])]


class PlainSource(DataSource):
    """The obvious source: rows, one pull of a queue after the other, a connection per task."""

    @classmethod
    def name(cls) -> str:
        return "plain"

    def schema(self) -> StructType:
        return project_schema(None)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _PlainReader(self.options, schema)


class _PlainReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._name_server, self._topic = options["nameserver"], options["topic"]
        self._queues, self._messages = int(options["queues"]), int(options["messages"])
        self._names = schema.names

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(queue_id) for queue_id in range(self._queues)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        queue = MessageQueue(self._topic, "broker-a", partition.value)
        config = ClientConfig(name_server=self._name_server)
        cluster = Cluster(config, make_client_id(config))
        cluster.start()
        try:
            offset, subscription = 0, Subscription(self._topic)
            while offset < self._messages:
                pull = cluster.broker("broker-a").pull(queue, offset, group="plain", subscription=subscription)
                answer, messages = cluster.run(pull, 30)
                for message in messages:
                    if message.queue_offset < self._messages:
                        yield _row(message, self._names)
                offset = answer.next_offset
        finally:
            cluster.close()


def _row(message: Message, names: Sequence[str]) -> tuple[Any, ...]:
    values = {
        "topic": message.topic,
        "brokerName": message.queue.broker_name,
        "queueId": message.queue.queue_id,
        "queueOffset": message.queue_offset,
        "msgId": message.message_id,
        "tags": message.tags,
        "keys": message.properties.get("KEYS"),
        "body": message.body,
        "properties": message.properties,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "reconsumeTimes": message.reconsume_times,
        "bornTimestamp": message.born_at,
        "storeTimestamp": message.stored_at,
        "bornHost": message.born_host,
        "storeHost": message.store_host,
    }
    return tuple(values[name] for name in names)


class CountingSource(DataSource):
    """A stream with one row in every batch, to measure the cost of a micro-batch of a Python source."""

    @classmethod
    def name(cls) -> str:
        return "counting"

    def schema(self) -> str:
        return "value long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return _CountingReader()


class _CountingReader(DataSourceStreamReader):
    def __init__(self) -> None:
        self._count = 0

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"count": 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:  # noqa: N802
        self._count = max(self._count, (start or {"count": 0})["count"]) + 1
        return {"count": self._count}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(json.dumps([start["count"], end["count"]]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        begin, end = json.loads(partition.value)
        yield pa.RecordBatch.from_arrays([pa.array(range(begin, end), pa.int64())], ["value"])

    def commit(self, end: dict[str, int]) -> None:
        pass
