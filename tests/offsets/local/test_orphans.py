"""A new store looks for stores that other client ids have left, among those of other users and processes."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.disk import Disk
from tests.offsets.local.driving import QUEUE, leave_offsets, put, without_privileges


def store_of(base, client_id, **options):
    config = ConsumerConfig(group="g", name_server="127.0.0.1:9876", offset_store_dir=base, **options)
    return LocalFileOffsetStore.for_group(config, client_id)


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX")
@pytest.mark.parametrize("unreadable", ["10.0.0.7@DEFAULT", "10.0.0.7@DEFAULT/g"])
def test_a_store_that_may_not_be_read_is_ignored(shared, unreadable):
    """Another user of the host keeps its stores in the same directory."""
    events = []
    for client_id in ("10.0.0.5@DEFAULT", "10.0.0.7@DEFAULT"):
        with without_privileges():
            leave_offsets(shared / client_id / "g", [QUEUE], 5)
    (shared / unreadable).chmod(0)
    with without_privileges(), store_of(shared, "10.0.0.9@mine", instance_name="mine", on_event=events.append) as store:
        assert store.found.source == "new"
    (shared / unreadable).chmod(0o700)
    (found,) = events
    assert (found.kind, found.facts["orphans"]) == ("store-orphaned", 1)
    assert "10.0.0.5@DEFAULT" in found.text


def test_a_store_in_use_is_not_left_behind(tmp_path):
    """Members with instance names of their own share a directory. Only stores without owner are left."""
    events = []
    living, new, later = (
        store_of(tmp_path, f"10.0.0.5@{name}", instance_name=name, on_event=events.append)
        for name in ("living", "new", "later")
    )
    with living:
        put(living, QUEUE, 5)
        with new:
            assert new.found.source == "new"
    assert events == []
    with later:
        (found,) = events
        assert (found.kind, found.facts["orphans"]) == ("store-orphaned", 1)
        assert f"{living.directory}" in found.text


def test_a_search_changes_nothing_in_the_stores_it_finds(tmp_path):
    """A store of a Java client has no lock file."""
    events, javas = [], tmp_path / "10.0.0.5@DEFAULT" / "g"
    leave_offsets(javas, [QUEUE], 5)
    (javas / "offsets.lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in [javas, *javas.iterdir()]}
    with store_of(tmp_path, "10.0.0.9@mine", instance_name="mine", on_event=events.append):
        assert [event.kind for event in events] == ["store-orphaned"]
    assert {path: path.stat().st_mtime_ns for path in [javas, *javas.iterdir()]} == before


@pytest.mark.virtual
def test_a_search_does_not_keep_an_owner_out(tmp_path):
    """It locks each store that it finds for an instant, perhaps just when the store's owner starts again."""
    directory = tmp_path / "10.0.0.5@mine" / "g"
    leave_offsets(directory, [QUEUE], 5)
    searching = Disk().lock(str(directory / "offsets.lock"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (time.sleep(0.005), searching.release()))
        with store_of(tmp_path, "10.0.0.5@mine", instance_name="mine") as store:
            assert store.read_offset(QUEUE) == 5
