"""H06, H07, H16–H18: brokers that correct offsets: which corrections are followed, how soon, and which are stored."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue
from pyrocket_consumer.errors import OffsetStoreError, ProtocolError, RocketError
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.local.directories import store_directory
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from pyrocket_consumer.offsets.local.recovery import recover
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import Exchange, Fault, Gate, answer
from tests.consumer.orders import GROUP, QUEUE, TOPIC, Orders, ours_and, request_matcher
from tests.consuming import WAIT_S, RecordingListener, numbered, until
from tests.hazards.members import (
    HeldRequests,
    broadcasting,
    committed_values,
    faulty,
    full_disk,
    ours,
    pulled_offsets,
    settle,
)
from tests.hazards.naive import NaiveMember, Window
from tests.offsets.local.disks import WRITES, FailureHook, MemoryDisk, WatchedDisk
from tests.offsets.local.driving import encode_offsets
from tests.resets import fill, queue

PULL, MAX_OFFSET = RequestCode.PULL_MESSAGE, RequestCode.GET_MAX_OFFSET


def moved(next_offset: int, low: int, high: int, remark: str = "OFFSET_OVERFLOW_BADLY") -> Fault:
    fields = {"nextBeginOffset": next_offset, "minOffset": low, "maxOffset": high, "suggestWhichBrokerId": 0}
    return answer(21, remark, {name: str(value) for name, value in fields.items()})


def corrected(events: Any) -> tuple[int, int]:
    """Wait for the event of a correction, and return the old and the new offset."""
    facts = events.wait_for("offset-corrected").facts
    return facts["from"], facts["to"]


class ObeysAtOnce(NaiveMember):
    """Every other client: it follows the broker's offset at once."""

    def on_offset_moved(self, window: Window, answer: RemotingCommand) -> None:
        self.on_correction(window, int(answer.fields["nextBeginOffset"]))


# --- forwards


def test_expired_messages_are_skipped_with_an_event(orders, broker):
    orders.fill(10)
    broker.commit(GROUP, TOPIC, {0: 2})
    broker.delete_before(TOPIC, 0, 6)
    with orders.consuming() as (_, seen):
        seen.wait_for(4)
        assert corrected(orders.events) == (2, 6)
        assert "2 to 5" in orders.events.wait_for("range-skipped").text
    assert sorted(seen.bodies) == numbered(4, 6)
    assert orders.committed == {0: 10}
    assert len(orders.events.of("offset-corrected")) == 1


def test_a_correction_while_consuming_takes_effect_once(orders):
    def skip(exchange: Exchange) -> None:
        orders.fill(10, 10)  # before the correction, so that the queue has offset 15 by then
        moved(15, 15, 20, "OFFSET_TOO_SMALL")(exchange)

    with orders.consuming(pull_hold_s=0.5) as (_, seen):
        orders.fill(10)
        seen.wait_for(10)
        orders.on(PULL, skip)
        orders.events.wait_for("offset-corrected")
        seen.wait_for(15)
        orders.wait_committed(20)
    expected = Counter(numbered(10) + numbered(5, 15))
    assert Counter(seen.bodies) == expected, "the consumer does not wait for messages that the broker no longer has"


def test_cached_messages_are_consumed_before_a_correction(orders, broker):
    """Cached messages that no listener has are not skipped, because they may exist only here."""
    begun, release, held = threading.Event(), threading.Event(), HeldRequests()

    def judge(message):
        begun.set()
        release.wait(30)

    orders.fill(10)
    orders.on(PULL, held, queueOffset=10)
    with orders.consuming(RecordingListener(judge), consume_threads=1, shutdown_timeout_s=1) as (_, seen):
        assert begun.wait(WAIT_S)
        pull = held.wait()
        orders.fill(10, 10)
        broker.delete_before(TOPIC, 0, 15)
        pull.later(0, lambda: pull.handle(pull.answer))
        settle()
        assert orders.committed.get(0, 0) == 0
        assert orders.events.of("offset-corrected") == []
        release.set()
        seen.wait_for(10)
        assert corrected(orders.events) == (10, 15)
        orders.wait_committed(20)
    assert Counter(seen.bodies) == Counter(numbered(10) + numbered(5, 15))


