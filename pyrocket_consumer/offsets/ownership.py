"""One owner per store: a lock from load to close, and who holds it."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Self

from pyrocket_consumer.errors import OffsetStoreLocked
from pyrocket_consumer.offsets.disk import Disk, DiskLock

LOCK_FILE = "offsets.lock"
OWNER_FILE = "offsets.owner"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns, or last owned, a store."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        who = "this process" if (self.pid, self.host) == (os.getpid(), socket.gethostname()) else f"process {self.pid}"
        return f"{who} on host {self.host} (since {since})"


class Ownership:
    """The lock on a store's directory. The operating system releases it when the process ends, even by kill -9."""

    def __init__(self, lock: DiskLock) -> None:
        self._lock = lock

    @classmethod
    def take(cls, disk: Disk, directory: str) -> Self:
        """Become the owner of the store in `directory`, which exists.

        Raises:
            OffsetStoreLocked: another process, or another store object of this one, owns it; the text says who.
            OSError: the lock file can neither be made nor opened.
        """
        lock = disk.lock(os.path.join(directory, LOCK_FILE))
        if lock is None:
            owner = read_owner(disk, directory)
            raise OffsetStoreLocked(
                f"offset store {directory} is in use by {owner or 'another process'}; stop it, "
                "or give this one an instance_name or a directory of its own"
            )
        owner = Owner(os.getpid(), socket.gethostname(), time.time())
        try:
            file = disk.open(os.path.join(directory, OWNER_FILE), create=True)
            try:
                file.write_at(json.dumps(asdict(owner)).encode(), 0)
            finally:
                file.close()
        except OSError:
            pass  # full disk: only the text of another's OffsetStoreLocked is poorer
        return cls(lock)

    def release(self) -> None:
        """Let another process own the store."""
        self._lock.release()


def read_owner(disk: Disk, directory: str) -> Owner | None:
    """Return who took the store last; it may have ended since."""
    try:
        text = disk.read(os.path.join(directory, OWNER_FILE))
        fields = json.loads(text or b"")
        return Owner(int(fields["pid"]), str(fields["host"]), float(fields["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
