"""H05, H10, H11, H12: the stores of members: where their offsets are, and that memory takes precedence."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue, OffsetStoreLocked, OffsetStoreUnwritable
from pyrocket_consumer.offsets.local.directories import store_directory
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import numbered, until
from tests.hazards.members import broadcasting, faulty, filled, full_disk, give_time_to, ours
from tests.hazards.naive import NaiveMember
from tests.resets import fill, queue

KEPT = "They are kept in memory, and the next persist tries again"


class KeepsOffsetsInTheHomeDirectory(NaiveMember):
    """Go and C++: the directory is in the user's current home directory, and no option changes it."""

    @property
    def file(self) -> Path:
        return store_directory(Path.home() / ".rocketmq_client_go", self.client_id, self.group) / "offsets.json"


@pytest.mark.hazard("H10")
@pytest.mark.parametrize("member", [ours, faulty(KeepsOffsetsInTheHomeDirectory, "sent meanwhile were skipped")])
def test_offsets_are_in_the_configured_directory(embedded, names, member, tmp_path, monkeypatch):
    """`offset_store_dir` or an environment variable names the directory, such as a volume that outlives containers.

    Faulty: Go and C++ keep offsets in the home directory, and lose them with it.
    """
    # Only a volume outlives the container. A consumer without offsets begins at "last".
    topic, group = filled(embedded, names, queues=1, messages=0)
    options = broadcasting(tmp_path / "volume", consume_from="last")
    monkeypatch.setenv("HOME", str(tmp_path / "first-container"))
    with member(embedded, topic, group, **options) as consumer:
        fill(embedded, topic, 5)
        consumer.seen.wait_for(5)
    fill(embedded, topic, 5, start=5)
    monkeypatch.setenv("HOME", str(tmp_path / "second-container"))
    with member(embedded, topic, group, **options) as consumer:
        fill(embedded, topic, 1, start=10)
        consumer.seen.wait(lambda seen: b"m10" in seen.bodies)
        until(lambda: consumer.stored() == {queue(topic, 0): 11}, "consumed")
        missed = set(numbered(5, 5)) - set(consumer.seen.bodies)
        assert not missed, f"{len(missed)} messages sent meanwhile were skipped"


@pytest.mark.hazard("H10")
def test_a_start_reports_whether_it_found_offsets(embedded, names, tmp_path, caplog):
    """The log line of the start names the directory and the offsets found. `progress()` reports where a queue began."""
    topic, group = filled(embedded, names, queues=1, messages=3)
    held_queue = queue(topic, 0)
    caplog.set_level("INFO", "pyrocket_consumer")
    origins, lines = [], []
    for _ in range(2):
        caplog.clear()
        with ours(embedded, topic, group, **broadcasting(tmp_path)) as consumer:
            until(lambda consumer=consumer: consumer.stored() == {held_queue: 3}, "consumed")
            origins.append(consumer.consumer.progress()[held_queue].origin)
            lines += [record.getMessage() for record in caplog.records if "offset store loaded" in record.getMessage()]
    assert origins == ["first start from the first message", "stored"]
    assert len(lines) == 2 and all(str(tmp_path) in line for line in lines), lines
    assert "found=new queues=0" in lines[0] and "queues=1" in lines[1], lines


