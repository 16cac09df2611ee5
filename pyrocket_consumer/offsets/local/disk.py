"""The file operations of the local store. Every access to the disk goes through this module.

Tests replace `Disk` by one that fails, stops or forgets at a given call, to simulate crashes and power loss.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time

from filelock import lock_descriptor, unlock_descriptor

from pyrocket_consumer.transport.forks import close_in_children

_ON_WINDOWS = sys.platform == "win32"
_LOCK_ATTEMPTS = 10
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_LOCK_FLAGS = os.O_RDWR | _O_NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
_LOCK_PAUSES_S = (0.003, 0.01)  # between attempts to lock a file

MAX_FILE_BYTES = 1 << 30
"""The size of the largest file that is read. A journal is at most this large, so a larger file is not from a store."""

if sys.platform == "win32":

    def _pwrite(fd: int, data: bytes, position: int) -> int:
        os.lseek(fd, position, os.SEEK_SET)  # the store writes from one thread at a time
        return os.write(fd, data)
else:
    _pwrite = os.pwrite

if sys.platform == "darwin":

    def _sync(fd: int) -> None:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync does not reach the platter on macOS
elif sys.platform == "win32":
    _sync = os.fsync
else:
    _sync = os.fdatasync


class DiskFile:
    """An open file, written at given positions."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write_at(self, data: bytes, position: int) -> None:
        """Write all of `data` at `position`. It survives the end of the process, but not yet a power failure."""
        written = _pwrite(self._fd, data, position)
        while written < len(data):  # a full disk takes a part first, then refuses the rest
            written += _pwrite(self._fd, data[written:], position + written)

    def sync(self) -> None:
        """Return when all data written to the file, through any descriptor, survives a power failure."""
        _sync(self._fd)

    def is_at(self, path: str) -> bool:
        """Return whether `path` still names this file. Return True if that cannot be determined."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the file without syncing it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class DiskLock(DiskFile):
    """An exclusive lock on a file. It ends with the process, however that ends, and stays with it after a fork."""

    def __init__(self, path: str, fd: int, created_file: bool) -> None:
        super().__init__(fd)
        self._path = path
        self.created_file = created_file
        """Whether locking created the file."""
        close_in_children(self)

    def fileno(self) -> int:
        """Return the descriptor of the file, -1 once it is closed."""
        return self._fd

    def is_in_place(self) -> bool:
        """Return whether the locked file still has its name, so that other processes find it locked."""
        return self._fd >= 0 and self.is_at(self._path)

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._fd >= 0:
            unlock_descriptor(self._fd)
            self.close()


class Disk:
    """The disk of this machine. All operations raise OSError if the disk fails or a permission is missing."""

    def make_directories(self, path: str) -> None:
        """Create the directory and its missing parents, readable by this user only.

        A directory of another user is an error, because that user could replace its files at any time.
        """
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
            except FileExistsError:  # another process created it first, or it is no directory
                if not os.path.isdir(each):
                    raise
            path = each
        if _ON_WINDOWS:
            return
        owner, us = os.stat(path).st_uid, os.geteuid()
        if owner not in (us, 0):
            raise PermissionError(
                errno.EPERM,
                f"it belongs to user {owner}, and this process runs as user {us}: run it as {owner}, or "
                f"chown the directory to {us}",
                path,
            )

    def read(self, path: str) -> bytes | None:
        """Return the contents of the file, or None if it does not exist.

        A link, a pipe, a device, or a file of more than MAX_FILE_BYTES is an error, so this never blocks.
        """
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
        """Open an existing file for writing; with `create`, replace it by a new one."""
        flags = os.O_RDWR | _O_NOFOLLOW | getattr(os, "O_BINARY", 0)
        if not create:
            return DiskFile(os.open(path, flags))
        flags |= os.O_CREAT | os.O_EXCL
        try:
            return DiskFile(os.open(path, flags, 0o600))
        except FileExistsError:  # left by a crash, or a link of another user, whose target must not be written
            os.remove(path)
            return DiskFile(os.open(path, flags, 0o600))

    def link(self, source: str, target: str) -> None:
        """Give the file a second name; `target` must not exist."""
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        """Rename `source` to `target` in one step. This survives a power failure once the directory is synced."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """Remove the file if it exists."""
        try:
            os.remove(path)
        except FileNotFoundError:
            pass

    def exists(self, path: str) -> bool:
        """Return whether the file exists. Return True if that cannot be determined."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass
        return True

    def sync_directory(self, path: str) -> None:
        """Return when all names in the directory survive a power failure."""
        if _ON_WINDOWS:  # directories cannot be opened there, and NTFS journals renames
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> DiskLock | None:
        """Lock the file without waiting, and create it if missing. Return None if another process has the lock."""
        for _ in range(_LOCK_ATTEMPTS):
            try:
                fd, is_new = os.open(path, _LOCK_FLAGS | os.O_CREAT | os.O_EXCL, 0o600), True
            except FileExistsError:
                try:
                    fd, is_new = os.open(path, _LOCK_FLAGS), False
                except FileNotFoundError:
                    continue  # removed in between
            lock = DiskLock(path, fd, is_new)
            is_ours = False
            try:
                if not _lock_soon(fd):
                    return None
                is_ours = lock.is_in_place()  # False if the file was removed or replaced in between
                if is_ours:
                    return lock
            finally:
                if not is_ours:
                    lock.close()
        raise OSError(errno.ENOLCK, "another process replaces the lock file at each attempt", path)

    def is_locked(self, path: str) -> bool:
        """Return whether a process has locked the file. Return True if that cannot be determined."""
        try:
            fd = os.open(path, _LOCK_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        try:
            if not _lock_soon(fd):
                return True
            unlock_descriptor(fd)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False


def _lock_soon(fd: int) -> bool:
    """Lock the file unless another process keeps it locked. `is_locked` has the lock only for an instant."""
    for pause in _LOCK_PAUSES_S:
        if lock_descriptor(fd, blocking=False):
            return True
        time.sleep(pause)
    return lock_descriptor(fd, blocking=False)


def write_file(disk: Disk, path: str, data: bytes) -> None:
    """Write a complete file and sync it. Remove a partial file after a failure."""
    try:
        file = disk.open(path, create=True)
        try:
            file.write_at(data, 0)
            file.sync()
        finally:
            file.close()
    except OSError:
        try:
            disk.remove(path)
        except OSError:
            pass
        raise
