"""An embedded cluster, and an admin of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pyrocket_consumer.admin import Admin
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import LONG_TIMEOUT_S


@contextmanager
def administered(**options: Any) -> Iterator[tuple[EmbeddedCluster, Admin]]:
    """Run a cluster with these options, and an admin of it."""
    with EmbeddedCluster(**options) as cluster, admin_of(cluster) as admin:
        yield cluster, admin


def admin_of(cluster: Any, **options: Any) -> Admin:
    return Admin(
        name_server=cluster.name_server, call_timeout_s=LONG_TIMEOUT_S, connect_timeout_s=LONG_TIMEOUT_S, **options
    )


@pytest.fixture
def admin(embedded: EmbeddedCluster) -> Iterator[Admin]:
    with admin_of(embedded) as admin:
        yield admin


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, Any]:
    """Return options of a broadcasting member with its offsets in the directory of this test."""
    return {"message_model": "broadcasting", "offset_store_dir": tmp_path}