class HasTheProcessIdInItsDirectory(NaiveMember):
    """Go: the directory's name contains the process id."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "instance_name": f"{os.getpid()}#{time.time_ns()}"})


@pytest.mark.hazard("H11")
@pytest.mark.parametrize("member", [ours, faulty(HasTheProcessIdInItsDirectory, "were consumed again after a restart")])
def test_a_restarted_program_finds_its_offsets(embedded, names, member, tmp_path):
    """The directory's name has no part that changes with each run, such as the process id or a time.

    Faulty: Go puts the process id into it, and starts without offsets after each restart.
    """
    # Start the same program twice on the same machine.
    topic, group = filled(embedded, names, queues=1, messages=5)
    for start in (0, 5):
        with member(embedded, topic, group, **broadcasting(tmp_path)) as consumer:
            fill(embedded, topic, 5, start=start + 5)
            consumer.seen.wait(lambda seen, last=b"m%d" % (start + 9): last in seen.bodies)
            until(lambda consumer=consumer, start=start: consumer.stored() == {queue(topic, 0): start + 10}, "consumed")
    again = set(consumer.seen.bodies) & set(numbered(10))
    assert not again, f"{len(again)} messages were consumed again after a restart"


@pytest.mark.hazard("H11")
@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "is left behind")])
def test_a_changed_address_names_the_directory_left_behind(embedded, names, member, tmp_path):
    """A member with a new store emits `store-orphaned` if another client id of its group has left a store.

    The event names that directory, and `pyrocket offsets adopt` moves its offsets to the new client id.

    Faulty: all others silently start without offsets.
    """
    # The machine has another address after a restart, so the client has another id.
    topic, group = filled(embedded, names, queues=1, messages=5)
    with member(embedded, topic, group, **broadcasting(tmp_path, client_ip="10.0.0.5")) as consumer:
        consumer.seen.wait_for(5)
        left = store_directory(tmp_path, consumer.client_id, group)
    with member(embedded, topic, group, **broadcasting(tmp_path, client_ip="10.0.0.9")) as consumer:
        consumer.seen.wait_for(5)  # it starts without offsets, at the position of `consume_from`
        orphaned = [event for event in consumer.events.of("store-orphaned") if str(left) in event.text]
        assert orphaned, f"no event reports that {left} is left behind"


@pytest.mark.hazard("H12")
@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "two processes write one file")])
def test_two_processes_of_a_host_have_a_store_each(embedded, names, member, tmp_path):
    """A store belongs to one process until it ends. A second process uses the next slot, and both find theirs again.

    Faulty: Java and C++, where both processes are `ip@DEFAULT` and write one file.
    """
    # Restart two consumers of one group on one host, at different offsets of a queue.
    topic, group = filled(embedded, names, queues=1, messages=0)
    held_queue, options = queue(topic, 0), broadcasting(tmp_path)
    with member(embedded, topic, group, **options) as first, member(embedded, topic, group, **options) as second:
        fill(embedded, topic, 10)
        for each in (first, second):
            until(lambda each=each: each.stored() == {held_queue: 10}, "consumed")
            each.pause()
        first.reset(topic, {held_queue: 3})
        second.reset(topic, {held_queue: 7})
        stored = [each.stored()[held_queue] for each in (first, second)]
        assert stored == [3, 7], f"two processes write one file: {stored}"
        assert first.client_id != second.client_id
    with member(embedded, topic, group, **options) as first, member(embedded, topic, group, **options) as second:
        for each, count in ((first, 7), (second, 3)):
            each.seen.wait(lambda seen, count=count: len(seen.messages) == count)
            until(lambda each=each: each.stored() == {held_queue: 10}, "consumed")


@pytest.mark.hazard("H12")
@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "two members write one store")])
def test_a_store_whose_lock_was_removed_has_one_owner(embedded, names, member, tmp_path):
    """An owner regularly checks its lock. If another process has taken the store meanwhile, the owner stops writing.

    It emits `store-taken` and continues to consume, and `close()` raises.

    Faulty: all others lock nothing, or never check the lock again.
    """
    # A cleanup job removes files of a running member, and another process of the host starts.
    topic, group = filled(embedded, names, queues=1, messages=0)
    held_queue, options = queue(topic, 0), broadcasting(tmp_path, client_ip="127.0.0.1")
    with member(embedded, topic, group, **options) as first:
        fill(embedded, topic, 5)
        until(lambda: first.stored() == {held_queue: 5}, "consumed")
        for lock in tmp_path.rglob("offsets.lock"):
            lock.unlink()
        with member(embedded, topic, group, **options) as second:
            assert second.client_id == first.client_id, "its store was free"
            second.pause()
            second.reset(topic, {held_queue: 2})
            fill(embedded, topic, 5, start=5)
            until(lambda: bool(first.events.of("store-taken")) or second.stored() != {held_queue: 2}, "an event")
            assert second.stored() == {held_queue: 2}, "two members write one store"
            fill(embedded, topic, 1, start=10)
            first.seen.wait_for(11)
            first.events.wait_for("commit-failed")
            assert first.held() == {held_queue: 11}, "it continues from memory"
            with pytest.raises(OffsetStoreLocked, match="taken by this process .*offsets.lock"):
                first.close()
            assert second.stored() == {held_queue: 2}
    assert len(first.events.of("store-taken")) == 1


@pytest.mark.hazard("H12")
def test_a_store_removed_under_its_member_is_written_again(embedded, names, tmp_path):
    """If its files are removed, and no other process has taken it, the store writes all offsets again and emits
    `store-removed`.
    """
    topic, group = filled(embedded, names, queues=2, messages=6)
    with ours(embedded, topic, group, **broadcasting(tmp_path / "s")) as consumer:
        until(lambda: sum(consumer.stored().values()) == 6, "consumed")
        before = consumer.stored()
        shutil.rmtree(tmp_path / "s")
        consumer.events.wait_for("store-removed")
        until(lambda: consumer.stored() == before, "the files are written again")
        fill(embedded, topic, 2, start=6)
        until(lambda: sum(consumer.stored().values()) == 8, "consumed")
    assert not consumer.events.of("commit-failed")


def test_an_offset_that_a_closing_member_cannot_store_is_not_kept(embedded, names, tmp_path):
    """Only the event of the store, emitted while it is open, promises that the next persist tries again."""
    topic, group = filled(embedded, names, queues=1, messages=3)
    with ours(embedded, topic, group, **broadcasting(tmp_path, commit_interval_s=3600)) as consumer:
        until(lambda: consumer.held() == {queue(topic, 0): 3}, "consumed")
        with full_disk(), pytest.raises(OffsetStoreUnwritable, match="Messages consumed since the last persist"):
            consumer.close()
        (failed,), (unwritable,) = (consumer.events.of(kind) for kind in ("commit-failed", "store-unwritable"))
    assert failed.text.startswith("final offset not stored, messages may be redelivered: offsets cannot be written to ")
    assert failed.text.endswith("File too large; raise the limit on file sizes")
    assert unwritable.text == f"{failed.text.partition('redelivered: ')[2]}. {KEPT}"


class HasAnEqualClientId(NaiveMember):
    """Java before 4.9, and containers with one address and process id 1: members with equal client ids."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "instance_name": "DEFAULT"})


