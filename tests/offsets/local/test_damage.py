"""Files that are cut short, overwritten or have flipped bits are never silently empty or silently wrong."""

from __future__ import annotations

import os
import shutil
from itertools import product

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.errors import OffsetStoreCorrupt, OffsetStoreError, OffsetStoreLocked, OffsetStoreUnwritable
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.journal import HEADER_BYTES, decode_header, replay
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each
from tests.offsets.local.disks import MemoryDisk, WatchedDisk
from tests.offsets.local.driving import (
    ORDERS,
    encode_offsets,
    flip_bit,
    leave_offsets,
    open_store,
    put,
    read_store,
    update,
)
from tests.trials import trials

QUEUES = ORDERS[:3]
MAIN, BACKUP, JOURNAL = "/s/offsets.json", "/s/offsets.json.bak", "/s/offsets.journal"
EXPECTED, CHECKPOINT = (dict(zip(QUEUES, offsets, strict=True)) for offsets in ((130, 122, 110), (120, 121, 110)))
FILES = ["offsets.json", "offsets.json.bak", "offsets.journal"]
HAS_PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")


def used_and_killed() -> MemoryDisk:
    """Return the files of a killed store: backup 110, checkpoint 120 for two queues, journal 122 and 130."""
    disk, now = MemoryDisk(), [0.0]
    store = open_store(journal_bytes=4096, disk=disk, clock=lambda: now[0])
    update(store, QUEUES, 110)
    store.persist_all()
    store.update_offset(QUEUES[0], 120)
    store.update_offset(QUEUES[1], 121)
    now[0] += 10  # a checkpoint is due
    store.persist_all()
    for offset in range(121, 131):
        put(store, QUEUES[0], offset)
    put(store, QUEUES[1], 122)
    return disk.after_kill()


def files_with(changes: dict[str, bytes | None]) -> dict[str, bytes]:
    return {path: data for path, data in (GOOD | changes).items() if data is not None}


GOOD = used_and_killed().files()

BESIDE = ("/s/offsets.lock", "/s/offsets.owner")


def loaded(changes: dict[str, bytes | None], **options):
    """Load a store with some files changed, use it, and load it again. Return its offsets, events and disk."""
    disk, events = MemoryDisk.holding(files_with(changes)), []
    store = LocalFileOffsetStore("/s", journal_bytes=4096, disk=disk, on_event=events.append, **options)
    try:
        store.load()
        offsets = store.clone_offset_table()
        put(store, QUEUES[2], 555)
        again = open_store(journal_bytes=4096, disk=disk.after_kill())
        assert again.clone_offset_table() == offsets | {QUEUES[2]: 555}
        assert again.found.source == "file"
        store.close()
    except OffsetStoreError:  # the failed load changed no file
        untouched = {path: data for path, data in disk.files().items() if path not in BESIDE}
        assert untouched == {path: data for path, data in files_with(changes).items() if path not in BESIDE}
        raise
    return offsets, events, disk


def set_aside(disk: MemoryDisk, kind: str = ".unreadable-") -> list[bytes]:
    return [data for path, data in disk.files().items() if kind in path]


def test_the_files_are_as_described():
    assert loaded({})[:2] == (EXPECTED, [])
    assert decode_checkpoint(GOOD[MAIN])[0][QUEUES[0]] == 120
    assert decode_checkpoint(GOOD[BACKUP])[0][QUEUES[0]] == 110
    assert replay(GOOD[JOURNAL], decode_header(GOOD[JOURNAL])).offsets[QUEUES[0]] == 130


@pytest.mark.slow("flips each bit")
def test_no_flipped_bit_of_offsets_json_goes_unnoticed():
    for byte, bit in product(range(len(GOOD[MAIN])), range(8)):
        offsets, events, _ = loaded({MAIN: flip_bit(GOOD[MAIN], byte, bit)})
        assert events, (byte, bit)
        assert offsets


@pytest.mark.slow("flips each bit")
@pytest.mark.parametrize("closes", [1, 2, 3])
def test_no_flipped_bit_goes_unnoticed_after_a_clean_close(closes):
    """The journal is empty then, but its header has the checksums. So only an undamaged copy is used."""
    disk = MemoryDisk()
    for number in range(closes):
        leave_offsets("/s", QUEUES, 1000 + 10 * number, journal_bytes=4096, disk=disk)
    good = disk.files()
    for byte, bit in product(range(len(good[MAIN])), range(8)):
        events, again = [], MemoryDisk.holding(good | {MAIN: flip_bit(good[MAIN], byte, bit)})
        store = LocalFileOffsetStore("/s", journal_bytes=4096, disk=again, on_event=events.append)
        if closes == 1:
            with pytest.raises(OffsetStoreCorrupt):  # there is no copy
                store.load()
            continue
        with store:
            assert store.clone_offset_table() == dict.fromkeys(QUEUES, 1000 + 10 * (closes - 2))
            assert "offsets.json.bak and the journal are used" in events[0].text


