"""One owner per store: a lock held from load to close, and a file that names the owner."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace

from pyrocket_consumer.errors import OffsetStoreLocked, ProtocolError
from pyrocket_consumer.offsets.local.disk import Disk
from pyrocket_consumer.protocol.fastjson import loads
from pyrocket_consumer.text import escape_controls

LOCK_FILE = "offsets.lock"
OWNER_FILE = "offsets.owner"
MAX_HOST_CHARACTERS = 255
MAX_TIMESTAMP = 4_102_444_800.0
"""The end of the year 2099. A later time in the owner file is invalid."""


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
