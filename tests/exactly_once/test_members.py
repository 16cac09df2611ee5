"""Members of other clients in a group whose offsets are in a database."""

import json
import logging
from contextlib import ExitStack

import pytest
from sqlalchemy import create_engine

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer, drop
from tests.consuming import consuming
from tests.exactly_once.booking import billing, refused, send, until_all
from tests.exactly_once.ledgers import BODIES, EXACTLY_ONCE, GROUP, TOPIC, ledger_in, once
from tests.hazards.naive import NaiveMember

pytestmark = pytest.mark.databases("sqlite")

WHO, HOW = RequestCode.GET_CONSUMER_CONNECTION_LIST, RequestCode.GET_CONSUMER_RUNNING_INFO
MAX_MEMBERS_PER_CHECK = 200
"""In one check."""


def list_members(count, language, name="m{}"):
    """A fault: the broker lists `count` members, and does not know them when a request must be relayed to them."""
    member = {"clientAddr": "1.1.1.1:1", "language": language, "version": 435}
    text = {
        "connectionSet": [{**member, "clientId": name.format(number)} for number in range(count)],
        "subscriptionTable": {},
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
    }
    return answer(0, "", {}, json.dumps(text).encode())


def late(cluster):
    """A member of this library that joins later, without a database."""
    return consuming(cluster, TOPIC, GROUP, orderly=True, instance_name="late")


def is_refused(cluster, ledger, match):
    """Check that a member that books does not start, and return the error text."""
    return refused(billing(cluster, ledger), match, ConfigError)


def wait_for_checks(cluster, times):
    """Wait until the member list was requested this often again."""
    checks = count_requests(cluster, WHO)
    cluster.wait_until(lambda: count_requests(cluster, WHO) > checks + times)


def count_requests(cluster, code):
    return len(cluster.broker("broker-a").requests(code))


@pytest.fixture
def foreigner(embedded):
    send(embedded, [])
    member = NaiveMember(embedded, TOPIC, GROUP, client_ip="127.0.0.9", orderly=True)
    member.start()
    yield member
    member.close()


@pytest.mark.parametrize("fault", [None, answer(1, "busy")], ids=["at once", "late"])
def test_a_group_with_a_member_of_another_client_is_refused(embedded, ledger, foreigner, fault):
    if fault is not None:
        embedded.broker("broker-a").on(WHO, fault)
    is_refused(embedded, ledger, f"members of another client.*allow_foreign_members.*{foreigner.client_id}")
    assert ledger.offsets.offsets(GROUP) == []


def test_foreign_members_may_be_allowed_and_brokers_lock(embedded, database, foreigner):
    with ledger_in(database, allow_foreign_members=True) as ledger, billing(embedded, ledger) as (consumer, _):
        embedded.wait_until(lambda: len([each for each in consumer.progress() if each.topic == TOPIC]) == 2)
        locks = embedded.broker("broker-a").locks(GROUP)
        assert {owner for queue, owner in locks.items() if queue in consumer.progress()} == {consumer.client_id}


@pytest.mark.parametrize("fault", [None, drop, answer(1, "busy")], ids=["heard", "lost", "busy"])
def test_a_member_that_has_no_database_is_refused(embedded, ledger, fault):
    """As in a rolling deployment that moves a group into the database."""
    send(embedded)
    with consuming(embedded, TOPIC, GROUP, orderly=True) as (former, seen):
        seen.wait_for(len(BODIES))
        if fault is not None:  # its first response is lost
            embedded.broker("broker-a").on(HOW, fault)
        is_refused(embedded, ledger, f"allow_foreign_members.*{former.client_id}.*not in a database")
    assert ledger.offsets.offsets(GROUP) == []
    with billing(embedded, ledger):
        until_all(embedded, ledger)


def test_a_later_member_of_another_client_is_reported_once(embedded, ledger, events):
    send(embedded)
    with billing(embedded, ledger, on_event=events, rebalance_interval_s=0.2), ExitStack() as stack:
        until_all(embedded, ledger)
        member = NaiveMember(embedded, TOPIC, GROUP, client_ip="127.0.0.9", orderly=True)
        member.start()
        stack.callback(member.close)
        event = events.wait_for("foreign-member")
        assert member.client_id in event.text and "stop" in event.text
        wait_for_checks(embedded, 3)
    assert len(events.of("foreign-member")) == 1


def test_a_broker_without_a_member_list_delays_no_start(embedded, ledger, caplog):
    caplog.set_level(logging.WARNING)
    send(embedded)
    embedded.broker("broker-a").on(WHO, answer(1, "busy"), times=None)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    (line,) = [record.getMessage() for record in caplog.records if "not known" in record.getMessage()]
    assert "broker-a" in line and "busy" in line


def test_a_foreign_member_unknown_at_the_start_is_reported_later(embedded, ledger, events, caplog):
    """A start does not wait for silent members, because one hanging member would stop the whole group."""
    caplog.set_level(logging.WARNING)
    send(embedded)
    broker = embedded.broker("broker-a")
    broker.on(HOW, answer(1, "busy"), times=None)
    with (
        consuming(embedded, TOPIC, GROUP, orderly=True) as (former, _),
        billing(embedded, ledger, on_event=events, rebalance_interval_s=0.2),
    ):
        (line,) = [record.getMessage() for record in caplog.records if "not known" in record.getMessage()]
        assert former.client_id in line and "busy" in line
        wait_for_checks(embedded, 20)
        assert events.of("foreign-member") == []
        assert count_requests(embedded, HOW) < count_requests(embedded, WHO) / 2, "at growing intervals"
        broker.clear_faults()
        assert former.client_id in events.wait_for("foreign-member").text
        known = count_requests(embedded, HOW)
        wait_for_checks(embedded, 5)
        assert count_requests(embedded, HOW) == known, "known members get no further request"
    assert len(events.of("foreign-member")) == 1


