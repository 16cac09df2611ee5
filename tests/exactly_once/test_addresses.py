"""How a store of offsets is created: addresses with passwords, engines, options. Those that cannot work are refused."""

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import QueuePool, StaticPool

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.admin import Admin
from pyrocket_consumer.cli import main
from pyrocket_consumer.errors import ConfigError, OffsetStoreError
from pyrocket_consumer.offsets import DatabaseOffsets, LocalFileOffsetStore
from pyrocket_consumer.offsets.database.store import ddl
from tests.exactly_once.booking import consumed, send
from tests.exactly_once.ledgers import BODIES, GROUP, TOPIC, every_database
from tests.for_each import for_each

pytestmark = pytest.mark.databases("sqlite")

# --- secrets

IN_QUERY = "postgresql+psycopg://127.0.0.1:1/db?user=app&password=swordfish&sslpassword=swordfish"


@for_each(
    "given",
    [
        "postgresql://app:swordfish@db/app",
        b"postgresql://app:swordfish@db/app",
        make_url(IN_QUERY),
        {"PASSWORD": "swordfish"},
        sessionmaker(bind=create_async_engine(IN_QUERY)),
    ],
)
@for_each("way", ["engine", "offset_store", "store"])
def test_an_object_that_is_no_engine_is_shown_without_password(embedded, given, way):
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
    output = capsys.readouterr()
    assert "***" in output.err and "swordfish" not in output.err + output.out


def test_secrets_are_not_shown():
    shown = repr(DatabaseOffsets(create_engine("postgresql+psycopg://app:swordfish@db/app")))
    assert "swordfish" not in shown and "***@db/app" in shown
    url = "postgresql+psycopg://app@127.0.0.1:1/app?options=-cx%3Dswordfish&credential=swordfish&sslmode=disable"
    shown = repr(DatabaseOffsets.at(url))  # any option that may be a secret is hidden
    assert "swordfish" not in shown and "sslmode=disable" in shown


@for_each("make", [DatabaseOffsets.at, lambda url: DatabaseOffsets(create_engine(url))])
def test_a_password_with_an_at_in_it_is_not_shown(make):
    with pytest.raises(ConfigError, match="written %40") as caught:
        make("postgresql+psycopg://app:p@fishy@127.0.0.1:1/app")
    assert "fishy" not in str(caught.value)


# --- addresses


@for_each(
    "url, expected",
    [
        ("postgresql://app:sword#fish@db:port/app", "cannot be read"),
        ("postgresql+psycopg://app:swordfish@[::1/app", "cannot be read"),
        ("sqlite:////tmp/none.db?timeout=long&password=swordfish", "its driver does not accept"),
        ("", "cannot be read"),
        ("postgres://app@db/app", "it must be SQLite, PostgreSQL"),
        ("mssql://app@db/app", "it must be SQLite, PostgreSQL"),
        ("sqlite:////tmp/there/is/none.db", "there is no such file"),
    ],
)
def test_an_address_that_cannot_be_used_is_not_shown(url, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        DatabaseOffsets.at(url)
    assert "sword" not in str(caught.value).replace("password", "") and caught.value.__cause__ is None


@for_each(
    "url, expected",
    [
        ("nonsense", "one of SQLAlchemy's"),
        ("env:NOT_THERE", "there is no variable NOT_THERE in the environment; set it"),
        ("env:EMPTY", "the variable EMPTY is empty; set it to the database's address"),
        ("env:NO_TEXT", "is not UTF-8"),
        ("sqlite:///\udcff.db", "is not UTF-8"),
        ("env:", "names no database"),
        ("", "names no database"),
        ("oracle://secret:word@db/x", "is a database of oracle"),
        ("postgresql+nosuch://secret:word@db/x", "needs a driver"),
        ("sqlite://", "in memory"),
        ("sqlite:////nowhere/at/all.db", "there is no such file"),
    ],
)
@for_each("command", [("show", GROUP, TOPIC), ("lag", GROUP)])
def test_an_address_that_a_tool_cannot_use_is_named(embedded, monkeypatch, capsys, url, expected, command):
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("NO_TEXT", "sqlite:////\udcff.db")
    send(embedded, [])
    embedded.broker("broker-a").create_group(GROUP)
    assert main(["offsets", *command, "-n", embedded.name_server, "--store", url]) == 2
    output = capsys.readouterr().err
    assert expected in output and "word" not in output and len(output.splitlines()) == 1


def test_an_asynchronous_address_works(embedded, ledger, monkeypatch, reset):
    assert DatabaseOffsets.at(ledger.database.async_url).offsets(GROUP) == []
    consumed(embedded, ledger)
    monkeypatch.setenv("LEDGER_URL", ledger.database.async_url)
    code, output = reset(what="show")
    assert (code, [each["committed"] for each in output["queues"]]) == (0, [25] * 4)
    assert reset("--to", "earliest", "--execute")[0] == 0
    assert [ledger.offset(queue_id=number) for number in range(4)] == [0] * 4


@every_database
def test_the_tables_can_be_made_from_what_is_printed(database, capsys):
    kind, table = {"mariadb": "mysql"}.get(database.kind, database.kind), "t" * 54
    assert main(["offsets", "ddl", "--dialect", kind, "--inbox", "--table", table]) == 0
    statements = [each for each in capsys.readouterr().out.split(";\n") if each.strip()]
    assert len(statements) == len(ddl(kind, table, with_inbox=True))
    engine = database.engine()
    for _ in range(2):  # the second call has nothing to do
        with engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))
    offsets = DatabaseOffsets(engine, table, inbox_days=1)
    offsets.load()
    offsets.close()
    with pytest.raises(OffsetStoreError):
        DatabaseOffsets(engine).load()
    engine.dispose()


