"""A store that a changed client id left behind can be moved without losing offsets."""

from __future__ import annotations

import pytest

from pyrocket_consumer.errors import OffsetStoreError, OffsetStoreLocked
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.adopt import adopt_store
from pyrocket_consumer.offsets.local.directories import find_orphans, read_store
from tests.offsets.local.driving import ORDERS, leave_offsets

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
