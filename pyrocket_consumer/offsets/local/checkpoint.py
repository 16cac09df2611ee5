"""offsets.json on the disk: always replaced, never edited, with the one before as backup."""

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
    """Replaces offsets.json so that at each instant the old one or the new one is there, whole."""

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
        """Say what loading has found: a good file becomes the backup next time, unreadable ones are set aside."""
        self.main, self.backup = identity(main or b""), identity(backup or b"")
        self._unreadable = list(unreadable)
        self._main_is_good = main is not None and MAIN_FILE not in unreadable

    def is_in_place(self) -> bool:
        """Tell whether the file is, if there is to be one; if not, the next one replaces none."""
        if self._main_is_good and not self._disk.exists(self._main):
            self._main_is_good = False
            return False
        return True

    def replace(self, text: bytes, before_renames: Callable[[], None]) -> None:
        """Write, sync, rename, sync the directory. `before_renames` is called when the old file is about to go."""
        disk, main, written = self._disk, self._main, identity(text)
        new = main + ".new"
        write_file(disk, new, text)
        before_renames()
        while self._unreadable:
            self._set_aside(self._unreadable[-1])
            self._unreadable.pop()
        if self._main_is_good and self.main != written:  # the backup shall tell a checkpoint from the one before
            self._rotate(main)
        disk.replace(new, main)
        self.main, self._main_is_good = written, True
        self._synced_directory.sync()

    def _rotate(self, main: str) -> None:
        """Make the present file the backup, without a moment in which there is neither."""
        backup = self._backup
        new = backup + ".new"
        try:
            try:
                self._disk.link(main, new)
            except FileExistsError:  # a crash has left it
                self._disk.remove(new)
                self._disk.link(main, new)
            self._disk.replace(new, backup)
        except OSError:  # no hard links on this file system, for example
            self._disk.replace(main, backup)
            self._main_is_good = False  # there is none until the new one is in place
        self.backup = self.main

    def _set_aside(self, name: str) -> None:
        """Keep an unreadable file under another name, for whoever wants to look at it."""
        path = os.path.join(self._directory, name)
        aside = f"{path}.unreadable-{time.time_ns()}"
        try:
            self._disk.replace(path, aside)
        except FileNotFoundError:
            return
        log.warning("unreadable file of the offset store set aside: file=%s", aside)
