"""Chooses the code that runs for every message: the Python code in `record`, or the same functions compiled.

`_accelerator.c` is built if there is a compiler. `PYROCKET_PURE=1` switches the compiled part off. Only the speed
differs; the tests run with both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from pyrocket_consumer.text import logger

SOURCE = "72c1c8068b9af1b2"
"""The digest of the C file that belongs to this Python code. A build of another C file is not used."""


class RecordRows(Protocol):
    """The records of many pull responses, one row each."""

    count: int
    responses: bytes
    """The index of the response of each row, as 32-bit numbers."""
    compressed: bool
    """Whether any body is compressed."""

    def filter_tags(self, tags: tuple[bytes, ...], /) -> bool:
        """Keep the rows with one of `tags`. Return whether the properties of all rows could be read."""

    def column(self, name: str, /) -> tuple[Any, ...] | None:
        """Return the Arrow buffers of a column, None if only the Python code can read it."""


FindRows = Callable[[tuple[tuple[bytes | bytearray, int, int, int, int], ...], int], RecordRows | None]
"""Finds the records of (data, start, stop, first offset, end offset) tuples whose offsets are in the range.

Its second argument is the most records of a response. It returns None if a record is unusual or damaged.
"""


def _compiled() -> tuple[ModuleType | None, str]:
    """Return the compiled module or None, and the reason."""
    if os.environ.get("PYROCKET_PURE", "0") not in ("", "0"):
        return None, "PYROCKET_PURE is set"
    try:
        import pyrocket_consumer.protocol._accelerator as module  # type: ignore[import-not-found]

        if module.SOURCE != SOURCE:
            raise ImportError("it is of another version's source")
    except Exception as error:  # a broken build may raise anything; the Python code does not need it
        if isinstance(error, ModuleNotFoundError) and error.name == "pyrocket_consumer.protocol._accelerator":
            return None, (
                "there is no build of it here. It was installed without a compiler and Python's headers or with "
                "PYROCKET_PURE, or this is a copy or an archive of the sources"
            )
        reason = f"its build cannot be used: {error}; install the package again"
        logger("wire").warning("Python code is used in place of the compiled part: %s", reason)
        return None, reason
    return module, "it was built, and PYROCKET_PURE is not set"


compiled, REASON = _compiled()

ACCELERATED: bool = compiled is not None
"""Whether the compiled part is used; else the slower Python code runs. `REASON` is the reason."""

if TYPE_CHECKING or compiled is None:
    from pyrocket_consumer.protocol.record import Record, are_offsets_rising, decode_records, make_record, mark_done
else:
    Record = compiled.Record
    make_record = compiled.make_record
    decode_records = compiled.decode_records
    are_offsets_rising = compiled.are_offsets_rising
    mark_done = compiled.mark_done

find_rows: FindRows | None = compiled.find_rows if compiled is not None else None
"""Used by `columns`, which has the same code with numpy in place of the compiled part."""

__all__ = [
    "ACCELERATED",
    "FindRows",
    "REASON",
    "Record",
    "RecordRows",
    "decode_records",
    "find_rows",
    "mark_done",
    "make_record",
    "are_offsets_rising",
]
