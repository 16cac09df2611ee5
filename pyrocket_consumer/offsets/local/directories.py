"""The directories of a group's stores on this host, `<base>/<client id>/<group>` as for Java clients, and their owners.

A store has one owner: a lock held from load to close, and a file that names the owner.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from pyrocket_consumer.errors import ConfigError, OffsetStoreError, OffsetStoreLocked, ProtocolError
from pyrocket_consumer.model import EventKind
from pyrocket_consumer.offsets.local.disk import Disk
from pyrocket_consumer.offsets.local.journal import JOURNAL_FILE
from pyrocket_consumer.offsets.local.offsets_json import BACKUP_FILE, MAIN_FILE
from pyrocket_consumer.protocol.fastjson import loads
from pyrocket_consumer.text import escape_controls, safe_repr

LOCK_FILE = "offsets.lock"
OWNER_FILE = "offsets.owner"
MAX_HOST_CHARACTERS = 255
MAX_TIMESTAMP = 4_102_444_800.0
"""The end of the year 2099. A later time in the owner file is invalid."""

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

    def notes(self, disk: Disk, directory: str, *, is_new: bool) -> Iterator[tuple[EventKind, str, dict[str, object]]]:
        """Yield the kind, text and facts of each event about the store that was opened in `directory`.

        `store-orphaned`: it is new, and the group has a store under another client id. `store-slot`: processes of this
        host without instance names may have swapped their stores.
        """
        if is_new and (orphans := find_orphans(self.base, self.client_id, self.group)):
            text = (
                f"this store is new, but group {self.group} has one under another client id: {orphans[0]}. "
                f"To use its offsets, stop, and adopt it: pyrocket offsets adopt {orphans[0]} {directory}"
            )
            yield EventKind.STORE_ORPHANED, text, {"orphans": len(orphans)}
        if self.has_slots and (text := self._slot_change(disk, directory)):
            remedy = "to let each keep its store, give each an instance_name of its own"
            yield EventKind.STORE_SLOT, f"{text}; {remedy}", {"client_id": Path(directory).parent.name}

    def _slot_change(self, disk: Disk, directory: str) -> str:
        """Return how this store and that of another slot may have been swapped, or "" if nothing shows that."""
        client_id = Path(directory).parent.name
        written = last_write_time(directory)
        age = None if written is None else max(0.0, time.time() - written)
        store = "this store is new" if age is None else f"this store was last written {age:.0f} s ago"
        if client_id != self.client_id:
            return f"another process of this host has {self.client_id}, this one has {client_id}; {store}"
        for slot in islice(slot_ids(client_id), 1, _MAX_SLOTS_CHECKED):
            other = os.fspath(store_directory(self.base, slot, self.group))
            newer = last_write_time(other)
            if newer is None:
                break
            owner = read_owner(disk, other)
            if owner is not None and owner.is_alive and newer > (written or 0.0) + _SLOT_LAG_S:
                return f"{store}, so messages since then are delivered here, too; {owner} continued with {slot}"
        return ""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns, or last owned, a store."""

    pid: int
    host: str
    since: float
    closes_by: float | None = None
    """The time by which the owner will have released the store, if it has announced one."""

    @property
    def is_closing(self) -> bool:
        """Whether the owner has announced that it will release the store soon."""
        return self.closes_by is not None and time.time() < self.closes_by

    @property
    def is_alive(self) -> bool:
        """Whether the process exists. True if it runs on another host, where this cannot be checked."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # the process belongs to another user
        return True

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        who = "this process" if (self.pid, self.host) == (os.getpid(), socket.gethostname()) else f"process {self.pid}"
        return f"{who} on host {self.host} (since {since})"


class StoreClosing(OffsetStoreLocked):
    """The owner of the store has announced that it will release it soon."""


class Ownership:
    """The lock on a store's directory. The operating system releases it when the process ends, even after kill -9."""

    def __init__(self, disk: Disk, directory: str) -> None:
        """Become the owner of the store in the existing `directory`.

        Raises:
            OffsetStoreLocked: another process, or another store object of this process, owns it.
            OSError: the lock file cannot be created or opened.
        """
        lock = disk.lock(os.path.join(directory, LOCK_FILE))
        if lock is None:
            owner = read_owner(disk, directory)
            raise (StoreClosing if owner is not None and owner.is_closing else OffsetStoreLocked)(
                f"offset store {directory} is in use by {owner or 'another process'}; stop it, "
                "or give this one an instance_name or a directory of its own"
            )
        self.lock = lock
        self.directory = directory
        self._disk = disk
        self._owner = Owner(os.getpid(), socket.gethostname(), time.time())
        self._write_owner(self._owner)

    def lock_again(self) -> None:
        """Lock the current lock file, after the one locked before was removed or replaced.

        Raises:
            OffsetStoreLocked: another process or store object owns the store, or has owned it meanwhile.
            OSError: the lock file cannot be created or opened.
        """
        self.lock.release()
        lock = self._disk.lock(os.path.join(self.directory, LOCK_FILE))
        owner = read_owner(self._disk, self.directory)
        if lock is not None:
            if owner is None or replace(owner, closes_by=None) == self._owner:
                self.lock = lock
                self._write_owner(self._owner)
                return
            lock.release()
        raise OffsetStoreLocked(
            f"offset store {self.directory} was taken by {owner or 'another process'}, because {LOCK_FILE} had been "
            "removed or replaced while it was in use here. No more offsets are written here. Close the store, and open "
            "it when the other process has ended, or give this one an instance_name or a directory of its own"
        )

    def closes_within(self, seconds: float) -> None:
        """Announce to other processes that this one will release the store within `seconds`."""
        if self.lock.is_in_place():
            self._write_owner(replace(self._owner, closes_by=time.time() + seconds))

    def _write_owner(self, owner: Owner) -> None:
        path = os.path.join(self.directory, OWNER_FILE)
        try:
            file = self._disk.open(path + ".new", create=True)
            try:
                file.write_at(json.dumps(asdict(owner)).encode(), 0)
            finally:
                file.close()
            self._disk.replace(path + ".new", path)
        except OSError:
            pass  # a full disk, for example; other processes then only lack the name of this owner


def read_owner(disk: Disk, directory: str) -> Owner | None:
    """Return the last owner of the store, which may have ended; None if its file is missing or invalid."""
    try:
        fields = loads(disk.read(os.path.join(directory, OWNER_FILE)) or b"")
        pid, host, since, closes_by = fields["pid"], fields["host"], fields["since"], fields.get("closes_by")
        if (
            type(pid) is int
            and 0 < pid < 2**31
            and isinstance(host, str)
            and len(host) <= MAX_HOST_CHARACTERS
            and 0 <= float(since) < MAX_TIMESTAMP
            and (closes_by is None or 0 <= float(closes_by) < MAX_TIMESTAMP)
        ):
            return Owner(pid, escape_controls(host), float(since), None if closes_by is None else float(closes_by))
    except (OSError, ProtocolError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return None