class CorrectsMemoryOnly(NaiveMember):
    """Java before 5.2 removes the queue without persisting it, and adds it again with the offset of the file."""

    def on_correction(self, window: Window, target: int) -> None:
        with self.lock:
            window.dropped = True
            self.windows.pop(window.queue, None)
            self.offsets.pop(window.queue, None)
        self._rebalance_due.set()


@pytest.mark.hazard("H06")
@ours_and(NaiveMember, faulty(CorrectsMemoryOnly, "wrong pulls continue after a correction"))
def test_every_wrong_offset_is_corrected_once(embedded, broker, tmp_path, member):
    """A correction is in the file before the queue is pulled again, even if no message was consumed.

    Faulty: Java before 5.2 pulls at the old offset without end, because it never writes the new one.
    """
    orders = Orders(embedded, queues=2, messages=60)
    held_queues = [queue(TOPIC, 0), queue(TOPIC, 1)]
    for each in held_queues:
        broker.delete_before(TOPIC, each.queue_id, 30)
    directory = store_directory(tmp_path, "127.0.0.1@DEFAULT", GROUP)
    directory.mkdir(parents=True)
    (directory / "offsets.json").write_bytes(encode_offsets(dict.fromkeys(held_queues, 5)))

    def wrong_pulls() -> list[tuple[int, int]]:
        return sorted(each for each in pulled_offsets(broker, TOPIC) if each[1] < 30)

    expected = dict.fromkeys(held_queues, 30)
    options = broadcasting(tmp_path, commit_interval_s=3600, rebalance_interval_s=0.2)
    with member(embedded, TOPIC, GROUP, **options) as consumer:
        until(lambda: consumer.stored() == expected or len(wrong_pulls()) > 2, "the correction is stored")
        settle()
        assert wrong_pulls() == [(0, 5), (1, 5)], f"wrong pulls continue after a correction: {wrong_pulls()}"
        assert consumer.stored() == expected
        assert len(consumer.events.of("offset-corrected")) == 2
        assert not consumer.seen.messages
        orders.fill(2, 60)
        consumer.seen.wait_for(2)


# --- backwards


class EmitsNothing(NaiveMember):
    """Follows a correction, and reports it only in its log."""

    def emit(self, *about: object, **facts: object) -> None:
        pass


@pytest.mark.hazard("H16")
@ours_and(NaiveMember, faulty(EmitsNothing, "no offset-corrected"))
def test_an_offset_beyond_the_end_of_the_queue_is_reported(embedded, broker, member):
    """An offset beyond the end moves to the end, with an event `offset-corrected` that has both offsets. Reset the
    group if it must consume all of a recreated topic. Delete a group's offsets with its topic, because later the
    topic's end passes an old offset, which then looks valid.

    Faulty: all others move to the end, and report it only in a log.
    """
    orders = Orders(embedded, messages=20)
    broker.commit(GROUP, TOPIC, {0: 500})
    with member(embedded, TOPIC, GROUP) as consumer:
        until(lambda: consumer.stored() == {QUEUE: 20}, "the correction is stored")
        orders.fill(3, 20)
        consumer.seen.wait_for(3)
        assert sorted(consumer.seen.bodies) == numbered(3, 20)
        assert corrected(consumer.events) == (500, 20)


@pytest.mark.hazard("H17")
@ours_and(faulty(ObeysAtOnce, "continued at 0, so everything is consumed again"))
def test_a_correction_to_zero_is_confirmed_first(embedded, broker, member):
    """The consumer follows a correction backwards only after five requests, one per second, for the queue's first and
    last offset. Then it continues at the nearest existing offset, even if the broker has returned 0.

    Faulty: Java, Go and C++ follow it at once, and consume days of messages again.
    """
    orders = Orders(embedded, messages=10)  # one beyond the end, as after a failover
    broker.commit(GROUP, TOPIC, {0: 11})
    orders.on(PULL, moved(0, 0, 10), times=None, queueOffset=11)  # as brokers up to 4.9.3 respond
    with member(embedded, TOPIC, GROUP) as consumer:
        offsets = until(lambda: [each for _, each in pulled_offsets(broker, TOPIC) if each != 11], "it continues")
        assert offsets[0] == 10, f"continued at {offsets[0]}, so everything is consumed again"
        broker.clear_faults(PULL)
        orders.fill(3, 10)
        consumer.seen.wait_for(3)
        assert sorted(consumer.seen.bodies) == numbered(3, 10)


