"""A failing database: an error in the store's statements fails no message, and delays only the affected queues."""

import asyncio
import multiprocessing
import os
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from pyrocket_consumer import MessageQueue, PushConsumer
from pyrocket_consumer.errors import DatabaseError
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.testing import Gate, RequestCode
from tests.consuming import WAIT_S, consuming
from tests.exactly_once.booking import (
    billing,
    booked_once,
    consumed,
    continues_after,
    dead,
    refused,
    replaced,
    send,
    until_all,
    until_at,
)
from tests.exactly_once.ledgers import BODIES, EXACTLY_ONCE, GROUP, INSERT, TOPIC, every_database, once, row
from tests.resets import held

SOME, MORE = BODIES[:10], BODIES[10:20]
servers = pytest.mark.databases("postgresql", "mariadb")


@contextmanager
def locked(ledger, *queues):
    """Another session locks the rows of these queues."""
    where = "consumer_group = :g AND topic = :t AND broker_name = 'broker-a' AND queue_id = :q"
    statement = text(f"SELECT * FROM pyrocket_offsets WHERE {where} FOR UPDATE")
    with ledger.engine.connect() as connection, connection.begin():
        for queue in queues:
            connection.execute(statement, {"g": GROUP, "t": TOPIC, "q": queue}).all()
        yield


@contextmanager
def renamed(ledger, table="pyrocket_offsets"):
    """The table is missing, as during a migration."""
    ledger.execute(f"ALTER TABLE {table} RENAME TO away")
    try:
        yield
    finally:
        ledger.execute(f"ALTER TABLE away RENAME TO {table}")


# --- statements of the store


@pytest.mark.databases("mariadb")
def test_a_row_that_is_locked_for_long_is_no_failure(embedded, ledger, events):
    session_options = {"init_command": "SET SESSION innodb_lock_wait_timeout = 1"}
    offsets = DatabaseOffsets(engine := create_engine(ledger.database.url, connect_args=session_options))
    continues_after(lambda: locked(ledger, 0), embedded, ledger, events, offsets=offsets)
    engine.dispose()


@every_database
def test_a_table_that_is_missing_for_a_while_fails_nothing(embedded, ledger, events):
    event = continues_after(lambda: renamed(ledger), embedded, ledger, events)
    assert "pyrocket_offsets" in event.text


@servers
def test_a_database_that_dies_is_no_failure(embedded, ledger, events):
    continues_after(lambda: dead(ledger), embedded, ledger, events)


@servers
def test_a_database_that_dies_repeatedly(embedded, ledger):
    send(embedded)
    many = [str(number) for number in range(100, 1000)]
    with billing(embedded, ledger):
        for start in range(0, 900, 300):
            send(embedded, many[start : start + 300])
            with dead(ledger):
                pass
        until_all(embedded, ledger, [*BODIES, *many])
    assert ledger.bodies() == once([*BODIES, *many])


@servers
def test_a_database_that_is_down_at_the_start_is_named(embedded, ledger):
    send(embedded)
    with dead(ledger):
        refusal = refused(billing(embedded, ledger), "cannot be reached.*check the address")
        assert str(ledger.database.server.port) in refusal and ":app@" not in refusal
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("mariadb")
def test_an_account_that_is_refused_for_a_while_is_no_failure(embedded, ledger, events):
    """Its password was changed, and then changed back."""
    url, account = ledger.engine.url.set(username="teller", password="one"), "teller@'127.0.0.1'"
    ledger.execute(f"CREATE USER {account} IDENTIFIED BY 'one'")
    ledger.execute(f"GRANT ALL ON {url.database}.* TO {account}")

    @contextmanager
    def refused():
        ledger.execute(f"SET PASSWORD FOR {account} = PASSWORD('two')")
        yield
        ledger.execute(f"SET PASSWORD FOR {account} = PASSWORD('one')")

    try:
        offsets = DatabaseOffsets(create_engine(url, poolclass=NullPool))
        continues_after(refused, embedded, ledger, events, offsets=offsets)
    finally:
        ledger.execute(f"DROP USER {account}")


