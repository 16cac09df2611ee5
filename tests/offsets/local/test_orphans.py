"""A new store looks for stores that other client ids have left, among those of other users and processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.offsets import LocalFileOffsetStore
from tests.offsets.local.driving import QUEUE, leave_offsets

ANOTHER_USER = 12345


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read every directory, so be another user meanwhile."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(ANOTHER_USER)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a directory that every user may write to, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


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
