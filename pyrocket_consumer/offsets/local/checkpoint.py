"""The file offsets.json: always replaced, never edited; the previous file stays as the backup."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from pyrocket_consumer.offsets.local.disk import Disk, SyncedDirectory
from pyrocket_consumer.offsets.local.journal import FileIdentity, identity
from pyrocket_consumer.offsets.local.journal_file import write_file
from pyrocket_consumer.offsets.local.recovery import BACKUP_FILE, MAIN_FILE
from pyrocket_consumer.text import logger

log = logger("offsets")


class CheckpointFile:
    """Replaces offsets.json so that the old file or the new one exists, complete, at each instant."""

    def __init__(self, disk: Disk, names: SyncedDirectory) -> None:
        self._disk = disk
        self._synced_directory = names
        self._directory = names.directory
        self._main = os.path.join(names.directory, MAIN_FILE)
        self._backup = os.path.join(names.directory, BACKUP_FILE)
        self._main_is_good = False
        self._unreadable: list[str] = []
        self.main: FileIdentity = (0, 0)
        self.backup: FileIdentity = (0, 0)

    def set_loaded(self, main: bytes | None, backup: bytes | None, unreadable: Sequence[str]) -> None:
        """Take the files that `load` found. The next `replace` backs up a good one, and sets bad ones aside."""
        self.main, self.backup = identity(main or b""), identity(backup or b"")
        self._unreadable = list(unreadable)
        self._main_is_good = main is not None and MAIN_FILE not in unreadable

    def is_in_place(self) -> bool:
        """Return whether the file exists, or should not. If it is missing, the next `replace` makes no backup."""
        if self._main_is_good and not self._disk.exists(self._main):
            self._main_is_good = False
            return False
        return True

    def replace(self, text: bytes, before_renames: Callable[[], None]) -> None:
        """Write, sync, rename, sync the directory. Call `before_renames` before the first rename."""
        disk, main, written = self._disk, self._main, identity(text)
        new = main + ".new"
        write_file(disk, new, text)
        before_renames()
        while self._unreadable:
            self._set_aside(self._unreadable[-1])
            self._unreadable.pop()
        if self._main_is_good and self.main != written:  # the backup must differ from the checkpoint
            self._rotate(main)
        disk.replace(new, main)
        self.main, self._main_is_good = written, True
        self._synced_directory.sync()

    def _rotate(self, main: str) -> None:
        """Make the current file the backup. At each instant one of the two exists."""
        backup = self._backup
        new = backup + ".new"
        try:
            try:
                self._disk.link(main, new)
            except FileExistsError:  # left by a crash
                self._disk.remove(new)
                self._disk.link(main, new)
            self._disk.replace(new, backup)
        except OSError:  # no hard links on this file system, for example
            self._disk.replace(main, backup)
            self._main_is_good = False  # offsets.json does not exist until the new file is renamed
        self.backup = self.main

    def _set_aside(self, name: str) -> None:
        """Rename an unreadable file, so that the user can examine it."""
        path = os.path.join(self._directory, name)
        aside = f"{path}.unreadable-{time.time_ns()}"
        try:
            self._disk.replace(path, aside)
        except FileNotFoundError:
            return
        log.warning("unreadable file of the offset store set aside: file=%s", aside)