@servers
def test_rows_that_are_locked_hold_up_no_other_queue(embedded, ledger, events):
    consumed(embedded, ledger, BODIES, queues=20)
    others = [f"more {number}" for number in range(20)]
    with locked(ledger, *range(8)):
        send(embedded, others, queues=20)
        with billing(embedded, ledger, on_event=events, start_wait_s=0.1):
            embedded.wait_until(lambda: len(ledger.bodies()) >= 112, 25)
            events.wait_for("store-unreachable")
            assert not events.of("broker-unreachable") or "not begun" in events.of("broker-unreachable")[0].text
    with billing(embedded, ledger):
        until_all(embedded, ledger, [*BODIES, *others])
    assert ledger.bodies() == once([*BODIES, *others])


@pytest.mark.databases("postgresql")
def test_listeners_leave_a_connection_for_the_rest(embedded, ledger, events):
    engine = create_engine(ledger.database.url, pool_size=1, max_overflow=0)

    def book(messages, connection):
        time.sleep(0.02)
        ledger.book(messages, connection)

    booked_once(embedded, ledger, book, queues=16, offsets=DatabaseOffsets(engine), on_event=events)
    engine.dispose()
    assert not events.of("store-unreachable")


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("face", ["plain", "session", "async"])
def test_a_file_that_is_replaced_is_no_failure(embedded, ledger, events, face):
    make, url = (create_async_engine, "async_url") if face == "async" else (create_engine, "url")
    engine = make(getattr(ledger.database, url), pool_size=1, max_overflow=0)  # which no new connection replaces

    def book(messages, handle):
        handle.execute(INSERT, [row(message) for message in messages])

    async def book_async(messages, connection):
        await connection.execute(INSERT, [row(message) for message in messages])

    offsets = DatabaseOffsets(sessionmaker(engine) if face == "session" else engine)
    listener = book_async if face == "async" else book
    continues_after(lambda: replaced(ledger), embedded, ledger, events, listener, offsets)
    if face == "async":
        asyncio.run(engine.dispose())
    else:
        engine.dispose()


@pytest.mark.databases("sqlite")
def test_an_older_file_gets_the_effects_that_it_lacks(embedded, ledger):
    path = make_url(ledger.database.url).database
    offsets = DatabaseOffsets(engine := create_engine(ledger.database.url))
    send(embedded, SOME, queues=1)
    with billing(embedded, ledger, offsets=offsets):
        until_at(embedded, ledger, 10)
        shutil.copy(path, f"{path}.copy")
        send(embedded, MORE, queues=1)
        until_at(embedded, ledger, 20)
        os.replace(f"{path}.copy", path)
        ledger.engine.dispose()
        send(embedded, BODIES[20:30], queues=1)
        until_all(embedded, ledger, BODIES[:30])
    engine.dispose()
    assert ledger.bodies() == once(BODIES[:30])


@every_database
def test_effects_are_repeated_if_a_database_lost_them_with_their_offsets(embedded, ledger):
    """As after a failover to a server that lagged: neither the effects nor the offset are there."""
    send(embedded, SOME, queues=1)
    with billing(embedded, ledger):
        until_at(embedded, ledger, 10)
        with ledger.engine.begin() as connection:
            connection.execute(text("DELETE FROM ledger WHERE queue_offset >= 5"))
            connection.execute(text("UPDATE pyrocket_offsets SET next_offset = 5 WHERE topic = :t"), {"t": TOPIC})
        send(embedded, MORE, queues=1)
        until_all(embedded, ledger, [*SOME, *MORE])
    assert ledger.bodies() == once([*SOME, *MORE])


# --- a start, and its end


