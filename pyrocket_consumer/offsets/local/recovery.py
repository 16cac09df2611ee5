"""Combine the files of a store into its offsets, in whatever state a crash or a bad disk has left them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pyrocket_consumer.errors import OffsetStoreCorrupt, ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.local.journal import (
    JOURNAL_FILE,
    FileIdentity,
    JournalHeader,
    Replay,
    decode_header,
    identity,
    replay,
)
from pyrocket_consumer.offsets.local.offsets_json import BACKUP_FILE, MAIN_FILE, decode_checkpoint

OnUnreadable = Literal["raise", "backup", "start_over"]
Source = Literal["new", "file", "backup", "started-over"]


class Unrecoverable(OffsetStoreCorrupt):
    """Files are unreadable, and `on_unreadable` does not allow to continue. `policies` are the values that would."""

    def __init__(self, reason: str, policies: str) -> None:
        super().__init__(f"{reason}. Restore the file from a copy")
        self.policies = policies


@dataclass(slots=True)
class RecoveredStore:
    """The offsets in the files, the file that each comes from, and the damage found.

    The offsets of the queues in `from_journal` are from the journal, all others from `source`. `epochs` are as old as
    the offsets. After a recovery from the backup, a reset since that backup applies again.
    """

    source: Source = "new"
    offsets: dict[MessageQueue, int] = field(default_factory=dict)
    from_journal: Collection[MessageQueue] = ()
    epochs: dict[MessageQueue, int] = field(default_factory=dict)
    main: FileIdentity = (0, 0)
    backup: FileIdentity = (0, 0)
    header: JournalHeader | None = None
    journal_size: int | None = None
    journal_frames: int = 0
    unreadable: list[str] = field(default_factory=list)
    notes: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)  # texts and facts for events

    def add_note(self, text: str, **facts: object) -> None:
        self.notes.append((text, facts))


def recover(
    main: bytes | None, backup: bytes | None, journal: bytes | None, on_unreadable: OnUnreadable = "backup"
) -> RecoveredStore:
    """Return the offsets of a store with these files; pass None for a missing file.

    Raises:
        Unrecoverable: files are unreadable, and `on_unreadable` does not allow to continue.
        OffsetStoreError: a newer version of this package wrote the journal.
    """
    result = RecoveredStore(main=identity(main or b""), backup=identity(backup or b""))
    frames = _read_journal(result, journal, on_unreadable)
    _read_checkpoint(result, main, backup, journal is not None, on_unreadable)
    header = result.header
    if header is not None and (
        (result.source == "file" and not header.follows(main or b""))
        or (result.source == "backup" and not header.follows_backup(backup or b""))
    ):
        # The process crashed between a checkpoint and the header that names it, or another program wrote offsets.json
        # meanwhile. In both cases the checkpoint is newer than the frames.
        differing = sum(result.offsets.get(mq) != offset for mq, offset in frames.offsets.items())
        if differing or not frames.offsets:
            result.add_note(
                f"{MAIN_FILE if result.source == 'file' else BACKUP_FILE} is newer than {JOURNAL_FILE}, because "
                "another program wrote it, or a crash occurred between the two writes; its offsets are used",
                ignored_queues=differing,
            )
        return result
    result.offsets.update(frames.offsets)
    result.epochs.update(frames.epochs)
    result.from_journal = frames.offsets
    result.journal_frames = frames.frames
    return result


def _read_journal(result: RecoveredStore, journal: bytes | None, on_unreadable: OnUnreadable) -> Replay:
    if journal is None:
        return Replay()
    result.journal_size = len(journal)
    try:
        result.header = decode_header(journal)
    except ProtocolError as error:
        if on_unreadable == "raise":
            raise Unrecoverable(
                f"{JOURNAL_FILE} is unreadable: {error}", f"'backup' begins with {MAIN_FILE} only"
            ) from error
        result.unreadable.append(JOURNAL_FILE)
        result.add_note(
            f"{JOURNAL_FILE} is unreadable: {error}; offsets persisted since the last checkpoint are lost, so their "
            "messages will be redelivered"
        )
        return Replay()
    frames = replay(journal, result.header)
    damaged_bytes = frames.damaged_bytes + max(0, result.header.journal_bytes - len(journal))
    if damaged_bytes:
        result.unreadable.append(JOURNAL_FILE)
        result.add_note(
            f"{JOURNAL_FILE} has unreadable parts; the rest is used, and some messages may be redelivered",
            damaged_bytes=damaged_bytes,
        )
    return frames


def _read_checkpoint(
    result: RecoveredStore, main: bytes | None, backup: bytes | None, has_journal: bool, on_unreadable: OnUnreadable
) -> None:
    if main is None:
        if backup is None and not has_journal:
            return
        reason = f"{MAIN_FILE} is missing"
    else:
        header = result.header
        try:
            result.offsets, result.epochs = decode_checkpoint(main)
            if header is not None and header.contradicts(main, backup):
                result.offsets, result.epochs = {}, {}
                raise ProtocolError(
                    "its checksum is wrong, so it is damaged or was edited by hand (to use it as it is, "
                    f"remove {JOURNAL_FILE})"
                )
        except ProtocolError as error:
            result.unreadable.append(MAIN_FILE)
            reason = f"{MAIN_FILE} is unreadable: {error}" if main else f"{MAIN_FILE} is empty"
        else:
            result.source = "file"
            return
    if on_unreadable == "raise":
        raise Unrecoverable(
            reason, f"'backup' uses {BACKUP_FILE}; 'start_over' begins with the journal only if that is unreadable, too"
        )
    if backup is None:
        reason += f"; there is no {BACKUP_FILE}"
    else:
        try:
            result.offsets, result.epochs = decode_checkpoint(backup)
        except ProtocolError as error:
            result.unreadable.append(BACKUP_FILE)
            reason += f"; {BACKUP_FILE} is unreadable, too: {error}"
        else:
            result.source = "backup"
            result.add_note(
                f"{reason}; {BACKUP_FILE} and the journal are used, and some messages may be redelivered",
                queues=len(result.offsets),
            )
            return
    if on_unreadable == "backup":
        raise Unrecoverable(reason, "'start_over' begins with the journal only")
    result.source = "started-over"
    rest = "with the offsets of the journal" if result.header is not None else "without offsets"
    result.add_note(f"{reason}; starting over {rest}")
