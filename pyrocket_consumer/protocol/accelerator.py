"""Which of two is used for what every message pays: the Python code in `record`, or the same compiled.

`_accelerator.c` is built where there is a compiler and left out where there is none; `PYROCKET_PURE=1` switches it off.
Nothing but speed differs: the tests run with both.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from pyrocket_consumer.text import logger

SOURCE = "72c1c8068b9af1b2"
"""The digest of the C file that belongs to this Python code: a build of another one is not used."""


class RecordRows(Protocol):
    """The records of many answers: a row each."""

    count: int
    responses: bytes
    """Which answer each row is of, as numbers of 32 bits."""
    compressed: bool
    """Whether any body is."""

    def filter_tags(self, tags: tuple[bytes, ...], /) -> bool:
        """Keep the rows with one of `tags`; return whether the properties of all could be read."""

    def column(self, name: str, /) -> tuple[Any, ...] | None:
        """Return what Arrow holds of a column, None if that cannot be read this way."""


class FindRows(Protocol):
    """Finds the records of answers, no more than `max_records` in each, whose offsets are in a range."""

    def __call__(
        self, responses: tuple[tuple[bytes | bytearray, int, int, int, int], ...], max_records: int, /
    ) -> RecordRows | None:
        """Take data, start, stop, first offset and the one after the last; None: something is unusual or damaged."""


def _compiled() -> tuple[ModuleType | None, str]:
    """Return the compiled module, or None, and why it is that."""
    if os.environ.get("PYROCKET_PURE", "0") not in ("", "0"):
        return None, "PYROCKET_PURE is set"
    try:
        import pyrocket_consumer.protocol._accelerator as module  # type: ignore[import-not-found]

        if module.SOURCE != SOURCE:
            raise ImportError("it is of another version's source")
    except Exception as error:  # whatever a broken build raises: the Python code is whole
        if isinstance(error, ModuleNotFoundError) and error.name == "pyrocket_consumer.protocol._accelerator":
            return None, (
                "there is no build of it here: installed without a compiler and Python's headers or with "
                "PYROCKET_PURE, or a copy or an archive of the sources"
            )
        reason = f"its build cannot be used: {error}; install the package again"
        logger("wire").warning("Python code is used in place of the compiled part: %s", reason)
        return None, reason
    return module, "it was built, and PYROCKET_PURE is not set"


compiled, REASON = _compiled()

ACCELERATED: bool = compiled is not None
"""Whether the compiled part is used; else everything runs in Python, slower. `REASON` tells why."""

if TYPE_CHECKING or compiled is None:
    from pyrocket_consumer.protocol.record import Record, are_offsets_rising, decode_records, make_record, mark_done
else:
    Record = compiled.Record
    make_record = compiled.make_record
    decode_records = compiled.decode_records
    are_offsets_rising = compiled.are_offsets_rising
    mark_done = compiled.mark_done

find_rows: FindRows | None = compiled.find_rows if compiled is not None else None
"""For `columns`, which does the same with numpy where there is none."""

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
