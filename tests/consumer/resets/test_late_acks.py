"""H02: a listener that returns after a reset has consumed a message of an earlier period."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from pyrocket_consumer import Message
from pyrocket_consumer.protocol.codes import RequestCode
from tests.consuming import WAIT_S, RecordingListener, numbered, until
from tests.hazards.members import (
    HeldRequests,
    Queues,
    committed_values,
    faulty,
    give_time_to,
    ours,
    request_matcher,
    send_reset_to_members,
    settle,
)
from tests.hazards.naive import NaiveMember, Window
from tests.resets import fill, queue

SINGLE = queue("S", 0)


class CountsLateAcks(NaiveMember):
    """Stores an acknowledgement, also if its window was dropped meanwhile."""

    def acked(self, window: Window, message: Message) -> None:
        with self.lock:
            window.unfinished.pop(message.queue_offset, None)
            self.offsets[window.queue] = window.edge()


class ChecksAndThenStores(NaiveMember):
    """Java: "if not dropped: store" in two steps, and a reset takes effect between them."""

    def acked(self, window: Window, message: Message) -> None:
        if not window.dropped:
            time.sleep(0.02)
            with self.lock:
                window.unfinished.pop(message.queue_offset, None)
                self.offsets[window.queue] = window.edge()


class WaitsBeforeItResets(NaiveMember):
    """Java until 4.9 and Go: windows are dropped, 10 s pass, another reset arrives, and its pull loop continues."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._both_have_come = threading.Barrier(2, timeout=WAIT_S)

    def on_reset(self, targets: Queues) -> None:
        for held_queue in targets:
            self.windows[held_queue].dropped = True
        self._both_have_come.wait()
        for held_queue, target in targets.items():
            self.offsets[held_queue] = target
            self.persist(held_queue)
            self.pull_at(held_queue, target)


def reset_by_call(consumer: Any, broker: Any, target: int) -> None:
    consumer.reset("S", {SINGLE: target})


def reset_by_broker(consumer: Any, broker: Any, target: int) -> None:
    send_reset_to_members(broker, "G", {SINGLE: target})


@pytest.mark.hazard("H02")
@pytest.mark.parametrize("held_commit", [False, True], ids=["after", "while-it-is-stored"])
@pytest.mark.parametrize("reset", [reset_by_call, reset_by_broker])
@pytest.mark.parametrize(
    "member", [ours, NaiveMember, faulty(CountsLateAcks, "a listener from before the reset has written")]
)
def test_a_listener_that_returns_after_a_reset_changes_nothing(embedded, broker, reset, held_commit, member):
    """A reset fences the queue's window before it stores the target, so no earlier acknowledgement reaches the store.

    The reset does not sleep, and does not wait for a slow listener.

    Faulty: clients that store an acknowledgement whenever it arrives.
    """
    # The listener has 9 while the queue moves back to 2. It returns after that, or while 2 is being stored.
    begun, release, held = threading.Event(), threading.Event(), HeldRequests()
    fill(embedded, "S", 10)

    def listener(message: Message) -> None:
        if message.queue_offset == 9 and not begun.is_set():
            begun.set()
            release.wait(30)

    with member(embedded, "S", "G", RecordingListener(listener)) as consumer:
        try:
            consumer.seen.wait_for(10)
            until(lambda: consumer.stored() == {SINGLE: 9}, "all except the last")
            if held_commit:
                broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, held, when=request_matcher("S", commitOffset=2))
            consumer.pause()
            resetting = threading.Thread(target=reset, args=(consumer, broker, 2))
            resetting.start()
            if held_commit:
                held.wait()
                release.set()
                settle()
                held.exchanges[0].later(0, lambda: held.exchanges[0].handle(held.exchanges[0].answer))
            resetting.join(30)
            until(lambda: (0, 2) in committed_values(broker, "S"), "the target is stored")
            release.set()

            def commits() -> list[int]:
                made = [offset for _, offset in committed_values(broker, "S")]
                return made[made.index(2) :]

            give_time_to(lambda: set(commits()) != {2}, member)
            late = commits()
            assert set(late) == {2}, f"{late} was committed: a listener from before the reset has written"
            consumer.resume()
            consumer.seen.wait(lambda seen: len(seen.bodies) == 18)
            until(lambda: consumer.stored() == {SINGLE: 10}, "consumed again")
        finally:
            release.set()
    assert Counter(consumer.seen.bodies) == Counter(numbered(10) + numbered(8, 2))


@pytest.mark.hazard("H02")
@pytest.mark.parametrize(
    "member",
    [
        ours,
        pytest.param(ours, marks=[pytest.mark.live, pytest.mark.slow("real threads race")], id="ours-in-real-time"),
        NaiveMember,
        faulty(ChecksAndThenStores, "by a listener from before it"),
    ],
)
def test_the_check_and_the_store_of_an_ack_are_one_step(embedded, member):
    """The check that the window is alive and the move of the offset are one step, under the window's lock.

    Faulty: Java checks first, and stores later.
    """
    # Resets interrupt twenty listeners at any step. Nothing is pulled after that, so only these listeners could write.
    fill(embedded, "S", 500)
    with member(
        embedded, "S", "G", RecordingListener(lambda message: time.sleep(0.01)), commit_interval_s=0.01
    ) as consumer:
        for target in range(1, 6):
            seen = len(consumer.seen.messages)
            consumer.resume()
            consumer.seen.wait(lambda listener, seen=seen: len(listener.messages) >= seen + 50)
            consumer.pause()
            consumer.reset("S", {SINGLE: target})
            give_time_to(lambda target=target: consumer.stored()[SINGLE] != target, member)
            stored = consumer.stored()[SINGLE]
            assert stored == target, f"{stored} was stored after a reset to {target}, by a listener from before it"


@pytest.mark.hazard("H02")
@pytest.mark.parametrize("member", [ours, NaiveMember, faulty(WaitsBeforeItResets, "two pulls of one queue continue")])
def test_two_resets_in_a_row_leave_one_pull_and_one_replay(embedded, broker, member):
    """Resets of a queue run one after the other, and each stops the pull loop of the one before.

    Faulty: in Go and old Java, two resets within ten seconds leave two pull loops, and all messages are delivered
    twice.
    """
    # Two resets to 0, with a short pause: the replay is delivered once, and one pull loop continues.
    fill(embedded, "S", 10)
    with member(embedded, "S", "G") as consumer:
        until(lambda: consumer.stored() == {SINGLE: 10}, "consumed")
        consumer.pause()
        for _ in range(2):
            send_reset_to_members(broker, "G", {SINGLE: 0})
            threading.Event().wait(0.1)
        if member is not WaitsBeforeItResets:  # which begins when both resets have arrived
            consumer.events.wait_for("offset-reset", 2)
        until(lambda: consumer.stored() == {SINGLE: 0}, "reset")
        until(lambda: broker.held_pulls("S") == 0, "the broker has responded to the earlier pulls")
        settle()
        consumer.resume()
        until(lambda: consumer.stored() == {SINGLE: 10}, "consumed again")
        fill(embedded, "S", 5, start=10)
        until(lambda: consumer.stored() == {SINGLE: 15}, "consumed")
        give_time_to(lambda: len(consumer.seen.messages) > 25, member)
        assert Counter(consumer.seen.bodies) == Counter(numbered(10) + numbered(15)), "two pulls of one queue continue"
        until(lambda: broker.held_pulls("S") <= 1, "one pull waits")
