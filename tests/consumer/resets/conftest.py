"""A cluster with two topics: T has two queues, S a single one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyrocket_consumer import Admin
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import LONG_TIMEOUT_S


@pytest.fixture
def embedded(embedded: EmbeddedCluster) -> EmbeddedCluster:
    embedded.create_topic("T", queues=2)
    embedded.create_topic("S", queues=1)
    return embedded


@pytest.fixture
def admin(embedded: EmbeddedCluster) -> Iterator[Admin]:
    with Admin(name_server=embedded.name_server, call_timeout_s=LONG_TIMEOUT_S) as admin:
        yield admin


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, Any]:
    """Options of a broadcasting member whose offsets are below this test's directory."""
    return {"message_model": "broadcasting", "offset_store_dir": tmp_path}
