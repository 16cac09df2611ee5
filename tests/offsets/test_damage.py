"""Files that are cut short, overwritten or have flipped bits: never silently empty, never silently wrong."""

from __future__ import annotations

import os
import shutil

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.errors import OffsetStoreCorrupt, OffsetStoreError, OffsetStoreLocked, OffsetStoreUnwritable
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.directories import read_store
from pyrocket_consumer.offsets.journal import HEADER_BYTES, decode_header, replay
from pyrocket_consumer.offsets.offsets_json import decode_checkpoint, encode_offsets
from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each
from tests.offsets.disks import MemoryDisk
from tests.offsets.driving import put
from tests.trials import trials

QUEUES = [MessageQueue("orders", "broker-a", number) for number in range(3)]
MAIN, BACKUP, JOURNAL = "/s/offsets.json", "/s/offsets.json.bak", "/s/offsets.journal"
EXPECTED = dict(zip(QUEUES, (130, 122, 110), strict=True))


def used_and_killed() -> MemoryDisk:
    """A store with all its files: backup 110, checkpoint 120 for two queues, journal 122 and 130."""
    disk = MemoryDisk()
    now = [0.0]
    store = LocalFileOffsetStore("/s", journal_bytes=4096, disk=disk, clock=lambda: now[0])
    store.load()
    for queue in QUEUES:
        store.update_offset(queue, 110)
    store.persist_all()
    for queue, offset in zip(QUEUES, (120, 121), strict=False):
        store.update_offset(queue, offset)
    now[0] += 10  # a checkpoint is due
    store.persist_all()
    for offset in range(121, 131):
        put(store, QUEUES[0], offset)
    put(store, QUEUES[1], 122)
    return disk.after_kill()


GOOD = used_and_killed().files()


def loaded(changes: dict[str, bytes | None], **options):
    """Load a store with some files changed; return its offsets, events and disk. It is used and opened again, too."""
    disk, events = MemoryDisk(), []
    for path, data in (GOOD | changes).items():
        if data is not None:
            disk.put(path, data)
    store = LocalFileOffsetStore("/s", journal_bytes=4096, disk=disk, on_event=events.append, **options)
    try:
        store.load()
        offsets = store.clone_offset_table()
        put(store, QUEUES[2], 555)
        again = LocalFileOffsetStore("/s", journal_bytes=4096, disk=disk.after_kill())
        again.load()
        assert again.clone_offset_table() == offsets | {QUEUES[2]: 555}
        assert again.found.source == "file"
        store.close()
    except OffsetStoreError:
        # What stopped it touched nothing.
        beside = ("/s/offsets.lock", "/s/offsets.owner")
        assert {path: data for path, data in disk.files().items() if path not in beside} == {
            path: data for path, data in (GOOD | changes).items() if data is not None and path not in beside
        }
        raise
    return offsets, events, disk


def test_the_files_are_as_described():
    assert loaded({})[:2] == (EXPECTED, [])
    assert decode_checkpoint(GOOD[MAIN])[0][QUEUES[0]] == 120
    assert decode_checkpoint(GOOD[BACKUP])[0][QUEUES[0]] == 110
    assert replay(GOOD[JOURNAL], decode_header(GOOD[JOURNAL])).offsets[QUEUES[0]] == 130


@pytest.mark.slow("flips each bit")
def test_no_flipped_bit_of_offsets_json_goes_unnoticed():
    for byte in range(len(GOOD[MAIN])):
        for bit in range(8):
            damaged = bytearray(GOOD[MAIN])
            damaged[byte] ^= 1 << bit
            offsets, events, _ = loaded({MAIN: bytes(damaged)})
            assert events, (byte, bit)
            assert offsets


