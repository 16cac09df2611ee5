"""The directories of a group's stores on this host: `<base>/<client id>/<group>`, as for Java clients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyrocket_consumer.errors import ConfigError, OffsetStoreError
from pyrocket_consumer.offsets.local.disk import LocalDisk
from pyrocket_consumer.offsets.local.ownership import LOCK_FILE
from pyrocket_consumer.offsets.local.recovery import BACKUP_FILE, JOURNAL_FILE, MAIN_FILE, RecoveredStore, recover
from pyrocket_consumer.text import safe_repr

BASE_VARIABLE = "ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR"


def base_directory(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return `chosen`, else ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR, else `~/.rocketmq_offsets`, as Java does.

    The path is absolute.

    Raises:
        ConfigError: no directory can have this path, or its home directory is unknown.
        OffsetStoreError: it is relative, and the working directory was removed.
    """
    if chosen:
        given, origin = os.fspath(chosen), "offset_store_dir"
    elif variable := os.environ.get(BASE_VARIABLE):
        given, origin = variable, BASE_VARIABLE
    else:
        given, origin = os.path.join("~", ".rocketmq_offsets"), "the default"
    try:
        path = Path(given).expanduser()
    except (RuntimeError, UnicodeEncodeError):
        raise ConfigError(
            f"offsets cannot be stored in {safe_repr(given, 200)} ({origin}): the home directory "
            f"of {safe_repr(Path(given).parts[0])} is unknown; set offset_store_dir to a path without ~"
        ) from None
    return Path(absolute_path(str(path), origin))


def absolute_path(directory: str | os.PathLike[str], name: str = "directory") -> str:
    """Return the absolute path of `directory`, which a later chdir() does not change. `name` is its option.

    Raises:
        ConfigError: no directory can have this path.
        OffsetStoreError: it is relative, and the working directory was removed.
    """
    try:
        path = os.fspath(directory)
        is_allowed = isinstance(path, str) and path and "\0" not in path and os.fsencode(path)
    except (TypeError, UnicodeEncodeError):
        is_allowed = False
    if not is_allowed:
        raise ConfigError(f"{name}={safe_repr(directory, 200)} is not allowed; name the directory of the store")
    try:
        return os.path.abspath(path)
    except OSError as error:
        raise OffsetStoreError(
            f"{name}={safe_repr(directory, 200)}: the working directory cannot be found ({error.strerror or error}); "
            "name an absolute path"
        ) from error


def store_directory(base: str | os.PathLike[str], client_id: str, group: str) -> Path:
    """Return the directory of a member's store. Source: LocalFileOffsetStore.

    Raises:
        ConfigError: the client id cannot be the name of one directory, so other programs would not find the store.
    """
    if {"/", "\0", os.sep, os.altsep} & set(client_id) or client_id in (".", ".."):
        raise ConfigError(
            f"client id {client_id!r} cannot name the directory of its offsets; use client_ip, instance_name and "
            f"unit_name without {os.sep!r}"
        )
    return Path(base) / client_id / group


def slot_ids(client_id: str) -> Iterator[str]:
    """Yield the client ids that a process tries, in this order: `ip@DEFAULT`, `ip@DEFAULT-1`, `ip@DEFAULT-2` …"""
    address, instance, *rest = client_id.split("@")
    yield client_id
    for slot in range(1, 1000):
        yield "@".join([address, f"{instance}-{slot}", *rest])


def read_store(directory: str | os.PathLike[str]) -> RecoveredStore:
    """Return the contents of the store in `directory` without locking it; its owner may be writing.

    Raises:
        OffsetStoreCorrupt: neither its file nor the backup can be read.
        OffsetStoreError: a file cannot be opened.
    """

    def read(name: str) -> bytes | None:
        try:
            return LocalDisk().read(os.path.join(directory, name))
        except OSError as error:
            raise OffsetStoreError(f"cannot read {Path(directory, name)}: {error.strerror or error}") from error

    # Read the journal first. If the owner then writes a checkpoint, that has all offsets of these frames.
    journal = read(JOURNAL_FILE)
    return recover(read(MAIN_FILE), read(BACKUP_FILE), journal)


def last_write_time(directory: str | os.PathLike[str]) -> float | None:
    """Return the time of the last write to the store in `directory`, or None if there is no readable store."""
    times = []
    for name in (MAIN_FILE, BACKUP_FILE, JOURNAL_FILE):
        try:
            times.append(Path(directory, name).stat().st_mtime)
        except OSError:
            pass
    return max(times, default=None)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A store of the same group under another client id, which no process had when it was found."""

    client_id: str
    directory: Path
    modified_at: float

    def __str__(self) -> str:
        return str(self.directory)


def find_orphans(base: str | os.PathLike[str], client_id: str, group: str) -> list[Orphan]:
    """Return the unused stores of `group` under other client ids than `client_id` and its slots, newest first.

    A client id changes with the host's address or the instance name, and the member then uses another directory.
    Directories that cannot be read, such as those of other users, are ignored.
    """
    mine = set(slot_ids(client_id))
    orphans, disk = [], LocalDisk()
    try:
        siblings = [entry for entry in os.scandir(base) if entry.name not in mine]
    except OSError:
        return []
    for sibling in siblings:
        directory = Path(sibling.path, group)
        written = last_write_time(directory)
        if written is not None and not disk.is_locked(os.path.join(directory, LOCK_FILE)):
            orphans.append(Orphan(sibling.name, directory, written))
    return sorted(orphans, key=lambda orphan: orphan.modified_at, reverse=True)
