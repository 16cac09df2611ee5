"""Sessions, asyncio and Django: each has its effects once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from uuid import uuid4

import pytest
from sqlalchemy import Integer, String, make_url
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from pyrocket_consumer import AsyncPushConsumer
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.consuming import QUICK, consuming
from tests.exactly_once.booking import billing, booked_once, continues_after, dead, replaced, send, until_all
from tests.exactly_once.ledgers import BODIES, EXACTLY_ONCE, GROUP, INSERT, TOPIC, once, row


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    body: Mapped[str] = mapped_column(String(64))


def test_a_session_is_flushed_and_committed(embedded, ledger):
    Base.metadata.create_all(ledger.engine)
    offsets, left = DatabaseOffsets(sessionmaker(ledger.engine)), [ValueError("not now")]

    def book(messages, session):
        session.add_all([Entry(body=message.body.decode()) for message in messages])
        if left:
            raise left.pop()

    send(embedded)
    with billing(embedded, ledger, book, offsets):
        embedded.wait_until(lambda: ledger.query("SELECT COUNT(*) FROM entries")[0][0] >= 100)
    assert sorted(int(body) for (body,) in ledger.query("SELECT body FROM entries")) == list(range(100))


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
@pytest.mark.databases("sqlite", "postgresql")
def test_a_listener_must_not_end_its_session(embedded, ledger, events, end):
    offsets = DatabaseOffsets(sessionmaker(ledger.engine))
    ended = []

    def book(messages, session):
        session.execute(INSERT, [row(message) for message in messages])
        if not ended:
            ended.append(end)
            getattr(session, end)()

    booked_once(embedded, ledger, book, offsets=offsets, on_event=events)
    assert len(events.of("listener-failed")) == 1


@pytest.mark.live
@pytest.mark.databases("sqlite", "postgresql")
@pytest.mark.parametrize("kind", ["connection", "session"])
@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_an_asynchronous_engine(embedded, ledger, async_engine, events, kind, face):
    offsets = DatabaseOffsets(async_engine if kind == "connection" else async_sessionmaker(async_engine))
    offsets.create_tables()
    trouble = ["raise", "commit"]

    async def book(messages, handle):
        await handle.execute(INSERT, [row(message) for message in messages])
        await asyncio.sleep(0)
        match trouble.pop() if trouble else "":
            case "commit":
                await handle.commit()
            case "raise":
                raise ValueError("not now")

    send(embedded)
    options = {**EXACTLY_ONCE, "offset_store": offsets, "on_event": events}
    if face == "blocking":
        with consuming(embedded, TOPIC, GROUP, offsets.exactly_once(book), **options):
            until_all(embedded, ledger)
    else:

        async def consume():
            consumer = AsyncPushConsumer(GROUP, name_server=embedded.name_server, **{**QUICK, **options})
            await consumer.subscribe(TOPIC, offsets.exactly_once(book))
            async with consumer:
                await asyncio.to_thread(until_all, embedded, ledger)
            await async_engine.dispose()

        asyncio.run(consume())
    assert ledger.bodies() == once(BODIES)
    assert len(events.of("listener-failed")) == 2


@pytest.mark.live
@pytest.mark.databases("sqlite", "postgresql")
def test_an_asynchronous_transaction_of_the_listener(embedded, ledger, async_engine):
    offsets = DatabaseOffsets(async_engine)

    async def book(messages):
        async with async_engine.begin() as connection:
            await connection.execute(INSERT, [row(message) for message in messages])
            await offsets.advance(connection, messages)

    booked_once(embedded, ledger, book, offsets=offsets, own=True)


@pytest.mark.live
@pytest.mark.databases("sqlite", "postgresql")
def test_a_listener_that_is_cancelled_is_rolled_back(embedded, ledger, async_engine):
    offsets = DatabaseOffsets(async_engine)
    cancelled = []

    async def book(messages, connection):
        await connection.execute(INSERT, [row(message) for message in messages])
        if len(cancelled) < 3:
            cancelled.append(messages)
            asyncio.current_task().cancel()
        await asyncio.sleep(0.001)

    booked_once(embedded, ledger, book, offsets=offsets)


# --- Django


@pytest.fixture
def alias(ledger) -> Iterator[str]:
    """The ledger's database as a database of Django."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
        django.setup()
    url, name = make_url(ledger.database.url), f"db{uuid4().hex}"
    engine = {"sqlite": "sqlite3"}.get(ledger.database.kind, ledger.database.kind)
    settings = {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": url.database,
        "HOST": url.host or "",
        "PORT": str(url.port or ""),
        "USER": url.username or "",
        "PASSWORD": url.password or "",
    }
    connections.settings[name] = connections.configure_settings({**connections.settings, name: settings})[name]
    yield name
    connections[name].close()
    del connections.settings[name]


def book_in_django(alias, messages):
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.executemany("INSERT INTO ledger VALUES (%s, %s, %s)", [[*row(each).values()] for each in messages])


@pytest.mark.slow("imports Django, which a new environment has to compile first")
@pytest.mark.databases("sqlite", "postgresql")
def test_django(embedded, ledger, events, alias):
    from django.db import connections, transaction

    offsets = DatabaseOffsets.django(alias)
    trouble = ["raise", "commit", "set_rollback"]

    def book(messages):
        book_in_django(alias, messages)
        match trouble.pop() if trouble else "":
            case "raise":
                raise ValueError("not now")
            case "commit":
                connections[alias].commit()
            case "set_rollback":
                transaction.set_rollback(True, using=alias)

    booked_once(embedded, ledger, book, offsets=offsets, on_event=events)
    assert len(events.of("listener-failed")) == 3


@pytest.mark.databases("postgresql")
def test_django_continues_after_its_database_was_down(embedded, ledger, events, alias):
    book = partial(book_in_django, alias)
    continues_after(lambda: dead(ledger), embedded, ledger, events, book, DatabaseOffsets.django(alias))


@pytest.mark.databases("sqlite")
def test_django_continues_after_its_file_was_replaced(embedded, ledger, events, alias):
    book, offsets = partial(book_in_django, alias), DatabaseOffsets.django(alias)
    continues_after(lambda: replaced(ledger), embedded, ledger, events, book, offsets, consume_threads=1)


@pytest.mark.databases("sqlite")
def test_django_transactions_of_the_listener(embedded, ledger, alias):
    from django.db import connections, transaction

    offsets = DatabaseOffsets.django(alias)

    def book(messages):
        with transaction.atomic(using=alias):
            book_in_django(alias, messages)
            offsets.advance(None, messages)
        connections[alias].close()  # a thread of the consumer opened it, and ends before the test

    booked_once(embedded, ledger, book, offsets=offsets, own=True)


@pytest.mark.databases("sqlite")
def test_an_alias_that_does_not_exist_is_named(alias):
    with pytest.raises(ConfigError, match="alias='nowhere'"):
        DatabaseOffsets.django("nowhere")