@pytest.fixture
def silent():
    """The port of a server that accepts connections, and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.live
@pytest.mark.slow("the driver gives up after 4 s")
@pytest.mark.parametrize("face", ["plain", "async"])
def test_a_database_that_is_silent_keeps_no_close_waiting(embedded, silent, face):
    url = f"postgresql+psycopg://app@127.0.0.1:{silent}/app?connect_timeout=4"
    engine = create_engine(url) if face == "plain" else create_async_engine(url)
    consumer = PushConsumer(GROUP, name_server=embedded.name_server, orderly=True, offset_store=DatabaseOffsets(engine))
    consumer.subscribe(TOPIC, lambda message: None)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(consumer.start)
        embedded.wait_until(lambda: any(thread.name == "pyrocket-store" for thread in threading.enumerate()))
        began = time.monotonic()
        consumer.close(1)
        assert "closed while it started" in str(starting.exception(20))
        assert time.monotonic() - began < 7, "it connects once"
    names = {"pyrocket-store", "pyrocket-database", "pyrocket-io"}
    embedded.wait_until(lambda: not names & {thread.name for thread in threading.enumerate()}, 20)


@pytest.fixture
def impatient(embedded, ledger):
    """A ledger, and a function that creates a consumer with a short timeout for locks of its database."""
    engine = create_engine(ledger.database.url, connect_args={"timeout": 0.1})
    offsets = DatabaseOffsets(engine)

    def make(**options):
        given = {"name_server": embedded.name_server, "offset_store": offsets, **EXACTLY_ONCE, **options}
        consumer = PushConsumer(GROUP, **given)
        consumer.subscribe(TOPIC, offsets.exactly_once(ledger.book))
        return consumer

    yield ledger, make
    engine.dispose()


@pytest.mark.live
@pytest.mark.databases("sqlite")
def test_a_start_waits_for_a_writer(embedded, impatient):
    ledger, make = impatient
    send(embedded, SOME, queues=1)
    with ledger.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN EXCLUSIVE")
        timer = threading.Timer(0.5, connection.rollback)
        timer.start()
        with make(consume_from="first"):
            timer.join()
            until_all(embedded, ledger, SOME)


@pytest.mark.slow("SQLite waits in real time")
@pytest.mark.databases("sqlite")
def test_a_group_begins_with_messages_after_its_start(embedded, impatient):
    """A new group begins with messages after its start, even in queues that begin later."""
    ledger, make = impatient
    send(embedded, ["old"], queues=1)
    embedded.broker("broker-a").on(RequestCode.HEART_BEAT, loaded := Gate())
    consumer = make(start_wait_s=1)
    starting = threading.Thread(target=consumer.start)
    starting.start()
    loaded.wait_held()
    with ledger.engine.connect() as writer:
        writer.exec_driver_sql("BEGIN EXCLUSIVE")
        loaded.open()
        starting.join()
        send(embedded, SOME, queues=1)
        writer.rollback()
    until_all(embedded, ledger, SOME)
    consumer.close()


@pytest.mark.live
@pytest.mark.databases("sqlite", "postgresql")
def test_many_queues_begin_in_few_transactions(embedded, ledger):
    consumed(embedded, ledger, BODIES, queues=100)
    begun = []
    event.listen(ledger.engine, "begin", begun.append)
    with billing(embedded, ledger) as (consumer, _):
        embedded.wait_until(lambda: len(consumer.progress()) == 101)
        assert len(begun) < 30


@pytest.mark.databases("sqlite")
def test_an_engine_that_begins_by_events_of_its_own(embedded, ledger):
    """As SQLAlchemy's documentation recommends for SQLite."""
    engine = create_engine(ledger.database.url)
    event.listen(engine, "connect", lambda connection, record: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    booked_once(embedded, ledger, offsets=DatabaseOffsets(engine))
    engine.dispose()


# --- rows and addresses


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("column", ["next_offset", "epoch", "reset_epoch", "queue_id"])
@pytest.mark.parametrize("value", ["'abc'", "-3", "9223372036854775807", "1.5"])
def test_an_invalid_row_is_named_and_stops_no_member(embedded, ledger, events, column, value):
    consumed(embedded, ledger, SOME, queues=2)
    ledger.execute(f"UPDATE pyrocket_offsets SET {column} = {value} WHERE topic = :t AND queue_id = 0", t=TOPIC)
    with pytest.raises(DatabaseError, match=f"{column}=.*delete it if no group uses it"):
        ledger.offsets.offsets(GROUP)
    with billing(embedded, ledger, on_event=events, commit_interval_s=0.1) as (consumer, _):
        send(embedded, MORE, queues=2, queue_id=1)
        until_all(embedded, ledger, [*SOME, *MORE])
        if column != "queue_id" and (column, value) != (
            "epoch",
            "'abc'",
        ):  # otherwise SQLite reads it as 0 + 1, or it has no owner
            assert column in events.wait_for("store-unreachable").text
        time.sleep(0.3)  # a few checks of all claims
        assert consumer.state.value == "running"
    assert not events.of("consumer-failed")


@every_database
@pytest.mark.parametrize("when", ["idle", "in a call"])
def test_a_queue_continues_after_its_row_was_deleted(embedded, ledger, events, when):
    """By a clean-up, for example. Otherwise `consume_from="last"` would skip the waiting messages."""
    running, deleted = threading.Event(), threading.Event()

    def book(messages, connection):
        if when == "in a call" and messages[0].queue_offset == 8:
            running.set()
            assert deleted.wait(WAIT_S)
        ledger.book(messages, connection)

    send(embedded, [], queues=1)
    with billing(embedded, ledger, book, consume_from="last", on_event=events) as (consumer, _):
        embedded.wait_until(lambda: held(consumer, TOPIC))
        send(embedded, SOME[:8], queues=1)
        until_at(embedded, ledger, 8)
        if when == "in a call":
            send(embedded, SOME[8:], queues=1)
            assert running.wait(WAIT_S)
        ledger.execute("DELETE FROM pyrocket_offsets")
        deleted.set()
        send(embedded, MORE, queues=1)
        until_all(embedded, ledger, [*SOME[:8], *(SOME[8:] if when == "in a call" else []), *MORE])
    event = next(each for each in events.of("offset-forgotten") if each.queue.topic == TOPIC)
    assert (event.facts["offset"], "its row was deleted" in events.of("queue-fenced")[0].text) == (8, True)
    assert set(ledger.bodies().values()) == {1}


@pytest.mark.databases("sqlite")
def test_a_row_with_another_offset_is_believed(embedded, ledger, events):
    """A row is believed, even a lower one; only a missing row is replaced by what the member knows."""
    send(embedded, SOME, queues=1)
    with billing(embedded, ledger, on_event=events):
        until_at(embedded, ledger, 10)
        ledger.execute("UPDATE pyrocket_offsets SET next_offset = 5, epoch = epoch + 1 WHERE topic = :t", t=TOPIC)
        embedded.wait_until(lambda: len(ledger.rows()) >= 15)
    assert not events.of("offset-forgotten")


@pytest.mark.databases("sqlite")
def test_a_new_topic_without_a_row_begins_like_a_new_one(embedded, ledger, events):
    """The member does not use its offset of the former topic."""
    send(embedded, SOME, queues=1)
    with billing(embedded, ledger, on_event=events):
        until_at(embedded, ledger, 10)
        embedded.delete_topic(TOPIC)
        send(embedded, MORE + BODIES[20:30], queues=1)
        ledger.execute("DELETE FROM pyrocket_offsets")
        until_all(embedded, ledger, BODIES[:30])
    assert not [each for each in events.of("offset-forgotten") if each.queue.topic == TOPIC]


@pytest.mark.databases("sqlite")
def test_a_row_that_was_deleted_keeps_its_reset(embedded, ledger, events):
    send(embedded, SOME, queues=1)
    with billing(embedded, ledger, on_event=events):
        until_at(embedded, ledger, 10)
        ledger.offsets.reset(GROUP, {MessageQueue(TOPIC, "broker-a", 0): 10}, 7)
        embedded.wait_until(lambda: ledger.offsets.offsets(GROUP, TOPIC)[0].epoch == 3)  # begun, reset, claimed
        ledger.execute("DELETE FROM pyrocket_offsets WHERE topic = :t", t=TOPIC)
        embedded.wait_until(lambda: [each.reset_epoch for each in ledger.offsets.offsets(GROUP, TOPIC)] == [7])


# --- forks


def _in_child(offsets, answers):
    try:
        answers.put(len(offsets.offsets(GROUP)))
        queue = MessageQueue(TOPIC, "broker-a", 3)
        answers.put(offsets.claim(None, GROUP, [queue], "child")[queue].epoch)
    except BaseException as error:
        answers.put(repr(error))


@pytest.mark.databases("postgresql")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("face", ["plain", "async"])
def test_a_forked_child_has_connections_of_its_own(embedded, ledger, face):
    engine = create_async_engine(ledger.database.async_url) if face == "async" else ledger.engine
    offsets = DatabaseOffsets(engine)

    async def book_async(messages, connection):
        await connection.run_sync(lambda plain: ledger.book(messages, plain))

    listener = offsets.exactly_once(book_async if face == "async" else ledger.book)
    send(embedded, SOME)
    with consuming(embedded, TOPIC, GROUP, listener, **EXACTLY_ONCE, offset_store=offsets):
        until_all(embedded, ledger, SOME)
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=_in_child, args=(offsets, answers := fork.Queue()))
        child.start()
        found = [answers.get(timeout=20), answers.get(timeout=20)]
        child.join(10)
        assert not child.is_alive()
        assert found == [4 + 1, 2]  # with the retry topic
        send(embedded, MORE)
        until_all(embedded, ledger, [*SOME, *MORE])
    if face == "async":
        asyncio.run(engine.dispose())
    assert ledger.bodies() == once([*SOME, *MORE])
