"""The few file operations the local store needs. Everything that touches the disk goes through here.

A stand-in for `Disk` can fail, stop or forget at each call: that is how crashes and power loss are tested.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Protocol

from filelock import FileLock, Timeout

_ON_WINDOWS = sys.platform == "win32"


class DiskFile(Protocol):
    """An open file, written at given positions."""

    def write_at(self, data: bytes, position: int) -> None:
        """Write all of `data` at `position`; it survives the end of the process, not yet a power failure."""

    def sync(self) -> None:
        """Return when everything written to the file, through whichever opening, survives a power failure."""

    def close(self) -> None:
        """Give the file up without syncing it."""


class DiskLock(Protocol):
    """An exclusive lock; it also ends when the process ends, in whatever way."""

    def release(self) -> None:
        """Let others have it."""


class Disk(Protocol):
    """File operations by path. All raise OSError when the disk, or the permission, does not allow them."""

    def make_directories(self, path: str) -> None:
        """Create the directory and those above it, where missing."""

    def read(self, path: str) -> bytes | None:
        """Return what the file holds, None when there is no such file."""

    def open(self, path: str, *, create: bool) -> DiskFile:
        """Open a file for writing: an existing one as it is, or with `create` an empty one in its place."""

    def link(self, source: str, target: str) -> None:
        """Give the file a second name; `target` must not exist."""

    def replace(self, source: str, target: str) -> None:
        """Rename, in one step, over whatever `target` was. Survives a power failure once the directory is synced."""

    def remove(self, path: str) -> None:
        """Remove the file, if there is one."""

    def sync_directory(self, path: str) -> None:
        """Return when all names in the directory survive a power failure."""

    def lock(self, path: str) -> DiskLock | None:
        """Take the exclusive lock `path` without waiting, None when someone else has it."""


_CANNOT_SYNC_NAMES = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""What network and FUSE file systems that cannot sync directories say. The sync of a file still counts there."""


class SyncedNames:
    """The names in a directory, synced where the file system can do so."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self.directory = directory
        self.sync_refused: OSError | None = None
        """What the file system says that syncs no directories."""

    def sync(self) -> None:
        """Return when all names survive a power failure, or must be left to the file system."""
        try:
            self._disk.sync_directory(self.directory)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_NAMES:
                raise
            self.sync_refused = error


class _LocalFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    if sys.platform == "win32":

        def write_at(self, data: bytes, position: int) -> None:
            os.lseek(self._fd, position, os.SEEK_SET)  # the store writes from one thread at a time
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]

        def sync(self) -> None:
            os.fsync(self._fd)

    else:

        def write_at(self, data: bytes, position: int) -> None:
            written = os.pwrite(self._fd, data, position)
            while written < len(data):  # a full disk takes a part first, then refuses the rest
                written += os.pwrite(self._fd, data[written:], position + written)

        if sys.platform == "darwin":

            def sync(self) -> None:
                import fcntl

                fcntl.fcntl(self._fd, fcntl.F_FULLFSYNC)  # fsync does not reach the platter there

        else:

            def sync(self) -> None:
                os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class LocalDisk:
    """The disk of this machine."""

    def make_directories(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def read(self, path: str) -> bytes | None:
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def open(self, path: str, *, create: bool) -> DiskFile:
        flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | (os.O_CREAT | os.O_TRUNC if create else 0)
        return _LocalFile(os.open(path, flags, 0o666))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except FileNotFoundError:
            pass

    def sync_directory(self, path: str) -> None:
        if _ON_WINDOWS:  # where directories cannot be opened, and renames are journalled
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> DiskLock | None:
        lock = FileLock(path, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return None
        return lock