@pytest.mark.hazard("H12")
@pytest.mark.parametrize("member", [ours, faulty(HasAnEqualClientId, "queues belong to two members")])
def test_members_with_the_same_configuration_share_the_queues(embedded, names, member):
    """Each clustering consumer has its own client id, made from process id and time.

    Faulty: clients whose ids can be equal. Equal ids get the same queues, and no member gets the other queues.
    """
    # Two clustering members with the same configuration.
    topic, group = filled(embedded, names, queues=4, messages=0)
    with member(embedded, topic, group) as first, member(embedded, topic, group) as second:
        until(lambda: len(second.held()) >= 2, "the second has queues")
        until(lambda: len(first.held()) == 2 or set(first.held()) == set(second.held()), "they have settled")
        both = set(first.held()) & set(second.held())
        assert not both, f"{len(both)} queues belong to two members"


@pytest.fixture
def two_brokers() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(brokers=2, long_poll_tick_s=0.1) as cluster:
        yield cluster


class ReadsTheFile(NaiveMember):
    """Java before 5.2: does not persist a queue that it gives up, and starts a new queue at the file's offset."""

    def drop(self, queue: MessageQueue) -> None:
        self.windows.pop(queue).dropped = True
        self.offsets.pop(queue, None)


class ForgetsWhatItCouldNotWrite(NaiveMember):
    """Java from 5.2 on: persists a queue that it gives up, and forgets it even if that failed."""

    def drop(self, queue: MessageQueue) -> None:
        super().drop(queue)
        self.offsets.pop(queue, None)


@pytest.mark.hazard("H05")
@pytest.mark.parametrize(
    ("member", "is_full"),
    [
        (ours, False),
        (ours, True),
        (NaiveMember, True),
        faulty(ReadsTheFile, "messages were consumed again", False),
        faulty(ForgetsWhatItCouldNotWrite, "messages were consumed again", True),
    ],
)
def test_a_queue_that_returns_continues_at_its_offset(two_brokers, names, member, tmp_path, is_full):
    """The store persists a queue before it forgets it, keeps it while that fails, and prefers memory to the file.

    Faulty: Java before 5.2 reads the file, which is as old as the last timer. Later ones forget offsets they could not
    write.
    """
    # A broker's route is missing for a while, and the timer that persists has not run.
    topic, group = names.topic(), names.group()
    held_queue, broker = queue(topic, 0, "broker-b"), two_brokers.broker("broker-b")
    two_brokers.create_topic(topic, queues=1)
    two_brokers.send(topic, b"early", count=20, broker_name="broker-b")
    with member(two_brokers, topic, group, **broadcasting(tmp_path, commit_interval_s=3600)) as consumer:
        consumer.seen.wait(lambda seen: len(seen.messages) == 20)
        until(lambda: consumer.held().get(held_queue) == 20, "all consumed")
        with full_disk() if is_full else nullcontext():
            two_brokers.call(lambda: two_brokers.unregister(broker))
            until(lambda: held_queue not in consumer.held(), "the queue is gone")
            two_brokers.call(lambda: two_brokers.register(broker))
            until(lambda: held_queue in consumer.held(), "the queue is back")
            two_brokers.send(topic, b"late", count=5, broker_name="broker-b")
            consumer.seen.wait(lambda seen: seen.bodies.count(b"late") == 5)
            give_time_to(lambda: consumer.seen.bodies.count(b"early") > 20, member)
        times = Counter(consumer.seen.bodies)
        assert times[b"early"] == 20, f"{times[b'early'] - 20} messages were consumed again"
        assert times[b"late"] == 5
