"""Offsets in files of this host, as broadcasting groups store them.

* `offsets.json`: the checkpoint, in the text that Java clients write and read
* `offsets.json.bak`: the previous checkpoint
* `offsets.journal`: the offsets persisted since the checkpoint
* `offsets.lock`: locked while a process has the store; `offsets.owner` names that process

Locks are taken in this order. The write lock orders all persists. The journal's two locks let a flush run without the
write lock. The table lock guards memory (see OffsetTable), and no other lock is taken under it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

from pyrocket_consumer.config import ConsumerConfig, check_bool, check_choice, check_int, check_range
from pyrocket_consumer.errors import (
    ConfigError,
    OffsetStoreCorrupt,
    OffsetStoreError,
    OffsetStoreLocked,
    OffsetStoreUnwritable,
)
from pyrocket_consumer.model import ConsumerEvent, EventKind, MessageQueue, ReadOffsetType
from pyrocket_consumer.offsets.base import OffsetTable, QueueReset, check_offset, check_queue, check_read_type
from pyrocket_consumer.offsets.local.directories import (
    MemberDirectories,
    Ownership,
    StoreClosing,
    absolute_path,
    base_directory,
    store_directory,
)
from pyrocket_consumer.offsets.local.disk import Disk
from pyrocket_consumer.offsets.local.journal import JOURNAL_FILE, MIN_JOURNAL_BYTES, FileOffset, QueueNames
from pyrocket_consumer.offsets.local.offsets_json import BACKUP_FILE, MAIN_FILE
from pyrocket_consumer.offsets.local.recovery import OnUnreadable, Source, Unrecoverable, recover
from pyrocket_consumer.offsets.local.writer import Durability, StoreReports, StoreWriter, reason_and_remedy
from pyrocket_consumer.text import logger, safe_repr
from pyrocket_consumer.transport.forks import renew_locks_in_children

log = logger("offsets")


@dataclass(frozen=True, slots=True)
class FoundOffsets:
    """The result of `load`. `source` names where the offsets were found.

    It is "new" if there was no store, and "started-over" if neither offsets.json nor its backup was readable.
    """

    source: Source
    queues: int
    journal_frames: int


class LocalFileOffsetStore(OffsetTable[FileOffset]):
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
        self._disk = disk or Disk()
        self._clock = clock
        self._member: MemberDirectories | None = None
        self._reports = StoreReports(absolute_path(directory), on_event, clock)
        self._writer: StoreWriter | None = None  # while the store is open
        self._found: FoundOffsets | None = None
        # Under the table lock. The second one is only for durability "checkpoint".
        self._names: dict[tuple[str, str], QueueNames] = {}
        self._awaiting_checkpoint: dict[FileOffset, None] = {}
        self.renew_locks()
        renew_locks_in_children(self)

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
        store._member = MemberDirectories(base, client_id, config.group, config.instance_name == "DEFAULT")
        return store

    @property
    def client_id(self) -> str:
        """The client id that this store belongs to: the name of the parent directory."""
        return self.directory.parent.name

    @property
    def directory(self) -> Path:
        """The directory of the files."""
        return Path(self._reports.directory)

    @property
    def found(self) -> FoundOffsets:
        """The result of `load`: whether the store is new, and where its offsets were found.

        Raises:
            OffsetStoreError: the store is not loaded yet; call `load`.
        """
        if self._found is None:
            raise OffsetStoreError(f"offset store {self.directory} is not loaded; call load(), or use `with`")
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
            if self._writer is not None and not self._forked:
                self._writer.ownership.closes_within(seconds)

    def _load(self, wait_for_closing: bool) -> None:
        try:
            with self._write_lock:
                self._check_not_forked()
                if self._writer is not None:
                    self._check_open()
                    return
                ownership = self._take_ownership(wait_for_closing)
                self._reports.directory = ownership.directory
                try:
                    writer = self._recover(ownership)
                    if self._member is not None:
                        is_new = self.found.source == "new"
                        for kind, text, facts in self._member.notes(self._disk, ownership.directory, is_new=is_new):
                            self._reports.add(kind, text, **facts)
                except BaseException:
                    ownership.lock.release()
                    raise
                self._writer = writer
        finally:
            self._reports.emit()
        log.info(
            "offset store loaded: directory=%s found=%s queues=%d journal_frames=%d durability=%s",
            self.directory,
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
        entry = self._find_entry(mq)
        if read_type is ReadOffsetType.READ_FROM_MEMORY:
            return None if entry is None else entry.offset
        check_read_type(read_type)
        if entry is not None and entry.offset is not None and read_type is not ReadOffsetType.READ_FROM_STORE:
            return entry.offset
        with self._table_lock:
            if self._writer is not None and not self._forked:
                if entry is None:
                    return None
                if entry.offset is None:
                    entry.offset = entry.stored
                return entry.stored
        raise self._not_open()

    def persist(self, mq: MessageQueue) -> None:
        """Return when the offset of `mq` in memory is durable (see `durability`).

        If it is durable already, this does nothing.

        Raises:
            OffsetStoreUnwritable: it is not durable. Memory keeps it, and a later call tries again.
            OffsetStoreLocked: the lock file was removed and another process has the store, so it never will be.
        """
        entry = self._find_entry(mq)
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
        entry = self._find_entry(mq)
        return 0 if entry is None else entry.epoch

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
            check_offset(mq, reset.epoch, "epoch")
            if reset.offset is not None:
                check_offset(mq, reset.offset)
        try:
            with self._write_lock:
                writer = self._check_open()
                writer.check_files_if_due()
                with self._table_lock:
                    entries = [(self._entries.get(mq) or self._add_entry(mq), reset) for mq, reset in resets.items()]
                    for entry, reset in entries:
                        if not entry.epoch:
                            writer.reset_entries.append(entry)
                        entry.epoch = reset.epoch
                        if reset.offset is not None:
                            entry.offset = reset.offset
                writer.write_resets([(entry, reset.offset) for entry, reset in entries])
                target = writer.written
            self._make_durable(writer, target)
        finally:
            self._reports.emit()

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
                writer = self._check_open()
                while True:
                    writer.write_durably((entry,))
                    writer.checkpoint_if_due()
                    with self._table_lock:
                        if entry.offset is None or entry.offset == entry.stored:
                            entry.offset = None
                            return
        finally:
            self._reports.emit()

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
                writer = self._writer
                if writer is None:
                    return
                try:
                    self._check_open()
                    writer.finish(self._entries_of(None))
                except OffsetStoreUnwritable as error:
                    raise OffsetStoreUnwritable(
                        f"not all offsets could be written to {self.directory} before it was closed: "
                        f"{reason_and_remedy(error.__cause__)}. Messages consumed since the last persist will be "
                        "redelivered"
                    ) from error.__cause__
                finally:
                    self._writer = None
                    writer.close()
        finally:
            self._reports.emit()
        if writer.checkpoint_is_stale:
            log.warning("offset store closed, offsets.json is older than its journal: directory=%s", self.directory)
        else:
            log.info("offset store closed: directory=%s", self.directory)

    # -- persisting ----------------------------------------------------------------------------------------------

    def _persist(self, entries: Sequence[FileOffset]) -> None:
        if self._durability == "checkpoint":
            with self._table_lock:
                self._awaiting_checkpoint.update(dict.fromkeys(entries))
        try:
            with self._write_lock:
                writer = self._check_open()
                if self._durability == "checkpoint":
                    # One checkpoint serves all callers that wait for the lock. The later ones find nothing to write.
                    with self._table_lock:
                        entries, self._awaiting_checkpoint = list(self._awaiting_checkpoint), {}
                writer.write(entries)
                writer.checkpoint_if_due()
                target = writer.written
            self._make_durable(writer, target)
        finally:
            if self._reports.waiting:
                self._reports.emit()

    def _make_durable(self, writer: StoreWriter, target: int) -> None:
        """Return when the first `target` writes of `writer` are durable. No lock is held."""
        journal = writer.journal
        if journal.durable < target and not journal.flush(target):
            with self._write_lock:
                if journal.durable >= target:
                    return
                if writer is not self._writer:
                    raise self._not_open()  # closed meanwhile, which failed; a new load has replaced memory
                self._check_open()
                writer.checkpoint()

    # -- loading -------------------------------------------------------------------------------------------------

    def _take_ownership(self, wait_for_closing: bool) -> Ownership:
        """Become the owner of the directory, or of the first free slot.

        With `wait_for_closing`, raise StoreClosing at the first slot whose owner will close soon.
        """
        directories = (self._reports.directory,) if self._member is None else self._member.candidates()
        for directory in directories:
            try:
                self._disk.make_directories(directory)
                return Ownership(self._disk, directory)
            except OffsetStoreLocked as error:
                if wait_for_closing and isinstance(error, StoreClosing):
                    raise
                locked = error
            except OSError as error:
                option = "" if self._member is None else " (offset_store_dir)"
                raise OffsetStoreUnwritable(
                    f"offset store {directory} cannot be opened: {reason_and_remedy(error)}, or choose another "
                    f"directory{option}. Nothing was started"
                ) from error
        raise locked

    def _recover(self, ownership: Ownership) -> StoreWriter:
        """Read the files into memory, and return the writer that continues them."""
        journal, main, backup = (self._read(name) for name in (JOURNAL_FILE, MAIN_FILE, BACKUP_FILE))
        try:
            found = recover(main, backup, journal, self._on_unreadable)
        except Unrecoverable as error:
            chosen = f"on_unreadable_store={self._on_unreadable!r}"
            if self._member is None:  # created without a consumer
                chosen = f"LocalFileOffsetStore(…, on_unreadable={self._on_unreadable!r})"
            raise OffsetStoreCorrupt(
                f"offset store {self.directory}: {error}, or choose another policy than {chosen}: {error.policies}"
            ) from error
        except OffsetStoreError as error:
            raise type(error)(f"offset store {self.directory}: {error}") from error
        if found.source == "new" and self._existing_only:
            raise OffsetStoreError(
                f"offset store {self.directory} does not exist, and existing_only requires one; check the directory "
                "and the client id (address@instance), or start without existing_only"
            )
        for text, facts in found.notes:
            self._reports.add(EventKind.STORE_FALLBACK, text, **facts)
        writer = StoreWriter(
            self._disk,
            ownership,
            found,
            self._reports,
            durability=self._durability,
            checkpoint_interval_s=self._checkpoint_interval_s,
            journal_bytes=self._journal_bytes,
            clock=self._clock,
        )
        with self._table_lock:
            self._awaiting_checkpoint = {}
            unused = 0
            for known in self._entries.values():  # keep the objects, because another thread may be about to persist one
                known.stored, known.origin, known.epoch = None, None, 0
                if self._found is not None:
                    unused += known.offset is not None and known.offset != found.offsets.get(known.queue)
                    known.offset = None
            for mq, offset in found.offsets.items():
                entry = self._entries.setdefault(mq, self._new_entry(mq))
                entry.stored, entry.origin = offset, found.source
                if entry.offset is None:
                    entry.offset = offset
                writer.stored_entries.append(entry)
            for mq in found.from_journal:
                self._entries[mq].origin = "journal"
            for mq, epoch in found.epochs.items():
                entry = self._entries.setdefault(mq, self._new_entry(mq))
                entry.epoch = epoch
                writer.reset_entries.append(entry)
        if unused:
            log.info(
                "offset store opened again, offsets in memory are discarded: directory=%s queues=%d",
                self.directory,
                unused,
            )
        self._found = FoundOffsets(found.source, len(found.offsets), found.journal_frames)
        return writer

    def _read(self, name: str) -> bytes | None:
        try:
            return self._disk.read(os.path.join(self._reports.directory, name))
        except OSError as error:
            raise OffsetStoreError(
                f"cannot read {name} in {self.directory}: {reason_and_remedy(error, 'check its owner and permissions')}"
            ) from error

    # -- state ---------------------------------------------------------------------------------------------------

    def _new_entry(self, mq: MessageQueue) -> FileOffset:
        names = self._names.get((mq.topic, mq.broker_name))
        if names is None:
            names = QueueNames(mq.topic, mq.broker_name, len(self._names))
            self._names[mq.topic, mq.broker_name] = names
        return FileOffset(mq, names)

    def _check_open(self) -> StoreWriter:
        writer = self._writer
        if writer is None or self._forked:
            raise self._not_open()
        if writer.taken_reason is not None:
            raise OffsetStoreLocked(writer.taken_reason)
        return writer

    def _not_open(self) -> OffsetStoreError:
        self._check_not_forked()
        return OffsetStoreError(f"offset store {self.directory} is not open; call load(), or use `with`")

    def _check_not_forked(self) -> None:
        if self._forked:
            raise OffsetStoreError(
                f"offset store {self.directory} was opened before this process was forked, and stays with its parent; "
                "make a store after the fork"
            )

    def renew_locks(self) -> None:
        """Create new locks. In a forked child, an open store belongs to the parent."""
        self._table_lock, self._write_lock = Lock(), Lock()
        self._forked = self._writer is not None


def adopt_store(orphan: str | os.PathLike[str], directory: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """Move the offsets of the store `orphan` into the store `directory`; return the new path of the orphan's files.

    This locks both stores, so neither may be in use. Once the offsets are durable in `directory`, the orphan is
    renamed to `<orphan>.adopted-<seconds>`. With `replace`, they replace offsets that `directory` already has.

    Raises:
        ConfigError: `orphan` or `directory` is no path.
        OffsetStoreError: `orphan` is no store, or `directory` holds offsets and `replace` is not set. Or `orphan`
            belongs to a client id, and `directory` to another group or to none. Or only the renaming failed.
        OffsetStoreLocked: one of the stores is in use.
        OffsetStoreUnwritable: a store cannot be opened, or the offsets not be written; `orphan` is unchanged.
    """
    check_bool("replace", replace)
    source, target = Path(absolute_path(orphan, "orphan")), Path(absolute_path(directory))
    if os.path.realpath(source) == os.path.realpath(target):
        raise OffsetStoreError(f"{source} cannot adopt itself; name the store left behind first, then the one used now")
    if not any(Disk().exists(os.path.join(source, name)) for name in (MAIN_FILE, BACKUP_FILE, JOURNAL_FILE)):
        raise OffsetStoreError(
            f"{source} is no offset store; name the directory with offsets.json in it: DIRECTORY/CLIENT-ID/GROUP"
        )
    if "@" in source.parent.name and (target.name != source.name or "@" not in target.parent.name):
        raise OffsetStoreError(
            f"no consumer of group {source.name!r} looks for its offsets in {target}; name the directory that is used "
            f"now: DIRECTORY/CLIENT-ID/{source.name}"
        )
    with LocalFileOffsetStore(source, existing_only=True) as old, LocalFileOffsetStore(target) as new:
        present = new.clone_offset_table()
        if present and not replace:
            raise OffsetStoreError(
                f"offset store {target} holds offsets of {len(present)} queues already; compare both, and to use those "
                f"of {source}, pass replace=True (pyrocket: --replace)"
            )
        offsets = old.clone_offset_table()
        for mq, offset in offsets.items():
            new.update_offset(mq, offset)
        new.persist_all(offsets)
    kept = source.with_name(f"{source.name}.adopted-{int(time.time())}")
    try:
        source.rename(kept)
    except OSError as error:
        raise OffsetStoreError(
            f"the offsets of {source} are in {target} now, but it could not be renamed to {kept.name}: "
            f"{error.strerror or error}; move it away yourself"
        ) from error
    return kept
