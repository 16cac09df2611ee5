"""A listener's effect and its offset commit together, whatever happens to either."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import create_engine, event, text

from pyrocket_consumer import ConsumeResult, MessageQueue, PushConsumer, Retry, Suspend
from pyrocket_consumer.errors import ConfigError, Fenced, OffsetStoreError
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.consuming import WAIT_S, Events, consuming
from tests.exactly_once.ledgers import EXACTLY_ONCE, INSERT, ledger_in, once, row

TOPIC, GROUP = "orders", "billing"
BODIES = [str(number) for number in range(100)]


def send(cluster, bodies=BODIES, queues=4, **options):
    cluster.create_topic(TOPIC, queues=queues)
    for body in bodies:
        cluster.send(TOPIC, body.encode(), **options)


def billing(cluster, ledger, listener=None, **options):
    wrapped = ledger.offsets.exactly_once(listener or ledger.book)
    return consuming(
        cluster, TOPIC, GROUP, wrapped, **{**EXACTLY_ONCE, "offset_store": ledger.offsets, **options}
    )


def until_all(cluster, ledger, bodies=BODIES):
    cluster.wait_until(lambda: len(ledger.bodies()) >= len(set(bodies)))


def test_each_message_has_its_effect_once_and_in_order(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert [offset for _, _, offset in ledger.rows()] == [offset for _ in range(4) for offset in range(25)]
    assert [ledger.offset(GROUP, queue, TOPIC) for queue in range(4)] == [25] * 4


def test_a_consumer_goes_on_where_the_last_one_committed(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    send(embedded, ["100", "101"])
    with billing(embedded, ledger):
        until_all(embedded, ledger, [*BODIES, "100", "101"])
    assert ledger.bodies() == once([*BODIES, "100", "101"])


@pytest.mark.databases("sqlite")
def test_the_broker_is_told_and_never_asked(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
        embedded.wait_until(lambda: embedded.committed(GROUP, TOPIC) == dict.fromkeys(range(4), 25))
    ledger.execute("DELETE FROM ledger")
    ledger.execute("UPDATE pyrocket_offsets SET next_offset = 20")
    with billing(embedded, ledger):
        embedded.wait_until(lambda: len(ledger.rows()) >= 20)
    assert {offset for _, _, offset in ledger.rows()} == {20, 21, 22, 23, 24}


def test_what_a_listener_raises_rolls_everything_back(embedded, ledger):
    failures = []

    def book(messages, connection):
        ledger.book(messages, connection)
        if len(failures) < 3:
            failures.append([message.body for message in messages])
            raise ValueError("not now")

    send(embedded, queues=1)
    events = Events()
    with billing(embedded, ledger, book, on_event=events):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert failures[0] == failures[1] == failures[2]
    assert len(events.of("listener-failed")) == 3


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("answer", [ConsumeResult.RETRY, Suspend(0.05), "some", 42, ConsumeResult.ROLLBACK])
def test_what_a_listener_returns_rolls_everything_back(embedded, ledger, answer):
    seen = []

    def book(messages, connection):
        ledger.book(messages, connection)
        seen.append([message.queue_offset for message in messages])
        if len(seen) < 3:
            return Retry(messages[2:]) if answer == "some" else answer

    send(embedded, queues=1)
    with billing(embedded, ledger, book):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert seen[0] == seen[1] == seen[2] == list(range(8))


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("answer", [None, ConsumeResult.SUCCESS, ConsumeResult.COMMIT])
def test_what_means_success_commits(embedded, ledger, answer):
    def book(messages, connection):
        ledger.book(messages, connection)
        return answer

    send(embedded, queues=1)
    with billing(embedded, ledger, book):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("sqlite")
def test_one_message_at_a_time(embedded, ledger):
    def book(message, connection):
        connection.execute(INSERT, row(message))

    send(embedded)
    with billing(embedded, ledger, book, listener_batch_size=1):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


def test_who_lost_its_claim_changes_nothing(embedded, ledger):
    """As after a freeze: another member has the queue, and what this one still does is undone."""
    once_only, taken = threading.Event(), threading.Event()

    def book(messages, connection):
        if not once_only.is_set():
            once_only.set()
            assert taken.wait(WAIT_S)
        ledger.book(messages, connection)

    send(embedded, queues=1)
    events = Events()
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
            embedded.wait_until(lambda: len([each for each in two.progress() if each.topic == TOPIC]) == 2)
            for body in BODIES[40:80]:
                embedded.send(TOPIC, body.encode())
            until_all(embedded, ledger, BODIES[:80])
        for body in BODIES[80:]:
            embedded.send(TOPIC, body.encode())
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("postgresql", "mariadb")
def test_a_database_that_dies_holds_queues_up_and_passes_nothing_over(embedded, ledger):
    server = ledger.database.server
    send(embedded, BODIES[:50])
    events = Events()
    with billing(embedded, ledger, on_event=events, max_reconsume_times=1):
        until_all(embedded, ledger, BODIES[:50])
        server.kill()
        try:
            for body in BODIES[50:]:
                embedded.send(TOPIC, body.encode())
            events.wait_for("store-unreachable")
        finally:
            server.start()
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert not events.of("message-given-up") and not events.of("listener-failed")


@pytest.mark.databases("postgresql", "mariadb")
def test_a_database_that_dies_again_and_again(embedded, ledger):
    send(embedded)
    many = [str(number) for number in range(100, 1000)]
    with billing(embedded, ledger):
        for start in range(0, 900, 300):
            for body in many[start : start + 300]:
                embedded.send(TOPIC, body.encode())
            ledger.database.server.kill()
            ledger.database.server.start()
            ledger.engine.dispose()
        until_all(embedded, ledger, [*BODIES, *many])
    assert ledger.bodies() == once([*BODIES, *many])


@pytest.mark.databases("postgresql", "mariadb")
def test_a_database_that_is_away_at_the_start_is_named(embedded, ledger):
    send(embedded)
    ledger.database.server.kill()
    try:
        with pytest.raises(OffsetStoreError, match="cannot be reached.*check the address") as caught:
            billing(embedded, ledger).__enter__()
        assert str(ledger.database.server.port) in str(caught.value) and ":app@" not in str(caught.value)
    finally:
        ledger.database.server.start()
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


def test_a_table_that_is_missing_is_named(embedded, database):
    engine = database.engine()
    embedded.create_topic(TOPIC)
    offsets = DatabaseOffsets(engine)
    with pytest.raises(OffsetStoreError, match="the table is missing.*create_tables"):
        consuming(embedded, TOPIC, GROUP, lambda messages: None, offset_store=offsets, orderly=True).__enter__()
    engine.dispose()


def test_a_table_of_another_version_is_named(embedded, ledger):
    embedded.create_topic(TOPIC)
    ledger.execute("ALTER TABLE pyrocket_offsets DROP COLUMN reset_epoch")
    with pytest.raises(OffsetStoreError, match="of another version.*pyrocket offsets ddl"):
        billing(embedded, ledger).__enter__()


def test_an_engine_that_commits_each_statement_is_refused(embedded, ledger):
    embedded.create_topic(TOPIC)
    engine = create_engine(ledger.database.url, isolation_level="AUTOCOMMIT")
    offsets = DatabaseOffsets(engine)
    with pytest.raises(OffsetStoreError, match="AUTOCOMMIT"):
        consuming(embedded, TOPIC, GROUP, lambda messages: None, offset_store=offsets, orderly=True).__enter__()
    engine.dispose()
    assert ledger.query("SELECT * FROM pyrocket_offsets") == []


@pytest.mark.databases("mariadb")
def test_a_table_that_undoes_nothing_is_refused(embedded, ledger):
    embedded.create_topic(TOPIC)
    keys = ", ".join(f"MODIFY {name} VARCHAR(60)" for name in ("consumer_group", "topic", "broker_name"))
    ledger.execute(f"ALTER TABLE pyrocket_offsets {keys}, ENGINE=MyISAM")
    with pytest.raises(OffsetStoreError, match="InnoDB"):
        billing(embedded, ledger).__enter__()


@pytest.mark.parametrize("end", ["commit", "rollback", "close", "transaction"])
def test_a_listener_that_ends_its_transaction_has_failed(embedded, ledger, end):
    calls = []

    def book(messages, connection):
        calls.append(messages)
        if len(calls) == 1:
            if end == "transaction":
                connection.get_transaction().rollback()
            else:
                getattr(connection, end)()
        ledger.book(messages, connection)

    send(embedded)
    events = Events()
    with billing(embedded, ledger, book, on_event=events):
        events.wait_for("listener-failed")
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("sqlite")
def test_a_transaction_that_is_committed_behind_our_back_is_told(embedded, ledger):
    def book(messages, connection):
        ledger.book(messages, connection)
        connection.get_transaction().commit()

    send(embedded, ["1"])
    events = Events()
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

    def book(messages, connection):
        ledger.book(messages, connection)
        booking.set()

    send(embedded, queues=1)
    with billing(embedded, ledger, book):
        until_all(embedded, ledger)
    assert len(lost) == 3
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("postgresql")
def test_transactions_that_meet_are_tried_again(embedded, database):
    engine = create_engine(database.url, isolation_level="SERIALIZABLE")
    with ledger_in(database) as ledger:
        ledger.execute("CREATE TABLE total(n INTEGER)")
        ledger.execute("INSERT INTO total VALUES (0)")
        offsets = DatabaseOffsets(engine)

        def book(messages, connection):
            ledger.book(messages, connection)
            n = connection.execute(text("SELECT n FROM total")).scalar_one()
            connection.execute(text("UPDATE total SET n = :n"), {"n": n + len(messages)})

        send(embedded, queues=8)
        events = Events()
        options = {**EXACTLY_ONCE, "offset_store": offsets, "on_event": events}
        with consuming(embedded, TOPIC, GROUP, offsets.exactly_once(book), **options):
            until_all(embedded, ledger)
        assert ledger.bodies() == once(BODIES)
        assert ledger.query("SELECT n FROM total") == [(100,)]
        assert not events.of("listener-failed")
    engine.dispose()


@pytest.mark.databases("postgresql", "mariadb")
def test_deadlocks_are_tried_again(embedded, ledger):
    ledger.execute("CREATE TABLE total(id INTEGER PRIMARY KEY, n INTEGER)")
    ledger.execute("INSERT INTO total VALUES (0, 0), (1, 0)")

    def book(messages, connection):
        first = messages[0].queue.queue_id % 2
        for number in (first, 1 - first):
            connection.execute(
                text("UPDATE total SET n = n + :count WHERE id = :id"), {"id": number, "count": len(messages)}
            )
        ledger.book(messages, connection)

    send(embedded, BODIES[:32], queues=2)
    events = Events()
    with billing(embedded, ledger, book, on_event=events):
        until_all(embedded, ledger, BODIES[:32])
    assert ledger.bodies() == once(BODIES[:32])
    assert ledger.query("SELECT n FROM total") == [(32,), (32,)]
    assert not events.of("listener-failed")


def test_what_a_filter_leaves_out_is_passed(embedded, ledger):
    embedded.create_topic(TOPIC, queues=1)
    for number in range(40):
        embedded.send(TOPIC, str(number).encode(), tags="odd" if number % 2 else "even")
    wrapped = ledger.offsets.exactly_once(ledger.book)
    with consuming(embedded, TOPIC, GROUP, wrapped, "even", **EXACTLY_ONCE, offset_store=ledger.offsets):
        embedded.wait_until(lambda: ledger.offset(GROUP, 0, TOPIC) == 40)
    assert ledger.bodies() == once([str(number) for number in range(0, 40, 2)])


def test_a_message_that_is_given_up_is_passed(embedded, ledger):
    def book(messages, connection):
        ledger.book(messages, connection)
        if any(message.body == b"3" for message in messages):
            raise ValueError("three is odd")

    send(embedded, BODIES[:10], queues=1)
    events = Events()
    with billing(embedded, ledger, book, listener_batch_size=1 + 1, max_reconsume_times=1, on_event=events):
        events.wait_for("message-given-up", 2)
        embedded.wait_until(lambda: ledger.offset(GROUP, 0, TOPIC) == 10)
    assert ledger.bodies() == once([body for body in BODIES[:10] if body not in ("2", "3")])


@pytest.mark.databases("sqlite")
def test_a_listener_with_no_transaction_is_at_least_once(embedded, ledger):
    send(embedded)
    with consuming(embedded, TOPIC, GROUP, orderly=True, offset_store=ledger.offsets) as (_, seen):
        seen.wait_for(100)
        embedded.wait_until(lambda: [ledger.offset(GROUP, queue, TOPIC) for queue in range(4)] == [25] * 4)


def test_a_transaction_of_ones_own(embedded, ledger):
    calls = []

    def book(messages):
        calls.append(len(messages))
        with ledger.engine.begin() as connection:
            ledger.book(messages, connection)
            ledger.offsets.advance(connection, messages)
            if len(calls) == 2:
                raise ValueError("rolled back")

    send(embedded)
    with consuming(embedded, TOPIC, GROUP, book, **EXACTLY_ONCE, offset_store=ledger.offsets):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


def test_a_transaction_of_ones_own_is_fenced(embedded, ledger):
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

    send(embedded, queues=1)
    events = Events()
    with consuming(embedded, TOPIC, GROUP, book, **EXACTLY_ONCE, offset_store=ledger.offsets, on_event=events):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert raised


def test_a_transaction_of_ones_own_whose_commit_was_not_answered(embedded, ledger):
    calls = []

    def book(messages):
        calls.append(messages)
        with ledger.engine.begin() as connection:
            ledger.book(messages, connection)
            ledger.offsets.advance(connection, messages)
        if len(calls) == 2:
            raise ValueError("after the commit")

    send(embedded, queues=1)
    with consuming(embedded, TOPIC, GROUP, book, **EXACTLY_ONCE, offset_store=ledger.offsets):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


@pytest.mark.databases("sqlite")
def test_advance_is_for_listeners(ledger):
    with ledger.engine.begin() as connection, pytest.raises(ConfigError, match="outside of a listener call"):
        ledger.offsets.advance(connection, [])


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("options", "text_of_it"),
    [
        ({"orderly": False}, "needs orderly=True"),
        ({"auto_commit": False}, "needs orderly=True, with auto_commit"),
        ({"message_model": "broadcasting"}, "clustering group only"),
    ],
)
def test_a_consumer_that_cannot_be_exact_is_refused(ledger, options, text_of_it):
    with pytest.raises(ConfigError, match=text_of_it):
        PushConsumer(GROUP, name_server="x:1", offset_store=ledger.offsets, **{"orderly": True, **options})


@pytest.mark.databases("sqlite")
def test_bad_arguments_are_named(ledger, tmp_path):
    engine = ledger.engine
    for arguments, message in [
        ({"table": "a b"}, "table='a b' is not allowed"),
        ({"table": 3}, "table=3"),
        ({"inbox_days": 0}, "inbox_days=0"),
        ({"on_divergence": "go"}, "on_divergence='go'"),
        ({"allow_foreign_members": 1}, "allow_foreign_members=1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            DatabaseOffsets(engine, **arguments)
    with pytest.raises(ConfigError, match="must be a SQLAlchemy Engine"):
        DatabaseOffsets(f"sqlite:///{tmp_path}/x.db")
    with pytest.raises(ConfigError, match="in memory"):
        DatabaseOffsets(create_engine("sqlite://"))
    with pytest.raises(ConfigError, match=r"cannot be called with \(messages, connection\)"):
        ledger.offsets.exactly_once(lambda messages: None)
    with pytest.raises(ConfigError, match="must be a function"):
        ledger.offsets.exactly_once("book")

    async def book(messages, connection):
        pass

    with pytest.raises(ConfigError, match="async def"):
        ledger.offsets.exactly_once(book)


def test_secrets_do_not_show():
    offsets = DatabaseOffsets(create_engine("postgresql+psycopg://app:geheim@db/app"))
    assert "geheim" not in repr(offsets) and "***@db/app" in repr(offsets)


def test_a_reset_in_the_database_moves_a_group_that_runs(embedded, ledger):
    send(embedded)
    events = Events()
    with billing(embedded, ledger, on_event=events):
        until_all(embedded, ledger)
        ledger.execute("DELETE FROM ledger")
        queues = [MessageQueue(TOPIC, "broker-a", number) for number in range(4)]
        ledger.offsets.reset(GROUP, dict.fromkeys(queues, 20), reset_epoch=7)
        for number in range(4):  # who has nothing to do hears of it when it has
            embedded.send(TOPIC, f"new {number}".encode(), queue_id=number)
        embedded.wait_until(lambda: len(ledger.rows()) >= 24)
        events.wait_for("queue-fenced", 4)
    assert {offset for _, _, offset in ledger.rows()} == set(range(20, 26))
    assert set(ledger.bodies().values()) == {1}
    assert {each.reset_epoch for each in ledger.offsets.offsets(GROUP, TOPIC)} == {7}


def test_a_reset_of_a_member_moves_the_row_and_fences_what_runs(embedded, ledger):
    send(embedded, queues=1)
    running, go_on = threading.Event(), threading.Event()

    def book(messages, connection):
        ledger.book(messages, connection)
        if messages[-1].queue_offset == 99 and not running.is_set():
            running.set()
            assert go_on.wait(WAIT_S)

    with billing(embedded, ledger, book) as (consumer, _):
        assert running.wait(WAIT_S)
        epoch = ledger.offsets.offsets(GROUP, TOPIC)[0].epoch if ledger.database.kind != "sqlite" else 1
        target = {MessageQueue(TOPIC, "broker-a", 0): 90}
        mover = threading.Thread(target=lambda: consumer.reset_offsets(TOPIC, to=target))
        mover.start()
        if ledger.database.kind != "sqlite":  # there the call that runs holds the whole database
            embedded.wait_until(lambda: ledger.offsets.offsets(GROUP, TOPIC)[0].epoch == epoch + 1)
        go_on.set()
        mover.join(WAIT_S)
        embedded.wait_until(lambda: ledger.offset(GROUP, 0, TOPIC) == 100 and len(ledger.bodies()) == 100)
    counts = ledger.bodies()
    assert all(counts[body] == 1 for body in BODIES[:90])
    assert all(counts[body] in (1, 2) for body in BODIES[90:])
