"""Effects exactly once on every kind of broker."""

import pytest

from pyrocket_consumer.admin import Admin
from pyrocket_consumer.errors import ConfigError
from tests.consuming import consuming, until
from tests.exactly_once.booking import refused, send
from tests.exactly_once.ledgers import BODIES, EXACTLY_ONCE, once
from tests.interop.members import java_options

pytestmark = pytest.mark.databases("sqlite")


@pytest.fixture
def topic(names):
    return names.topic()


@pytest.fixture
def group(names):
    return names.group()


@pytest.fixture
def billing(cluster, topic, group, ledger):
    """Creates members of a group that books."""

    def make(**options):
        given = {**EXACTLY_ONCE, "offset_store": ledger.offsets, **options}
        return consuming(cluster, topic, group, ledger.offsets.exactly_once(ledger.book), **given)

    return make


@pytest.fixture
def all_are_booked(ledger):
    def wait(bodies=BODIES):
        until(lambda: sum(ledger.bodies().values()) >= len(bodies), "all are booked")
        assert ledger.bodies() == once(bodies)

    return wait


def test_a_group_continues_and_the_broker_shows_its_offset(cluster, topic, group, billing, all_are_booked):
    send(cluster, topic=topic)
    with billing():
        all_are_booked()
    for body in ("later", "last"):
        cluster.send(topic, body.encode())
    with billing():
        all_are_booked([*BODIES, "later", "last"])
        until(lambda: sum(cluster.committed(group, topic).values()) == 102, "it is published")


def test_members_that_join_and_leave_book_each_message_once(cluster, topic, billing, all_are_booked):
    send(cluster, topic=topic)
    with billing(instance_name="one"), billing(instance_name="two"):
        cluster.send(topic, lambda number: b"a%d" % number, count=40)
        with billing(instance_name="three"):
            cluster.send(topic, lambda number: b"b%d" % number, count=40)
        all_are_booked([*BODIES, *(f"{kind}{number}" for kind in "ab" for number in range(40))])


@pytest.mark.parametrize("running", [True, False])
def test_a_reset_reaches_the_group(cluster, topic, group, ledger, billing, all_are_booked, running):
    send(cluster, queues=1, topic=topic)

    def reset():
        with Admin(name_server=cluster.name_server) as admin:
            assert admin.plan_reset(group, topic, "earliest", store=ledger.offsets).execute().verified

    def all_are_booked_again():
        until(lambda: sum(ledger.bodies().values()) == 200, "all are booked again")
        assert set(ledger.bodies().values()) == {2}

    with billing():
        all_are_booked()
        if running:
            reset()
            all_are_booked_again()
    if not running:
        reset()
        with billing():
            all_are_booked_again()


def test_a_recreated_topic_is_not_consumed(cluster, topic, ledger, events, billing, all_are_booked):
    send(cluster, queues=1, topic=topic)
    with billing():
        all_are_booked()
    cluster.delete_topic(topic)
    send(cluster, [f"new {number}" for number in range(150)], queues=1, topic=topic)
    with billing(on_event=events, start_wait_s=0.1):
        event = events.wait_for("log-diverged")
        assert (event.queue.topic, event.facts["offset"]) == (topic, 99)
    assert ledger.bodies() == once(BODIES)


def test_a_group_with_a_java_member_is_refused(real_cluster, java, topic, group, ledger):
    send(real_cluster, topic=topic)
    with java.consumer(real_cluster.name_server, group, topic, **java_options("a")) as member:
        until(lambda: len(member.messages) >= len(BODIES), "the Java member has all")
        options = {**EXACTLY_ONCE, "offset_store": ledger.offsets}
        made = consuming(real_cluster, topic, group, ledger.offsets.exactly_once(ledger.book), **options)
        refused(made, "members of another client.*JAVA", ConfigError)
    assert ledger.bodies() == {}
