"""The stores of a group's offsets: `OffsetStore` and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyrocket_consumer.model import OffsetStore, ReadOffsetType
from pyrocket_consumer.offsets.base import MemoryOffsetStore, QueueReset, ResetEpochs
from pyrocket_consumer.offsets.database.store import DatabaseOffsets

if TYPE_CHECKING:
    from pyrocket_consumer.offsets.local.store import FoundOffsets, LocalFileOffsetStore

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
    if name not in ("LocalFileOffsetStore", "FoundOffsets"):  # imported on first use; most consumers need no files
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyrocket_consumer.offsets.local import store

    value = globals()[name] = getattr(store, name)
    return value
