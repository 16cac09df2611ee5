"""Names that older releases of PySpark lack, with replacements for these releases.

4.0 and 4.1 have no read limits and one batch per AvailableNow run; 4.0 writes streams as rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import datasource

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            ReadMinRows,
            SupportsTriggerAvailableNow,
        )
    except ImportError:

        class ReadLimit:
            """How much a batch may hold; a placeholder."""

        @dataclass
        class ReadAllAvailable(ReadLimit):
            """All messages."""

        @dataclass
        class ReadMinRows(ReadLimit):
            """At least `min_rows`, else none."""

            min_rows: int

        @dataclass
        class ReadMaxRows(ReadLimit):
            """At most `max_rows`."""

            max_rows: int

        class SupportsTriggerAvailableNow:
            """A reader that can stop at the end offsets that it found when it started."""


DataSourceStreamArrowWriter: type | None = getattr(datasource, "DataSourceStreamArrowWriter", None)
"""None if streams can be written as rows only."""

PUSHES_FILTERS = hasattr(datasource.DataSourceReader, "pushFilters")
"""False before 4.1, where Spark does not pass filters to readers."""

__all__ = [
    "PUSHES_FILTERS",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
]
