"""The directories of a group's stores on this host: `<base>/<client id>/<group>`, as for Java clients."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pyrocket_consumer.errors import ConfigError, OffsetStoreError
from pyrocket_consumer.model import EventKind
from pyrocket_consumer.offsets.local.disk import Disk
from pyrocket_consumer.offsets.local.journal import JOURNAL_FILE
from pyrocket_consumer.offsets.local.offsets_json import BACKUP_FILE, MAIN_FILE
from pyrocket_consumer.offsets.local.ownership import LOCK_FILE, read_owner
from pyrocket_consumer.offsets.local.writer import StoreReports
from pyrocket_consumer.text import safe_repr

_MAX_SLOTS_CHECKED = 16  # when a load searches for a swapped store
_SLOT_LAG_S = 10.0  # another slot counts as newer if it was written at least this much later

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


def last_write_time(directory: str | os.PathLike[str]) -> float | None:
    """Return the time of the last write to the store in `directory`, or None if there is no readable store."""
    times = []
    for name in (MAIN_FILE, BACKUP_FILE, JOURNAL_FILE):
        try:
            times.append(Path(directory, name).stat().st_mtime)
        except OSError:
            pass
    return max(times, default=None)


def find_orphans(base: str | os.PathLike[str], client_id: str, group: str) -> list[Path]:
    """Return the unused stores of `group` under other client ids than `client_id` and its slots, newest first.

    A client id changes with the host's address or the instance name, and the member then uses another directory.
    Directories that cannot be read, such as those of other users, are ignored.
    """
    mine = set(slot_ids(client_id))
    orphans: list[tuple[float, Path]] = []
    try:
        siblings = [entry for entry in os.scandir(base) if entry.name not in mine]
    except OSError:
        return []
    for sibling in siblings:
        directory = Path(sibling.path, group)
        written = last_write_time(directory)
        if written is not None and not Disk().is_locked(os.path.join(directory, LOCK_FILE)):
            orphans.append((written, directory))
    return [directory for _, directory in sorted(orphans, reverse=True)]


@dataclass(frozen=True, slots=True)
class MemberDirectories:
    """The directories of this host that a member of a group may use.

    With `has_slots`, several processes share the client id. Each uses the first directory that no other one has.
    """

    base: Path
    client_id: str
    group: str
    has_slots: bool

    def candidates(self) -> Iterator[str]:
        """Yield the directories, in the order in which a process tries them."""
        for slot in slot_ids(self.client_id) if self.has_slots else (self.client_id,):
            yield os.fspath(store_directory(self.base, slot, self.group))

    def report_orphans(self, reports: StoreReports) -> None:
        """Report `store-orphaned` about a new store, if the group has one under another client id."""
        orphans = find_orphans(self.base, self.client_id, self.group)
        if orphans:
            reports.add(
                EventKind.STORE_ORPHANED,
                f"this store is new, but group {self.group} has one under another client id: {orphans[0]}. "
                f"To use its offsets, stop, and adopt it: pyrocket offsets adopt {orphans[0]} {reports.directory}",
                orphans=len(orphans),
            )

    def report_slot_change(self, disk: Disk, reports: StoreReports) -> None:
        """Report `store-slot` if processes of this host without instance names may have swapped their stores."""
        if not self.has_slots:
            return
        client_id = Path(reports.directory).parent.name
        written = last_write_time(reports.directory)
        age = None if written is None else max(0.0, time.time() - written)
        store = "this store is new" if age is None else f"this store was last written {age:.0f} s ago"
        remedy = "to let each keep its store, give each an instance_name of its own"
        if client_id != self.client_id:
            text = f"another process of this host has {self.client_id}, this one has {client_id}; {store}; {remedy}"
            reports.add(EventKind.STORE_SLOT, text, client_id=client_id)
            return
        for slot in islice(slot_ids(client_id), 1, _MAX_SLOTS_CHECKED):
            directory = os.fspath(store_directory(self.base, slot, self.group))
            newer = last_write_time(directory)
            if newer is None:
                return
            owner = read_owner(disk, directory)
            if owner is not None and owner.is_alive and newer > (written or 0.0) + _SLOT_LAG_S:
                text = (
                    f"{store}, so messages since then are delivered here, too; {owner} continued with {slot}; {remedy}"
                )
                reports.add(EventKind.STORE_SLOT, text, client_id=client_id)
                return
