"""A listener may do anything with its transaction and its messages. No effect is lost, and none happens twice."""

import asyncio
import sqlite3
import sys
from contextlib import suppress
from functools import wraps

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from pyrocket_consumer import Retry
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.exactly_once.booking import billing, booked_once, consuming_own, failing, send, until_at
from tests.exactly_once.ledgers import BODIES, INSERT, every_database, ledger_in, offsets_driven, once, row

SOME = BODIES[:12]
LAST = len(SOME)

pytestmark = pytest.mark.databases("sqlite")


@pytest.mark.parametrize("change", ["pop", "clear", "reverse"])
def test_a_listener_may_change_its_list(embedded, ledger, change):
    """The offset that commits with an effect is the end of the call, even if the listener changes its list."""
    behind = []

    def book(messages, connection):
        behind.append(messages[0].queue_offset - (ledger.offset() or 0))
        ledger.book(messages, connection)
        for _ in list(messages) if change == "pop" else [0]:
            getattr(messages, change)()

    booked_once(embedded, ledger, book, queues=1, commit_interval_s=60)  # only the listener's transaction commits
    assert set(behind) == {0}


@pytest.mark.parametrize("outcome", [Retry(), ValueError("not now")], ids=["returned", "raised"])
def test_a_wrapper_that_drops_the_outcome_loses_nothing(embedded, ledger, outcome):
    booked = ledger.offsets.exactly_once(failing(ledger, outcome))

    def handle(messages):
        with suppress(ValueError):
            booked(messages)

    booked_once(embedded, ledger, handle, queues=1, bodies=SOME, own=True)


def test_a_wrapper_may_retry_its_listener(embedded, ledger):
    booked = ledger.offsets.exactly_once(failing(ledger, Retry()))
    tries = []

    def handle(messages):
        for _ in range(2):
            tries.append(result := booked(messages))
            if result is None:
                return None
        return result

    booked_once(embedded, ledger, handle, queues=1, bodies=SOME[:8], max_reconsume_times=0, own=True)
    assert [result is None for result in tries[:2]] == [False, True]


def test_a_wrapper_may_retry_after_an_exception(embedded, ledger):
    book = failing(ledger, ValueError("not now"), when=lambda messages: messages[0].body == b"2")
    booked = ledger.offsets.exactly_once(book)

    def handle(messages):
        again = []
        for message in messages:
            try:
                booked([message])
            except ValueError:
                again.append(message)
        for message in again:
            booked([message])

    booked_once(embedded, ledger, handle, queues=1, bodies=SOME, own=True)


def test_after_a_refused_part_the_whole_list_is_due(embedded, ledger):
    booked = ledger.offsets.exactly_once(failing(ledger, ValueError("not now")))

    def handle(messages):
        first, rest = messages[:1], messages[1:]
        try:
            booked(first)
        except ValueError:
            booked(rest)  # this is refused
            booked(first)
            booked(rest[:1])
        else:
            if rest:
                booked(rest)

    booked_once(embedded, ledger, handle, queues=1, bodies=SOME[:4], own=True)


def test_a_transaction_for_each_message_of_a_list(embedded, ledger):
    booked = ledger.offsets.exactly_once(failing(ledger, Retry(), when=lambda messages: messages[0].body == b"3"))

    def handle(messages):
        for message in messages:
            booked([message])

    booked_once(embedded, ledger, handle, queues=1, bodies=SOME, own=True)
    assert ledger.rows() == [(body, 0, offset) for offset, body in enumerate(SOME)]


def own_transaction(ledger, messages):
    with ledger.engine.begin() as connection:
        ledger.book(messages, connection)
        ledger.offsets.advance(connection, messages)


def noted(listener):
    """Record the errors that refuse a listener's calls in its `errors`."""

    @wraps(listener)
    def call(*arguments):
        try:
            return listener(*arguments)
        except ConfigError as error:
            call.errors.append(str(error))
            raise

    call.errors = []
    return call


