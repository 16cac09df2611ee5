"""H05: where a queue that comes back goes on: memory counts before the file, and is kept until the file has it."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue
from tests.consuming import until
from tests.hazards.members import broadcasting, faulty, full_disk, give_time_to, ours
from tests.hazards.naive import NaiveMember
from tests.resetting import queue

CLUSTER = {"brokers": 2}


class ReadsTheFile(NaiveMember):
    """Java before 5.2: a queue that is given up is not persisted, and one that comes begins where the file says."""

    def drop(self, queue: MessageQueue) -> None:
        self.windows.pop(queue).dropped = True
        self.offsets.pop(queue, None)


class ForgetsWhatItCouldNotWrite(NaiveMember):
    """Java from 5.2 on: a queue that is given up is persisted, and forgotten even if that failed."""

    def drop(self, queue: MessageQueue) -> None:
        super().drop(queue)
        self.offsets.pop(queue, None)


@pytest.mark.hazard("H05")
@pytest.mark.parametrize(
    ("member", "is_full"),
    [
        (ours, False),
        (ours, True),
        faulty(ReadsTheFile, "messages were consumed again", False),
        faulty(ForgetsWhatItCouldNotWrite, "messages were consumed again", True),
    ],
)
def test_a_queue_that_comes_back_goes_on_where_it_was(embedded, names, member, tmp_path, is_full):
    """A queue is persisted before it is forgotten, and stays in memory while that fails; memory counts before the file.

    Faulty: Java before 5.2 reads the file, which is as old as the timer; later ones forget what they could not write.
    """
    # A broker's route is gone for a while, and the timer that persists has not run
    topic, group = names.topic(), names.group()
    place, broker = queue(topic, 0, "broker-b"), embedded.broker("broker-b")
    embedded.create_topic(topic, queues=1)
    embedded.send(topic, b"early", count=20, broker_name="broker-b")
    with member(embedded, topic, group, **broadcasting(tmp_path, commit_interval_s=3600)) as consumer:
        consumer.seen.wait(lambda seen: len(seen.messages) == 20)
        until(lambda: consumer.held().get(place) == 20, "all consumed")
        with full_disk() if is_full else nullcontext():
            embedded.call(lambda: embedded.unregister(broker))
            until(lambda: place not in consumer.held(), "the queue is gone")
            embedded.call(lambda: embedded.register(broker))
            until(lambda: place in consumer.held(), "the queue is back")
            embedded.send(topic, b"late", count=5, broker_name="broker-b")
            consumer.seen.wait(lambda seen: seen.bodies.count(b"late") == 5)
            give_time_to(lambda: consumer.seen.bodies.count(b"early") > 20, member)
        times = Counter(consumer.seen.bodies)
        assert times[b"early"] == 20, f"{times[b'early'] - 20} messages were consumed again"
        assert times[b"late"] == 5


@pytest.mark.hazard("H05")
def test_the_naive_member_is_right(embedded: Any, names: Any, tmp_path: Path) -> None:
    test_a_queue_that_comes_back_goes_on_where_it_was(embedded, names, NaiveMember, tmp_path, True)
