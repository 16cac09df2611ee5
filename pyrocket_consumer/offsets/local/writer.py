"""Makes the offsets of a store durable, in the journal or in offsets.json, and reports what keeps it from that."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

from pyrocket_consumer.errors import OffsetStoreLocked, OffsetStoreUnwritable
from pyrocket_consumer.model import ConsumerEvent, EventKind
from pyrocket_consumer.offsets.local.directories import Ownership
from pyrocket_consumer.offsets.local.disk import Disk, write_file
from pyrocket_consumer.offsets.local.journal import JOURNAL_FILE, FileOffset, JournalFile, identity
from pyrocket_consumer.offsets.local.offsets_json import BACKUP_FILE, MAIN_FILE, encode_epochs, fill_templates
from pyrocket_consumer.offsets.local.recovery import RecoveredStore
from pyrocket_consumer.text import logger

log = logger("offsets")

Durability = Literal["fsync", "process", "checkpoint"]

_REMIND_INTERVAL_S = 60.0  # between two events about an unwritable disk, or removed files
_FILE_CHECK_INTERVAL_S = 1.0  # between two checks that the files still exist
_CANNOT_SYNC_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""The errors of network and FUSE file systems that cannot sync directories. They still sync files."""

_LOCKS_REMEDY = "this file system lacks locks, or another function of a store; use a local one, or mount it with locks"
_FILE_REMEDY = "a directory, link or device has the name of a file; move it away"
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "raise the quota",
    errno.EFBIG: "raise the limit on file sizes",
    errno.EROFS: "mount it writable",
    errno.EACCES: "let this user write to it",
    errno.EPERM: "let this user write to it",
    errno.EIO: "check the disk",
    errno.ENOLCK: _LOCKS_REMEDY,
    errno.ENOTSUP: _LOCKS_REMEDY,
    errno.EOPNOTSUPP: _LOCKS_REMEDY,
    errno.ENOSYS: _LOCKS_REMEDY,
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit on open files",
    errno.ENAMETOOLONG: "use shorter names",
    errno.ESTALE: "mount it again",
    errno.EISDIR: _FILE_REMEDY,
    errno.ELOOP: _FILE_REMEDY,
    errno.ENOTDIR: "a file has the name of a directory; move it away",
    errno.EEXIST: "a file has the name of a directory; move it away",
}


def reason_and_remedy(error: BaseException | None, remedy: str = "check the directory") -> str:
    """Return why the disk has refused something, and what to do about it."""
    number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    return f"{reason or error}; {_REMEDIES.get(number or 0, remedy)}"