@pytest.mark.parametrize("closes", [1, 2, 3])
def test_no_flipped_bit_goes_unnoticed_after_a_clean_close(closes):
    """The journal is empty then, but knows what was written: the copy that is whole is used, or nothing."""
    disk = MemoryDisk()
    for number in range(closes):
        with LocalFileOffsetStore("/s", journal_bytes=4096, disk=disk) as store:
            for queue in QUEUES:
                store.update_offset(queue, 1000 + 10 * number)
    good = disk.files()
    for byte in range(len(good[MAIN])):
        for bit in range(8):
            damaged, events = bytearray(good[MAIN]), []
            damaged[byte] ^= 1 << bit
            again = MemoryDisk()
            for path, data in (good | {MAIN: bytes(damaged)}).items():
                again.put(path, data)
            store = LocalFileOffsetStore("/s", journal_bytes=4096, disk=again, on_event=events.append)
            if closes == 1:
                with pytest.raises(OffsetStoreCorrupt):  # there is no copy
                    store.load()
                continue
            store.load()
            assert store.clone_offset_table() == dict.fromkeys(QUEUES, 1000 + 10 * (closes - 2))
            assert "offsets.json.bak and the journal are used" in events[0].text
            store.close()


@pytest.mark.parametrize("name", [MAIN, BACKUP, JOURNAL])
def test_a_flipped_bit_never_gives_an_offset_nobody_stored(name):
    stored = {queue: {offset} for queue, offset in EXPECTED.items()}
    for text in (GOOD[MAIN], GOOD[BACKUP]):
        for queue, offset in decode_checkpoint(text)[0].items():
            stored[queue].add(offset)
    stored[QUEUES[0]] |= set(range(120, 131))
    for byte in range(min(len(GOOD[name]), 1500)):
        damaged = bytearray(GOOD[name])
        damaged[byte] ^= 1 << byte % 8
        offsets, _, _ = loaded({name: bytes(damaged)})
        for queue, offset in offsets.items():
            assert offset in stored[queue], (name, byte)


def test_offsets_json_cut_anywhere_is_replaced_by_the_backup():
    for length in range(len(GOOD[MAIN])):
        offsets, events, disk = loaded({MAIN: GOOD[MAIN][:length]})
        assert offsets == EXPECTED
        assert "store-fallback" in [str(event.kind) for event in events]
        assert [data for path, data in disk.files().items() if ".unreadable-" in path] == [GOOD[MAIN][:length]]


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
    for byte in [*range(48), *range(HEADER_BYTES, end), end + 100, 4095]:
        for bit in range(8):
            damaged = bytearray(GOOD[JOURNAL])
            damaged[byte] ^= 1 << bit
            offsets, events, _ = loaded({JOURNAL: bytes(damaged)})
            if last <= byte < end:  # like a frame that was never acknowledged
                assert offsets == EXPECTED | {QUEUES[1]: 121}
            else:
                assert events or offsets == EXPECTED, (byte, bit)


