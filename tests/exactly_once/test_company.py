"""Members of other clients in a group whose offsets are in a database."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import Events, consuming
from tests.exactly_once.ledgers import ledger_in, once
from tests.exactly_once.test_exactly_once import BODIES, GROUP, TOPIC, billing, send, until_all
from tests.hazards.naive import NaiveMember

pytestmark = pytest.mark.databases("sqlite")


@pytest.fixture
def foreigner(embedded):
    send(embedded, [])
    member = NaiveMember(embedded, TOPIC, GROUP, client_ip="127.0.0.9", orderly=True)
    member.start()
    yield member
    member.close()


def test_a_group_with_a_member_of_another_client_is_refused(embedded, ledger, foreigner):
    with pytest.raises(ConfigError, match=f"members of another client.*{foreigner.client_id}.*allow_foreign_members"):
        billing(embedded, ledger).__enter__()
    assert ledger.query("SELECT * FROM pyrocket_offsets") == []


def test_it_is_not_if_it_shall_not_be_and_then_brokers_lock_queues(embedded, database, foreigner):
    with ledger_in(database, allow_foreign_members=True) as ledger, billing(embedded, ledger) as (consumer, _):
        embedded.wait_until(lambda: len([each for each in consumer.progress() if each.topic == TOPIC]) == 2)
        locks = embedded.broker("broker-a").locks(GROUP)
        assert {owner for queue, owner in locks.items() if queue in consumer.progress()} == {consumer.client_id}


def test_a_group_with_a_member_that_has_no_database_is_refused(embedded, ledger):
    """As in a rolling deployment that moves a group into the database."""
    send(embedded)
    with consuming(embedded, TOPIC, GROUP, orderly=True) as (former, seen):
        seen.wait_for(len(BODIES))
        with pytest.raises(ConfigError, match=f"{former.client_id}.*not in a database.*allow_foreign_members"):
            billing(embedded, ledger).__enter__()
    assert ledger.query("SELECT * FROM pyrocket_offsets") == []
    with billing(embedded, ledger):
        until_all(embedded, ledger)


@pytest.mark.parametrize("kind", ["another client", "no database"])
def test_one_that_comes_later_is_told_once(embedded, ledger, kind):
    send(embedded)
    events = Events()
    with billing(embedded, ledger, on_event=events, rebalance_interval_s=0.2) as (consumer, _), ExitStack() as stack:
        until_all(embedded, ledger)
        if kind == "another client":
            member = NaiveMember(embedded, TOPIC, GROUP, client_ip="127.0.0.9", orderly=True)
            member.start()
            stack.callback(member.close)
        else:
            member, _ = stack.enter_context(consuming(embedded, TOPIC, GROUP, orderly=True, instance_name="late"))
        event = events.wait_for("foreign-member")
        assert member.client_id in event.text
        assert "stop" in event.text
        looks = len(embedded.broker("broker-a").requests(RequestCode.GET_CONSUMER_CONNECTION_LIST))
        embedded.wait_until(
            lambda: len(embedded.broker("broker-a").requests(RequestCode.GET_CONSUMER_CONNECTION_LIST)) > looks + 3
        )
    assert len(events.of("foreign-member")) == 1


def test_without_others_no_broker_locks_anything(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
        assert embedded.broker("broker-a").locks(GROUP) == {}


def test_members_of_ours_are_welcome(embedded, ledger):
    send(embedded)
    with billing(embedded, ledger, instance_name="one"), billing(embedded, ledger, instance_name="two"):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
