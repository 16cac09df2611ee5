"""H09: what has not been consumed is never committed past, whatever the broker says about the end of the queue."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pyrocket_consumer import Message
from pyrocket_consumer.testing import answer
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import Seen, numbered, until
from tests.hazards.members import Kind, committed_values, faulty, give_time_to, of, ours
from tests.hazards.naive import NaiveMember, Window
from tests.resetting import queue


class StoresWhatNoNewMessageSays(NaiveMember):
    """Stores the next offset of "no new message" although messages are with the listener."""

    def on_nothing_found(self, window: Window, next_offset: int) -> None:
        super().on_nothing_found(window, next_offset)
        self.offsets[window.queue] = next_offset


def no_commit_past_what_is_unfinished(
    cluster: Any, names: Any, member: Kind, code: int = 19, **options: object
) -> None:
    """Messages 0 to 9 are with the listener, and the broker says twice that there is nothing more."""
    topic, group = names.topic(), names.group()
    cluster.create_topic(topic, queues=1)
    for body in numbered(10):
        cluster.send(topic, body)
    broker, at_end = cluster.broker("broker-a"), of(topic, queueOffset=10)
    nothing = answer(code, None, {"nextBeginOffset": "10", "minOffset": "0", "maxOffset": "10"})
    broker.on(RequestCode.PULL_MESSAGE, nothing, times=2, when=at_end)
    first, others = threading.Event(), threading.Event()

    def listener(message: Message) -> None:
        (first if message.queue_offset < 3 else others).wait(30)

    def commits_while_blocked() -> list[int]:
        give_time_to(lambda: any(offset for _, offset in committed_values(broker, topic)), member)
        return [offset for _, offset in committed_values(broker, topic) if offset > 0]

    with member(cluster, topic, group, Seen(listener), **options) as consumer:
        try:
            consumer.seen.wait_for(1 if options.get("orderly") else 10)
            broker.wait_for(RequestCode.PULL_MESSAGE, 3, when=at_end)
            assert not (past := commits_while_blocked()), f"{past} was committed while the listener has all messages"
            others.set()
            assert not (past := commits_while_blocked()), f"{past} was committed while the listener has 0, 1 and 2"
            first.set()
            if options.get("auto_commit", True):
                until(lambda: consumer.stored() == {queue(topic, 0): 10}, "all is committed")
            else:
                consumer.seen.wait_for(10)
                assert not (past := commits_while_blocked()), f"{past} was committed, but not by the listener"
        finally:
            first.set()
            others.set()


@pytest.mark.hazard("H09")
@pytest.mark.parametrize("code", [19, 20], ids=["no-new", "no-matched"])
@pytest.mark.parametrize(
    "member", [ours, faulty(StoresWhatNoNewMessageSays, "was committed while the listener has all")]
)
def test_nothing_is_committed_past_messages_that_are_with_the_listener(
    embedded: Any, names: Any, code: int, member: Any
):
    """The commit offset is the lower edge of what is unfinished; "no new message" moves it in an empty window only.

    Faulty: Go stored the next offset of such an answer at once.
    """
    no_commit_past_what_is_unfinished(embedded, names, member, code)


@pytest.mark.hazard("H09")
@pytest.mark.parametrize("auto_commit", [True, False])
@pytest.mark.parametrize(
    "member", [ours, faulty(StoresWhatNoNewMessageSays, "was committed while the listener has all")]
)
def test_nor_in_order(embedded: Any, names: Any, auto_commit: bool, member: Any):
    """The same holds for orderly consumers, and what their listener has not committed counts as unfinished.

    Faulty: C++ had to fix the same mistake a second time, for orderly consumers.
    """
    options = {"orderly": True, "auto_commit": auto_commit}
    no_commit_past_what_is_unfinished(embedded, names, member, **options)


@pytest.mark.hazard("H09")
def test_the_naive_member_is_right(embedded: Any, names: Any):
    """What the faulty ones are made of passes: it is the fault that the check finds."""
    no_commit_past_what_is_unfinished(embedded, names, NaiveMember)
    no_commit_past_what_is_unfinished(embedded, names, NaiveMember, orderly=True)