class StoreReports:
    """The events of a store. They are kept until no lock is held, because their receiver may call the store."""

    def __init__(
        self, directory: str, on_event: Callable[[ConsumerEvent], None] | None, clock: Callable[[], float]
    ) -> None:
        self.directory = directory
        self.waiting: deque[ConsumerEvent] = deque()
        self._on_event = on_event
        self._clock = clock
        self._unwritable_since: float | None = None
        self._reminded_at = 0.0
        self._removal_reported_at = float("-inf")
        self._unsynced_reported = False

    def add(self, kind: EventKind, text: str, **facts: object) -> None:
        """Keep an event for `emit`."""
        self.waiting.append(ConsumerEvent(kind, text, facts={"directory": self.directory, **facts}))

    def emit(self) -> None:
        """Log all waiting events, and pass them to their receiver. The caller holds no lock."""
        while self.waiting:
            try:
                event = self.waiting.popleft()
            except IndexError:  # another thread has taken it
                return
            level = logging.INFO if event.kind is EventKind.STORE_RECOVERED else logging.WARNING
            log.log(level, "%s", event)
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:
                    log.exception("on_event failed for %s", event.kind)

    def unwritable_error(self, error: OSError) -> OffsetStoreUnwritable:
        """Return the error for the caller of a persist that has failed."""
        return OffsetStoreUnwritable(f"offsets cannot be written to {self.directory}: {reason_and_remedy(error)}")

    def note_unwritable(self, error: OSError, *, is_lossless: bool) -> None:
        """Report a failed write, again after a while if it lasts. With `is_lossless` all offsets are durable anyway."""
        now = self._clock()
        if self._unwritable_since is None:
            self._unwritable_since = now
        elif now - self._reminded_at < _REMIND_INTERVAL_S:
            return
        self._reminded_at = now
        if is_lossless:
            text = (
                f"not every file in {self.directory} can be written: {reason_and_remedy(error)}. Nothing is lost, "
                f"because {JOURNAL_FILE} has the offsets that {MAIN_FILE} lacks. The next persist tries again"
            )
        else:
            text = f"{self.unwritable_error(error)}. They are kept in memory, and the next persist tries again"
        self.add(EventKind.STORE_UNWRITABLE, text, for_s=round(now - self._unwritable_since, 3))

    def note_writable(self) -> None:
        """Report that writes succeed again, if they had failed."""
        if self._unwritable_since is not None:
            lasted_s = round(self._clock() - self._unwritable_since, 3)
            self._unwritable_since = None
            self.add(EventKind.STORE_RECOVERED, "offsets are written again", after_s=lasted_s)

    def note_unsynced(self, error: OSError) -> None:
        """Report once that the file system cannot sync directories."""
        if not self._unsynced_reported:
            self._unsynced_reported = True
            self.add(
                EventKind.STORE_UNSYNCED,
                "this file system cannot sync directories. Offsets survive the end of the process, but not every power "
                "failure, because new names of files may be lost. Use a local file system if that matters",
                error=error.strerror,
            )

    def note_removed(self) -> None:
        """Report that files have vanished, again after a while if it continues."""
        now = self._clock()
        if now - self._removal_reported_at >= _REMIND_INTERVAL_S:
            self._removal_reported_at = now
            self.add(
                EventKind.STORE_REMOVED,
                "files of the store were removed or replaced while it was in use; no other process had taken it, so "
                "all offsets are written again. Exclude the directory from the job that cleans up there",
            )


def sync_directory(disk: Disk, reports: StoreReports) -> None:
    """Return when all names survive a power failure, or when the file system cannot sync directories."""
    try:
        disk.sync_directory(reports.directory)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_DIRECTORIES:
            raise
        reports.note_unsynced(error)


