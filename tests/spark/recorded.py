"""A data source that records every call in a file, for tests of the order in which Spark calls.

Spark's Python processes import it, so it is a module of its own. The option `path` names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from pyrocket_consumer.spark.batch_reader import BatchReader
from pyrocket_consumer.spark.data_source import RocketMQDataSource
from pyrocket_consumer.spark.stream_reader import StreamReader


def calls(path: Path) -> list[str]:
    """Return the recorded calls, in order."""
    return path.read_text().splitlines() if path.exists() else []


class _Recorded:
    def __init__(self, file: str, options: Any, schema: Any) -> None:
        super().__init__(options, schema)
        self._file = file

    def _record(self, call: str) -> None:
        with open(self._file, "a") as file:
            file.write(call + "\n")


class RecordedStreamReader(_Recorded, StreamReader):
    _calls_itself = False

    def prepareForTriggerAvailableNow(self) -> None:
        self._record("prepareForTriggerAvailableNow")
        super().prepareForTriggerAvailableNow()

    def initialOffset(self) -> Any:
        if not self._calls_itself:
            self._record("initialOffset")
        return super().initialOffset()

    def latestOffset(self, start: Any = None, limit: Any = None) -> Any:
        self._calls_itself = True  # older releases pass no start
        end = super().latestOffset(start, limit)
        self._calls_itself = False
        self._record("latestOffset" if end != start else "latestOffset: nothing new")
        return end

    def reportLatestOffset(self) -> Any:
        self._record("reportLatestOffset")
        return super().reportLatestOffset()

    def partitions(self, start: Any, end: Any) -> Any:
        self._record("partitions" if start != end else "partitions: none")
        return super().partitions(start, end)

    def commit(self, end: Any) -> None:
        self._record("commit")
        super().commit(end)


class FailingReader(_Recorded, BatchReader):
    """A batch whose tasks return their first message and then fail, until their third attempt."""

    def read(self, partition: Any) -> Iterator[Any]:
        attempt = TaskContext.get().attemptNumber()
        self._record(f"read: attempt {attempt}")
        for batch in super().read(partition):
            if attempt < 2:
                yield batch.slice(0, 1)
                raise RuntimeError("this attempt crashed")
            yield batch


class RecordedSource(RocketMQDataSource):
    @classmethod
    def name(cls) -> str:
        return "recorded"

    def streamReader(self, schema: Any) -> Any:
        reader = super().streamReader(schema)
        assert isinstance(reader, StreamReader)
        return RecordedStreamReader(self.options["path"], reader._options, reader._schema)

    def reader(self, schema: Any) -> Any:
        reader = super().reader(schema)
        assert isinstance(reader, BatchReader)
        return FailingReader(self.options["path"], reader._options, reader._schema)
