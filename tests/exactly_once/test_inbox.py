"""Messages that a producer stored twice, and logs that differ from the consumed ones."""

import time
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from pyrocket_consumer.testing import RequestCode, drop
from tests.consuming import consuming
from tests.exactly_once.booking import billing, consumed, failing, send, until_all, until_at
from tests.exactly_once.ledgers import BODIES, EXACTLY_ONCE, GROUP, TOPIC, every_database, ledger_in, once
from tests.resets import queue

pytestmark = pytest.mark.databases("sqlite")


@pytest.fixture
def with_inbox(database):
    with ledger_in(database, inbox_days=7) as ledger:
        yield ledger


def send_twice(cluster, bodies, queues=1):
    cluster.create_topic(TOPIC, queues=queues)
    for body in bodies:
        for _ in range(2):
            cluster.send(TOPIC, body.encode(), properties={"UNIQ_KEY": f"id-{body}"})


@every_database
@pytest.mark.parametrize("queues", [1, 4])
def test_a_message_that_was_stored_twice_has_its_effect_once(embedded, with_inbox, events, queues):
    send_twice(embedded, BODIES, queues)
    with billing(embedded, with_inbox, on_event=events):
        until_at(embedded, with_inbox, 200 // queues, queues)
        event = events.wait_for("message-left-out")
    assert with_inbox.bodies() == once(BODIES)
    assert "stored them twice" in event.text and event.facts["message_id"].startswith("id-")
    assert with_inbox.query("SELECT COUNT(*) FROM pyrocket_inbox") == [(100,)]
    assert not events.of("listener-failed")


@every_database
def test_ids_of_all_kinds_are_kept_in_the_inbox(embedded, with_inbox):
    ids = ["a", "A", "a ", "ä", "a\x00b", "x" * 300, "x" * 301, "emoji 🚀", "'; DROP TABLE ledger; --", "%s", ":id"]
    embedded.create_topic(TOPIC, queues=1)
    for number, name in enumerate(ids):
        for _ in range(2):
            embedded.send(TOPIC, str(number).encode(), properties={"UNIQ_KEY": name})
    with billing(embedded, with_inbox):
        until_at(embedded, with_inbox, 2 * len(ids))
    assert with_inbox.bodies() == once([str(number) for number in range(len(ids))])


def test_failed_messages_are_not_in_the_inbox(embedded, with_inbox):
    send_twice(embedded, BODIES[:20])
    with billing(embedded, with_inbox, failing(with_inbox, *[ValueError("not now")] * 2)):
        until_all(embedded, with_inbox, BODIES[:20])
    assert with_inbox.bodies() == once(BODIES[:20])


def test_groups_have_inboxes_of_their_own(embedded, with_inbox):
    send_twice(embedded, BODIES[:20])
    for group in ("billing", "audit"):
        wrapped = with_inbox.offsets.exactly_once(with_inbox.book)
        with consuming(embedded, TOPIC, group, wrapped, **EXACTLY_ONCE, offset_store=with_inbox.offsets):
            embedded.wait_until(lambda name=group: with_inbox.offset(name, 0, TOPIC) == 40)
    assert set(with_inbox.bodies().values()) == {2}


@every_database
@pytest.mark.parametrize("count", [1, 100])
def test_old_ids_are_forgotten_however_few_new_ones_come(embedded, with_inbox, count):
    old = int((time.time() - 8 * 86400) * 1000)
    rows = [{"g": g, "id": f"older-{number}", "at": old} for number in range(3000) for g in (GROUP, "another")]
    with with_inbox.engine.begin() as connection:
        connection.execute(text("INSERT INTO pyrocket_inbox VALUES (:g, :id, :at)"), rows)
    send(embedded, BODIES[:count])
    with billing(embedded, with_inbox, commit_interval_s=0.5):
        until_all(embedded, with_inbox, BODIES[:count])
        in_group = "SELECT COUNT(*) FROM pyrocket_inbox WHERE consumer_group = :g"
        embedded.wait_until(lambda: with_inbox.query(in_group, g=GROUP) == [(count,)], 10)
        assert with_inbox.query(in_group, g="another") == [(3000,)]  # it may have another inbox_days


def test_others_that_share_an_id_are_consumed(embedded, with_inbox):
    """Items of a batch at some brokers; a message that was forwarded to another topic of the group."""
    embedded.create_topic(TOPIC, queues=1)
    embedded.create_topic("enriched", queues=1)
    for body in BODIES[:5]:
        embedded.send(TOPIC, body.encode(), properties={"UNIQ_KEY": "one"})
    embedded.send("enriched", b"0", properties={"UNIQ_KEY": "one"})
    with billing(embedded, with_inbox) as (consumer, _):
        consumer.subscribe("enriched", with_inbox.offsets.exactly_once(with_inbox.book))
        until_at(embedded, with_inbox, 5)
        embedded.wait_until(lambda: with_inbox.offset(GROUP, 0, "enriched") == 1)
    assert with_inbox.bodies() == once(BODIES[:5]) + once(["0"])


@every_database
@pytest.mark.parametrize("how", ["member", "store"])
def test_a_reset_consumes_messages_in_the_inbox_again(embedded, with_inbox, how):
    send_twice(embedded, BODIES[:5])
    with billing(embedded, with_inbox) as (consumer, _):
        until_at(embedded, with_inbox, 10)
        with_inbox.execute("DELETE FROM ledger")  # to be created again
        if how == "member":
            consumer.reset_offsets(TOPIC, "earliest")
        else:
            with_inbox.offsets.reset(GROUP, {queue(TOPIC, 0): 0}, int(time.time() * 1000))
        embedded.wait_until(lambda: len(with_inbox.bodies()) == 5)
        until_at(embedded, with_inbox, 10)
    assert with_inbox.bodies() == once(BODIES[:5])


@pytest.mark.databases("sqlite", "postgresql")
def test_ids_are_written_in_a_form_that_every_encoding_has(embedded, with_inbox):
    embedded.create_topic(TOPIC, queues=1)
    embedded.send(TOPIC, b"0", properties={"UNIQ_KEY": "\u03a9 \U0001f680"})
    with billing(embedded, with_inbox):
        until_at(embedded, with_inbox, 1)
    found = with_inbox.query("SELECT message_id FROM pyrocket_inbox")
    found += with_inbox.query("SELECT last_message_id FROM pyrocket_offsets WHERE topic = :t", t=TOPIC)
    assert [name.isascii() for (name,) in found] == [True, True]


# --- witness


def remade(cluster, bodies, queues=1):
    """The topic was deleted, and created again with other messages."""
    cluster.delete_topic(TOPIC)
    send(cluster, bodies, queues=queues)


@every_database
def test_a_recreated_topic_is_not_consumed(embedded, ledger, events):
    new = [f"new {number}" for number in range(40)]
    consumed(embedded, ledger, BODIES[:20], queues=1)
    remade(embedded, new)
    embedded.create_topic("others", queues=1)
    embedded.send("others", b"other")
    with billing(embedded, ledger, on_event=events, start_wait_s=0.1) as (consumer, _):
        consumer.subscribe("others", ledger.offsets.exactly_once(ledger.book))
        event = events.wait_for("log-diverged")
        assert event.facts["offset"] == 19 and event.queue == queue(TOPIC, 0)
        until_all(embedded, ledger, [*BODIES[:20], "other"])  # everything else continues
        assert ledger.bodies() == once([*BODIES[:20], "other"])
        assert len(events.of("log-diverged")) == 1
        ledger.offsets.reset(GROUP, {queue(TOPIC, 0): 0}, reset_epoch=1)  # the decision of an operator
        until_all(embedded, ledger, [*BODIES[:20], "other", *new])
    assert ledger.bodies() == once([*BODIES[:20], "other", *new])


def test_a_log_that_was_cut_is_not_consumed(embedded, ledger, events):
    consumed(embedded, ledger, BODIES[:20], queues=1)
    remade(embedded, [f"new {number}" for number in range(10)])
    with billing(embedded, ledger, on_event=events, start_wait_s=0.1):
        assert "it ends at 10, and 19 was the last consumed" in events.wait_for("log-diverged").text
    assert ledger.bodies() == once(BODIES[:20])


def test_a_changed_log_is_consumed_if_the_store_allows_it(embedded, database, events):
    new = [f"new {number}" for number in range(40)]
    with ledger_in(database, on_divergence="continue") as ledger:
        consumed(embedded, ledger, BODIES[:20], queues=1)
        remade(embedded, new)
        with billing(embedded, ledger, on_event=events):
            events.wait_for("log-diverged")
            until_all(embedded, ledger, [*BODIES[:20], *new[20:]])
        assert ledger.bodies() == once([*BODIES[:20], *new[20:]])


def test_expired_messages_do_not_make_another_log(embedded, ledger, events):
    consumed(embedded, ledger, BODIES[:20], queues=1)
    send(embedded, [f"later {number}" for number in range(20)], queues=1)
    embedded.broker("broker-a").delete_before(TOPIC, 0, 30)
    with billing(embedded, ledger, on_event=events):
        until_at(embedded, ledger, 40)
    assert not events.of("log-diverged")
    assert ledger.bodies() == once([*BODIES[:20], *(f"later {number}" for number in range(10, 20))])


@every_database
def test_the_table_may_have_a_name_of_its_own(embedded, database):
    with ledger_in(database, table="billing_offsets", inbox_days=1) as ledger:
        consumed(embedded, ledger, BODIES[:20])
        ledger.offsets.create_tables()  # they exist
        assert ledger.query("SELECT COUNT(*) FROM billing_offsets_inbox") == [(20,)]


@contextmanager
def while_it_runs(embedded, ledger, events):
    """Twenty messages were consumed, and the consumer continues."""
    send(embedded, BODIES[:20], queues=1)
    with billing(embedded, ledger, on_event=events, call_timeout_s=3.0, rebalance_interval_s=1.0):
        until_all(embedded, ledger, BODIES[:20])
        yield


@pytest.mark.parametrize("new", [3, 10])
def test_a_fail_over_during_consumption_skips_nothing(embedded, ledger, events, new):
    """The new master lacks the last five messages. Producers have stored others there before the member asks."""
    broker = embedded.broker("broker-a")
    with while_it_runs(embedded, ledger, events):
        broker.kill()
        broker.truncate(TOPIC, 0, 15)
        broker.on(RequestCode.PULL_MESSAGE, drop, times=None)
        broker.start()
        embedded.send(TOPIC, lambda number: b"new %d" % number, count=new)
        broker.clear_faults()
        event = events.wait_for("log-diverged", timeout_s=60)
        assert event.queue == queue(TOPIC, 0)
        assert ledger.offset(GROUP, 0, TOPIC) == 20
    assert ledger.bodies() == once(BODIES[:20])


def test_a_topic_that_is_recreated_while_consumed_is_stopped(embedded, ledger, events):
    with while_it_runs(embedded, ledger, events):
        remade(embedded, ["new"])
        events.wait_for("log-diverged", timeout_s=60)
    assert ledger.bodies() == once(BODIES[:20])


def test_a_broker_that_was_down_and_lost_nothing_continues(embedded, ledger, events):
    broker = embedded.broker("broker-a")
    with while_it_runs(embedded, ledger, events):
        broker.kill()
        broker.start()
        embedded.send(TOPIC, b"new")
        until_all(embedded, ledger, [*BODIES[:20], "new"])
    assert ledger.bodies() == once([*BODIES[:20], "new"])
    assert not events.of("log-diverged") and not events.of("queue-fenced")


def test_a_log_that_only_ends_earlier_is_consumed(embedded, ledger, events):
    """The lost messages do not matter, because the last consumed message is still there."""
    broker = embedded.broker("broker-a")
    embedded.create_topic(TOPIC, queues=1)
    for number in range(20):
        embedded.send(TOPIC, str(number).encode(), tags="ours" if number < 10 else "others")
    wrapped = ledger.offsets.exactly_once(ledger.book)
    options = {**EXACTLY_ONCE, "call_timeout_s": 3.0, "rebalance_interval_s": 1.0}
    with consuming(embedded, TOPIC, GROUP, wrapped, "ours", **options, offset_store=ledger.offsets, on_event=events):
        until_at(embedded, ledger, 20)
        broker.kill()
        broker.truncate(TOPIC, 0, 15)
        broker.start()
        events.wait_for("offset-corrected", timeout_s=60)
        embedded.send(TOPIC, b"10", tags="ours")
        until_all(embedded, ledger, BODIES[:11])
    assert ledger.bodies() == once(BODIES[:11])
    assert not events.of("log-diverged")
