"""The local store on a real disk, without a consumer: the offsets it finds and keeps, and its events."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import tracemalloc
from itertools import islice

import pytest

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.cluster.names import make_client_id
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.errors import ConfigError, OffsetStoreError, OffsetStoreLocked
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, QueueReset
from pyrocket_consumer.offsets.local.directories import base_directory, find_orphans, slot_ids
from pyrocket_consumer.offsets.local.journal import decode_header, replay
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each
from tests.offsets.local.disks import MemoryDisk, WatchedDisk
from tests.offsets.local.driving import (
    DURABILITIES,
    MEMORY,
    ORDERS,
    QUEUE,
    STORE,
    encode_offsets,
    leave_offsets,
    open_store,
    put,
    read_store,
    update,
)


def main_file(directory):
    return decode_checkpoint((directory / "offsets.json").read_bytes())[0]


def frames_in(directory):
    data = (directory / "offsets.journal").read_bytes()
    return replay(data, decode_header(data))


@pytest.mark.parametrize("durability", DURABILITIES)
def test_persisted_offsets_are_found_after_a_restart(tmp_path, durability):
    with LocalFileOffsetStore(tmp_path / "store", durability) as store:
        assert store.found.source == "new"
        for number, queue in enumerate(ORDERS):
            put(store, queue, number)
        store.update_offset(QUEUE, 100)
        store.persist_all(ORDERS)
        assert read_store(tmp_path / "store").offsets[QUEUE] == 100
        store.update_offset(QUEUE, 101)  # closing persists it
    expected = {QUEUE: 101} | {queue: queue.queue_id for queue in ORDERS[1:]}
    assert main_file(tmp_path / "store") == expected
    with LocalFileOffsetStore(tmp_path / "store", durability) as store:
        assert (store.found.source, store.found.queues, store.found.journal_frames) == ("file", 8, 0)
        assert store.clone_offset_table() == expected
        assert store.origin(QUEUE) == "file"
        assert store.origin(MessageQueue("x", "y", 1)) is None


def test_the_journal_has_the_offsets_since_the_checkpoint(tmp_path):
    now = [0.0]
    store = open_store(tmp_path, checkpoint_interval_s=5, clock=lambda: now[0])
    put(store, QUEUE, 1)  # the first persist of a new store writes both
    put(store, QUEUE, 2)
    assert (main_file(tmp_path), frames_in(tmp_path).offsets) == ({QUEUE: 1}, {QUEUE: 2})
    now[0] = 5.0
    store.persist_all()  # no offset has changed, but offsets.json is stale
    assert (main_file(tmp_path), frames_in(tmp_path).offsets) == ({QUEUE: 2}, {})
    put(store, QUEUE, 3)
    assert main_file(tmp_path) == {QUEUE: 2}
    store.close()
    assert main_file(tmp_path) == {QUEUE: 3}
    assert decode_checkpoint((tmp_path / "offsets.json.bak").read_bytes())[0] == {QUEUE: 2}


def test_with_checkpoint_durability_each_persist_is_readable(tmp_path):
    with LocalFileOffsetStore(tmp_path, "checkpoint") as store:
        for offset in range(5):
            put(store, QUEUE, offset)
            assert (tmp_path / "offsets.json").read_bytes() == encode_offsets({QUEUE: offset})
    assert not (tmp_path / "offsets.journal").exists()


def test_a_generation_is_never_reused():
    """Power loss may drop the last header and keep frames written after it. The next generation must not match them."""
    disk, generations = MemoryDisk(), set()
    leave_offsets("/s", [QUEUE], 1, disk=disk)
    for _ in range(5):
        again = disk.after_kill()
        put(open_store(disk=again), QUEUE, 2)
        generations.add(decode_header(again.files()["/s/offsets.journal"]).generation)
    assert len(generations) == 5


def test_an_unchanged_offset_costs_no_write(tmp_path):
    with LocalFileOffsetStore(tmp_path) as store:
        put(store, QUEUE, 5)
        put(store, QUEUE, 6)
        before = frames_in(tmp_path).frames
        for _ in range(10):
            put(store, QUEUE, 6)
            store.persist_all()
        assert frames_in(tmp_path).frames == before


def test_a_full_journal_becomes_a_checkpoint_and_nothing_is_lost(tmp_path):
    with LocalFileOffsetStore(tmp_path, "process", journal_bytes=4096) as store:
        for offset in range(2000):
            queue = ORDERS[offset % 8]
            put(store, queue, offset)
            if offset % 97 == 0:
                assert read_store(tmp_path).offsets[queue] == offset
        assert (tmp_path / "offsets.journal").stat().st_size == 4096


def test_a_batch_too_large_for_the_journal_becomes_a_checkpoint(tmp_path):
    many = [MessageQueue(f"topic-{n % 7}", "broker-a", n) for n in range(1000)]
    with LocalFileOffsetStore(tmp_path, journal_bytes=4096) as store:
        for round_ in range(3):
            update(store, many, round_)
            store.persist_all(many)
            assert set(read_store(tmp_path).offsets.values()) == {round_}
            put(store, many[3], 77)
            assert read_store(tmp_path).offsets[many[3]] == 77


@for_each(
    "number, named",
    enumerate(
        [
            lambda known: known,
            lambda known: known[::-1],
            lambda known: [MessageQueue(each.topic, each.broker_name, each.queue_id) for each in known],
            lambda known: [*known, MessageQueue("another topic", "broker-a", 0)],
            lambda known: iter(known),
        ]
    ),
    ids=["as known", "in another order", "equal ones", "and one more", "an iterator"],
)
def test_the_queues_of_a_table_may_be_named_in_any_way(tmp_path, number, named):
    known = [MessageQueue(f"topic-{n % 7}", "broker-a", n) for n in range(100)]
    with LocalFileOffsetStore(tmp_path / str(number)) as store:
        for round_ in range(3):
            update(store, known, round_)
            store.persist_all(named(known))
            assert read_store(store.directory).offsets == dict.fromkeys(known, round_)
        store.update_offset(known[0], 7)
        store.update_offset(known[1], 8)
        store.persist_all([*known[:1], *known[2:], known[2]])
        assert read_store(store.directory).offsets == dict.fromkeys(known, 2) | {known[0]: 7}


def test_another_journal_size_takes_effect_at_the_next_start(tmp_path):
    for size in (8192, 4096, 1 << 16):
        with LocalFileOffsetStore(tmp_path, journal_bytes=size) as store:
            put(store, QUEUE, size)
            assert (tmp_path / "offsets.journal").stat().st_size == size
    assert main_file(tmp_path) == {QUEUE: 1 << 16}


def test_an_offset_may_be_lowered(tmp_path):
    with LocalFileOffsetStore(tmp_path) as store:
        for offset in (9, 100, 10, 10):
            put(store, QUEUE, offset)
            assert read_store(tmp_path).offsets == {QUEUE: offset}


def test_an_offset_set_before_load_is_kept(tmp_path):
    leave_offsets(tmp_path, [QUEUE], 5)
    store = LocalFileOffsetStore(tmp_path)
    store.update_offset(QUEUE, 9)
    store.load()
    for _ in range(2):
        assert (store.read_offset(QUEUE, MEMORY), store.read_offset(QUEUE, STORE)) == (9, 5)
        store.load()  # a second time is safe
    store.close()
    assert main_file(tmp_path) == {QUEUE: 9}


def test_a_closed_store_does_not_persist_and_opens_again(tmp_path):
    store = LocalFileOffsetStore(tmp_path)
    with pytest.raises(OffsetStoreError, match="not open"):
        store.persist(QUEUE)
    with pytest.raises(OffsetStoreError, match="not loaded"):
        _ = store.found
    with store:
        store.update_offset(QUEUE, 5)
    store.update_offset(QUEUE, 6)  # a late listener: no error, and not durable
    for call in (lambda: store.persist(QUEUE), store.persist_all, lambda: store.remove_offset(QUEUE)):
        with pytest.raises(OffsetStoreError, match="not open"):
            call()
    with store:
        assert store.read_offset(QUEUE) == store.read_offset(QUEUE, MEMORY) == store.read_offset(QUEUE, STORE) == 5
    assert main_file(tmp_path) == {QUEUE: 5}


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_store_opened_again_continues_after_another_owner(tmp_path, durability, caplog):
    """This holds even if a listener acknowledges after the close, and a caller tries to persist that."""
    store = LocalFileOffsetStore(tmp_path, durability)
    with store:
        update(store, ORDERS[:3], 10)
    with LocalFileOffsetStore(tmp_path) as other:
        other.update_offset(QUEUE, 500)
        other.persist_resets({ORDERS[1]: QueueReset(3, 77)})
    store.update_offset(QUEUE, 11)
    with pytest.raises(OffsetStoreError, match="not open"):
        store.persist(QUEUE)
    with caplog.at_level(logging.INFO), store:
        assert f"offsets in memory are discarded: directory={tmp_path} queues=2" in caplog.text
        assert store.clone_offset_table() == {QUEUE: 500, ORDERS[1]: 3, ORDERS[2]: 10}
        assert store.reset_epoch(ORDERS[1]) == 77
        store.update_offset(ORDERS[2], 12)
        store.persist_all()
        assert read_store(tmp_path).offsets == {QUEUE: 500, ORDERS[1]: 3, ORDERS[2]: 12}
    assert main_file(tmp_path) == {QUEUE: 500, ORDERS[1]: 3, ORDERS[2]: 12}


def test_a_store_opened_again_forgets_removed_offsets(tmp_path):
    store = LocalFileOffsetStore(tmp_path)
    with store:
        store.update_offset(QUEUE, 10)
    for path in tmp_path.iterdir():
        path.unlink()
    with store:
        assert (store.found.source, store.clone_offset_table(), store.read_offset(QUEUE)) == ("new", {}, None)


def test_a_relative_directory_does_not_follow_the_process(tmp_path, monkeypatch):
    """The process may call chdir() later, and another application may have a store of the same name there."""
    mine, others = tmp_path / "mine", tmp_path / "others"
    for place in (mine, others):
        place.mkdir()
    leave_offsets(others / "offsets", [QUEUE], 777)
    monkeypatch.chdir(mine)
    store = LocalFileOffsetStore("offsets", checkpoint_interval_s=0)
    assert store.directory == mine / "offsets"
    monkeypatch.chdir(others)
    with store:
        for offset in range(7):
            put(store, QUEUE, offset)
    monkeypatch.chdir(mine)
    with store:  # opened again
        monkeypatch.chdir(others)
        store.update_offset(QUEUE, 8)
    assert (main_file(mine / "offsets"), main_file(others / "offsets")) == ({QUEUE: 8}, {QUEUE: 777})


def test_a_relative_base_directory_does_not_follow_it_either(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    stores = [LocalFileOffsetStore.for_group(config("base"), "10.0.0.5@DEFAULT") for _ in range(2)]
    monkeypatch.chdir(tmp_path / "elsewhere")
    with stores[0], stores[1]:
        ids = ("10.0.0.5@DEFAULT", "10.0.0.5@DEFAULT-1")
        assert [store.directory for store in stores] == [tmp_path / "base" / client_id / "g" for client_id in ids]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@for_each("directory", ["", None, 7, b"/tmp/offsets", "offsets\0", "offsets\ud800"])
def test_an_invalid_directory_is_refused(directory):
    with pytest.raises(ConfigError, match="directory=.* is not allowed; name the directory"):
        LocalFileOffsetStore(directory)


def start_with(base):
    """Start a broadcasting consumer that keeps its offsets in `base`."""
    options = {"message_model": "broadcasting", "offset_store_dir": base}
    with EmbeddedCluster() as cluster, PushConsumer("g", name_server=cluster.name_server, **options) as consumer:
        assert consumer is None, "it must not start"


@pytest.mark.skipif(os.name != "posix", reason="homes of users are POSIX")
@pytest.mark.parametrize(("base", "variable"), [("~nosuchuser/x", None), ("~\ud800/x", None), (None, "~nosuchuser/x")])
def test_an_unknown_home_directory_is_an_error_of_the_configuration(monkeypatch, base, variable):
    if variable is not None:
        monkeypatch.setenv("ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR", variable)
    with pytest.raises(ConfigError) as refused:
        start_with(base)
    assert f"offsets cannot be stored in {base or variable!r} (" in str(refused.value)
    assert ("offset_store_dir" if base else "ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR") + "):" in str(refused.value)
    assert "is unknown; set offset_store_dir to a path without ~" in str(refused.value)


@pytest.mark.skipif(os.name != "posix", reason="homes of users are POSIX")
def test_a_user_without_home_directory_must_name_one(monkeypatch):
    """In a container the user may have neither HOME nor a line in /etc/passwd."""

    def getpwuid(uid):
        raise KeyError(uid)

    monkeypatch.delenv("ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", getpwuid)
    with pytest.raises(
        ConfigError, match=r"in '~/.rocketmq_offsets' \(the default\): .* set offset_store_dir to a path"
    ):
        start_with(None)


def test_a_base_directory_that_no_path_can_name_is_refused():
    with pytest.raises(ConfigError, match=r"offset_store_dir='/tmp/.ud800' is not allowed; name the directory"):
        start_with("/tmp/\ud800")


@pytest.mark.skipif(os.name != "posix", reason="Windows does not remove a working directory")
def test_a_relative_directory_needs_a_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(
        OffsetStoreError, match="offset_store_dir='base': the working directory .*; name an absolute path"
    ):
        start_with("base")
    with pytest.raises(OffsetStoreError, match="directory='store': the working directory .*; name an absolute path"):
        LocalFileOffsetStore("store")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_stored_offset_is_not_known_while_the_store_is_closed(tmp_path, when):
    """None would mean that there is no offset, and a consumer would begin at the end."""
    with LocalFileOffsetStore(tmp_path) as store:
        store.update_offset(QUEUE, 5)
        store.update_offset(ORDERS[1], 6)
        store.remove_offset(ORDERS[1])
    if when == "before":
        store = LocalFileOffsetStore(tmp_path)
        store.update_offset(QUEUE, 5)
    unknown = [*((queue, STORE) for queue in ORDERS[:3]), *((queue,) for queue in ORDERS[1:3])]
    for arguments in unknown:
        with pytest.raises(OffsetStoreError, match=r"not open; call load\(\)"):
            store.read_offset(*arguments)
    assert store.read_offset(QUEUE) == 5
    assert [store.read_offset(queue, MEMORY) for queue in ORDERS[:3]] == [5, None, None]
    with store:
        assert [store.read_offset(queue) for queue in ORDERS[:3]] == [5, 6, None]
        assert [store.read_offset(queue, STORE) for queue in ORDERS[:3]] == [5, 6, None]


@for_each("epoch", [-1, 2**63, 1.0, "1", True, None])
def test_a_wrong_epoch_sets_nothing(epoch):
    with LocalFileOffsetStore("/s", disk=MemoryDisk()) as store:
        with pytest.raises(ConfigError, match=f"epoch {epoch!r} of orders.*whole number"):
            store.persist_resets({ORDERS[1]: QueueReset(3, 1), QUEUE: QueueReset(5, epoch)})
        assert (store.clone_offset_table(), store.reset_epoch(QUEUE), store.reset_epoch(ORDERS[1])) == ({}, 0, 0)


@for_each("resets", [None, [], "resets", 7, {QUEUE: None}, {QUEUE: 5}, {ORDERS[1]: QueueReset(3, 1), QUEUE: (5, 1)}])
def test_resets_of_another_type_set_nothing(resets):
    with LocalFileOffsetStore("/s", disk=MemoryDisk()) as store:
        with pytest.raises(ConfigError, match="pass a mapping from MessageQueue to QueueReset"):
            store.persist_resets(resets)
        assert store.clone_offset_table() == {}


def test_a_store_that_is_dropped_leaves_no_file_and_no_lock(tmp_path):
    def lowest_free():
        fd = os.open(os.devnull, os.O_RDONLY)
        os.close(fd)
        return fd

    gc.collect()
    before = lowest_free()
    for offset in range(5):
        store = open_store(tmp_path)
        put(store, QUEUE, offset)
        store.update_offset(QUEUE, 100)
        del store
        assert read_store(tmp_path).offsets == {QUEUE: offset}
    assert lowest_free() == before


@for_each("options", [{"instance_name": "../../x"}, {"instance_name": "a/b"}, {"client_ip": "/"}, {"unit_name": "a/"}])
def test_a_client_id_that_cannot_name_a_directory_is_refused(tmp_path, options):
    """The store would be in another directory, perhaps outside of `offset_store_dir`, where no search finds it."""
    chosen = config(tmp_path / "base", **{"client_ip": "10.0.0.5", **options})
    with pytest.raises(ConfigError, match="client id .* cannot name the directory .*; use client_ip, instance_name"):
        LocalFileOffsetStore.for_group(chosen, make_client_id(chosen, broadcasting=True))
    assert list(tmp_path.iterdir()) == []


def test_names_of_any_script_and_with_percent_signs_survive(tmp_path):
    names = [("%RETRY%orders", "broker-a"), ("订单%d", 'b"\\\n'), ("", "")]
    queues = [MessageQueue(*pair, number) for number, pair in enumerate(names)]
    with LocalFileOffsetStore(tmp_path) as store:
        for number in range(2):
            for queue in queues:
                put(store, queue, number)
            assert read_store(tmp_path).offsets == dict.fromkeys(queues, number)
    assert main_file(tmp_path) == dict.fromkeys(queues, 1)


def test_a_store_that_must_exist_is_not_created(tmp_path):
    with pytest.raises(OffsetStoreError, match="existing_only"):
        LocalFileOffsetStore(tmp_path, existing_only=True).load()
    leave_offsets(tmp_path, [QUEUE], 5)
    with LocalFileOffsetStore(tmp_path, existing_only=True) as store:
        assert store.read_offset(QUEUE) == 5


@for_each(
    "options",
    [
        {"durability": "none"},
        {"on_unreadable": "ignore"},
        {"journal_bytes": 100},
        {"journal_bytes": 1.5},
        {"checkpoint_interval_s": -1},
    ],
)
def test_wrong_settings_are_refused(tmp_path, options):
    with pytest.raises(ConfigError):
        LocalFileOffsetStore(tmp_path, **options)


def test_the_offsets_found_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        leave_offsets(tmp_path, [QUEUE], 5)
    assert f"offset store loaded: directory={tmp_path} found=new queues=0" in caplog.text
    assert "\n" not in caplog.messages[0]


def test_files_of_another_program_are_not_changed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    leave_offsets(tmp_path, [QUEUE], 5)
    ours = ["offsets.journal", "offsets.json", "offsets.lock", "offsets.owner"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", *ours]


def test_a_later_write_of_java_counts(tmp_path):
    events, store = [], open_store(tmp_path)
    put(store, QUEUE, 5)
    put(store, QUEUE, 6)  # in the journal only
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    store.close()
    for name, data in files.items():  # as after kill -9 …
        (tmp_path / name).write_bytes(data)
    (tmp_path / "offsets.json").write_bytes(encode_offsets({QUEUE: 50, ORDERS[1]: 1}))  # … and a run of a Java client
    with LocalFileOffsetStore(tmp_path, on_event=events.append) as store:
        assert store.clone_offset_table() == {QUEUE: 50, ORDERS[1]: 1}
        put(store, QUEUE, 51)
        assert read_store(tmp_path).offsets == {QUEUE: 51, ORDERS[1]: 1}
    assert [str(event.kind) for event in events] == ["store-fallback"]
    assert "another program" in events[0].text


@pytest.mark.parametrize("writes", [1, 2, 5])
@pytest.mark.parametrize("runs_before", [1, 2])
def test_writes_of_java_between_two_runs_count(tmp_path, writes, runs_before):
    main, events = tmp_path / "offsets.json", []
    for offset in range(runs_before):
        leave_offsets(tmp_path, [QUEUE], offset)
    for number in range(1, writes + 1):  # as MixAll.string2File does, which keeps the previous file
        (tmp_path / "offsets.json.bak").write_bytes(main.read_bytes())
        main.write_bytes(encode_offsets({QUEUE: 100 * number}))
    with LocalFileOffsetStore(tmp_path, on_event=events.append) as store:
        assert store.clone_offset_table() == {QUEUE: 100 * writes}
        store.update_offset(QUEUE, 1000)
    assert [str(event.kind) for event in events] == ["store-fallback"]
    assert "another program wrote it" in events[0].text
    with LocalFileOffsetStore(tmp_path, on_event=events.append) as store:
        assert store.clone_offset_table() == {QUEUE: 1000}
    assert len(events) == 1


@pytest.mark.hazard("H15")
def test_queues_that_a_persist_omits_stay_in_the_store(tmp_path):
    with LocalFileOffsetStore(tmp_path, "checkpoint") as store:
        update(store, ORDERS, 50)
        store.persist_all(ORDERS)
        for queue in ORDERS[4:]:
            store.remove_offset(queue)
        store.update_offset(QUEUE, 60)
        for _ in range(3):
            store.persist_all(ORDERS[:4])
            store.persist_all([])
        assert main_file(tmp_path) == dict.fromkeys(ORDERS, 50) | {QUEUE: 60}
    assert len(main_file(tmp_path)) == 8


def test_an_update_during_the_last_write_is_written_too():
    def update_once(count, operation, path):
        if operation == "write_at" and path.endswith(".journal") and store.read_offset(QUEUE, MEMORY) == 2:
            store.update_offset(QUEUE, 3)

    disk = MemoryDisk()
    store = open_store(disk=WatchedDisk(disk, update_once))
    put(store, QUEUE, 1)
    store.update_offset(QUEUE, 2)
    store.remove_offset(QUEUE)
    assert (store.read_offset(QUEUE, MEMORY), store.read_offset(QUEUE, STORE)) == (None, 3)
    store.close()
    assert decode_checkpoint(disk.files()["/s/offsets.json"])[0] == {QUEUE: 3}


@pytest.mark.hazard("H10")
def test_the_directory_is_a_setting_a_variable_or_javas_default(monkeypatch, tmp_path):
    monkeypatch.delenv("ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert base_directory() == tmp_path / ".rocketmq_offsets"
    monkeypatch.setenv("ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR", "/data/offsets")
    assert str(base_directory()) == "/data/offsets"
    assert base_directory("~/mine") == tmp_path / "mine"


def test_the_slots_of_a_client_id():
    slots = ["10.0.0.5@DEFAULT", "10.0.0.5@DEFAULT-1", "10.0.0.5@DEFAULT-2"]
    assert list(islice(slot_ids("10.0.0.5@DEFAULT"), 3)) == slots
    assert list(slot_ids("[::1]@DEFAULT@unit"))[1] == "[::1]@DEFAULT-1@unit"


def config(tmp_path, **options):
    return ConsumerConfig(group="g", name_server="127.0.0.1:9876", offset_store_dir=tmp_path, **options)


@pytest.mark.hazard("H11")
def test_a_changed_client_id_names_the_store_it_leaves_behind(tmp_path):
    events = []
    chosen = config(tmp_path, on_event=events.append)
    with LocalFileOffsetStore.for_group(chosen, "10.0.0.5@DEFAULT") as store:
        store.update_offset(QUEUE, 5)
    assert events == []
    with LocalFileOffsetStore.for_group(chosen, "10.0.0.99@DEFAULT") as store:
        assert store.found.source == "new"
        store.update_offset(QUEUE, 1)
    assert [str(event.kind) for event in events] == ["store-orphaned"]
    assert str(tmp_path / "10.0.0.5@DEFAULT" / "g") in events[0].text
    with LocalFileOffsetStore.for_group(chosen, "10.0.0.99@DEFAULT"):
        assert len(events) == 1  # only a new store emits the event
    assert [orphan.parent.name for orphan in find_orphans(tmp_path, "10.0.0.99@DEFAULT", "g")] == ["10.0.0.5@DEFAULT"]
    assert find_orphans(tmp_path, "10.0.0.99@DEFAULT", "another-group") == []
    assert find_orphans(tmp_path / "nowhere", "x@y", "g") == []


def test_errors_pickle():
    error = pickle.loads(pickle.dumps(OffsetStoreLocked("store /x is in use by process 7")))
    assert str(error) == "store /x is in use by process 7"


def test_a_disk_without_hard_links_keeps_a_backup_too():
    disk = MemoryDisk()
    disk.has_links = False
    with LocalFileOffsetStore("/s", "checkpoint", disk=disk) as store:
        for offset in range(4):
            put(store, QUEUE, offset)
    files = disk.files()
    assert decode_checkpoint(files["/s/offsets.json"])[0] == {QUEUE: 3}
    assert decode_checkpoint(files["/s/offsets.json.bak"])[0] == {QUEUE: 2}


MANY = [MessageQueue(f"topic-{number // 64}", "broker-a", number % 64) for number in range(4096)]


@pytest.mark.slow("tens of thousands of queues")
def test_a_queue_needs_little_memory_beyond_its_key(tmp_path):
    def memory():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        store = open_store(tmp_path)
        before = memory()
        for number, queue in enumerate(MANY):
            store.update_offset(queue, 10**9 + number)
        store.persist_all()
        put(store, QUEUE, 1)
        assert (memory() - before) / len(MANY) <= 200  # bytes, including the offset itself
        store.close()
        del store
        before = memory()
        store = open_store(tmp_path)
        assert (memory() - before) / len(MANY) <= 300  # now the store holds its own keys
    finally:
        tracemalloc.stop()
    store.close()


@pytest.mark.parametrize("queues", [16, 4096])
def test_a_persist_writes_few_bytes_checkpoints_included(queues):
    """This covers all frames from one checkpoint to the next. The checkpoint interval does not end meanwhile."""
    disk, checkpoints, persists = MemoryDisk(), [], 0

    def check(count, operation, path):
        if operation == "replace" and path.endswith(".json"):
            checkpoints.append(count)

    with LocalFileOffsetStore("/s", "process", disk=WatchedDisk(disk, check), clock=lambda: 0.0) as store:
        update(store, MANY[:queues], 0)
        store.persist_all()
        before = disk.bytes_written
        checkpoints.clear()
        while not checkpoints:
            queue = MANY[persists % queues]
            persists += 1
            put(store, queue, 10**9 + persists)
        assert persists > 46_000
        assert (disk.bytes_written - before) / persists <= 32
