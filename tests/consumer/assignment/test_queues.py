"""H21, H39, H47: queues that are assigned and given up: their start offsets, their names, and their other owners."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.offsets import MemoryOffsetStore
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, answer, close_connection, drop, garbage
from tests.consumer.orders import GROUP, QUEUE, TOPIC, Orders, ours_and, request_matcher
from tests.consuming import WAIT_S, numbered, until
from tests.hazards.members import committed_values, faulty, ours, pulled_offsets
from tests.hazards.naive import NaiveMember
from tests.hazards.other_members import STRANGER, DropsWithoutStoring, members_of
from tests.resets import fill, queue

MEMBERS, PULL = RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.PULL_MESSAGE
ASK = RequestCode.QUERY_CONSUMER_OFFSET
NEVER_S = 3600.0


# --- the start offset of a queue


class TakesErrorsForNone(NaiveMember):
    """Java up to 4.9 (error responses) and C++ (also no response): every error means "no offset"."""

    def read_stored(self, queue: MessageQueue) -> int | None:
        try:
            return super().read_stored(queue)
        except (OSError, ValueError, KeyError):
            return None


TROUBLE = {
    "system error": answer(1, "boom"),
    "busy": answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"),
    "message illegal": answer(13, "no"),
    "no answer": drop,
    "connection closed": close_connection,
    "no offset in the answer": answer(0),
    "garbage": garbage(b"\0" * 40),
}


def begins_at(embedded: EmbeddedCluster, member: Any, what: str, stored: int | None, first: int) -> None:
    orders, broker = Orders(embedded, messages=10), embedded.broker("broker-a")
    if stored is not None:
        broker.commit(GROUP, TOPIC, {0: stored})
    orders.on(ASK, TROUBLE[what], times=2)
    options = {"call_timeout_s": 1.0} if TROUBLE[what] is drop else {}  # only a missing response should reach it
    with member(embedded, TOPIC, GROUP, consume_from="last", rebalance_interval_s=0.1, **options) as consumer:
        broker.wait_for(PULL, timeout_s=WAIT_S, when=request_matcher())
        orders.fill(1, 10)
        consumer.seen.wait(lambda seen: b"m10" in seen.bodies)
        started = pulled_offsets(broker, TOPIC)[0][1]
        assert started == first, f"began at {started} after {what}, {stored} was stored"
        assert sum(request_matcher()(each.command) for each in broker.requests(ASK)) == 3
        until(lambda: consumer.stored() == {QUEUE: 11}, "committed")
        assert min(offset for _, offset in committed_values(broker, TOPIC)) >= first


@pytest.mark.hazard("H21")
@pytest.mark.parametrize(
    ("member", "what"),
    [
        *(pytest.param(ours, what, id=what) for what in TROUBLE),
        *((NaiveMember, what) for what in ("system error", "no answer", "connection closed")),
        *(faulty(TakesErrorsForNone, "began at 10", what) for what in TROUBLE),
    ],
)
def test_an_error_does_not_count_as_no_stored_offset(embedded, member, what):
    """The consumer pulls a queue only when its stored offset is known. After an error, an invalid response or none, it
    repeats the request. Only the broker's "not found" makes `consume_from` decide.

    Faulty: Java up to 4.9 for error responses, C++ for every failure.
    """
    begins_at(embedded, member, what, stored=7, first=7)


@pytest.mark.hazard("H21")
def test_not_found_after_an_error_means_no_offset(embedded):
    """If the broker finally returns "not found", the rule for new groups applies."""
    begins_at(embedded, ours, "system error", stored=None, first=10)


# --- lists of members


class AnEmptyPlaceIsEmpty(DropsWithoutStoring):
    """Drops everything when it is missing in the list of members."""

    def allocate(self, topic: str) -> list[MessageQueue]:
        return super().allocate(topic) if self.client_id in self.members(topic) else []


LISTS = {
    "all except this member": [STRANGER],
    "another one": [STRANGER, "us"],
    "several": [STRANGER, "0.0.0.0@1", "us"],
}


@pytest.mark.hazard("H39")
@pytest.mark.parametrize(
    ("member", "which"),
    [
        *(pytest.param(ours, which, id=which) for which in LISTS),
        (NaiveMember, "another one"),
        *(faulty(AnEmptyPlaceIsEmpty, "messages were consumed again", which) for which in LISTS),
    ],
)
def test_a_wrong_list_of_members_repeats_nothing(embedded, broker, member, which):
    """If a list of members takes queues away, right or wrong, the offsets are stored first, and nothing is repeated.

    Faulty: a member that is missing in a list drops everything without storing offsets.
    """
    # For a while the broker does not name this member, or names members that do not exist.
    orders = Orders(embedded, queues=2)
    with member(embedded, TOPIC, GROUP, commit_interval_s=NEVER_S, rebalance_interval_s=0.1) as consumer:
        orders.fill(10)
        consumer.seen.wait_for(10)
        until(lambda: consumer.held() == {queue(TOPIC, 0): 5, queue(TOPIC, 1): 5}, "consumed")
        listed = members_of(*(consumer.client_id if each == "us" else each for each in LISTS[which]))
        broker.forget_requests()
        broker.on(MEMBERS, listed, times=None)
        broker.wait_for(MEMBERS, 8, WAIT_S)  # some rounds, each for two topics
        until(lambda: isinstance(consumer, NaiveMember) or len(consumer.held()) < 2, "queues are given up")
        broker.clear_faults()
        until(lambda: len(consumer.held()) == 2, "they are assigned again")
        orders.fill(10, 10)
        consumer.seen.wait_for(20)
        again = [body for body in numbered(20) if consumer.seen.bodies.count(body) > 1]
        assert not again, f"{len(again)} messages were consumed again"


class LeavesAGhost(NaiveMember):
    """Unregisters, but its threads continue, and the next rebalance round joins the group again."""

    def members(self, topic: str) -> list[str]:
        try:
            return super().members(topic)
        except OSError:
            return []

    def close(self) -> None:
        self.leave()

    def __exit__(self, *exc_info: object) -> None:
        super().close()


@pytest.mark.hazard("H39")
@ours_and(NaiveMember, faulty(LeavesAGhost, "a closed member is in the group again"))
def test_a_closed_member_leaves_no_ghost(cluster, topic, group, member):
    """After close() a consumer runs no thread, and sends no heartbeat or commit.

    Faulty: Java before 4.9.1, closed just after its start, continued to commit for days.
    """
    cluster.create_topic(topic, queues=1)
    fill(cluster, topic, 5)
    with member(cluster, topic, group, rebalance_interval_s=0.1) as consumer:
        consumer.seen.wait_for(5)
        consumer.close()
        with suppress(AssertionError):
            until(lambda: consumer.client_id in cluster.members(group), "a ghost", 1.0)
        assert consumer.client_id not in cluster.members(group), "a closed member is in the group again"


# --- names of brokers

LOGICAL = "__syslo__global__"
"""A broker name in the form of logical queues."""


class TranslatesNames(MemoryOffsetStore):
    """Keeps offsets under the physical name that belongs to a logical one."""

    def update_offset(self, mq: MessageQueue, offset: int, increase_only: bool = False) -> None:
        super().update_offset(dataclasses.replace(mq, broker_name=mq.broker_name.strip("_")), offset, increase_only)


@pytest.mark.hazard("H47")
@pytest.mark.parametrize("faulty_store", [None, faulty(TranslatesNames, "kept under")])
def test_offsets_are_kept_under_the_unchanged_broker_name(names, tmp_path, faulty_store):
    """The consumer does not translate a broker name for its store, also if it has the prefix of logical queues.

    Faulty: a store that translates logical queues, and so depends on a mapping that may change.
    """
    store = faulty_store() if faulty_store else None
    options = {"offset_store": store} if store else {"offset_store_dir": tmp_path}
    with EmbeddedCluster(brokers=[LOGICAL], long_poll_tick_s=0.1) as cluster:
        Orders(cluster, queues=2, messages=6)
        with ours(cluster, TOPIC, GROUP, message_model="broadcasting", **options) as consumer:
            consumer.seen.wait_for(6)

            def stored() -> dict[MessageQueue, int]:
                return store.clone_offset_table() if store else consumer.stored()

            until(lambda: sum(stored().values()) == 6, "stored")
            kept = {each.broker_name for each in stored()}
            assert kept == {LOGICAL}, f"kept under {kept}"
