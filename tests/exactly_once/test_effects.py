"""A listener's effect and its offset commit together, or neither does."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from pyrocket_consumer import ConsumeResult, Retry, Suspend
from pyrocket_consumer.errors import ConfigError, Fenced
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import Gate
from tests.consuming import WAIT_S, consuming
from tests.exactly_once.booking import billing, booked_once, consumed, failing, refused, send, until_all, until_at
from tests.exactly_once.ledgers import BODIES, EXACTLY_ONCE, GROUP, INSERT, TOPIC, ledger_in, once, row
from tests.resets import held


def test_each_message_has_its_effect_once_and_in_order(embedded, ledger):
    booked_once(embedded, ledger)
    assert [offset for _, _, offset in ledger.rows()] == [offset for _ in range(4) for offset in range(25)]
    assert [ledger.offset(queue_id=queue) for queue in range(4)] == [25] * 4


def test_a_consumer_continues_where_the_last_one_committed(embedded, ledger):
    consumed(embedded, ledger)
    send(embedded, ["100", "101"])
    with billing(embedded, ledger):
        until_all(embedded, ledger, [*BODIES, "100", "101"])
    assert ledger.bodies() == once([*BODIES, "100", "101"])


@pytest.mark.databases("sqlite")
def test_offsets_are_published_to_the_broker_and_never_read_there(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
        embedded.wait_until(lambda: embedded.committed(GROUP, TOPIC) == dict.fromkeys(range(4), 25))
    ledger.execute("DELETE FROM ledger")
    ledger.execute("UPDATE pyrocket_offsets SET next_offset = 20")
    with billing(embedded, ledger):
        embedded.wait_until(lambda: len(ledger.rows()) >= 20)
    assert {offset for _, _, offset in ledger.rows()} == {20, 21, 22, 23, 24}


@pytest.mark.databases("sqlite")
def test_the_last_offset_is_published_at_close_after_an_earlier_one(embedded, ledger):
    """When the consumer is closed, the broker has not yet answered an earlier commit."""
    gate = Gate()
    embedded.broker("broker-a").on(RequestCode.UPDATE_CONSUMER_OFFSET, gate)
    send(embedded, ["0"], queues=1)
    with ThreadPoolExecutor() as threads, billing(embedded, ledger) as (consumer, _):
        gate.wait_held()
        embedded.send(TOPIC, b"1")
        until_all(embedded, ledger, ["0", "1"])
        closing = threads.submit(consumer.close)
        time.sleep(0.5)  # the consumer publishes the second offset meanwhile
        gate.open()
        closing.result()
    assert embedded.committed(GROUP, TOPIC) == {0: 2}


@pytest.mark.databases("sqlite")
def test_queues_that_are_given_up_together_publish_their_last_offsets(embedded, ledger):
    gate = Gate()
    embedded.broker("broker-a").on(RequestCode.UPDATE_CONSUMER_OFFSET, gate)
    send(embedded, BODIES[:4])
    with ThreadPoolExecutor() as threads, billing(embedded, ledger) as (consumer, _):
        gate.wait_held()
        for body in BODIES[4:8]:
            embedded.send(TOPIC, body.encode())
        until_all(embedded, ledger, BODIES[:8])
        ending = threads.submit(consumer.unsubscribe, TOPIC)
        time.sleep(0.5)
        gate.open()
        ending.result()
        embedded.wait_until(lambda: not held(consumer, TOPIC))
        assert embedded.committed(GROUP, TOPIC) == dict.fromkeys(range(4), 2)


def test_an_exception_of_a_listener_rolls_everything_back(embedded, ledger, events):
    book = failing(ledger, *[ValueError("not now")] * 3)
    booked_once(embedded, ledger, book, queues=1, on_event=events)
    assert book.calls[:4] == [list(range(8))] * 4
    assert len(events.of("listener-failed")) == 3


SOME = pytest.param(lambda messages, connection: Retry(messages[2:]), id="some")


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("answer", [ConsumeResult.RETRY, Suspend(0.05), SOME, 42, ConsumeResult.ROLLBACK])
def test_a_failed_result_of_a_listener_rolls_everything_back(embedded, ledger, answer):
    book = failing(ledger, answer, answer)
    booked_once(embedded, ledger, book, queues=1)
    assert book.calls[:3] == [list(range(8))] * 3


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("answer", [None, ConsumeResult.SUCCESS, ConsumeResult.COMMIT])
def test_results_that_count_as_success_commit(embedded, ledger, answer):
    booked_once(embedded, ledger, failing(ledger, *[answer] * 100), queues=1)


@pytest.mark.databases("sqlite")
def test_one_message_at_a_time(embedded, ledger):
    def book(message, connection):
        connection.execute(INSERT, row(message))

    booked_once(embedded, ledger, book, listener_batch_size=1)


def test_a_member_that_lost_its_claim_changes_nothing(embedded, ledger, events):
    """As after a freeze: another member has the queue, and late work of this one is rolled back."""
    once_only, taken = threading.Event(), threading.Event()

    def book(messages, connection):
        if not once_only.is_set():
            once_only.set()
            assert taken.wait(WAIT_S)
        ledger.book(messages, connection)

    send(embedded, queues=1)
    with billing(embedded, ledger, book, on_event=events):
        assert once_only.wait(WAIT_S)
        ledger.execute("UPDATE pyrocket_offsets SET epoch = epoch + 1, owner = 'another', next_offset = 50")
        taken.set()
        events.wait_for("queue-fenced")
        until_all(embedded, ledger, BODIES[50:])
    assert ledger.bodies() == once(BODIES[50:])
    assert not events.of("listener-failed")


def test_two_members_share_queues_and_hand_them_over(embedded, ledger):
    send(embedded, BODIES[:40])
    with billing(embedded, ledger, instance_name="one"):
        until_all(embedded, ledger, BODIES[:40])
        with billing(embedded, ledger, instance_name="two") as (two, _):
            embedded.wait_until(lambda: len(held(two, TOPIC)) == 2)
            send(embedded, BODIES[40:80])
            until_all(embedded, ledger, BODIES[:80])
        send(embedded, BODIES[80:])
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


def no_start(cluster, offsets, match):
    """Check that no consumer starts with these offsets."""
    cluster.create_topic(TOPIC)
    refused(consuming(cluster, TOPIC, GROUP, lambda messages: None, offset_store=offsets, orderly=True), match)


def test_a_table_that_is_missing_is_named(embedded, database):
    no_start(embedded, DatabaseOffsets(database.engine()), "the table is missing.*create_tables")


def test_a_table_of_another_version_is_named(embedded, ledger):
    ledger.execute("ALTER TABLE pyrocket_offsets DROP COLUMN reset_epoch")
    no_start(embedded, ledger.offsets, "of another version.*pyrocket offsets ddl")


def test_an_engine_that_commits_each_statement_is_refused(embedded, ledger):
    engine = create_engine(ledger.database.url, isolation_level="AUTOCOMMIT")
    no_start(embedded, DatabaseOffsets(engine), "AUTOCOMMIT")
    engine.dispose()
    assert ledger.query("SELECT * FROM pyrocket_offsets") == []


@pytest.mark.databases("sqlite")
def test_an_async_engine_that_commits_at_once_is_refused(embedded, ledger):
    engine = create_async_engine(ledger.database.async_url, execution_options={"isolation_level": "AUTOCOMMIT"})
    no_start(embedded, DatabaseOffsets(engine), "keeps what is rolled back")


@pytest.mark.databases("mariadb")
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["pyrocket_inbox ENGINE=Aria"], "its inbox"),
        (
            [
                *(f"pyrocket_offsets MODIFY {name} VARCHAR(60)" for name in ("consumer_group", "topic", "broker_name")),
                "pyrocket_offsets ENGINE=MyISAM",
            ],
            "InnoDB",
        ),
    ],
    ids=["inbox", "offsets"],
)
def test_a_table_without_rollback_is_refused(embedded, database, changes, match):
    with ledger_in(database, inbox_days=1) as ledger:
        for change in changes:
            ledger.execute(f"ALTER TABLE {change}")
        no_start(embedded, ledger.offsets, match)


@pytest.mark.parametrize("end", ["commit", "rollback", "close", "transaction"])
def test_a_listener_that_ends_its_transaction_has_failed(embedded, ledger, events, end):
    ended = []

    def book(messages, connection):
        if not ended:
            ended.append(end)
            (connection.get_transaction().rollback if end == "transaction" else getattr(connection, end))()
        ledger.book(messages, connection)

    booked_once(embedded, ledger, book, on_event=events)
    assert events.of("listener-failed")


@pytest.mark.databases("sqlite")
def test_a_transaction_committed_by_the_listener_is_reported(embedded, ledger, events):
    book = failing(ledger, *[lambda messages, connection: connection.get_transaction().commit()] * 100)
    send(embedded, ["1"])
    with billing(embedded, ledger, book, on_event=events):
        assert "ended the transaction" in str(events.wait_for("listener-failed").facts["error"])
    assert ledger.offset(GROUP, 0, TOPIC) in (0, None)


def test_a_commit_whose_answer_is_lost_is_not_done_again(embedded, ledger):
    lost = []

    @event.listens_for(ledger.engine, "commit")
    def answer_is_lost(connection):
        if booking.is_set() and len(lost) < 3:
            booking.clear()
            lost.append(connection)
            connection.connection.dbapi_connection.commit()
            raise RuntimeError("the connection broke after the commit")

    booking = threading.Event()
    book = failing(ledger, *[lambda messages, connection: booking.set()] * 100)
    send(embedded, queues=1)
    with billing(embedded, ledger, book):
        until_all(embedded, ledger)
    assert len(lost) == 3
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("postgresql")
def test_conflicting_transactions_are_retried(embedded, database, events):
    engine = create_engine(database.url, isolation_level="SERIALIZABLE")
    with ledger_in(database) as ledger:
        ledger.execute("CREATE TABLE total(n INTEGER)")
        ledger.execute("INSERT INTO total VALUES (0)")
        offsets = DatabaseOffsets(engine)

        def book(messages, connection):
            ledger.book(messages, connection)
            n = connection.execute(text("SELECT n FROM total")).scalar_one()
            connection.execute(text("UPDATE total SET n = :n"), {"n": n + len(messages)})

        booked_once(embedded, ledger, book, queues=8, offsets=offsets, on_event=events)
        assert ledger.query("SELECT n FROM total") == [(100,)]
        assert not events.of("listener-failed")
    engine.dispose()


@pytest.mark.databases("postgresql", "mariadb")
def test_deadlocks_are_retried(embedded, ledger, events):
    ledger.execute("CREATE TABLE total(id INTEGER PRIMARY KEY, n INTEGER)")
    ledger.execute("INSERT INTO total VALUES (0, 0), (1, 0)")

    def book(messages, connection):
        first = messages[0].queue.queue_id % 2
        for number in (first, 1 - first):
            values = {"id": number, "count": len(messages)}
            connection.execute(text("UPDATE total SET n = n + :count WHERE id = :id"), values)
        ledger.book(messages, connection)

    booked_once(embedded, ledger, book, queues=2, bodies=BODIES[:32], on_event=events)
    assert ledger.query("SELECT n FROM total") == [(32,), (32,)]
    assert not events.of("listener-failed")


def test_messages_that_a_filter_excludes_are_passed(embedded, ledger):
    embedded.create_topic(TOPIC, queues=1)
    for number in range(40):
        embedded.send(TOPIC, str(number).encode(), tags="odd" if number % 2 else "even")
    wrapped = ledger.offsets.exactly_once(ledger.book)
    with consuming(embedded, TOPIC, GROUP, wrapped, "even", **EXACTLY_ONCE, offset_store=ledger.offsets):
        until_at(embedded, ledger, 40)
    assert ledger.bodies() == once([str(number) for number in range(0, 40, 2)])


def test_a_message_that_is_given_up_is_passed(embedded, ledger, events):
    def book(messages, connection):
        ledger.book(messages, connection)
        if any(message.body == b"3" for message in messages):
            raise ValueError("three is odd")

    send(embedded, BODIES[:10], queues=1)
    with billing(embedded, ledger, book, listener_batch_size=1 + 1, max_reconsume_times=1, on_event=events):
        events.wait_for("message-given-up", 2)
        until_at(embedded, ledger, 10)
    assert ledger.bodies() == once([body for body in BODIES[:10] if body not in ("2", "3")])


def test_a_transaction_of_the_listener(embedded, ledger):
    calls = []

    def book(messages):
        calls.append(len(messages))
        with ledger.engine.begin() as connection:
            ledger.book(messages, connection)
            ledger.offsets.advance(connection, messages)
            if len(calls) == 2:
                raise ValueError("rolled back")

    booked_once(embedded, ledger, book, own=True)


def test_a_transaction_of_the_listener_is_fenced(embedded, ledger, events):
    raised = []

    def book(messages):
        with ledger.engine.begin() as connection:
            ledger.book(messages, connection)
            if not raised:
                steal = text("UPDATE pyrocket_offsets SET epoch = epoch + 1")
                connection.execute(steal) if ledger.database.kind == "sqlite" else ledger.execute(steal.text)
            try:
                ledger.offsets.advance(connection, messages)
            except Fenced:
                raised.append(messages)
                raise

    booked_once(embedded, ledger, book, queues=1, on_event=events, own=True)
    assert raised


@pytest.mark.databases("sqlite")
def test_advance_is_for_listeners(ledger):
    with ledger.engine.begin() as connection, pytest.raises(ConfigError, match="outside of a listener call"):
        ledger.offsets.advance(connection, [])