@pytest.mark.hazard("H18")
@pytest.mark.parametrize("stored", [7, 10])
@ours_and(faulty(ObeysAtOnce, "consumed again from the start"))
def test_a_consumer_waits_for_a_loading_broker(embedded, broker, member, stored):
    """If a broker that has just started reports an empty queue, the consumer repeats its requests for up to five
    seconds. The queue continues at its offset, and no earlier message is consumed again.

    Faulty: all others begin at 0.
    """
    orders = Orders(embedded)
    orders.fill(10, stored_at_ms=int(time.time() * 1000) - 60_000)
    broker.commit(GROUP, TOPIC, {0: stored})
    orders.on(PULL, moved(0, 0, 0, "NO_MESSAGE_IN_QUEUE"))
    for code in (MAX_OFFSET, RequestCode.GET_MIN_OFFSET):
        orders.on(code, answer(0, fields={"offset": "0"}))
    with member(embedded, TOPIC, GROUP) as consumer:
        until(lambda: broker.requests(MAX_OFFSET) or consumer.seen.messages, "it requests the offsets")
        orders.fill(3, 10)
        consumer.seen.wait_for(13 - stored)
        assert sorted(consumer.seen.bodies) == sorted(numbered(13 - stored, stored)), "consumed again from the start"
        until(lambda: consumer.stored() == {QUEUE: 13}, "committed")
        assert min(offset for _, offset in committed_values(broker, TOPIC)) >= stored
        assert not consumer.events.of("offset-corrected")


@pytest.mark.hazard("H18")
@pytest.mark.versions("4.9.7", "5.5.0")  # the others take as long, with the same result
def test_a_broker_that_was_killed_and_comes_back(cluster, topic, group):
    """A member that pulls while its broker comes back from a kill consumes nothing again, and commits again what the
    broker has forgotten."""
    cluster.create_topic(topic, queues=2)
    with ours(cluster, topic, group) as consumer:
        fill(cluster, topic, 20)
        consumer.seen.wait_for(20)
        until(lambda: consumer.stored() == {queue(topic, 0): 10, queue(topic, 1): 10}, "committed")
        cluster.broker("broker-a").kill()
        cluster.broker("broker-a").start()
        fill(cluster, topic, 4, start=20)
        consumer.seen.wait_for(24, 90)
        until(lambda: consumer.stored() == {queue(topic, 0): 12, queue(topic, 1): 12}, "committed again", 60)
        assert Counter(consumer.seen.bodies) == Counter(numbered(24))
        assert not consumer.events.of("offset-corrected")


def test_a_confirmed_correction_backwards_is_followed(orders, broker):
    """A restarted broker may report for a while that all its queues are empty."""
    loading, silent, emptied = topics = [orders.make(1, each) for each in ("loading", "silent", "emptied")]
    seen, events = {each: RecordingListener() for each in topics}, orders.events

    def committed(each):
        return orders.cluster.committed(GROUP, each)

    with orders.consuming(RecordingListener(), pull_hold_s=0.5) as (consumer, _):
        for each in topics:
            consumer.subscribe(each, seen[each])
            orders.fill(10, topic=each)
            seen[each].wait_for(10)
            until(lambda each=each: committed(each) == {0: 10}, "committed")
        for code in (MAX_OFFSET, RequestCode.GET_MIN_OFFSET):
            broker.on(code, answer(0, fields={"offset": "0"}), when=request_matcher(loading))
        broker.on(MAX_OFFSET, answer(2, "busy"), times=5, when=request_matcher(silent))
        for each in (loading, silent):
            broker.on(PULL, moved(0, 0, 0), when=request_matcher(each))
        broker.truncate(emptied, 0, 0)
        broker.wait_for(MAX_OFFSET, when=request_matcher(loading))
        orders.fill(10, 10, topic=loading)
        seen[loading].wait_for(20)
        assert corrected(events) == (10, 0)
        assert events.of("offset-corrected")[0].queue.topic == emptied
        orders.fill(3, 10, topic=emptied)
        seen[emptied].wait_for(13)
        broker.wait_for(MAX_OFFSET, 6, when=request_matcher(silent))
        orders.fill(5, 10, topic=silent)
        seen[silent].wait_for(15)
    assert len(events.of("offset-corrected")) == 1, "a missing response confirms no correction"
    assert events.of("range-skipped") == []
    assert [committed(each)[0] for each in topics] == [20, 15, 3]
    for each, count in zip(topics, (20, 15, 13), strict=True):
        assert Counter(seen[each].bodies) == Counter(numbered(count))


