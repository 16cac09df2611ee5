"""Addresses with passwords, connections that are shared, rows that somebody has edited, tables that go away."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import QueuePool, StaticPool

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.admin import Admin
from pyrocket_consumer.cli import main
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.exactly_once.test_exactly_once import BODIES, GROUP, TOPIC, send

# --- secrets

IN_QUERY = "postgresql+psycopg://127.0.0.1:1/db?user=app&password=swordfish&sslpassword=swordfish"


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://app:swordfish@db/app",
        b"postgresql://app:swordfish@db/app",
        make_url(IN_QUERY),
        {"PASSWORD": "swordfish"},
        sessionmaker(bind=create_async_engine(IN_QUERY)),
    ],
)
@pytest.mark.parametrize("way", ["engine", "offset_store", "store"])
def test_what_is_no_engine_is_not_shown_with_its_password(embedded, given, way):
    with pytest.raises(ConfigError) as caught:
        if way == "engine":
            DatabaseOffsets(given)
        elif way == "offset_store":
            PushConsumer(GROUP, name_server=embedded.name_server, offset_store=given)
        else:
            with Admin(name_server=embedded.name_server) as admin:
                admin.offsets(GROUP, TOPIC, store=given)
    assert "swordfish" not in repr(caught.value)
    assert any(words in str(caught.value) for words in ("must be", "make it with", "see OffsetStore"))


def test_a_password_in_the_query_is_not_shown(embedded, capsys):
    offsets = DatabaseOffsets.at(IN_QUERY)
    assert offsets.address == "postgresql+psycopg://127.0.0.1:1/db?password=***&sslpassword=***&user=app"
    assert "swordfish" not in repr(offsets)
    with pytest.raises(ConfigError, match="needs a driver") as caught:
        DatabaseOffsets.at("postgresql+nosuch://app:swordfish@db/app?password=swordfish")
    assert "swordfish" not in str(caught.value)
    send(embedded, BODIES[:4])
    with Admin(name_server=embedded.name_server) as admin:
        admin.create_group(GROUP)
    assert main(["offsets", "lag", GROUP, "-n", embedded.name_server, "--store", IN_QUERY]) == 1
    told = capsys.readouterr()
    assert "***" in told.err and "swordfish" not in told.err + told.out


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://app:sword#fish@db:port/app", "cannot be read"),
        ("postgresql+psycopg://app:swordfish@[::1/app", "cannot be read"),
        ("sqlite:////tmp/none.db?timeout=long&password=swordfish", "its driver does not take"),
        ("", "cannot be read"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_and_not_shown(url, said):
    with pytest.raises(ConfigError, match=said) as caught:
        DatabaseOffsets.at(url)
    assert "sword" not in str(caught.value).replace("password", "") and caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("given", "said"), [("", "names no database"), ("env:", "names no database"), ("env:NONE_", "no variable NONE_")]
)
def test_a_store_that_is_empty_is_named(embedded, capsys, given, said):
    send(embedded, [])
    assert main(["offsets", "lag", GROUP, "-n", embedded.name_server, "--store", given]) == 2
    assert said in capsys.readouterr().err


# --- one connection for all


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///file::memory:?uri=true", "sqlite:///file:x?mode=memory&cache=shared&uri=true"]
)
def test_a_database_in_memory_is_refused_whatever_its_pool(url):
    for engine in (
        create_engine(url, poolclass=QueuePool),
        create_engine(url, poolclass=StaticPool),
        create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"), poolclass=StaticPool),
    ):
        with pytest.raises(ConfigError, match="in memory"):
            DatabaseOffsets(engine)


def test_one_connection_for_all_threads_is_refused(tmp_path):
    """They would commit each other's halves."""
    with pytest.raises(ConfigError, match="StaticPool"):
        DatabaseOffsets(create_engine(f"sqlite:///{tmp_path}/app.db", poolclass=StaticPool))
