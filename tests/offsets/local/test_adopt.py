"""A store that a changed client id left behind can be moved without losing offsets."""

from __future__ import annotations

import os

import pytest

from pyrocket_consumer.errors import ConfigError, OffsetStoreError, OffsetStoreLocked
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.directories import find_orphans
from pyrocket_consumer.offsets.local.store import adopt_store
from tests.for_each import for_each
from tests.offsets.local.driving import ORDERS, leave_offsets, read_store, without_privileges

QUEUES = ORDERS[:3]


def fill(directory, offset):
    leave_offsets(directory, QUEUES[:2], offset)


@pytest.mark.hazard("H11")
def test_a_store_left_behind_is_adopted(tmp_path):
    old, new = tmp_path / "10.0.0.5@DEFAULT" / "g", tmp_path / "10.0.0.9@DEFAULT" / "g"
    fill(old, 70)
    kept = adopt_store(old, new)
    assert read_store(new).offsets == dict.fromkeys(QUEUES[:2], 70)
    assert read_store(kept).offsets == dict.fromkeys(QUEUES[:2], 70)
    assert not old.exists()
    assert find_orphans(tmp_path, "10.0.0.9@DEFAULT", "g") == []


def test_existing_offsets_are_replaced_only_on_request(tmp_path):
    fill(tmp_path / "old", 70)
    fill(tmp_path / "new", 5)
    leave_offsets(tmp_path / "new", QUEUES[2:], 6)
    with pytest.raises(OffsetStoreError, match="holds offsets of 3 queues already"):
        adopt_store(tmp_path / "old", tmp_path / "new")
    assert set(read_store(tmp_path / "new").offsets.values()) == {5, 6}
    adopt_store(tmp_path / "old", tmp_path / "new", replace=True)
    assert read_store(tmp_path / "new").offsets == {QUEUES[0]: 70, QUEUES[1]: 70, QUEUES[2]: 6}


def test_a_store_in_use_is_not_adopted(tmp_path):
    fill(tmp_path / "old", 70)
    for used in ("old", "new"):
        with LocalFileOffsetStore(tmp_path / used), pytest.raises(OffsetStoreLocked):
            adopt_store(tmp_path / "old", tmp_path / "new")
    assert read_store(tmp_path / "old").offsets == dict.fromkeys(QUEUES[:2], 70)


def test_a_directory_without_a_store_is_not_adopted(tmp_path):
    fill(tmp_path / "store", 1)
    (tmp_path / "empty").mkdir()
    for source in ("nowhere", "empty", "store"):
        with pytest.raises(OffsetStoreError):
            adopt_store(tmp_path / source, tmp_path / "store")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("target", ["x", "10.0.0.9@DEFAULT/other", "10.0.0.9@DEFAULT", "clients/g"])
def test_a_store_is_adopted_only_within_its_group(tmp_path, target):
    old = tmp_path / "10.0.0.5@DEFAULT" / "g"
    fill(old, 70)
    with pytest.raises(OffsetStoreError, match="no consumer of group 'g' looks for its offsets in .*CLIENT-ID/g"):
        adopt_store(old, tmp_path / target)
    assert not (tmp_path / target).exists()
    assert read_store(old).offsets == dict.fromkeys(QUEUES[:2], 70)


@for_each("directory", ["", None, 7, b"/tmp/x", "x\0", "x\ud800"])
def test_a_wrong_path_is_refused(tmp_path, directory):
    fill(tmp_path / "old", 70)
    with pytest.raises(ConfigError, match="orphan=.* is not allowed; name the directory"):
        adopt_store(directory, tmp_path / "new")
    with pytest.raises(ConfigError, match="directory=.* is not allowed; name the directory"):
        adopt_store(tmp_path / "old", directory)


def test_links_that_lead_nowhere_are_no_stores(tmp_path):
    fill(tmp_path / "old", 70)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OffsetStoreError, match="loop/g"):
        adopt_store(tmp_path / "loop" / "g", tmp_path / "new")
    with pytest.raises(OffsetStoreError, match="loop/g"):
        adopt_store(tmp_path / "old", tmp_path / "loop" / "g")
    assert read_store(tmp_path / "old").offsets == dict.fromkeys(QUEUES[:2], 70)


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX")
def test_a_store_that_may_not_be_read_is_not_adopted(shared):
    fill(shared / "his" / "g", 70)
    (shared / "his").chmod(0)
    with without_privileges(), pytest.raises(OffsetStoreError, match="his/g cannot be opened: Permission denied"):
        adopt_store(shared / "his" / "g", shared / "new")
    (shared / "his").chmod(0o700)
    assert not (shared / "new").exists()
