"""Fixtures for effects that happen once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.databases import Database
from tests.exactly_once.ledgers import Ledger, ledger_in


@pytest.fixture
def embedded() -> Iterator[Any]:
    with EmbeddedCluster() as cluster:
        yield cluster


@pytest.fixture
def ledger(database: Database) -> Iterator[Ledger]:
    with ledger_in(database) as made:
        yield made
