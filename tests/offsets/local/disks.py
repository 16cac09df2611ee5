"""Disks for tests: one in memory that forgets unsynced data, and one that counts, fails or stops at each call."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.local.disk import Disk, DiskFile, DiskLock
from pyrocket_consumer.offsets.local.recovery import recover

SECTOR = 512


class PowerCut(BaseException):
    """The machine stops here. This is no Exception, because the store must not handle it."""


class _Inode:
    def __init__(self) -> None:
        self.now = bytearray()
        self.safe = b""
        self.unsynced: list[tuple[int, bytes]] = []

    def survivor(self, rng: random.Random) -> bytes:
        """Return the contents after a power failure: for each sector some version since the last sync."""
        result = bytearray(self.safe)
        for sector in range(0, max((at + len(data) for at, data in self.unsynced), default=0), SECTOR):
            touching = [(at, data) for at, data in self.unsynced if at < sector + SECTOR and at + len(data) > sector]
            for at, data in touching[: rng.randint(0, len(touching))]:
                first, last = max(at, sector), min(at + len(data), sector + SECTOR)
                if len(result) < last:
                    result.extend(bytes(last - len(result)))
                result[first:last] = data[first - at : last - at]
        return bytes(result)


class _MemoryFile:
    def __init__(self, disk: MemoryDisk, inode: _Inode, lies: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._lies = lies

    def write_at(self, data: bytes, position: int) -> None:
        now = self._inode.now
        if len(now) < position:
            now.extend(bytes(position - len(now)))
        now[position : position + len(data)] = data
        self._inode.unsynced.append((position, bytes(data)))
        self._disk.bytes_written += len(data)
        if position == 0:
            self._disk.beginnings.append(bytes(data[:512]))

    def sync(self) -> None:
        if not self._lies:
            self._inode.safe = bytes(self._inode.now)
            self._inode.unsynced.clear()

    def is_at(self, path: str) -> bool:
        return self._disk._names.get(path) is self._inode

    def close(self) -> None:
        pass


class _MemoryLock:
    def __init__(self, disk: MemoryDisk, path: str, created_file: bool) -> None:
        self._disk, self._path, self.created_file = disk, path, created_file
        self._inode = disk._names[path]
        disk._taken.add(self._inode)

    def is_in_place(self) -> bool:
        return self._inode in self._disk._taken and self._disk._names.get(self._path) is self._inode

    def release(self) -> None:
        self._disk._taken.discard(self._inode)


class MemoryDisk:
    """A disk with a write-back cache. File contents survive a power failure once synced, names once their directory is.

    `lying_files` and `lying_directories` report a sync and do nothing. They are negative controls of the power-loss
    tests.
    """

    def __init__(self, *, lying_files: tuple[str, ...] = (), lying_directories: bool = False) -> None:
        self._names: dict[str, _Inode] = {}
        self._safe_names: dict[str, _Inode] = {}
        self._unsynced: list[dict[str, _Inode | None]] = []
        self._taken: set[_Inode] = set()
        self._lying_files = lying_files
        self._lying_directories = lying_directories
        self.has_links = True
        self.beginnings: list[bytes] = []  # all data ever written at the start of a file
        self.bytes_written = 0

    def make_directories(self, path: str) -> None:
        pass

    def read(self, path: str) -> bytes | None:
        inode = self._names.get(path)
        return None if inode is None else bytes(inode.now)

    def open(self, path: str, *, create: bool) -> DiskFile:
        if create:
            self._change({path: _Inode()})
        elif path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return _MemoryFile(self, self._names[path], bool(self._lying_files) and path.endswith(self._lying_files))

    def link(self, source: str, target: str) -> None:
        if not self.has_links:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), target)
        if target in self._names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self._change({target: self._names[source]})

    def replace(self, source: str, target: str) -> None:
        if source not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if self._names.get(target) is not self._names[source]:  # rename() of two names of one file does nothing
            self._change({target: self._names[source], source: None})

    def remove(self, path: str) -> None:
        if path in self._names:
            self._change({path: None})

    def sync_directory(self, path: str) -> None:
        if not self._lying_directories:
            self._safe_names = dict(self._names)
            self._unsynced.clear()

    def lock(self, path: str) -> DiskLock | None:
        created_file = path not in self._names
        if created_file:
            self._change({path: _Inode()})
        return None if self._names[path] in self._taken else _MemoryLock(self, path, created_file)

    def exists(self, path: str) -> bool:
        return path in self._names

    def _change(self, names: dict[str, _Inode | None]) -> None:
        self._unsynced.append(names)
        self._apply(self._names, names)

    @staticmethod
    def _apply(table: dict[str, _Inode], names: dict[str, _Inode | None]) -> None:
        for path, inode in names.items():
            if inode is None:
                table.pop(path, None)
            else:
                table[path] = inode

    def files(self) -> dict[str, bytes]:
        """Return the contents of all files, by path."""
        return {path: bytes(inode.now) for path, inode in self._names.items()}

    def put(self, path: str, data: bytes | None) -> None:
        """Store `data` in the file as if synced; None removes the file."""
        if data is None:
            self.remove(path)
        else:
            file = self.open(path, create=True)
            file.write_at(data, 0)
            self._names[path].safe = data
            self._names[path].unsynced.clear()
        self._safe_names = dict(self._names)
        self._unsynced.clear()

    def recovered(self) -> dict[MessageQueue, int]:
        """Return the offsets that a restart finds in the store /s."""
        main, backup, journal = (self.read("/s/offsets" + end) for end in (".json", ".json.bak", ".journal"))
        return dict(recover(main, backup, journal).offsets)

    def free_locks(self) -> None:
        """Release the locks of a process that has ended. Its writes stay in the cache."""
        self._taken.clear()

    def after_kill(self) -> MemoryDisk:
        """Return the disk as the next process finds it after a kill of this one."""
        return self.holding({path: bytes(inode.now) for path, inode in self._names.items()})

    def after_power_loss(self, rng: random.Random) -> MemoryDisk:
        """Return the disk as it may be after a power failure now."""
        names = dict(self._safe_names)
        for change in self._unsynced[: rng.randint(0, len(self._unsynced))]:  # the file system's journal keeps order
            self._apply(names, change)
        return self.holding({path: inode.survivor(rng) for path, inode in names.items()})

    @staticmethod
    def holding(files: dict[str, bytes]) -> MemoryDisk:
        """Return a disk with these files."""
        disk = MemoryDisk()
        for path, data in files.items():
            disk.put(path, data)
        return disk


Hook = Callable[[int, str, str], None]


class WatchedDisk:
    """Calls `hook(count, operation, path)` before each operation on `disk`; the hook may raise, kill or sleep.

    Operations: make_directories, read, open, create, write_at, sync, link, replace, remove, sync_directory, lock.
    """

    def __init__(self, disk: Disk, hook: Hook) -> None:
        self._disk, self._hook = disk, hook
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, self._disk, None, name)

    def _call(self, target: Disk | DiskFile, file: str | None, name: str, *arguments: Any, **options: Any) -> Any:
        path = file or arguments[-1]  # the new one, if there are two paths
        if name not in ("exists", "is_at", "close"):
            self.count += 1
            self._hook(self.count, "create" if options.get("create") else name, path)
        done = getattr(target, name)(*arguments, **options)
        if name != "open":
            return done
        return SimpleNamespace(**{each: partial(self._call, done, path, each) for each in FILE_OPERATIONS})


FILE_OPERATIONS = ("write_at", "sync", "is_at", "close")
WRITES = ("create", "write_at", "sync", "link", "replace", "remove", "sync_directory", "make_directories")


class FailureHook:
    """A hook that makes writing operations fail while `error` is set, or those `when(operation, path)` picks."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.when: Callable[[str, str], bool] = lambda operation, path: operation in WRITES
        self.failures = 0

    def __call__(self, count: int, operation: str, path: str) -> None:
        if self.error is not None and self.when(operation, path):
            self.failures += 1
            raise OSError(self.error, os.strerror(self.error), path)