@pytest.mark.parametrize("choose", [lambda messages: messages[1:], lambda messages: messages[::-1]])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_messages_that_are_not_the_next_ones_are_refused(embedded, ledger, choose, is_wrapped):
    booked = ledger.offsets.exactly_once(ledger.book)

    @noted
    def handle(messages):
        if len(messages) == 1 or handle.errors:
            booked(messages)
        elif is_wrapped:
            booked(choose(messages))
        else:
            own_transaction(ledger, choose(messages))

    booked_once(embedded, ledger, handle, queues=1, bodies=SOME, own=True)
    assert "from offset 0 of orders" in handle.errors[0] and "in order" in handle.errors[0]


def test_messages_of_another_queue_are_refused(embedded, ledger):
    kept = []
    booked = ledger.offsets.exactly_once(ledger.book)

    @noted
    def handle(messages):
        kept.extend(messages)
        others = [each for each in kept if each.queue != messages[0].queue]
        if others and not handle.errors:
            own_transaction(ledger, others)
        booked(messages)

    booked_once(embedded, ledger, handle, queues=2, own=True)
    assert "those of the listener call" in handle.errors[0]


@pytest.mark.parametrize("what", ["advance", "exactly_once"])
def test_a_transaction_within_a_transaction_is_refused(embedded, ledger, events, what):
    inner = ledger.offsets.exactly_once(ledger.book)

    @noted
    def within(messages, connection):
        ledger.offsets.advance(connection, messages) if what == "advance" else inner(messages)

    booked_once(embedded, ledger, failing(ledger, within), queues=1, bodies=SOME, on_event=events)
    assert "within a listener of exactly_once" in within.errors[0]
    assert not events.of("store-unreachable")


@every_database
def test_messages_of_an_uncommitted_advance_are_redelivered(embedded, ledger, events):
    calls = []

    def handle(messages):
        calls.append(messages)
        connection = ledger.engine.connect()
        ledger.book(messages, connection)
        ledger.offsets.advance(connection, messages)
        if len(calls) > 1:
            connection.commit()
        connection.close()  # this rolls back uncommitted changes

    options = {"own": True, "on_event": events, "commit_interval_s": 0.2}
    booked_once(embedded, ledger, handle, queues=1, bodies=SOME[:8], **options)
    assert "was not committed" in events.of("offset-apart")[0].text


def test_a_later_call_does_not_skip_an_earlier_one(embedded, ledger, events):
    forgotten = []

    def handle(message):
        with ledger.engine.connect() as connection:
            ledger.book([message], connection)
            ledger.offsets.advance(connection, message)
            if message.body == b"3" and not forgotten:
                forgotten.append(message)
            else:
                connection.commit()

    options = {"own": True, "on_event": events, "listener_batch_size": 1, "commit_interval_s": 60.0}
    booked_once(embedded, ledger, handle, queues=1, bodies=SOME, **options)
    assert events.of("offset-apart")


def test_exactly_once_does_not_skip_an_advance(embedded, ledger, events):
    """The first call did not commit its `advance`. The next call, which is wrapped, is fenced."""
    booked, calls = ledger.offsets.exactly_once(ledger.book), []

    def handle(message):
        calls.append(message.queue_offset)
        if len(calls) > 1:
            return booked([message])
        with ledger.engine.connect() as connection:
            ledger.book([message], connection)
            ledger.offsets.advance(connection, message)

    options = {"own": True, "on_event": events, "listener_batch_size": 1, "commit_interval_s": 60.0}
    booked_once(embedded, ledger, handle, queues=1, bodies=SOME, **options)
    assert calls[:3] == [0, 1, 0]
    assert "was not committed" in events.of("offset-apart")[0].text


def test_an_unwrapped_listener_is_reported_once(embedded, ledger, events):
    def handle(messages):
        with ledger.engine.begin() as connection:
            ledger.book(messages, connection)

    booked_once(embedded, ledger, handle, own=True, on_event=events)
    assert len(events.of("offset-apart")) == 1
    assert "subscribe with exactly_once(listener)" in events.of("offset-apart")[0].text


@every_database
def test_messages_committed_by_advance_are_not_given_up(embedded, ledger, events):
    def handle(messages):
        own_transaction(ledger, messages)
        raise ValueError("after the commit")

    send(embedded, SOME, queues=1)  # more messages than one call takes
    with consuming_own(embedded, ledger, handle, on_event=events, max_reconsume_times=0):
        until_at(embedded, ledger, LAST)
        events.wait_for("listener-failed", 2)
        events.wait_for("queue-assigned")
    assert ledger.bodies() == once(SOME)
    assert not events.of("message-given-up")