@pytest.mark.parametrize("fault", [None, drop, answer(1, "busy")], ids=["heard", "lost", "busy"])
def test_a_later_member_without_a_database_is_reported_once(embedded, ledger, events, fault):
    send(embedded)
    with billing(embedded, ledger, on_event=events, rebalance_interval_s=0.2):
        if fault is not None:
            embedded.broker("broker-a").on(HOW, fault)
        with late(embedded) as (member, _):
            event = events.wait_for("foreign-member")
            assert member.client_id in event.text and "stop" in event.text
            wait_for_checks(embedded, 5)
    assert len(events.of("foreign-member")) == 1


@pytest.mark.cluster(brokers=2)
def test_a_foreign_member_is_reported_while_a_broker_is_silent(embedded, ledger, events):
    send(embedded)
    with billing(embedded, ledger, on_event=events, rebalance_interval_s=0.2):
        embedded.broker("broker-b").on(WHO, drop, times=None)
        with late(embedded) as (member, _):
            assert member.client_id in events.wait_for("foreign-member").text


def test_a_foreign_member_is_not_reported_again_after_a_silence(embedded, ledger, events):
    send(embedded)
    with billing(embedded, ledger, on_event=events, rebalance_interval_s=0.2), late(embedded):
        events.wait_for("foreign-member")
        embedded.broker("broker-a").on(WHO, answer(1, "busy"), times=3)
        wait_for_checks(embedded, 6)
    assert len(events.of("foreign-member")) == 1


def test_a_refused_start_has_a_short_text_with_the_remedy(embedded, ledger):
    send(embedded, [])
    embedded.broker("broker-a").on(WHO, list_members(5000, "JAVA", "\x1b[31m{}" + "x" * 200), times=None)
    text = is_refused(embedded, ledger, "5000 members of another client.*stop them.*: .*and 4990 more$")
    assert text.isprintable() and len(text) < 3000


def test_an_event_about_many_members_is_short_with_a_remedy(embedded, ledger, events):
    send(embedded, [])
    with billing(embedded, ledger, on_event=events, rebalance_interval_s=0.2):
        embedded.broker("broker-a").on(WHO, list_members(5000, "JAVA", "\x1b[31m{}" + "x" * 200), times=None)
        event = events.wait_for("foreign-member")
    assert "stop them" in event.text and event.text.endswith("and 4990 more")
    assert event.facts["count"] == 5000
    named = event.facts["members"]
    assert len(named) == 10 and all(len(name) < 300 and name.isprintable() for name in named)


def test_a_check_asks_a_limited_number_of_members(embedded, ledger):
    send(embedded, [])
    with billing(embedded, ledger, rebalance_interval_s=0.2):
        checks, before = count_requests(embedded, WHO), count_requests(embedded, HOW)
        embedded.broker("broker-a").on(WHO, list_members(1000, "PYTHON"), times=None)
        embedded.wait_until(lambda: count_requests(embedded, HOW) >= before + 1000)
        assert count_requests(embedded, HOW) - before <= MAX_MEMBERS_PER_CHECK * (
            count_requests(embedded, WHO) - checks
        )
        requests = embedded.broker("broker-a").requests(HOW)[before : before + 1000]
        assert len({request.command.fields["clientId"] for request in requests}) == 1000, "each member is checked"


def test_members_with_the_same_database_are_welcome_without_locks(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger, instance_name="one"), billing(embedded, ledger, instance_name="two"):
        until_all(embedded, ledger)
        assert embedded.broker("broker-a").locks(GROUP) == {}
    assert ledger.bodies() == once(BODIES)


def test_members_with_another_database_are_refused(embedded, ledger, tmp_path):
    embedded.create_topic(TOPIC)
    engine = create_engine(f"sqlite:///{tmp_path}/another.db")
    others = DatabaseOffsets(engine)
    others.create_tables()
    with consuming(embedded, TOPIC, GROUP, others.exactly_once(ledger.book), **EXACTLY_ONCE, offset_store=others):
        is_refused(embedded, ledger, "another database, or table")
    engine.dispose()


def test_a_subscription_of_a_consumer_that_runs_is_refused(embedded, ledger):
    """As in all examples: first `with` the consumer, then the subscription."""
    embedded.create_topic(TOPIC)
    with (
        consuming(embedded, TOPIC, GROUP, orderly=True),
        PushConsumer(GROUP, name_server=embedded.name_server, **EXACTLY_ONCE, offset_store=ledger.offsets) as consumer,
    ):
        with pytest.raises(ConfigError, match="without this database"):
            consumer.subscribe(TOPIC, ledger.offsets.exactly_once(ledger.book))
        assert not consumer.progress()


@pytest.mark.parametrize("store", ["none", "another"])
def test_a_listener_of_another_store_is_refused(ledger, tmp_path, store):
    engine = create_engine(f"sqlite:///{tmp_path}/another.db")
    another = DatabaseOffsets(engine) if store == "another" else None
    consumer = PushConsumer(GROUP, name_server="127.0.0.1:1", orderly=True, offset_store=another)
    with pytest.raises(ConfigError, match="pass that store to the consumer as offset_store"):
        consumer.subscribe(TOPIC, ledger.offsets.exactly_once(ledger.book))
    consumer.close()
    engine.dispose()
