"""H01: the answer to a pull from before a reset is nobody's any more."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from pyrocket_consumer import Message
from pyrocket_consumer.wire.codes import RequestCode
from pyrocket_consumer.wire.frame import RemotingCommand
from pyrocket_consumer.wire.message import StoredMessage, decode_messages, encode_message
from tests.consuming import Seen, numbered, until
from tests.hazards.members import Held, Kind, committed_values, faulty, give_time_to, of, ours, tell_members
from tests.hazards.naive import NaiveMember, Window
from tests.resetting import fill, queue

ANSWERS = {"found": 0, "no-new": 19, "no-matched": 20, "offset-moved": 21}


class BelievesLateAnswers(NaiveMember):
    """Java and Go: these branches do not look whether the window was dropped, and acks only ever raise the offset."""

    def on_pull_answer(self, window: Window, answer: RemotingCommand) -> None:
        if not window.dropped or self.closing.is_set():
            super().on_pull_answer(window, answer)
            return
        next_offset = int(answer.fields["nextBeginOffset"])
        if answer.code == 0:  # neither Java nor Go: here the messages of the answer are consumed
            for message in decode_messages(answer.body, window.queue):
                self.tasks.put((self.windows[window.queue], message))
        elif answer.code == 21:
            self.offsets[window.queue] = next_offset
            self.windows[window.queue].dropped = True
        else:  # the old window was emptied, so that it seems to have nothing unfinished
            self.offsets[window.queue] = max(next_offset, self.offsets.get(window.queue, 0))

    def acked(self, window: Window, message: Message) -> None:
        before = self.offsets.get(window.queue, 0)
        super().acked(window, message)
        self.offsets[window.queue] = max(before, self.offsets[window.queue])


def a_late_answer_changes_nothing(cluster: Any, names: Any, member: Kind, what: str) -> None:
    """A pull waits at 20; a reset to 5 comes; the replay is at 10 when the pull is answered after all."""
    topic, group = names.topic(), names.group()
    place, held, go_on, end = queue(topic, 0), Held(), threading.Event(), threading.Event()
    cluster.create_topic(topic, queues=1)
    fill(cluster, topic, 20)
    broker = cluster.broker("broker-a")
    broker.on(RequestCode.PULL_MESSAGE, held, when=of(topic, queueOffset=20))
    times: Counter[int] = Counter()

    def listener(message: Message) -> None:
        times[message.queue_offset] += 1
        if times[message.queue_offset] == 2:
            (go_on if message.queue_offset < 10 else end).wait(30)

    with member(cluster, topic, group, Seen(listener)) as consumer:
        try:
            consumer.seen.wait_for(20)
            held.wait()
            until(lambda: consumer.stored() == {place: 20}, "consumed")
            tell_members(broker, group, {place: 5})
            consumer.seen.wait(lambda seen: len(seen.bodies) == 35)
            fields = {"nextBeginOffset": 30, "minOffset": 0, "maxOffset": 30, "suggestWhichBrokerId": 0}
            stray = encode_message(StoredMessage(topic=topic, body=b"stray", queue_offset=20))
            held.answer(ANSWERS[what], None, fields, stray if what == "found" else b"")
            give_time_to(lambda: b"stray" in consumer.seen.bodies or (0, 30) in committed_values(broker, topic), member)
            go_on.set()
            until(lambda: consumer.stored()[place] >= 10, "5 to 9 are consumed again")
            assert consumer.stored() == {place: 10}, f"{consumer.stored()} stored by an answer from before the reset"
            end.set()
            until(lambda: consumer.stored() == {place: 20}, "all is consumed again")
            commits = [offset for _, offset in committed_values(broker, topic)]
            assert max(commits) == 20
            fill(cluster, topic, 1, start=20)
            consumer.seen.wait_for(21)
            assert Counter(consumer.seen.bodies) == Counter(numbered(21) + numbered(15, 5)), (
                "messages of an answer from before the reset were consumed"
            )
        finally:
            go_on.set()
            end.set()


@pytest.mark.hazard("H01")
@pytest.mark.parametrize("what", ANSWERS)
@pytest.mark.parametrize("member", [ours, faulty(BelievesLateAnswers, "from before the reset")])
def test_the_answer_of_a_pull_from_before_a_reset_changes_nothing(
    embedded: Any, names: Any, what: str, member: Any
) -> None:
    """Each period of a queue has a window of its own: what comes late for an ended one reaches neither store nor pull
    loop, whatever the answer says.

    Faulty: Java and Go take "no new message", "no matched message" and corrections without looking whether the queue
    was dropped.
    """
    a_late_answer_changes_nothing(embedded, names, member, what)


@pytest.mark.hazard("H01")
def test_the_naive_member_is_right(embedded: Any, names: Any) -> None:
    a_late_answer_changes_nothing(embedded, names, NaiveMember, "no-new")