class StoreWriter:
    """Writes the offsets of an open store: to the journal, or, if they do not fit there, with a new offsets.json.

    Callers hold the store's write lock, except for `journal.flush`. Writes are counted. `written` is their number so
    far, and the journal counts how many of them are durable.
    """

    def __init__(
        self,
        disk: Disk,
        ownership: Ownership,
        found: RecoveredStore,
        reports: StoreReports,
        *,
        durability: Durability,
        checkpoint_interval_s: float,
        journal_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """Continue the files of the directory, as `recover` has found them. This writes nothing.

        The first write is always a checkpoint, which repairs the files. A killed process may not have synced them, not
        even their names. So even intact files may exist only in the system's cache until that checkpoint.
        """
        directory = ownership.directory
        self.ownership = ownership
        self.taken_reason: str | None = None
        """Why nothing more is written, once another process has taken the store."""
        self.written = 0
        self.stored_entries: list[FileOffset] = []  # those with a stored offset, in the order of offsets.json
        self.reset_entries: list[FileOffset] = []  # those with an epoch
        self.checkpoint_is_stale = bool(found.journal_frames) or found.source == "backup"
        """Whether the journal, or a backup, has offsets that offsets.json lacks."""
        self._disk = disk
        self._reports = reports
        self._clock = clock
        self._durability = durability
        self._checkpoint_interval_s = checkpoint_interval_s
        self._directory = directory
        self._main_path, self._backup_path = (os.path.join(directory, name) for name in (MAIN_FILE, BACKUP_FILE))
        self._main, self._backup, self._unreadable = found.main, found.backup, list(found.unreadable)
        self._main_is_good = found.source == "file"
        self._has_old_journal = found.journal_size is not None  # of another mode, if this one is "checkpoint"
        self._epochs_text: bytes | None = None
        self._durability_unknown = found.source != "new"  # there may be unsynced files, or files were removed since
        self._checkpointed_at = clock()
        self._checked_at = float("-inf")
        self._sync_directory = partial(sync_directory, disk, reports)
        self.journal = JournalFile(disk, os.path.join(directory, JOURNAL_FILE), journal_bytes, self._sync_directory)
        is_usable = found.header is not None and found.journal_size == journal_bytes
        # If the lock file was removed, a former owner may not have noticed, and may still write to the journal.
        is_ours = not ownership.lock.created_file
        if is_usable and is_ours and JOURNAL_FILE not in found.unreadable and durability != "checkpoint":
            try:
                self.journal.open()
            except OSError as error:
                self._note_unwritable(error)

    # -- offsets -------------------------------------------------------------------------------------------------

    def write(self, entries: Iterable[FileOffset]) -> None:
        """Write those of `entries` whose offset differs from the store.

        This write is durable once `durable` of the journal reaches `written`.
        """
        if self._clock() - self._checked_at >= _FILE_CHECK_INTERVAL_S:
            self.check_files()
        # Reading one attribute needs no lock.
        changed = [entry for entry in entries if (offset := entry.offset) is not None and offset != entry.stored]
        if changed or self._durability_unknown:
            self.written += 1
            self._durability_unknown = False
        if changed:
            journal = self.journal
            fits = journal.is_appendable
            journal.is_appendable = False  # until `_write_frames` has written the entries marked as stored below
            for entry in changed:
                if entry.stored is None:
                    self.stored_entries.append(entry)
                entry.stored = entry.offset
            self._write_frames(journal.encode_frames(changed) if fits else b"")

    def write_resets(self, resets: Sequence[tuple[FileOffset, int | None]]) -> None:
        """Write these offsets, and the epochs of the same entries, in one step."""
        self._epochs_text = None
        journal = self.journal
        frames = journal.encode_reset_frames(resets) if journal.is_appendable else b""
        journal.is_appendable = False  # until `_write_frames` has written them
        for entry, offset in resets:
            if offset is not None:
                if entry.stored is None:
                    self.stored_entries.append(entry)
                entry.stored = offset
        self.written += 1
        self._durability_unknown = False
        self._write_frames(frames)

    def _write_frames(self, frames: bytes) -> None:
        """Append `frames`, or write a checkpoint if they are empty because they do not fit.

        If both fail, the journal stays closed to frames. Otherwise a later frame would make this write count as durable
        although no file has it.
        """
        self.checkpoint_is_stale = True
        journal = self.journal
        if not frames:
            self.checkpoint()
        elif self._durability == "process":
            try:
                journal.write(frames, self.written)
            except OSError:
                self.checkpoint()
            else:
                journal.is_appendable = True
        else:
            journal.append(frames, self.written)
            journal.is_appendable = True

    def write_durably(self, entries: Iterable[FileOffset]) -> None:
        """Write as `write` does, and return when all writes so far are durable."""
        self.write(entries)
        if not self.journal.flush(self.written):
            self.checkpoint()

    def finish(self, entries: Iterable[FileOffset]) -> None:
        """Make all offsets durable in the journal, then if possible in offsets.json, too, before a close."""
        self.check_files()
        self.write_durably(entries)
        if self.checkpoint_is_stale:
            self._try_checkpoint()
        if self._durability_unknown:  # files were removed meanwhile, and could not be written again
            self.checkpoint()

    def close(self) -> None:
        """Close the files, and release the store."""
        self.journal.close()
        self.ownership.lock.release()

    # -- offsets.json --------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Make all writes durable in offsets.json, and start a new generation of the journal.

        Raises:
            OffsetStoreUnwritable: the file could not be written.
            OffsetStoreLocked: another process owns the store.
        """
        self.check_files()
        if self._epochs_text is None:
            self._epochs_text = encode_epochs({entry.queue: entry.epoch for entry in self.reset_entries})
        entries = self.stored_entries
        text = fill_templates(
            [entry.names.template for entry in entries],
            [entry.queue.queue_id for entry in entries],
            [entry.stored or 0 for entry in entries],
            self._epochs_text,
        )
        try:
            self._replace_main(text)
        except OSError as error:
            self._note_unwritable(error)
            raise self._reports.unwritable_error(error) from error
        self.journal.mark_durable(self.written)
        self.checkpoint_is_stale = self._durability_unknown = False
        self._checkpointed_at = self._clock()
        try:
            if self._durability != "checkpoint":
                self.journal.start_generation(self._main, self._backup)
            elif self._has_old_journal:
                self._disk.remove(os.path.join(self._directory, JOURNAL_FILE))  # the checkpoint has its frames
                self._has_old_journal = False
        except OSError as error:
            self._note_unwritable(error)  # durable anyway; until this works, each persist writes a checkpoint
        else:
            self._reports.note_writable()

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint if offsets.json has lacked offsets for `checkpoint_interval_s`."""
        if self.checkpoint_is_stale and self._clock() - self._checkpointed_at >= self._checkpoint_interval_s:
            self._try_checkpoint()

    def _try_checkpoint(self) -> None:
        """Write a checkpoint that no caller waits for. A failure emits an event, and the next interval tries again.

        The offsets are safe in the journal, or will be when the caller has flushed it.
        """
        try:
            self.checkpoint()
        except OffsetStoreUnwritable:
            self._checkpointed_at = self._clock()

    def _replace_main(self, text: bytes) -> None:
        """Replace offsets.json so that the old file or the new one exists, complete, at each instant."""
        disk, main, written = self._disk, self._main_path, identity(text)
        new = main + ".new"
        write_file(disk, new, text)
        # From the first rename on, the journal's header may not name the checkpoint on disk. The next load would
        # ignore frames appended now, so append no more until the header is rewritten.
        self.journal.is_appendable = False
        self.check_files_if_due()  # the write may have taken long
        while self._unreadable:
            self._set_aside(self._unreadable[-1])
            self._unreadable.pop()
        if self._main_is_good and self._main != written:  # the backup must differ from the checkpoint
            self._rotate()
        disk.replace(new, main)
        self._main, self._main_is_good = written, True
        self._sync_directory()

    def _rotate(self) -> None:
        """Make the current offsets.json the backup. At each instant one of the two exists."""
        main, backup = self._main_path, self._backup_path
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
        self._backup = self._main

    def _set_aside(self, name: str) -> None:
        """Rename an unreadable file, so that the user can examine it."""
        path = os.path.join(self._directory, name)
        aside = f"{path}.unreadable-{time.time_ns()}"
        try:
            self._disk.replace(path, aside)
        except FileNotFoundError:
            return
        log.warning("unreadable file of the offset store set aside: file=%s", aside)

    # -- the directory -------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """Check that the files still exist and that this store still holds the lock; someone may have removed them.

        If files are missing and no other process has taken the store, lock it again and have all offsets written
        again.

        Raises:
            OffsetStoreLocked: another process owns the store, or has owned it meanwhile.
            OffsetStoreUnwritable: the store cannot be locked.
        """
        self._checked_at = self._clock()
        is_held = self.ownership.lock.is_in_place()
        if not is_held:
            try:
                self._disk.make_directories(self._directory)
                self.ownership.lock_again()
            except OffsetStoreLocked as error:
                self.taken_reason = str(error)
                self._reports.add(EventKind.STORE_TAKEN, self.taken_reason)
                raise
            except OSError as error:
                self._durability_unknown = True
                self._note_unwritable(error)
                raise self._reports.unwritable_error(error) from error
        if self._main_is_good and not self._disk.exists(self._main_path):
            self._main_is_good = False
        elif is_held and self.journal.is_in_place():
            return
        self.journal.close()
        self._durability_unknown = True
        self._reports.note_removed()

    def check_files_if_due(self) -> None:
        """Call `check_files` if the last check is a second old."""
        if self._clock() - self._checked_at >= _FILE_CHECK_INTERVAL_S:
            self.check_files()

    def _note_unwritable(self, error: OSError) -> None:
        is_lossless = self.written <= self.journal.durable and not self._durability_unknown
        self._reports.note_unwritable(error, is_lossless=is_lossless)