@pytest.mark.parametrize("name", [MAIN, BACKUP, JOURNAL])
def test_a_flipped_bit_never_gives_an_offset_nobody_stored(name):
    stored = {QUEUES[0]: {110, *range(120, 131)}, QUEUES[1]: {110, 121, 122}, QUEUES[2]: {110}}
    for byte in range(min(len(GOOD[name]), 1500)):
        for queue, offset in loaded({name: flip_bit(GOOD[name], byte, byte % 8)})[0].items():
            assert offset in stored[queue], (name, byte)


def test_offsets_json_cut_anywhere_is_replaced_by_the_backup():
    for length in range(len(GOOD[MAIN])):
        offsets, events, disk = loaded({MAIN: GOOD[MAIN][:length]})
        assert offsets == EXPECTED
        assert "store-fallback" in [str(event.kind) for event in events]
        assert set_aside(disk) == [GOOD[MAIN][:length]]


@pytest.mark.hazard("H13")
@for_each("garbage", [b"", b"\0" * 400, b"null", b"{}", bytes(range(256)) * 2], ids=range(5))
def test_garbage_in_offsets_json_is_set_aside(garbage):
    offsets, events, _ = loaded({MAIN: garbage})
    assert offsets == EXPECTED
    assert "offsets.json.bak and the journal are used" in events[0].text
    with pytest.raises(OffsetStoreCorrupt, match="on_unreadable"):
        loaded({MAIN: garbage}, on_unreadable="raise")


@pytest.mark.slow("flips each bit")
def test_no_flipped_bit_of_the_journal_goes_unnoticed():
    end = replay(GOOD[JOURNAL], decode_header(GOOD[JOURNAL])).end
    last = end - 22
    for byte, bit in product([*range(48), *range(HEADER_BYTES, end), end + 100, 4095], range(8)):
        offsets, events, _ = loaded({JOURNAL: flip_bit(GOOD[JOURNAL], byte, bit)})
        if last <= byte < end:  # the same as a frame that was never acknowledged
            assert offsets == EXPECTED | {QUEUES[1]: 121}
        else:
            assert events or offsets == EXPECTED, (byte, bit)


