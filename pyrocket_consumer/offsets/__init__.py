"""Where a group's offsets are kept: `OffsetStore` and its kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyrocket_consumer.model import OffsetStore, ReadOffsetType
from pyrocket_consumer.offsets.database import DatabaseOffsets
from pyrocket_consumer.offsets.store import MemoryOffsetStore, QueueReset, ResetEpochs

if TYPE_CHECKING:
    from pyrocket_consumer.offsets.local_file_store import FoundOffsets, LocalFileOffsetStore

__all__ = [
    "OffsetStore",
    "ReadOffsetType",
    "MemoryOffsetStore",
    "LocalFileOffsetStore",
    "DatabaseOffsets",
    "QueueReset",
    "ResetEpochs",
    "FoundOffsets",
]


def __getattr__(name: str) -> Any:
    if name not in ("LocalFileOffsetStore", "FoundOffsets"):  # imported when first used: most consumers need no files
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyrocket_consumer.offsets import local_file_store

    value = globals()[name] = getattr(local_file_store, name)
    return value