def test_a_journal_cut_anywhere_loses_at_most_what_was_cut_off():
    end, size = replay(GOOD[JOURNAL], decode_header(GOOD[JOURNAL])).end, len(GOOD[JOURNAL])
    for length in [*range(end), *range(end, size, 64 // trials(64))]:  # behind its end there are zeros
        offsets, events, _ = loaded({JOURNAL: GOOD[JOURNAL][:length]})
        assert events
        assert offsets[QUEUES[0]] in range(120, 131)
        assert offsets[QUEUES[2]] == 110


@for_each("garbage", [b"", b"\0" * 4096, b"x" * 4096, b"x" * 9000], ids=range(4))
def test_garbage_in_the_journal_leaves_the_checkpoint(garbage):
    offsets, events, disk = loaded({JOURNAL: garbage})
    assert offsets == dict(zip(QUEUES, (120, 121, 110), strict=True))
    assert "offsets.journal is unreadable" in events[0].text
    assert [data for path, data in disk.files().items() if "journal.unreadable-" in path] == [garbage]
    with pytest.raises(OffsetStoreCorrupt):
        loaded({JOURNAL: garbage}, on_unreadable="raise")


@for_each("main", [b"{", b"", None], ids=["garbage", "empty", "missing"])
@for_each("backup", [b"}", b"", None], ids=["garbage", "empty", "missing"])
def test_with_neither_file_readable_the_policy_decides(main, backup):
    for policy in ("raise", "backup"):
        with pytest.raises(OffsetStoreCorrupt, match="Restore the file"):
            loaded({MAIN: main, BACKUP: backup}, on_unreadable=policy)
    offsets, events, disk = loaded({MAIN: main, BACKUP: backup}, on_unreadable="start_over")
    assert offsets == {QUEUES[0]: 130, QUEUES[1]: 122}  # the journal's, newer than anything else
    assert "starting over" in events[0].text
    aside = [data for path, data in disk.files().items() if ".unreadable-" in path]
    assert sorted(aside) == sorted(data for data in (main, backup) if data is not None)


def damage(directory, files):
    directory.mkdir(parents=True, exist_ok=True)
    for name in files:
        (directory / name).write_bytes(b"{")


@pytest.mark.parametrize("policy", ["raise", "backup"])
def test_the_error_names_the_option_its_reader_has_in_hand(policy, tmp_path):
    """A consumer's option is another than the parameter of a store that was made by itself."""
    files = ["offsets.json", "offsets.json.bak"]
    damage(tmp_path / "alone", files)
    with pytest.raises(OffsetStoreCorrupt) as alone:
        LocalFileOffsetStore(tmp_path / "alone", on_unreadable=policy).load()
    assert f"LocalFileOffsetStore(…, on_unreadable={policy!r})" in str(alone.value)
    damage(tmp_path / "10.0.0.1@DEFAULT" / "g", files)
    options = {"message_model": "broadcasting", "client_ip": "10.0.0.1", "offset_store_dir": tmp_path}
    with EmbeddedCluster() as cluster:
        consumer = PushConsumer("g", name_server=cluster.name_server, on_unreadable_store=policy, **options)
        with pytest.raises(OffsetStoreCorrupt) as consumers:
            consumer.start()
    told = str(consumers.value)
    assert f"on_unreadable_store={policy!r}" in told
    assert "on_unreadable=" not in told
    for error in (alone, consumers):
        assert "'start_over'" in str(error.value) and "Restore the file" in str(error.value)


def test_who_only_reads_is_advised_to_restore_the_file(tmp_path):
    damage(tmp_path, ["offsets.json", "offsets.json.bak"])
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
    with pytest.raises(OffsetStoreCorrupt):  # only the journal is left: some offsets are known to be missing
        loaded({MAIN: None, BACKUP: None})


def test_a_missing_journal_leaves_the_checkpoint():
    offsets, events, _ = loaded({JOURNAL: None})
    assert offsets == dict(zip(QUEUES, (120, 121, 110), strict=True))
    assert events == []


def test_a_backup_newer_than_the_journal_is_used_alone():
    """Without hard links there is a moment without offsets.json, and the last header may not have reached the disk."""
    newer = {**EXPECTED, QUEUES[0]: 900, QUEUES[1]: 100}
    offsets, events, _ = loaded({MAIN: None, BACKUP: encode_offsets(newer)})
    assert offsets == newer
    assert "offsets.json.bak is newer than offsets.journal" in events[-1].text


def test_everything_missing_is_a_new_store():
    offsets, events, _ = loaded({MAIN: None, BACKUP: None, JOURNAL: None})
    assert (offsets, events) == ({}, [])


@pytest.mark.hazard("H13")
def test_an_empty_main_file_is_never_copied_over_a_good_backup():
    """The second crash that costs Java clients everything: at each instant one good generation is there."""
    disk = MemoryDisk()
    for path, data in (GOOD | {MAIN: b""}).items():
        disk.put(path, data)

    seen = []

    class Looking(MemoryDisk):
        """Looks before each change of a name whether a restart would find the offsets."""

        def _change(self, names):
            seen.append(self.files())
            super()._change(names)

    looking = Looking()
    for path, data in disk.files().items():
        looking.put(path, data)
    seen.clear()
    with LocalFileOffsetStore("/s", "checkpoint", journal_bytes=4096, disk=looking) as store:
        for offset in range(600, 603):
            put(store, QUEUES[0], offset)
    assert len(seen) > 5
    for files in seen:
        again = MemoryDisk()
        for path, data in files.items():
            again.put(path, data)
        store = LocalFileOffsetStore("/s", disk=again)
        store.load()
        assert store.clone_offset_table().keys() == EXPECTED.keys()
        assert store.read_offset(QUEUES[0]) >= 130


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("name", ["offsets.json", "offsets.json.bak", "offsets.journal"])
def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OffsetStoreError, match=rf"{name} in .*not a regular file; something else is .*move it away"):
        LocalFileOffsetStore(tmp_path).load()
    with pytest.raises(OffsetStoreError, match="not a regular file"):
        read_store(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_an_owner_s_pipe_does_not_hold_up_who_is_refused(tmp_path):
    with LocalFileOffsetStore(tmp_path) as first:
        (tmp_path / "offsets.owner").unlink()
        os.mkfifo(tmp_path / "offsets.owner")
        with pytest.raises(OffsetStoreLocked, match="in use by another process"):
            LocalFileOffsetStore(tmp_path).load()
        first.update_offset(QUEUES[0], 1)


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("name", ["offsets.json.new", "offsets.json.bak.new", "offsets.journal.new", "offsets.owner"])
def test_nothing_is_written_through_a_link(tmp_path, name, link):
    """Neither what somebody has linked to there nor, where it is a file of the store itself, that one."""
    directory = tmp_path / "store"
    with LocalFileOffsetStore(directory) as store:
        store.update_offset(QUEUES[0], 1)
        store.persist_all()
    other = tmp_path / "other"
    other.write_bytes(b"of somebody else")
    for target in (other, directory / "offsets.journal"):
        (directory / name).unlink(missing_ok=True)
        link(target, directory / name)
        with LocalFileOffsetStore(directory) as store:
            store.update_offset(QUEUES[0], store.read_offset(QUEUES[0]) + 1)
            store.persist_all()
            killed = tmp_path / f"killed-{target.name}"
            shutil.copytree(directory, killed)
        with LocalFileOffsetStore(killed) as found, LocalFileOffsetStore(directory) as store:
            assert found.clone_offset_table() == store.clone_offset_table()
    assert found.clone_offset_table() == {QUEUES[0]: 3}
    assert other.read_bytes() == b"of somebody else"


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this system cannot tell links from files when it opens them")
@pytest.mark.parametrize("name", ["offsets.json", "offsets.json.bak", "offsets.journal", "offsets.lock"])
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path, name):
    directory, other = tmp_path / "store", tmp_path / "other"
    for offset in range(2):
        with LocalFileOffsetStore(directory) as store:
            store.update_offset(QUEUES[0], offset)
            store.persist_all()
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
                store.update_offset(QUEUES[0], offset)
                store.persist_all()
        with LocalFileOffsetStore(tmp_path / "a" / "b") as store:
            store.update_offset(QUEUES[0], 3)
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {mode for path, mode in modes.items() if path in ("a", "a/b")} == {0o700}
    assert {mode for path, mode in modes.items() if path not in ("a", "a/b")} == {0o600}
    assert len(modes) >= 7


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_the_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "his").mkdir()
    os.chown(tmp_path / "his", 12345, 12345)
    with pytest.raises(OffsetStoreUnwritable, match="belongs to user 12345, and this process runs as user 0"):
        LocalFileOffsetStore(tmp_path / "his").load()
    assert not list((tmp_path / "his").iterdir())


@pytest.mark.parametrize("name", ["offsets.json", "offsets.json.bak", "offsets.journal"])
def test_a_file_larger_than_any_of_ours_is_not_read(tmp_path, name):
    with LocalFileOffsetStore(tmp_path) as store:
        store.update_offset(QUEUES[0], 1)
    with open(tmp_path / name, "ab") as file:
        file.truncate(5 << 30)
    with pytest.raises(OffsetStoreError, match=rf"{name}.* has 5368709120 bytes"):
        LocalFileOffsetStore(tmp_path).load()
