"""Resets, and where groups are, when offsets are in a database: the same commands, with `--store`."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import create_engine, text

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.admin import Admin
from pyrocket_consumer.cli import main
from pyrocket_consumer.errors import ConfigError, OffsetStoreError
from pyrocket_consumer.offsets import DatabaseOffsets, LocalFileOffsetStore
from tests.consuming import Events
from tests.exactly_once.ledgers import once
from tests.exactly_once.test_exactly_once import BODIES, GROUP, TOPIC, billing, send, until_all


@pytest.fixture
def reset(embedded, ledger, monkeypatch, capsys):
    monkeypatch.setenv("LEDGER_URL", ledger.database.url)

    def run(*words, what="reset"):
        store = ["--store", "env:LEDGER_URL"]
        code = main(["offsets", what, GROUP, TOPIC, "-n", embedded.name_server, *store, "-o", "json", *words])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_group_that_runs_is_reset_though_it_has_nothing_to_do(embedded, ledger, reset):
    send(embedded)
    events = Events()
    with billing(embedded, ledger, on_event=events) as (consumer, _):
        until_all(embedded, ledger)
        ledger.execute("DELETE FROM ledger")
        code, told = reset("--to", "earliest", "--execute")
        assert code == 0
        assert told["plan"]["way"] == "store"
        assert {each["state"] for each in told["result"]["outcomes"]} == {"moved"}
        assert all(consumer.client_id in each["text"] for each in told["result"]["outcomes"])
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert len(events.of("queue-fenced")) == 4


def test_a_group_that_does_not_run_is_reset(embedded, ledger, reset):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    ledger.execute("DELETE FROM ledger")
    code, told = reset("--queue", "broker-a/0=10", "--queue", "broker-a/1=20", "--execute")
    assert code == 0
    assert [(each["current"], each["target"]) for each in told["plan"]["moves"]] == [(25, 10), (25, 20)]
    assert [each["text"] for each in told["result"]["outcomes"]] == ["in the database"] * 2
    assert "env:LEDGER_URL" in told["undo"][0] and "broker-a/0=25" in told["undo"][0]
    assert embedded.committed(GROUP, TOPIC)[0] == 10  # for whoever looks there
    with billing(embedded, ledger):
        embedded.wait_until(lambda: len(ledger.rows()) >= 20)
    assert len(ledger.rows()) == 20


@pytest.mark.databases("sqlite")
def test_a_plan_changes_nothing(embedded, ledger, reset):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    before = ledger.query("SELECT * FROM pyrocket_offsets")
    code, told = reset("--to", "earliest")
    assert code == 0 and told["result"] is None
    assert ledger.query("SELECT * FROM pyrocket_offsets") == before


@pytest.mark.databases("sqlite")
def test_show_and_lag_have_what_the_database_has(embedded, ledger, reset):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    ledger.execute("UPDATE pyrocket_offsets SET next_offset = 5")
    code, told = reset(what="show")
    assert code == 0
    assert [each["committed"] for each in told["queues"]] == [5] * 4 and told["lag"] == 80
    assert all(each["consumed_at"] for each in told["queues"])


@pytest.mark.databases("sqlite")
def test_queues_that_were_never_consumed_are_reset(embedded, ledger, reset):
    send(embedded)
    with Admin(name_server=embedded.name_server) as admin:
        admin.create_group(GROUP)
    assert reset("--queue", "broker-a/0=10", "--execute")[0] == 0
    with billing(embedded, ledger, consume_from="last"):
        embedded.wait_until(lambda: len(ledger.rows()) >= 15)
    assert len(ledger.rows()) == 15


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "one of SQLAlchemy's"),
        ("env:NOT_THERE", "no variable NOT_THERE"),
        ("oracle://secret:word@db/x", "needs a driver"),
        ("sqlite://", "in memory"),
        ("sqlite:////nowhere/at/all.db", "unable to open"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(embedded, ledger, capsys, url, said):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    assert main(["offsets", "show", GROUP, TOPIC, "-n", embedded.name_server, "--store", url]) != 0
    told = capsys.readouterr().err
    assert said in told and "word" not in told


@pytest.mark.databases("sqlite")
def test_a_store_that_is_none_is_refused(embedded, tmp_path):
    admin = Admin(name_server=embedded.name_server)
    with admin, pytest.raises(ConfigError, match="must be a DatabaseOffsets"):
        admin.plan_reset(GROUP, TOPIC, "earliest", store=LocalFileOffsetStore(tmp_path))


def test_the_tables_can_be_made_from_what_is_printed(database, capsys):
    kind = "mysql" if database.kind == "mariadb" else database.kind
    assert main(["offsets", "ddl", "--dialect", kind, "--inbox", "--table", "billing_offsets"]) == 0
    engine = create_engine(database.url)
    with engine.begin() as connection:
        for statement in capsys.readouterr().out.split(";\n"):
            if statement.strip():
                connection.execute(text(statement))
    offsets = DatabaseOffsets(engine, "billing_offsets", inbox_days=1)
    offsets.load()
    offsets.close()
    with pytest.raises(OffsetStoreError):
        DatabaseOffsets(engine).load()
    engine.dispose()


@pytest.mark.databases("sqlite")
def test_making_the_tables_twice_is_no_error(database):
    engine = create_engine(database.url)
    for _ in range(2):
        DatabaseOffsets(engine, inbox_days=1).create_tables()
    engine.dispose()


@pytest.mark.databases("sqlite")
def test_a_reset_of_the_broker_reaches_members(embedded, ledger):
    """As a tool of Java's makes it: the broker tells members, and the row moves."""
    send(embedded)
    with billing(embedded, ledger) as (consumer, _):
        until_all(embedded, ledger)
        ledger.execute("DELETE FROM ledger")
        with Admin(name_server=embedded.name_server) as admin:
            result = admin.plan_reset(GROUP, TOPIC, "earliest").execute()
        assert result.verified
        until_all(embedded, ledger)
        assert {each.epoch for each in ledger.offsets.offsets(GROUP, TOPIC)} == {2}
        queue = MessageQueue(TOPIC, "broker-a", 0)
        assert consumer.progress()[queue].origin == "reset"
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("sqlite")
def test_a_reset_that_was_recorded_is_followed_once_by_whoever_claims(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    ledger.execute("DELETE FROM ledger")
    with Admin(name_server=embedded.name_server) as admin:
        admin.plan_reset(GROUP, TOPIC, {MessageQueue(TOPIC, "broker-a", 1): 5}, model="broadcasting").execute()
    for _ in range(2):
        with billing(embedded, ledger):
            embedded.wait_until(lambda: len(ledger.rows()) >= 20)
    assert [(queue, offset) for _, queue, offset in ledger.rows()] == [(1, offset) for offset in range(5, 25)]


@pytest.mark.databases("sqlite")
def test_a_reset_that_was_recorded_before_a_group_began_is_never_followed(embedded, ledger):
    send(embedded)
    with Admin(name_server=embedded.name_server) as admin:
        admin.create_group(GROUP)
        with billing(embedded, ledger, orderly=True):
            until_all(embedded, ledger)
        ledger.execute("DELETE FROM pyrocket_offsets")
        admin.plan_reset(GROUP, TOPIC, "earliest", model="broadcasting").execute()
    ledger.execute("DELETE FROM ledger")
    for _ in range(2):
        with billing(embedded, ledger, consume_from="last") as (consumer, _):
            embedded.wait_until(lambda one=consumer: len(one.progress()) == 5)
    assert ledger.rows() == []
