"""Names of PySpark that its older releases do not have, and stand-ins for those.

4.0 and 4.1 have no read limits and one batch per AvailableNow run; 4.0 streams to rows only.
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
            """How much a batch may hold; here for its name only."""

        @dataclass
        class ReadAllAvailable(ReadLimit):
            """All there is."""

        @dataclass
        class ReadMinRows(ReadLimit):
            """At least so much, else nothing."""

            min_rows: int

        @dataclass
        class ReadMaxRows(ReadLimit):
            """At most so much."""

            max_rows: int

        class SupportsTriggerAvailableNow:
            """A reader that can end where the queues ended when it began."""


DataSourceStreamArrowWriter: type | None = getattr(datasource, "DataSourceStreamArrowWriter", None)
"""None where streams can be written as rows only."""

PUSHES_FILTERS = hasattr(datasource.DataSourceReader, "pushFilters")
"""False before 4.1: Spark tells readers nothing of filters."""

__all__ = [
    "PUSHES_FILTERS",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
]
