"""Offsets in files of this host, as broadcasting groups store them.

* `offsets.json`: the checkpoint, in the text that Java clients write and read
* `offsets.json.bak`: the previous checkpoint
* `offsets.journal`: the offsets persisted since the checkpoint
* `offsets.lock`: locked while a process has the store; `offsets.owner` names that process

Locks are taken in this order. The write lock orders all persists. The journal's two locks let a flush run without the
write lock. The table lock guards memory (see OffsetTable), and no other lock is taken under it.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Literal, Self

from pyrocket_consumer.config import ConsumerConfig, check_bool, check_choice, check_int, check_range
from pyrocket_consumer.errors import (
    ConfigError,
    OffsetStoreCorrupt,
    OffsetStoreError,
    OffsetStoreLocked,
    OffsetStoreUnwritable,
)
from pyrocket_consumer.model import ConsumerEvent, EventKind, MessageQueue, ReadOffsetType
from pyrocket_consumer.offsets.base import (
    OffsetTable,
    QueueReset,
    check_epoch,
    check_offset,
    check_queue,
    check_read_type,
)
from pyrocket_consumer.offsets.local.checkpoint import CheckpointFile
from pyrocket_consumer.offsets.local.directories import (
    absolute_path,
    base_directory,
    find_orphans,
    last_write_time,
    slot_ids,
    store_directory,
)
from pyrocket_consumer.offsets.local.disk import Disk, LocalDisk, SyncedDirectory
from pyrocket_consumer.offsets.local.journal import MIN_JOURNAL_BYTES
from pyrocket_consumer.offsets.local.journal_file import JournaledOffset, JournalFile
from pyrocket_consumer.offsets.local.offsets_json import encode_epochs, entry_template, fill_templates
from pyrocket_consumer.offsets.local.ownership import Ownership, StoreClosing, read_owner
from pyrocket_consumer.offsets.local.recovery import (
    BACKUP_FILE,
    JOURNAL_FILE,
    MAIN_FILE,
    OnUnreadable,
    Source,
    Unrecoverable,
    recover,
)
from pyrocket_consumer.text import logger, safe_repr

log = logger("offsets")

Durability = Literal["fsync", "process", "checkpoint"]

_REMIND_INTERVAL_S = 60.0  # between two events about an unwritable disk, or removed files
_FILE_CHECK_INTERVAL_S = 1.0  # between two checks that the files still exist
_MAX_SLOTS_CHECKED = 16  # when a load searches for a swapped store
_SLOT_LAG_S = 10.0  # another slot counts as newer if it was written at least this much later
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


@dataclass(frozen=True, slots=True)
class FoundOffsets:
    """The result of `load`. `source` names where the offsets were found.

    It is "new" if there was no store, and "started-over" if neither offsets.json nor its backup was readable.
    """

    source: Source
    queues: int
    journal_frames: int


class _FileOffset(JournaledOffset):
    """`stored` is the offset last passed to the disk; `origin` names the file where `load` found it."""

    __slots__ = ("origin",)

    def __init__(self, queue: MessageQueue, name_index: int) -> None:
        # super().__init__() is too slow, because loading may create tens of thousands of entries.
        self.queue, self.name_index = queue, name_index
        self.offset: int | None = None
        self.stored: int | None = None
        self.origin: str | None = None


class LocalFileOffsetStore(OffsetTable[_FileOffset]):
    """Keeps offsets in a directory that one process owns at a time. It also works without a consumer.

    A relative `directory` is resolved when the store is created. A closed store can be loaded again.

    Any thread may call the store, but no signal handler may. A handler may interrupt a call on its own thread, and
    would then wait for it forever. Let the handler set an event that ends the main loop, and close the store there.

    `durability`: with "fsync" (default) a persisted offset survives a power failure. With "process" it survives only
    the end of the process, even a sudden one. With "checkpoint" it is as durable as with "fsync", and each persist
    rewrites offsets.json for Java programs that read it at any time. In the other modes offsets.json is up to
    `checkpoint_interval_s` old while the store is open.

    `on_unreadable`, for a damaged offsets.json: "raise"; "backup" (default) uses offsets.json.bak, and raises if that
    is damaged, too; "start_over" then begins with the journal only. Unreadable files are set aside, never overwritten.

    `existing_only`: raise instead of creating a new store, for a group that must have one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        durability: Durability = "fsync",
        on_unreadable: OnUnreadable = "backup",
        *,
        existing_only: bool = False,
        checkpoint_interval_s: float = 5.0,
        journal_bytes: int = 1024 * 1024,
        on_event: Callable[[ConsumerEvent], None] | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        check_bool("existing_only", existing_only)
        check_choice("durability", durability, ["fsync", "process", "checkpoint"])
        check_choice("on_unreadable", on_unreadable, ["raise", "backup", "start_over"])
        check_range("checkpoint_interval_s", checkpoint_interval_s, 0, 86400)
        check_int("journal_bytes", journal_bytes, MIN_JOURNAL_BYTES, 1 << 30)
        self._durability = durability
        self._on_unreadable = on_unreadable
        self._existing_only = existing_only
        self._checkpoint_interval_s = checkpoint_interval_s
        self._journal_bytes = journal_bytes
        self._on_event = on_event
        self._disk: Disk = disk or LocalDisk()
        self._clock = clock
        self._member: tuple[Path, str, str, bool] | None = None  # base, client id, group, may take another slot

        self._write_lock = Lock()
        self._ownership: Ownership | None = None
        self._forked = False
        self._found: FoundOffsets | None = None
        self._name_indexes: dict[tuple[str, str], int] = {}  # under the table lock
        self._epochs: dict[MessageQueue, int] = {}  # changed under both locks
        # Under the table lock; only for durability "checkpoint".
        self._awaiting_checkpoint: dict[_FileOffset, None] = {}
        self._events: deque[ConsumerEvent] = deque()
        self._unwritable_since: float | None = None
        self._unsynced_reported = False
        self._taken_reason: str | None = None  # set once another process has taken the store while it was open here
        self._checked_at = self._removal_reported_at = float("-inf")
        self._reminded_at = 0.0

        # Under the write lock. `_written` counts the writes so far; the journal counts how many of them are durable.
        self._set_directory(absolute_path(directory))
        self._stored_entries: list[_FileOffset] = []  # in the order of offsets.json
        self._templates: list[bytes] = []  # by name_index: the template of an entry of offsets.json
        self._epochs_text: bytes | None = None
        self._durability_unknown = False  # `load` may have found unsynced files, or files were removed since
        self._has_old_journal = False  # in mode "checkpoint": another mode has left a journal
        self._checkpoint_is_stale = False  # the journal, or a backup, has offsets that offsets.json lacks
        self._checkpointed_at = 0.0
        _stores.add(self)

    @classmethod
    def for_group(cls, config: ConsumerConfig, client_id: str) -> Self:
        """Return the store of the member `client_id`, configured for its group but not loaded yet.

        Processes of one host share a client id unless each has an instance name. The first process to load gets that
        store, the next one gets `…@DEFAULT-1`, and so on. `client_id` and `directory` name it after `load`.
        """
        base = base_directory(config.offset_store_dir)
        store = cls(
            store_directory(base, client_id, config.group),
            config.durability,
            config.on_unreadable_store,
            on_event=config.on_event,
        )
        store._member = base, client_id, config.group, config.instance_name == "DEFAULT"
        return store

    @property
    def client_id(self) -> str:
        """The client id that this store belongs to: the name of the parent directory."""
        return self.directory.parent.name

    @property
    def directory(self) -> Path:
        """The directory of the files."""
        return Path(self._directory)

    @property
    def found(self) -> FoundOffsets:
        """The result of `load`: whether the store is new, and where its offsets were found.

        Raises:
            OffsetStoreError: the store is not loaded yet; call `load`.
        """
        if self._found is None:
            raise OffsetStoreError(f"offset store {self._directory} is not loaded; call load(), or use `with`")
        return self._found

    def origin(self, mq: MessageQueue) -> str | None:
        """Return where `load` found the offset of `mq`: "file", "backup" or "journal"; None if it found no offset."""
        entry = self._find_entry(mq)
        return entry.origin if entry else None

    def load(self) -> None:
        """Lock the store, and read its offsets into memory. The first `load` keeps offsets that were set before.

        A `load` after `close` discards the offsets in memory, also those acknowledged after the `close`, because
        another owner may have stored newer ones.

        Raises:
            OffsetStoreLocked: another process owns the store.
            OffsetStoreCorrupt: its files are unreadable, and `on_unreadable` does not allow to continue.
            OffsetStoreUnwritable: the directory cannot be created or written.
            OffsetStoreError: it does not exist (`existing_only`), or a newer version wrote it.
        """
        self._load(wait_for_closing=False)

    def try_load(self) -> bool:
        """Load the store and return True. Return False if its owner has announced that it will close soon.

        When a new process replaces an old one on the same host, the new one can then wait for the old one's store. It
        would otherwise use another slot, and not continue at the same offsets.
        """
        try:
            self._load(wait_for_closing=True)
        except StoreClosing:
            return False
        return True

    def closes_within(self, seconds: float) -> None:
        """Announce to other processes that this store will close within `seconds`; see `try_load`."""
        with self._write_lock:
            if self._ownership is not None and not self._forked:
                self._ownership.closes_within(seconds)

    def _load(self, wait_for_closing: bool) -> None:
        try:
            with self._write_lock:
                self._check_not_forked()
                if self._ownership is not None:
                    self._check_open()
                    return
                try:
                    self._take_ownership(wait_for_closing)
                    self._recover()
                    self._report_orphans()
                    self._report_slot_change()
                except BaseException:
                    self._release()
                    raise
        finally:
            self._emit_events()
        log.info(
            "offset store loaded: directory=%s found=%s queues=%d journal_frames=%d durability=%s",
            self._directory,
            self.found.source,
            self.found.queues,
            self.found.journal_frames,
            self._durability,
        )

    def read_offset(
        self, mq: MessageQueue, read_type: ReadOffsetType = ReadOffsetType.MEMORY_FIRST_THEN_STORE
    ) -> int | None:
        """Return the offset of `mq`, or None without one. This never reads the disk, because no one else writes it.

        The stored offset is the one last persisted. It is copied to memory only if memory has none, so a read never
        replaces an offset that is not durable yet.

        Raises:
            OffsetStoreError: the stored offset is needed, and the store is not open.
        """
        with self._table_lock:
            entry = self._entries.get(mq)
            if read_type is ReadOffsetType.READ_FROM_MEMORY:
                return None if entry is None else entry.offset
            check_read_type(read_type)
            if entry is not None and entry.offset is not None and read_type is not ReadOffsetType.READ_FROM_STORE:
                return entry.offset
            if self._is_open:
                if entry is None:
                    return None
                if entry.offset is None:
                    entry.offset = entry.stored
                return entry.stored
        self._check_not_forked()
        raise self._not_open()

    def persist(self, mq: MessageQueue) -> None:
        """Return when the offset of `mq` in memory is durable (see `durability`).

        If it is durable already, this does nothing.

        Raises:
            OffsetStoreUnwritable: it is not durable. Memory keeps it, and a later call tries again.
            OffsetStoreLocked: the lock file was removed and another process has the store, so it never will be.
        """
        with self._table_lock:
            entry = self._entries.get(mq)
        self._persist(() if entry is None else (entry,))

    def persist_all(self, mqs: Iterable[MessageQueue] | None = None) -> None:
        """Persist `mqs`, or all queues in memory, in one step. A crash leaves all of them or none.

        The stored offsets of other queues stay.

        Raises:
            OffsetStoreUnwritable: they are not durable. Memory keeps them, and a later call tries again.
        """
        self._persist(self._entries_of(mqs))

    def reset_epoch(self, mq: MessageQueue) -> int:
        """Return the epoch of the newest reset `mq` has followed, 0 if none."""
        with self._table_lock:
            return self._epochs.get(mq, 0)

    def persist_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        """Set offsets and epochs in one step, and return when they are durable. A crash leaves all of them or none.

        Raises:
            ConfigError: `resets` has another type, or an offset or epoch is not a whole number from 0 to 2**63 - 1.
                No offset was set.
            OffsetStoreUnwritable: they are not durable. Memory has them, and a later persist tries again.
        """
        if not isinstance(resets, Mapping) or not all(isinstance(reset, QueueReset) for reset in resets.values()):
            raise ConfigError(
                f"resets={safe_repr(resets)} is not allowed; pass a mapping from MessageQueue to QueueReset"
            )
        for mq, reset in resets.items():
            check_queue(mq)
            check_epoch(mq, reset.epoch)
            if reset.offset is not None:
                check_offset(mq, reset.offset)
        try:
            with self._write_lock:
                self._check_open()
                self._write_resets(resets)
                journal, target = self._journal, self._written
            self._make_durable(journal, target)
        finally:
            self._emit_events()

    def remove_offset(self, mq: MessageQueue) -> None:
        """Persist the offset of `mq`, and remove it from memory; the store keeps it.

        Raises:
            OffsetStoreUnwritable: it is not durable, and still in memory.
        """
        entry = self._find_entry(mq)
        if entry is None:
            return
        try:
            # No one else persists while the write lock is held, so the offset compared is the durable one.
            with self._write_lock:
                self._check_open()
                while True:
                    self._write_changes(self._unstored((entry,)))
                    self._checkpoint_if_due()
                    if not self._journal.flush(self._written):
                        self._checkpoint()
                    with self._table_lock:
                        if entry.offset is None or entry.offset == entry.stored:
                            entry.offset = None
                            return
        finally:
            self._emit_events()

    def close(self) -> None:
        """Persist the offsets in memory, write the checkpoint, and release the store. Safe to call twice.

        If offsets.json cannot be written, for example on a full disk, the journal still has all offsets. The store
        then emits `store-unwritable`, and the next owner reads both files.

        Raises:
            OffsetStoreUnwritable: not all offsets are durable. The store is closed anyway.
            OffsetStoreLocked: its lock was removed and another process owns it. Nothing was written.
        """
        if self._forked:  # the parent owns the files and the lock
            return
        try:
            with self._write_lock:
                if self._ownership is None:
                    return
                try:
                    self._check_open()
                    self._check_files()
                    self._write_changes(self._unstored(self._entries_of(None)))
                    if not self._journal.flush(self._written):
                        self._checkpoint()
                    elif self._checkpoint_is_stale:
                        self._try_checkpoint()
                    if self._durability_unknown:  # files were removed meanwhile, and could not be written again
                        self._checkpoint()
                    is_stale = self._checkpoint_is_stale
                except OffsetStoreUnwritable as error:
                    raise OffsetStoreUnwritable(
                        f"not all offsets could be written to {self._directory} before it was closed: "
                        f"{_reason_and_remedy(error.__cause__)}. Messages consumed since the last persist will be "
                        "redelivered"
                    ) from error.__cause__
                finally:
                    self._release()
        finally:
            self._emit_events()
        if is_stale:
            log.warning("offset store closed, offsets.json is older than its journal: directory=%s", self._directory)
        else:
            log.info("offset store closed: directory=%s", self._directory)

    def __enter__(self) -> Self:
        self.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- persisting ----------------------------------------------------------------------------------------------

    def _persist(self, entries: Sequence[_FileOffset]) -> None:
        if self._durability == "checkpoint":
            with self._table_lock:
                self._awaiting_checkpoint.update(dict.fromkeys(entries))
        try:
            with self._write_lock:
                self._check_open()
                if self._durability == "checkpoint":
                    # One checkpoint serves all callers that wait for the lock. The later ones find nothing to write.
                    with self._table_lock:
                        entries, self._awaiting_checkpoint = list(self._awaiting_checkpoint), {}
                self._write_changes(self._unstored(entries))
                self._checkpoint_if_due()
                journal, target = self._journal, self._written
            self._make_durable(journal, target)
        finally:
            if self._events:
                self._emit_events()

    def _make_durable(self, journal: JournalFile, target: int) -> None:
        """Return when the first `target` writes, as `journal` counts them, are durable. No lock is held."""
        if journal.durable < target and not journal.flush(target):
            with self._write_lock:
                if journal.durable >= target:
                    return
                if journal is not self._journal:
                    raise self._not_open()  # closed meanwhile, which failed; a new load has replaced memory
                self._check_open()
                self._checkpoint()

    def _unstored(self, entries: Iterable[_FileOffset]) -> list[_FileOffset]:
        """Return the entries that differ from the store. Reading one attribute needs no lock."""
        return [entry for entry in entries if (offset := entry.offset) is not None and offset != entry.stored]

    def _write_changes(self, changed: Sequence[_FileOffset]) -> None:
        """Write `changed` to the journal, or with a checkpoint. The caller holds the write lock.

        `_written` then counts this write. It is durable once `durable` of the journal reaches that count.
        """
        if self._clock() - self._checked_at >= _FILE_CHECK_INTERVAL_S:
            self._check_files()
        if changed or self._durability_unknown:
            self._written += 1
            self._durability_unknown = False
        if changed:
            journal = self._journal
            fits = journal.is_appendable
            journal.is_appendable = False  # until `_write_frames` has written the entries marked as stored below
            for entry in changed:
                if entry.stored is None:
                    self._stored_entries.append(entry)
                entry.stored = entry.offset
            self._write_frames(journal.encode_frames(changed) if fits else b"")

    def _checkpoint_if_due(self) -> None:
        if self._checkpoint_is_stale and self._clock() - self._checkpointed_at >= self._checkpoint_interval_s:
            self._try_checkpoint()

    def _try_checkpoint(self) -> None:
        """Write a checkpoint that no caller waits for. A failure emits an event, and the next interval tries again.

        The offsets are safe in the journal, or will be when the caller has flushed it.
        """
        try:
            self._checkpoint()
        except OffsetStoreUnwritable:
            self._checkpointed_at = self._clock()

    def _check_files(self) -> None:
        """Check that the files still exist and that this store still holds the lock; someone may have removed them.

        If files are missing and no other process has taken the store, lock it again and have all offsets written
        again. The caller holds the write lock.

        Raises:
            OffsetStoreLocked: another process owns the store, or has owned it meanwhile.
            OffsetStoreUnwritable: the store cannot be locked.
        """
        self._checked_at = self._clock()
        if self._ownership is None:
            return
        is_held = self._ownership.is_held()
        if not is_held:
            try:
                self._disk.make_directories(self._directory)
                self._ownership.lock_again()
            except OffsetStoreLocked as error:
                self._taken_reason = str(error)
                self._add_event(EventKind.STORE_TAKEN, self._taken_reason, directory=self._directory)
                raise
            except OSError as error:
                self._durability_unknown = True
                self._note_unwritable(error)
                raise self._unwritable_error(error) from error
        files_are_there = self._checkpoint_file.is_in_place() and self._journal.is_in_place()
        if is_held and files_are_there:
            return
        self._journal.close()
        self._durability_unknown = True
        if self._checked_at - self._removal_reported_at >= _REMIND_INTERVAL_S:
            self._removal_reported_at = self._checked_at
            self._add_event(
                EventKind.STORE_REMOVED,
                "files of the store were removed or replaced while it was in use; no other process had taken it, so "
                "all offsets are written again. Exclude the directory from the job that cleans up there",
                directory=self._directory,
            )

    def _write_resets(self, resets: Mapping[MessageQueue, QueueReset]) -> None:
        """Set memory and write, as `_write_changes` does.

        The caller holds the write lock, so no one else can persist a part of the resets.
        """
        if self._clock() - self._checked_at >= _FILE_CHECK_INTERVAL_S:
            self._check_files()
        with self._table_lock:
            entries = [(self._entries.get(mq) or self._add_entry(mq), reset) for mq, reset in resets.items()]
            for entry, reset in entries:
                self._epochs[entry.queue] = reset.epoch
                if reset.offset is not None:
                    entry.offset = reset.offset
        self._epochs_text = None
        journal, frames = self._journal, b""
        if journal.is_appendable:
            frames = journal.encode_reset_frames(
                [(entry.name_index, entry.queue, reset.offset, reset.epoch) for entry, reset in entries]
            )
        journal.is_appendable = False  # until `_write_frames` has written them
        for entry, reset in entries:
            if reset.offset is not None:
                if entry.stored is None:
                    self._stored_entries.append(entry)
                entry.stored = reset.offset
        self._written += 1
        self._durability_unknown = False
        self._write_frames(frames)

    def _write_frames(self, frames: bytes) -> None:
        """Append `frames`, or write a checkpoint if they are empty because they do not fit.

        The caller holds the write lock. If both fail, the journal stays closed to frames. Otherwise a later frame
        would make this write count as durable although no file has it.
        """
        self._checkpoint_is_stale = True
        journal = self._journal
        if not frames:
            self._checkpoint()
        elif self._durability == "process":
            try:
                journal.write(frames, self._written)
            except OSError:
                self._checkpoint()
            else:
                journal.is_appendable = True
        else:
            journal.append(frames, self._written)
            journal.is_appendable = True

    def _checkpoint(self) -> None:
        """Make all writes durable in offsets.json, and start a new generation of the journal.

        The caller holds the write lock.

        Raises:
            OffsetStoreUnwritable: the file could not be written.
            OffsetStoreLocked: another process owns the store.
        """
        self._check_files()
        order, templates = self._stored_entries, self._templates
        with self._table_lock:
            new_names = list(islice(self._name_indexes, len(templates), None))
        templates += [entry_template(*name_index) for name_index in new_names]
        if self._epochs_text is None:
            self._epochs_text = encode_epochs(self._epochs)
        text = fill_templates(
            [templates[entry.name_index] for entry in order],
            [entry.queue.queue_id for entry in order],
            [entry.stored or 0 for entry in order],
            self._epochs_text,
        )
        journal = self._journal
        try:
            self._checkpoint_file.replace(text, before_renames=self._stop_appending)
        except OSError as error:
            self._note_unwritable(error)
            raise self._unwritable_error(error) from error
        journal.mark_durable(self._written)
        self._note_unsynced()
        self._checkpoint_is_stale = self._durability_unknown = False
        self._checkpointed_at = self._clock()
        try:
            if self._durability != "checkpoint":
                journal.start_generation(self._checkpoint_file.main, self._checkpoint_file.backup)
            elif self._has_old_journal:
                self._disk.remove(os.path.join(self._directory, JOURNAL_FILE))  # the checkpoint has its frames
                self._has_old_journal = False
        except OSError as error:
            self._note_unwritable(error)  # durable anyway; until this works, each persist writes a checkpoint
        else:
            self._note_writable()

    def _note_unsynced(self) -> None:
        refusal = self._synced_directory.sync_error
        if refusal is not None and not self._unsynced_reported:
            self._unsynced_reported = True
            self._add_event(
                EventKind.STORE_UNSYNCED,
                "this file system cannot sync directories. Offsets survive the end of the process, but not every power "
                "failure, because new names of files may be lost. Use a local file system if that matters",
                directory=self._directory,
                error=refusal.strerror,
            )

    def _stop_appending(self) -> None:
        # From the first rename on, the journal's header may not name the checkpoint on disk. The next load would
        # ignore frames appended now, so append no more until the header is rewritten.
        self._journal.is_appendable = False
        if self._clock() - self._checked_at >= _FILE_CHECK_INTERVAL_S:  # the write took long
            self._check_files()

    # -- loading -------------------------------------------------------------------------------------------------

    def _take_ownership(self, wait_for_closing: bool) -> None:
        """Become the owner of the directory, or of the first free slot.

        With `wait_for_closing`, raise StoreClosing at the first slot whose owner will close soon.
        """
        if self._member is None or not self._member[-1]:
            return self._lock_directory(self._directory)
        base, client_id, group, _ = self._member
        for slot in slot_ids(client_id):
            try:
                return self._lock_directory(os.fspath(store_directory(base, slot, group)))
            except OffsetStoreLocked as error:
                if wait_for_closing and isinstance(error, StoreClosing):
                    raise
                locked = error
        raise locked

    def _lock_directory(self, directory: str) -> None:
        try:
            self._disk.make_directories(directory)
            self._ownership = Ownership.take(self._disk, directory)
        except OSError as error:
            option = "" if self._member is None else " (offset_store_dir)"
            raise OffsetStoreUnwritable(
                f"offset store {directory} cannot be opened: {_reason_and_remedy(error)}, or choose another "
                f"directory{option}. Nothing was started"
            ) from error
        self._set_directory(directory)

    def _set_directory(self, directory: str) -> None:
        """Use the files of `directory`, and start counting writes to them."""
        self._directory = directory
        self._synced_directory = SyncedDirectory(self._disk, directory)
        self._checkpoint_file = CheckpointFile(self._disk, self._synced_directory)
        self._journal = JournalFile(self._disk, self._synced_directory, self._journal_bytes)
        self._written = 0

    def _recover(self) -> None:
        """Read the files, and write none. The first persist always writes a checkpoint, which repairs them.

        A killed process may not have synced its files, not even their names. So even intact files may exist only in
        the system's cache until that checkpoint.
        """
        journal, main, backup = (self._read(name) for name in (JOURNAL_FILE, MAIN_FILE, BACKUP_FILE))
        try:
            found = recover(main, backup, journal, self._on_unreadable)
        except Unrecoverable as error:
            chosen = f"on_unreadable_store={self._on_unreadable!r}"
            if self._member is None:  # created without a consumer
                chosen = f"LocalFileOffsetStore(…, on_unreadable={self._on_unreadable!r})"
            raise OffsetStoreCorrupt(
                f"offset store {self._directory}: {error}, or choose another policy than {chosen}: {error.policies}"
            ) from error
        except OffsetStoreError as error:
            raise type(error)(f"offset store {self._directory}: {error}") from error
        if found.source == "new" and self._existing_only:
            raise OffsetStoreError(
                f"offset store {self._directory} does not exist, and existing_only requires one; check the directory "
                "and the client id (address@instance), or start without existing_only"
            )
        for text, facts in found.notes:
            self._add_event(EventKind.STORE_FALLBACK, text, directory=self._directory, **facts)
        with self._table_lock:
            self._epochs = dict(found.epochs)
            self._awaiting_checkpoint = {}
            unused = 0
            for known in self._entries.values():  # keep the objects, because another thread may be about to persist one
                known.stored = known.origin = None
                if self._found is not None:
                    unused += known.offset is not None and known.offset != found.offsets.get(known.queue)
                    known.offset = None
            self._stored_entries = []
            for mq, offset in found.offsets.items():
                entry = self._entries.setdefault(mq, self._new_entry(mq))
                entry.stored, entry.origin = offset, found.source
                if entry.offset is None:
                    entry.offset = offset
                self._stored_entries.append(entry)
            for mq in found.from_journal:
                self._entries[mq].origin = "journal"
        if unused:
            log.info(
                "offset store opened again, offsets in memory are discarded: directory=%s queues=%d",
                self._directory,
                unused,
            )
        self._epochs_text = None
        self._found = FoundOffsets(found.source, len(found.offsets), found.journal_frames)
        self._checkpoint_file.set_loaded(main, backup, found.unreadable)
        self._has_old_journal = journal is not None
        self._durability_unknown = found.source != "new"
        self._checkpoint_is_stale = bool(found.journal_frames) or found.source == "backup"
        self._checkpointed_at = self._clock()
        usable = journal is not None and len(journal) == self._journal_bytes and JOURNAL_FILE not in found.unreadable
        # If the lock file was removed, a former owner may not have noticed, and may still write to the journal.
        is_ours = self._ownership is not None and not self._ownership.created_lock_file
        if usable and is_ours and found.header and self._durability != "checkpoint":
            try:
                self._journal.open()
            except OSError as error:
                self._note_unwritable(error)

    def _report_orphans(self) -> None:
        if self._member is None or self.found.source != "new":
            return
        base, client_id, group, _ = self._member
        orphans = find_orphans(base, client_id, group)
        if orphans:
            self._add_event(
                EventKind.STORE_ORPHANED,
                f"this store is new, but group {group} has one under another client id: {orphans[0]}. "
                f"To use its offsets, stop, and adopt it: pyrocket offsets adopt {orphans[0]} {self._directory}",
                directory=self._directory,
                orphans=len(orphans),
            )

    def _report_slot_change(self) -> None:
        """Emit `store-slot` if processes of this host without instance names may have swapped their stores."""
        if self._member is None or not self._member[-1]:
            return
        base, first_id, group, _ = self._member
        written = last_write_time(self._directory)
        store = "this store is new" if written is None else f"this store was last written {_format_age(written)}"
        remedy = "to let each keep its store, give each an instance_name of its own"
        facts = {"directory": self._directory, "client_id": self.client_id}
        if self.client_id != first_id:
            text = f"another process of this host has {first_id}, this one has {self.client_id}; {store}; {remedy}"
            self._add_event(EventKind.STORE_SLOT, text, **facts)
            return
        for slot in islice(slot_ids(first_id), 1, _MAX_SLOTS_CHECKED):
            directory = os.fspath(store_directory(base, slot, group))
            newer = last_write_time(directory)
            if newer is None:
                return
            owner = read_owner(self._disk, directory)
            if owner is not None and owner.is_alive and newer > (written or 0.0) + _SLOT_LAG_S:
                text = (
                    f"{store}, so messages since then are delivered here, too; {owner} continued with {slot}; {remedy}"
                )
                self._add_event(EventKind.STORE_SLOT, text, **facts)
                return

    def _read(self, name: str) -> bytes | None:
        try:
            return self._disk.read(os.path.join(self._directory, name))
        except OSError as error:
            raise OffsetStoreError(
                f"cannot read {name} in {self._directory}: "
                f"{_reason_and_remedy(error, 'check its owner and permissions')}"
            ) from error

    # -- state and events ----------------------------------------------------------------------------------------

    def _new_entry(self, mq: MessageQueue) -> _FileOffset:
        return _FileOffset(mq, self._name_indexes.setdefault((mq.topic, mq.broker_name), len(self._name_indexes)))

    def _release(self) -> None:
        """Close the files and release the store. The caller holds the write lock."""
        self._journal.close()
        if self._ownership is not None:
            self._ownership.release()
            self._ownership = self._taken_reason = None

    def _check_open(self) -> None:
        if self._forked or self._ownership is None:  # inlined _is_open, because each persist calls this
            self._check_not_forked()
            raise self._not_open()
        if self._taken_reason is not None:
            raise OffsetStoreLocked(self._taken_reason)

    @property
    def _is_open(self) -> bool:
        return self._ownership is not None and not self._forked

    def _not_open(self) -> OffsetStoreError:
        return OffsetStoreError(f"offset store {self._directory} is not open; call load(), or use `with`")

    def _check_not_forked(self) -> None:
        if self._forked:
            raise OffsetStoreError(
                f"offset store {self._directory} was opened before this process was forked, and stays with its parent; "
                "make a store after the fork"
            )

    def _after_fork_in_child(self) -> None:
        # Other threads of the parent may have held the locks. They do not run here, and would never release them.
        self._table_lock, self._write_lock = Lock(), Lock()
        self._forked = self._ownership is not None

    def _unwritable_error(self, error: OSError) -> OffsetStoreUnwritable:
        return OffsetStoreUnwritable(f"offsets cannot be written to {self._directory}: {_reason_and_remedy(error)}")

    def _note_unwritable(self, error: OSError) -> None:
        now = self._clock()
        if self._unwritable_since is None:
            self._unwritable_since = now
        elif now - self._reminded_at < _REMIND_INTERVAL_S:
            return
        self._reminded_at = now
        text = f"{self._unwritable_error(error)}. They are kept in memory, and the next persist tries again"
        if self._written <= self._journal.durable and not self._durability_unknown:
            text = (
                f"not every file in {self._directory} can be written: {_reason_and_remedy(error)}. Nothing is lost, "
                f"because {JOURNAL_FILE} has the offsets that {MAIN_FILE} lacks. The next persist tries again"
            )
        self._add_event(
            EventKind.STORE_UNWRITABLE,
            text,
            directory=self._directory,
            for_s=round(now - self._unwritable_since, 3),
        )

    def _note_writable(self) -> None:
        if self._unwritable_since is not None:
            lasted_s = round(self._clock() - self._unwritable_since, 3)
            self._unwritable_since = None
            self._add_event(
                EventKind.STORE_RECOVERED, "offsets are written again", directory=self._directory, after_s=lasted_s
            )

    def _add_event(self, kind: EventKind, text: str, **facts: object) -> None:
        """Keep an event until no lock is held, because its receiver may call the store."""
        self._events.append(ConsumerEvent(kind, text, facts=facts))

    def _emit_events(self) -> None:
        while True:
            try:
                event = self._events.popleft()
            except IndexError:
                return
            level = logging.INFO if event.kind is EventKind.STORE_RECOVERED else logging.WARNING
            log.log(level, "%s", event)
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:
                    log.exception("on_event failed for %s", event.kind)


def _reason_and_remedy(error: BaseException | None, remedy: str = "check the directory") -> str:
    number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    return f"{reason or error}; {_REMEDIES.get(number or 0, remedy)}"


def _format_age(then: float) -> str:
    return f"{max(0.0, time.time() - then):.0f} s ago"


_stores: weakref.WeakSet[LocalFileOffsetStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._after_fork_in_child()  # noqa: SLF001 - a fork is no call of a user


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