@pytest.mark.parametrize("count", [4, 60], ids=["few", "more than were lost"])
def test_messages_sent_while_a_correction_is_checked_are_consumed(orders, broker, count):
    """The broker has lost its last messages, so the messages at their offsets are new, and were not consumed."""
    gate = Gate()
    with orders.consuming(pull_hold_s=0.5) as (_, seen):
        orders.fill(100)
        seen.wait_for(100)
        orders.wait_committed(100)
        orders.on(MAX_OFFSET, gate, times=None)
        broker.truncate(TOPIC, 0, 60)
        gate.wait_held()
        orders.fill(count, 100)
        gate.open()
        seen.wait_for(100 + count)
        assert corrected(orders.events) == (100, 60)
        orders.fill(1, 200)
        seen.wait_for(101 + count)
    assert Counter(seen.bodies) == Counter([*numbered(100 + count), b"m200"])
    assert orders.events.of("range-skipped") == []


# --- while nothing can be stored


class ReadsTheFileAfterACorrection(NaiveMember):
    """Java from 5.2 on: a correction is persisted, removed from memory although that failed, and read from the file."""

    def on_correction(self, window: Window, target: int) -> None:
        with self.lock:
            window.dropped = True
            self.windows.pop(window.queue, None)
            self.offsets[window.queue] = target
        with suppress(OSError):
            self.persist(window.queue)
        self.offsets.pop(window.queue, None)
        self._rebalance_due.set()


@pytest.mark.hazard("H07")
@ours_and(
    NaiveMember,
    faulty(ReadsTheFileAfterACorrection, "corrections, one after the other"),
    faulty(EmitsNothing, "no event was emitted"),
)
def test_a_disk_that_is_full_while_an_offset_is_corrected(embedded, broker, tmp_path, member):
    """If a correction cannot be written, the consumer follows it from memory, once, and emits `store-unwritable`. The
    next commit that succeeds writes the offset.

    Faulty: Java and Go read the old offset from the file and are corrected again, without end. Neither informs its
    user.
    """
    orders = Orders(embedded, messages=10)
    options = broadcasting(tmp_path, rebalance_interval_s=0.2, pull_hold_s=0.1)
    with member(embedded, TOPIC, GROUP, **options) as consumer:
        consumer.seen.wait_for(10)
        until(lambda: consumer.stored() == {QUEUE: 10}, "consumed")
        consumer.pause()
        settle()  # a pull may still be in flight
        until(lambda: not broker.held_pulls(TOPIC), "no pull is held")
        with full_disk():
            orders.fill(10, 10)
            broker.delete_before(TOPIC, 0, 15)
            broker.forget_requests()
            consumer.resume()
            until(lambda: len(consumer.seen.bodies) == 15 or len(pulled_offsets(broker, TOPIC)) > 3, "consumed")
            settle()
            wrong = pulled_offsets(broker, TOPIC).count((0, 10))
            assert wrong == 1, f"{wrong} corrections, one after the other"
            assert sorted(consumer.seen.bodies[10:]) == numbered(5, 15)
            assert consumer.stored() == {QUEUE: 10}, "the disk is full"
            assert consumer.events.of("store-unwritable"), "no event was emitted that offsets are not stored"
        until(lambda: consumer.stored() == {QUEUE: 20}, "the next commit writes the offset in memory")


