"""Move a store to another directory, after a changed client id has left it behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pyrocket_consumer.config import check_bool
from pyrocket_consumer.errors import OffsetStoreError
from pyrocket_consumer.offsets.local.directories import absolute_path
from pyrocket_consumer.offsets.local.disk import LocalDisk
from pyrocket_consumer.offsets.local.recovery import BACKUP_FILE, JOURNAL_FILE, MAIN_FILE
from pyrocket_consumer.offsets.local.store import LocalFileOffsetStore


def adopt_store(orphan: str | os.PathLike[str], directory: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """Move the offsets of the store `orphan` into the store `directory`; return the new path of the orphan's files.

    This locks both stores, so neither may be in use. Once the offsets are durable in `directory`, the orphan is
    renamed to `<orphan>.adopted-<seconds>`. With `replace`, they replace offsets that `directory` already has.

    Raises:
        ConfigError: `orphan` or `directory` is no path.
        OffsetStoreError: `orphan` is no store, or `directory` holds offsets and `replace` is not set. Or `orphan`
            belongs to a client id, and `directory` to another group or to none. Or only the renaming failed.
        OffsetStoreLocked: one of the stores is in use.
        OffsetStoreUnwritable: a store cannot be opened, or the offsets not be written; `orphan` is unchanged.
    """
    check_bool("replace", replace)
    source, target = Path(absolute_path(orphan, "orphan")), Path(absolute_path(directory))
    if os.path.realpath(source) == os.path.realpath(target):
        raise OffsetStoreError(f"{source} cannot adopt itself; name the store left behind first, then the one used now")
    if not any(LocalDisk().exists(os.path.join(source, name)) for name in (MAIN_FILE, BACKUP_FILE, JOURNAL_FILE)):
        raise OffsetStoreError(
            f"{source} is no offset store; name the directory with offsets.json in it: DIRECTORY/CLIENT-ID/GROUP"
        )
    if "@" in source.parent.name and (target.name != source.name or "@" not in target.parent.name):
        raise OffsetStoreError(
            f"no consumer of group {source.name!r} looks for its offsets in {target}; name the directory that is used "
            f"now: DIRECTORY/CLIENT-ID/{source.name}"
        )
    with LocalFileOffsetStore(source, existing_only=True) as old, LocalFileOffsetStore(target) as new:
        present = new.clone_offset_table()
        if present and not replace:
            raise OffsetStoreError(
                f"offset store {target} holds offsets of {len(present)} queues already; compare both, and to use those "
                f"of {source}, pass replace=True (pyrocket: --replace)"
            )
        offsets = old.clone_offset_table()
        for mq, offset in offsets.items():
            new.update_offset(mq, offset)
        new.persist_all(offsets)
    kept = source.with_name(f"{source.name}.adopted-{int(time.time())}")
    try:
        source.rename(kept)
    except OSError as error:
        raise OffsetStoreError(
            f"the offsets of {source} are in {target} now, but it could not be renamed to {kept.name}: "
            f"{error.strerror or error}; move it away yourself"
        ) from error
    return kept
