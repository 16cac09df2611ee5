"""Moving a store to another directory: when a changed client id has left it behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pyrocket_consumer.errors import OffsetStoreError
from pyrocket_consumer.offsets.local_file_store import LocalFileOffsetStore


def adopt(orphan: str | os.PathLike[str], directory: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """Move the offsets of the store `orphan` into the store `directory`; return where the orphan's files are kept.

    Both are taken meanwhile, so neither may be in use. The offsets are durable in their new place before the old one is
    renamed to `<orphan>.adopted-<seconds>`. With `replace`, offsets that `directory` has already give way.

    Raises:
        OffsetStoreError: `orphan` is no store, or `directory` holds offsets and `replace` is not set.
        OffsetStoreLocked: one of them is in use.
        OffsetStoreUnwritable: the offsets could not be written; `orphan` is as it was.
    """
    source, target = Path(orphan), Path(directory)
    if source.resolve() == target.resolve():
        raise OffsetStoreError(f"{source} cannot adopt itself")
    if not source.is_dir():
        raise OffsetStoreError(f"{source} is no directory of an offset store")
    with LocalFileOffsetStore(source, existing_only=True) as old, LocalFileOffsetStore(target) as new:
        present = new.clone_offset_table()
        if present and not replace:
            raise OffsetStoreError(
                f"offset store {target} holds offsets of {len(present)} queues already; look at both, and if those of "
                f"{source} are wanted, say so with replace"
            )
        offsets = old.clone_offset_table()
        for mq, offset in offsets.items():
            new.update_offset(mq, offset)
        new.persist_all(offsets)
    kept = source.with_name(f"{source.name}.adopted-{int(time.time())}")
    source.rename(kept)
    return kept
