"""Where a group's offsets are kept: `OffsetStore` and its kinds."""

from pyrocket_consumer.model import OffsetStore, ReadOffsetType
from pyrocket_consumer.offsets.database import DatabaseOffsets
from pyrocket_consumer.offsets.local_file_store import FoundOffsets, LocalFileOffsetStore
from pyrocket_consumer.offsets.store import MemoryOffsetStore, QueueReset, ResetEpochs

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