def test_a_journal_cut_anywhere_loses_at_most_what_was_cut_off():
    end, size = replay(GOOD[JOURNAL], decode_header(GOOD[JOURNAL])).end, len(GOOD[JOURNAL])
    for length in [*range(end), *range(end, size, 64 // trials(64))]:  # zeros follow the last frame
        offsets, events, _ = loaded({JOURNAL: GOOD[JOURNAL][:length]})
        assert events
        assert offsets[QUEUES[0]] in range(120, 131)
        assert offsets[QUEUES[2]] == 110


@for_each("garbage", [b"", b"\0" * 4096, b"x" * 4096, b"x" * 9000], ids=range(4))
def test_garbage_in_the_journal_leaves_the_checkpoint(garbage):
    offsets, events, disk = loaded({JOURNAL: garbage})
    assert offsets == CHECKPOINT
    assert "offsets.journal is unreadable" in events[0].text
    assert set_aside(disk, "journal.unreadable-") == [garbage]
    with pytest.raises(OffsetStoreCorrupt):
        loaded({JOURNAL: garbage}, on_unreadable="raise")


@for_each("main", [b"{", b"", None], ids=["garbage", "empty", "missing"])
@for_each("backup", [b"}", b"", None], ids=["garbage", "empty", "missing"])
def test_with_neither_file_readable_the_policy_decides(main, backup):
    for policy in ("raise", "backup"):
        with pytest.raises(OffsetStoreCorrupt, match="Restore the file"):
            loaded({MAIN: main, BACKUP: backup}, on_unreadable=policy)
    offsets, events, disk = loaded({MAIN: main, BACKUP: backup}, on_unreadable="start_over")
    assert offsets == {QUEUES[0]: 130, QUEUES[1]: 122}  # from the journal, which is the newest file
    assert "starting over with the offsets of the journal" in events[0].text
    assert sorted(set_aside(disk)) == sorted(data for data in (main, backup) if data is not None)


def test_starting_over_without_a_journal_begins_without_offsets():
    for journal in (None, b"x" * 4096):
        offsets, events, _ = loaded({MAIN: b"{", BACKUP: None, JOURNAL: journal}, on_unreadable="start_over")
        assert offsets == {}
        assert "starting over without offsets" in events[-1].text


@for_each(
    "policy, files, advice",
    [
        (
            "raise",
            {MAIN: b"{"},
            "'backup' uses offsets.json.bak; 'start_over' begins with the journal only if that is unreadable, too",
        ),
        ("backup", {MAIN: b"{", BACKUP: b"}"}, "'start_over' begins with the journal only"),
        ("raise", {JOURNAL: b"x" * 4096}, "'backup' begins with offsets.json only"),
    ],
)
def test_the_error_advises_only_policies_that_help(policy, files, advice):
    with pytest.raises(OffsetStoreCorrupt) as refused:
        loaded(files, on_unreadable=policy)
    text = (
        f"Restore the file from a copy, or choose another policy than LocalFileOffsetStore(…, on_unreadable={policy!r})"
    )
    assert str(refused.value).endswith(f"{text}: {advice}")


def damage(directory):
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("offsets.json", "offsets.json.bak"):
        (directory / name).write_bytes(b"{")


@pytest.mark.parametrize("policy", ["raise", "backup"])
def test_the_error_names_the_option_of_its_reader(policy, tmp_path):
    """The consumer's option has another name than the parameter of a store used alone."""
    damage(tmp_path / "alone")
    with pytest.raises(OffsetStoreCorrupt) as alone:
        LocalFileOffsetStore(tmp_path / "alone", on_unreadable=policy).load()
    assert f"LocalFileOffsetStore(…, on_unreadable={policy!r})" in str(alone.value)
    damage(tmp_path / "10.0.0.1@DEFAULT" / "g")
    options = {"message_model": "broadcasting", "client_ip": "10.0.0.1", "offset_store_dir": tmp_path}
    with EmbeddedCluster() as cluster, pytest.raises(OffsetStoreCorrupt) as consumers:
        PushConsumer("g", name_server=cluster.name_server, on_unreadable_store=policy, **options).start()
    text = str(consumers.value)
    assert f"on_unreadable_store={policy!r}" in text
    assert "on_unreadable=" not in text
    for error in (alone, consumers):
        assert "'start_over'" in str(error.value) and "Restore the file" in str(error.value)


def test_a_reader_is_advised_to_restore_the_file(tmp_path):
    damage(tmp_path)
    with pytest.raises(OffsetStoreCorrupt, match="Restore the file") as refused:
        read_store(tmp_path)
    assert "on_unreadable" not in str(refused.value)


def test_an_unusable_directory_is_named_as_the_user_gave_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OffsetStoreUnwritable, match=r"another directory\. Nothing was started"):
        LocalFileOffsetStore(tmp_path / "file" / "store").load()
    options = {"message_model": "broadcasting", "offset_store_dir": tmp_path / "file"}
    with EmbeddedCluster() as cluster, pytest.raises(OffsetStoreUnwritable, match=r"directory \(offset_store_dir\)\."):
        PushConsumer("g", name_server=cluster.name_server, **options).start()


def test_a_missing_main_file_is_not_a_new_store():
    offsets, events, _ = loaded({MAIN: None})
    assert (offsets, len(events)) == (EXPECTED, 1)
    assert "offsets.json is missing" in events[0].text
    with pytest.raises(OffsetStoreCorrupt):
        loaded({MAIN: None}, on_unreadable="raise")
    with pytest.raises(OffsetStoreCorrupt):  # only the journal exists, so some offsets are missing
        loaded({MAIN: None, BACKUP: None})


def test_a_missing_journal_leaves_the_checkpoint():
    assert loaded({JOURNAL: None})[:2] == (CHECKPOINT, [])


def test_a_backup_newer_than_the_journal_is_used_alone():
    """Without hard links offsets.json is missing for a moment, and the last header may not have reached the disk."""
    newer = {**EXPECTED, QUEUES[0]: 900, QUEUES[1]: 100}
    offsets, events, _ = loaded({MAIN: None, BACKUP: encode_offsets(newer)})
    assert offsets == newer
    assert "offsets.json.bak is newer than offsets.journal" in events[-1].text


def test_everything_missing_is_a_new_store():
    assert loaded({MAIN: None, BACKUP: None, JOURNAL: None})[:2] == ({}, [])


@pytest.mark.hazard("H13")
def test_an_empty_main_file_is_never_copied_over_a_good_backup():
    """A second crash costs Java clients all offsets. Here one intact copy of the file exists at each moment."""
    disk, seen = MemoryDisk.holding(GOOD | {MAIN: b""}), []

    def check(count, operation, path):  # before each operation, a restart must find the offsets
        if operation in ("create", "link", "replace", "remove"):
            seen.append(disk.files())

    with LocalFileOffsetStore("/s", "checkpoint", journal_bytes=4096, disk=WatchedDisk(disk, check)) as store:
        for offset in range(600, 603):
            put(store, QUEUES[0], offset)
    assert len(seen) > 5
    for files in seen:
        store = open_store(disk=MemoryDisk.holding(files))
        assert store.clone_offset_table().keys() == EXPECTED.keys()
        assert store.read_offset(QUEUES[0]) >= 130


@HAS_PIPES
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_or_device_in_place_of_a_file_is_an_error(tmp_path, name):
    os.mkfifo(tmp_path / name)
    text = rf"{name} in .*not a regular file; a directory, link or device has the name of a file; move it away"
    with pytest.raises(OffsetStoreError, match=text):
        LocalFileOffsetStore(tmp_path).load()


@HAS_PIPES
def test_a_pipe_as_owner_file_does_not_block_a_second_process(tmp_path):
    with LocalFileOffsetStore(tmp_path) as first:
        (tmp_path / "offsets.owner").unlink()
        os.mkfifo(tmp_path / "offsets.owner")
        with pytest.raises(OffsetStoreLocked, match="in use by another process"):
            LocalFileOffsetStore(tmp_path).load()
        first.update_offset(QUEUES[0], 1)


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("name", ["offsets.json.new", "offsets.json.bak.new", "offsets.journal.new", "offsets.owner"])
def test_nothing_is_written_through_a_link(tmp_path, name, link):
    """Neither the target of another user's link is written, nor the target of a link to a file of the store."""
    directory = tmp_path / "store"
    leave_offsets(directory, QUEUES[:1], 1)
    other = tmp_path / "other"
    other.write_bytes(b"of another user")
    for target in (other, directory / "offsets.journal"):
        (directory / name).unlink(missing_ok=True)
        link(target, directory / name)
        with LocalFileOffsetStore(directory) as store:
            put(store, QUEUES[0], store.read_offset(QUEUES[0]) + 1)
            killed = tmp_path / f"killed-{target.name}"
            shutil.copytree(directory, killed)
        with LocalFileOffsetStore(killed) as found, LocalFileOffsetStore(directory) as store:
            assert found.clone_offset_table() == store.clone_offset_table()
    assert found.clone_offset_table() == {QUEUES[0]: 3}
    assert other.read_bytes() == b"of another user"


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this system cannot open a file without following links")
@pytest.mark.parametrize("name", [*FILES, "offsets.lock"])
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path, name):
    directory, other = tmp_path / "store", tmp_path / "other"
    for offset in range(2):
        leave_offsets(directory, QUEUES[:1], offset)
    (directory / name).rename(other)
    before = other.read_bytes()
    (directory / name).symlink_to(other)
    with pytest.raises(OffsetStoreError):
        LocalFileOffsetStore(directory).load()
    assert other.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX")
def test_files_and_directories_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        with LocalFileOffsetStore(tmp_path / "a" / "b") as store:
            for offset in (1, 2):
                put(store, QUEUES[0], offset)
        leave_offsets(tmp_path / "a" / "b", QUEUES[:1], 3)
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert [modes.pop("a"), modes.pop("a/b")] == [0o700, 0o700]
    assert set(modes.values()) == {0o600}
    assert len(modes) >= 5


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a directory to another user")
def test_the_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "his").mkdir()
    os.chown(tmp_path / "his", 12345, 12345)
    with pytest.raises(OffsetStoreUnwritable, match="belongs to user 12345, and this process runs as user 0"):
        LocalFileOffsetStore(tmp_path / "his").load()
    assert not list((tmp_path / "his").iterdir())


@pytest.mark.parametrize("name", FILES)
def test_a_file_larger_than_a_store_writes_is_not_read(tmp_path, name):
    leave_offsets(tmp_path, QUEUES[:1], 1)
    with open(tmp_path / name, "ab") as file:
        file.truncate(5 << 30)
    with pytest.raises(OffsetStoreError, match=rf"{name}.* has 5368709120 bytes"):
        LocalFileOffsetStore(tmp_path).load()