class StartsWhateverTheDirectory(NaiveMember):
    """Creates the directory at the first write, and only logs a failure."""

    def read_file(self) -> dict[MessageQueue, int]:
        try:
            return super().read_file()
        except OSError:
            return {}


@pytest.mark.hazard("H07")
@ours_and(faulty(StartsWhateverTheDirectory, "it started, and cannot store offsets"))
def test_a_directory_that_cannot_be_made_fails_the_start(embedded, tmp_path, member):
    """A start fails if the store cannot be written, and the error names the directory.

    Faulty: a client that runs anyway, and begins from the start after each restart.
    """
    Orders(embedded)
    (stores := tmp_path / "stores").write_text("")
    failure = "it started, and cannot store offsets"
    try:
        with member(embedded, TOPIC, GROUP, **broadcasting(stores / "store")):
            pass
    except (RocketError, OSError) as error:
        failure = str(error)
    assert str(stores) in failure and "Nothing was started" in failure, failure


QUEUES = [queue(TOPIC, number) for number in range(3)]


class OurFile:
    def __init__(self, disk: Any) -> None:
        self._store = LocalFileOffsetStore("/s", "checkpoint", disk=disk)
        self._store.load()

    def write(self, offset: int) -> None:
        for each in QUEUES:
            self._store.update_offset(each, offset)
        self._store.persist_all()

    @staticmethod
    def found(files: dict[str, bytes]) -> dict[MessageQueue, int]:
        main, backup, journal = (files.get("/s/offsets" + end) for end in (".json", ".json.bak", ".journal"))
        return dict(recover(main, backup, journal).offsets)


class WritesInPlace:
    """Java from 5.1 on copies the file over the backup, and then truncates and writes the file."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def write(self, offset: int) -> None:
        before = self._disk.read("/s/offsets.json")
        if before is not None:
            self._disk.open("/s/offsets.json.bak", create=True).write_at(before, 0)
        self._disk.open("/s/offsets.json", create=True).write_at(encode_offsets(dict.fromkeys(QUEUES, offset)), 0)

    @staticmethod
    def found(files: dict[str, bytes]) -> dict[MessageQueue, int]:
        text = files.get("/s/offsets.json") or files.get("/s/offsets.json.bak")
        return decode_checkpoint(text)[0] if text else {}


@pytest.mark.hazard("H07")
@pytest.mark.parametrize(
    ("file", "operations"),  # a file can be emptied on a full disk
    [
        *((OurFile, some) for some in (WRITES, ["write_at"], ["write_at", "sync"])),
        faulty(WritesInPlace, "a restart finds", ["write_at"]),
    ],
)
def test_a_disk_that_gets_full_in_the_middle_of_a_write(file, operations):
    """A write replaces the whole file or nothing. Whichever operation fails, the old file still exists.

    Faulty: Java from 5.1 on writes into file and backup, so one commit empties the file, and the next the backup.
    """
    for number in range(1, 40):  # the first, second, third … operation fails, and all after it, at the next tick, too
        memory, failing, done = MemoryDisk(), FailureHook(), 0

        def when(operation: str, path: str, number: int = number) -> bool:
            nonlocal done
            done += operation in operations
            return operation in operations and done >= number

        failing.when = when
        store = file(WatchedDisk(memory, failing))
        store.write(5)
        failing.error = errno.ENOSPC
        for offset in (6, 7):
            with suppress(OSError, OffsetStoreError):
                store.write(offset)
        found: Any
        try:
            found = file.found(memory.files())
            whole = set(found.values()) <= {5, 6, 7} and set(found) == set(QUEUES)
        except (OffsetStoreError, ProtocolError) as error:
            whole, found = False, error
        assert whole, f"full from operation {number} on, a restart finds {found}"
        if not failing.failures:
            assert number > 1, "the disk was never full"
            return
    raise AssertionError("more operations than this test counts")