def test_a_listener_that_wants_to_exit_is_rolled_back(embedded, ledger, events):
    book = failing(ledger, lambda messages, connection: sys.exit("enough"))
    booked_once(embedded, ledger, book, queues=1, bodies=SOME[:8], on_event=events)
    assert book.calls[0] == book.calls[1]
    assert len(events.of("listener-failed")) == 1


def test_a_disk_that_fails_behind_a_listener_is_not_its_failure(embedded, ledger, events):
    failures = [sqlite3.OperationalError("disk I/O error")]
    failures[0].sqlite_errorcode = sqlite3.SQLITE_IOERR

    def fail(statement):
        if statement.startswith("RELEASE") and failures:
            raise failures.pop()

    with offsets_driven(ledger, fail) as offsets:
        options = {"offsets": offsets, "max_reconsume_times": 0, "on_event": events}
        booked_once(embedded, ledger, queues=1, bodies=SOME[:8], **options)
    assert "disk I/O error" in events.of("store-unreachable")[0].text
    assert not events.of("listener-failed")


@pytest.mark.databases("sqlite", "mariadb")
@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT"])
def test_a_transaction_that_is_ended_by_text_is_noticed(embedded, ledger, events, end):
    ended = []

    def book(messages, connection):
        if not ended:
            connection.execute(text("UPDATE pyrocket_offsets SET owner = 'me' WHERE 1 = 0"))
            connection.execute(text(end))
            ended.append(end)
        ledger.book(messages, connection)

    booked_once(embedded, ledger, book, queues=1, bodies=SOME[:8], on_event=events)
    assert "has ended the transaction" in events.of("listener-failed")[0].facts["error"]


@pytest.mark.databases("postgresql")
def test_an_error_that_a_listener_catches_is_its_failure(embedded, ledger, events):
    def caught(messages, connection):
        with suppress(DBAPIError):
            connection.execute(text("SELECT 1 / 0"))

    booked_once(embedded, ledger, failing(ledger, caught, caught), queues=1, bodies=SOME[:8], on_event=events)
    assert len(events.of("listener-failed")) == 2
    assert not events.of("store-unreachable")


def test_a_listener_reads_within_its_transaction(embedded, ledger):
    ledger.execute("CREATE TABLE total(n INTEGER)")
    ledger.execute("INSERT INTO total VALUES (0)")

    def book(messages, connection):
        before = connection.execute(text("SELECT n FROM total")).scalar_one()
        ledger.book(messages, connection)
        connection.execute(text("UPDATE total SET n = :n"), {"n": before + len(messages)})

    booked_once(embedded, ledger, book)
    assert ledger.query("SELECT n FROM total") == [(100,)]


def test_advance_is_refused_with_an_inbox(embedded, database, events):
    with ledger_in(database, inbox_days=1) as ledger:
        handle = noted(lambda messages: own_transaction(ledger, messages))
        send(embedded, SOME[:1], queues=1)
        with consuming_own(embedded, ledger, handle, on_event=events):
            events.wait_for("listener-failed")
    assert "without inbox_days" in handle.errors[0]


@pytest.mark.live
def test_an_async_listener_that_fails_by_the_network_has_failed(embedded, ledger, async_engine, events):
    """The server that it could not connect to is not the database."""

    async def book(messages, connection):
        raise ConnectionRefusedError("a mail server, say")

    send(embedded, SOME[:2], queues=1)
    with billing(embedded, ledger, book, DatabaseOffsets(async_engine), max_reconsume_times=1, on_event=events):
        events.wait_for("message-given-up", 2)
    assert not events.of("store-unreachable")


@pytest.mark.live
def test_a_cancelled_call_of_a_wrapper_loses_nothing(embedded, ledger, async_engine):
    cancelled = []

    async def book(messages, connection):
        await connection.execute(INSERT, [row(message) for message in messages])
        if not cancelled:
            cancelled.append(messages)
            await asyncio.sleep(60)

    booked = (offsets := DatabaseOffsets(async_engine)).exactly_once(book)

    async def handle(messages):
        with suppress(TimeoutError):
            await asyncio.wait_for(booked(messages), 0.2)

    booked_once(embedded, ledger, handle, queues=1, bodies=SOME, offsets=offsets, own=True)
