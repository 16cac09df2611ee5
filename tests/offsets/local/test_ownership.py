"""A store has one owner, across processes, kill -9 and fork."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.errors import OffsetStoreError, OffsetStoreLocked
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.directories import read_owner
from pyrocket_consumer.offsets.local.disk import Disk
from tests.offsets.local.driving import QUEUE, put, read_store, run_in_fork

ROOT = Path(__file__).parents[3]

OWNER = """
import sys
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
config = ConsumerConfig(group="g", name_server="127.0.0.1:9876", offset_store_dir=sys.argv[1])
store = LocalFileOffsetStore.for_group(config, "10.0.0.5@DEFAULT")
store.load()
queue = MessageQueue("orders", "broker-a", 0)
print(store.client_id, store.read_offset(queue), flush=True)
for line in sys.stdin:
    store.update_offset(queue, int(line))
    store.persist(queue)
    print("persisted", flush=True)
"""


@contextmanager
def owner(base):
    """Run a process that owns a slot's store and persists the offsets that it receives."""
    command, pipes = [sys.executable, "-c", OWNER, str(base)], dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            client_id, offset = process.stdout.readline().split()
            yield process, client_id, None if offset == "None" else int(offset)
        finally:
            process.kill()


def persist(process, offset):
    process.stdin.write(f"{offset}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "persisted\n"


@pytest.mark.live
@pytest.mark.hazard("H12")
def test_a_store_belongs_to_one_process_until_that_is_killed(tmp_path):
    """Each process of a host has its own store. The next process can take it after the owner ends, even by kill -9."""
    directory = tmp_path / "10.0.0.5@DEFAULT" / "g"
    with owner(tmp_path) as (first, first_id, nothing), owner(tmp_path) as (second, second_id, none):
        assert (first_id, second_id, nothing, none) == ("10.0.0.5@DEFAULT", "10.0.0.5@DEFAULT-1", None, None)
        for offset in range(5):
            persist(first, 100 + offset)
            persist(second, 200 + offset)
        store = LocalFileOffsetStore(directory)
        with pytest.raises(OffsetStoreLocked, match=rf"in use by process {first.pid} on host .*instance_name"):
            store.load()
        assert read_store(directory).offsets == {QUEUE: 104}  # other processes may read it
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        with owner(tmp_path) as (_, third_id, offset):
            assert (third_id, offset) == ("10.0.0.5@DEFAULT", 104)
            second.kill()
            second.wait(30)
            with owner(tmp_path) as (_, fourth_id, offset):
                assert (fourth_id, offset) == ("10.0.0.5@DEFAULT-1", 204)
    with store:
        assert store.read_offset(QUEUE) == 104
        assert read_owner(Disk(), str(directory)).pid == os.getpid()


def slot(base, instance="DEFAULT"):
    options = {"offset_store_dir": str(base), "instance_name": instance}
    config = ConsumerConfig(group="g", name_server="127.0.0.1:9876", **options)
    return LocalFileOffsetStore.for_group(config, f"10.0.0.5@{instance}")


@pytest.mark.parametrize("instance", ["DEFAULT", "mine"])
def test_a_process_can_wait_for_a_store_that_will_close_soon(tmp_path, instance):
    old = slot(tmp_path, instance)
    old.load()
    old.update_offset(QUEUE, 5)
    patient = slot(tmp_path, instance)
    old.closes_within(30)
    assert [patient.try_load(), patient.try_load()] == [False, False]
    old.update_offset(QUEUE, 9)
    old.close()
    assert patient.try_load() is True
    assert (patient.client_id, patient.read_offset(QUEUE)) == (old.client_id, 9)
    patient.close()


def test_a_process_does_not_wait_for_a_late_close(tmp_path):
    with slot(tmp_path) as old:
        second, third = slot(tmp_path), slot(tmp_path)
        assert (second.try_load(), second.client_id) == (True, "10.0.0.5@DEFAULT-1"), "no owner has announced its close"
        old.closes_within(0.05)
        time.sleep(0.1)
        assert (third.try_load(), third.client_id) == (True, "10.0.0.5@DEFAULT-2")
        second.close()
        third.close()


def test_a_process_that_does_not_wait_takes_the_next_slot(tmp_path):
    with slot(tmp_path) as old:
        old.closes_within(30)
        with slot(tmp_path) as impatient:
            assert impatient.client_id == "10.0.0.5@DEFAULT-1"
    with slot(tmp_path, "mine") as old, pytest.raises(OffsetStoreLocked, match="in use by this process"):
        old.closes_within(30)
        slot(tmp_path, "mine").load()


def test_an_unreadable_owner_counts_as_not_closing(tmp_path):
    with slot(tmp_path) as old:
        (old.directory / "offsets.owner").write_text('{"pid": 1, "host": "x", "since": 0, "closes_by": "soon"}')
        with slot(tmp_path) as other:
            assert other.client_id == "10.0.0.5@DEFAULT-1"


@pytest.mark.parametrize(
    "owner",
    [
        "[" * 100_000,
        '{"pid": 1e999, "host": "x", "since": 0}',
        '{"pid": 99999999999999999999, "host": "x", "since": 0}',
        '{"pid": 1, "host": "x", "since": 1e300}',
        '{"pid": 1, "host": "x", "since": NaN}',
        '{"pid": 1, "host": "x", "since": 0, "closes_by": Infinity}',
        json.dumps({"pid": 1, "host": "x" * 100_000 + "\n\x1b[2J", "since": 0}),
    ],
    ids=["deep", "no-pid", "long-pid", "far", "never", "always-closing", "long-host"],
)
def test_a_locked_store_is_in_use_whatever_the_owner_file_has(tmp_path, owner):
    with slot(tmp_path, "mine") as old:
        (old.directory / "offsets.owner").write_text(owner)
        with pytest.raises(OffsetStoreLocked, match="is in use by another process; stop it") as refused:
            slot(tmp_path, "mine").load()
        assert len(str(refused.value)) < 1000


def error_of(call):
    try:
        call()
    except OffsetStoreError as error:
        return str(error)
    return "no error"


@pytest.mark.live
def test_after_a_fork_the_store_stays_with_the_parent(tmp_path):
    with LocalFileOffsetStore(tmp_path) as store:
        put(store, QUEUE, 1)

        def child(report):
            store.update_offset(QUEUE, 99)
            for call in (lambda: store.persist(QUEUE), store.persist_all, store.load):
                report(error_of(call))
            store.close()  # harmless
            report(error_of(LocalFileOffsetStore(tmp_path).load))

        *refused, in_use = run_in_fork(child)[0]
        assert ["stays with its parent" in error for error in refused] == [True] * 3
        assert "in use by process" in in_use
        assert read_store(tmp_path).offsets == {QUEUE: 1}
        with pytest.raises(OffsetStoreLocked):  # the child's exit has not released it
            LocalFileOffsetStore(tmp_path).load()
        put(store, QUEUE, 2)
    assert read_store(tmp_path).offsets == {QUEUE: 2}


@pytest.mark.live
def test_a_store_made_after_the_fork_works(tmp_path):
    unopened = LocalFileOffsetStore(tmp_path)

    def child(report):
        with unopened as store:
            store.update_offset(QUEUE, 3)

    assert run_in_fork(child) == ([], 0)
    with unopened as store:
        assert store.read_offset(QUEUE) == 3
