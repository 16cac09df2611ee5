"""An admin, and a directory for offsets."""

from __future__ import annotations

import pytest

from pyrocket_consumer import Admin
from tests.consuming import LONG_TIMEOUT_S


@pytest.fixture
def admin(cluster):
    with Admin(name_server=cluster.name_server, call_timeout_s=LONG_TIMEOUT_S) as admin:
        yield admin


@pytest.fixture
def stores(tmp_path):
    """Return options of a broadcasting member with its offsets in the directory of this test."""
    return {"message_model": "broadcasting", "offset_store_dir": str(tmp_path)}