# --- engines and options


@for_each(
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


@for_each(
    "options, expected",
    [
        ({"orderly": False}, "needs orderly=True"),
        ({"auto_commit": False}, "needs orderly=True, with auto_commit"),
        ({"message_model": "broadcasting"}, "clustering group only"),
    ],
)
def test_a_consumer_that_cannot_be_exact_is_refused(ledger, options, expected):
    with pytest.raises(ConfigError, match=expected):
        PushConsumer(GROUP, name_server="x:1", offset_store=ledger.offsets, **{"orderly": True, **options})


async def book_later(messages, connection):
    pass


WRONG = {
    "table='a b' is not allowed": lambda ledger, url: DatabaseOffsets(ledger.engine, table="a b"),
    "table=3": lambda ledger, url: DatabaseOffsets(ledger.engine, table=3),
    "up to 54 characters": lambda ledger, url: DatabaseOffsets(ledger.engine, "t" * 55),
    "inbox_days=0": lambda ledger, url: DatabaseOffsets(ledger.engine, inbox_days=0),
    "on_divergence='go'": lambda ledger, url: DatabaseOffsets(ledger.engine, on_divergence="go"),
    "allow_foreign_members=1": lambda ledger, url: DatabaseOffsets(ledger.engine, allow_foreign_members=1),
    "must be a SQLAlchemy Engine": lambda ledger, url: DatabaseOffsets(url),
    "pip install PyMySQL": lambda ledger, url: DatabaseOffsets.at("mysql://app@db/app"),
    "in memory": lambda ledger, url: DatabaseOffsets(create_engine("sqlite://")),
    # its threads would commit parts of each other's transactions
    "StaticPool": lambda ledger, url: DatabaseOffsets(create_engine(url, poolclass=StaticPool)),
    "create_async_engine": lambda ledger, url: DatabaseOffsets(create_engine(url.replace(":", "+aiosqlite:", 1))),
    r"sessionmaker\(engine\)": lambda ledger, url: DatabaseOffsets(sessionmaker()),
    "oracle": lambda ledger, url: ddl("oracle"),
    r"cannot be called with \(messages, connection\)": lambda ledger, url: ledger.offsets.exactly_once(lambda each: 1),
    "must be a function": lambda ledger, url: ledger.offsets.exactly_once("book"),
    "async def": lambda ledger, url: ledger.offsets.exactly_once(book_later),
}


@for_each("expected, make", WRONG.items(), WRONG)
def test_bad_arguments_are_named(ledger, tmp_path, expected, make):
    with pytest.raises(ConfigError, match=expected):
        make(ledger, f"sqlite:///{tmp_path}/x.db")


def test_an_object_that_is_no_store_is_refused(embedded, tmp_path):
    admin = Admin(name_server=embedded.name_server)
    with admin, pytest.raises(ConfigError, match="must be a DatabaseOffsets"):
        admin.plan_reset(GROUP, TOPIC, "earliest", store=LocalFileOffsetStore(tmp_path))
