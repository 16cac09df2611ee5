"""Fixtures for effects that happen once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pyrocket_consumer.admin import Admin
from pyrocket_consumer.cli import main
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import Events
from tests.databases import Database
from tests.exactly_once.ledgers import GROUP, TOPIC, Ledger, ledger_in


@pytest.fixture
def ledger(database: Database) -> Iterator[Ledger]:
    with ledger_in(database) as made:
        yield made


@pytest.fixture
def events() -> Events:
    """Return a recorder for `on_event`."""
    return Events()


@pytest.fixture
def reset(embedded: EmbeddedCluster, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """`reset("--to", "earliest")` runs a command for the group, and returns its exit code and output."""
    monkeypatch.setenv("LEDGER_URL", ledger.database.url)

    def run(*words: str, what: str = "reset") -> tuple[int, Any]:
        store = ["--store", "env:LEDGER_URL"]
        code = main(["offsets", what, GROUP, TOPIC, "-n", embedded.name_server, *store, "-o", "json", *words])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def admin(embedded: EmbeddedCluster) -> Iterator[Admin]:
    with Admin(name_server=embedded.name_server) as admin:
        yield admin


@pytest.fixture
def async_engine(ledger: Ledger) -> Iterator[AsyncEngine]:
    """The ledger's database with an asynchronous driver."""
    engine = create_async_engine(ledger.database.async_url)
    yield engine
    asyncio.run(engine.dispose())
