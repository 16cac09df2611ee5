"""The few file operations the local store needs. Everything that touches the disk goes through here.

A stand-in for `Disk` can fail, stop or forget at each call: that is how crashes and power loss are tested.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import weakref
from typing import Protocol

from filelock import lock_descriptor, unlock_descriptor

_ON_WINDOWS = sys.platform == "win32"
_LOCK_ATTEMPTS = 10
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)

MAX_FILE_BYTES = 1 << 30
"""No larger file is read into memory: it is not one of ours, whose journal has at most so much."""


class DiskFile(Protocol):
    """An open file, written at given positions."""

    def write_at(self, data: bytes, position: int) -> None:
        """Write all of `data` at `position`; it survives the end of the process, not yet a power failure."""

    def sync(self) -> None:
        """Return when everything written to the file, through whichever opening, survives a power failure."""

    def is_at(self, path: str) -> bool:
        """Tell whether this is the file of that name, and not another or none. True if it cannot be told."""

    def close(self) -> None:
        """Give the file up without syncing it."""


class DiskLock(Protocol):
    """An exclusive lock; it also ends when the process ends, in whatever way."""

    created_file: bool
    """There was no file of that name before."""

    def is_in_place(self) -> bool:
        """Tell whether the file that is locked still has its name, so that others find it locked."""

    def release(self) -> None:
        """Let others have it. Safe to call twice."""


class Disk(Protocol):
    """File operations by path. All raise OSError when the disk, or the permission, does not allow them."""

    def make_directories(self, path: str) -> None:
        """Create the directory and those above it, where missing, for nobody else to look into.

        That the directory is another user's is an error: he can exchange what is in it at any time.
        """

    def read(self, path: str) -> bytes | None:
        """Return what the file holds, None when there is no such file. Never waits: a pipe, a device is an error.

        So are a link, and a file larger than any of ours.
        """

    def open(self, path: str, *, create: bool) -> DiskFile:
        """Open a file for writing: an existing one as it is, or with `create` a new one in its place."""

    def link(self, source: str, target: str) -> None:
        """Give the file a second name; `target` must not exist."""

    def replace(self, source: str, target: str) -> None:
        """Rename, in one step, over whatever `target` was. Survives a power failure once the directory is synced."""

    def remove(self, path: str) -> None:
        """Remove the file, if there is one."""

    def exists(self, path: str) -> bool:
        """Tell whether there is such a file. True if it cannot be told."""

    def sync_directory(self, path: str) -> None:
        """Return when all names in the directory survive a power failure."""

    def lock(self, path: str) -> DiskLock | None:
        """Take the exclusive lock of the file, made if missing, without waiting; None when someone else has it."""


_CANNOT_SYNC_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""What network and FUSE file systems that cannot sync directories say. The sync of a file still counts there."""


class SyncedDirectory:
    """The names in a directory, synced where the file system can do so."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self.directory = directory
        self.sync_error: OSError | None = None
        """What the file system says that syncs no directories."""

    def sync(self) -> None:
        """Return when all names survive a power failure, or must be left to the file system."""
        try:
            self._disk.sync_directory(self.directory)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_DIRECTORIES:
                raise
            self.sync_error = error


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

    def is_at(self, path: str) -> bool:
        return _is_at(_identity(os.fstat(self._fd)), path)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class _LocalLock:
    """A locked file, open. A fork leaves it with the parent: the child closes its copy, and never unlocks."""

    def __init__(self, path: str, fd: int, created_file: bool) -> None:
        self._path = path
        self._fd: int | None = fd
        self._identity = _identity(os.fstat(fd))
        self.created_file = created_file
        _locks.add(self)

    def is_in_place(self) -> bool:
        return self._fd is not None and _is_at(self._identity, self._path)

    def release(self) -> None:
        if self._fd is not None:
            unlock_descriptor(self._fd)
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    __del__ = close


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino


def _is_at(identity: tuple[int, int], path: str) -> bool:
    try:
        return _identity(os.stat(path)) == identity
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


_locks: weakref.WeakSet[_LocalLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class LocalDisk:
    """The disk of this machine."""

    def make_directories(self, path: str) -> None:
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            parent = os.path.dirname(path)
            if parent == path or (os.path.lexists(path) and not os.path.isdir(path)):
                break
            path = parent
        for each in reversed(missing):
            try:
                os.mkdir(each, 0o700)
            except FileExistsError:  # another process was faster, or it is no directory
                if not os.path.isdir(each):
                    raise
            path = each
        self._check_owner(path)

    @staticmethod
    def _check_owner(directory: str) -> None:
        if _ON_WINDOWS:
            return
        owner, us = os.stat(directory).st_uid, os.geteuid()
        if owner not in (us, 0):
            raise PermissionError(
                errno.EPERM,
                f"it belongs to user {owner}, and this process runs as user {us}: run it as {owner}, or "
                f"chown the directory to {us}",
                directory,
            )

    def read(self, path: str) -> bytes | None:
        try:
            fd = os.open(path, os.O_RDONLY | _O_NOFOLLOW | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.EISDIR, "it is a link, not a regular file", path) from error
            raise
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EISDIR, "it is not a regular file", path)
            if found.st_size > MAX_FILE_BYTES:
                raise OSError(
                    errno.EFBIG,
                    f"it has {found.st_size} bytes; no file of a store has more than {MAX_FILE_BYTES}",
                    path,
                )
            return file.read(MAX_FILE_BYTES)

    def open(self, path: str, *, create: bool) -> DiskFile:
        flags = os.O_RDWR | _O_NOFOLLOW | getattr(os, "O_BINARY", 0)
        if not create:
            return _LocalFile(os.open(path, flags))
        flags |= os.O_CREAT | os.O_EXCL
        try:
            return _LocalFile(os.open(path, flags, 0o600))
        except FileExistsError:  # what a crash has left, or somebody's link: what that leads to is not ours to write
            os.remove(path)
            return _LocalFile(os.open(path, flags, 0o600))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except FileNotFoundError:
            pass

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass
        return True

    def sync_directory(self, path: str) -> None:
        if _ON_WINDOWS:  # where directories cannot be opened, and renames are journalled
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> DiskLock | None:
        flags = os.O_RDWR | _O_NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
        for _ in range(_LOCK_ATTEMPTS):
            try:
                fd, is_new = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
            except FileExistsError:
                try:
                    fd, is_new = os.open(path, flags), False
                except FileNotFoundError:
                    continue  # removed in between
            lock = _LocalLock(path, fd, is_new)
            is_ours = False
            try:
                if not lock_descriptor(fd, blocking=False):
                    return None
                is_ours = lock.is_in_place()  # or its file was removed in between, or replaced
                if is_ours:
                    return lock
            finally:
                if not is_ours:
                    lock.close()
        raise OSError(errno.ENOLCK, "the file to be locked is replaced each time", path)
