"""The pull loop of one queue, with a broker whose responses the test chooses, in any order."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pyrocket_consumer.consumer.assignment.pull_loop import PullLoop
from pyrocket_consumer.consumer.window.process_queue import Limits, ProcessQueue
from pyrocket_consumer.errors import ConnectError, ConnectionLost, RequestTimeout
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.command import PullMessageHeader
from pyrocket_consumer.protocol.frame import RemotingCommand, decode_command, encode_command
from pyrocket_consumer.protocol.message import StoredMessage, encode_message
from pyrocket_consumer.protocol.subscription import parse_subscription

QUEUE = MessageQueue("orders", "broker-a", 0)
FOUND, NO_NEW, NO_MATCHED, MOVED = 0, 19, 20, 21
BATCH = 8
END = 10_000  # the broker's max offset, unless a response has another one


# --- requests


class SentPull:
    """A pull as the broker sees it."""

    def __init__(self, broker_id: int, command: RemotingCommand, on_answer, timeout_s: float, on_late) -> None:
        self.header = PullMessageHeader.from_fields(command.fields)
        self.broker_id, self.offset, self.timeout_s = broker_id, self.header.queue_offset, timeout_s
        self.answer_too_late, self._on_answer = on_late, on_answer

    def respond_later(self, answer: RemotingCommand | Exception) -> Callable[[], None]:
        """Send the response, but do not deliver its messages yet."""
        return self._on_answer(answer) or (lambda: None)

    def answer(self, answer: RemotingCommand | Exception) -> None:
        self.respond_later(answer)()

    def found(self, count: int = BATCH, *, start: int | None = None, **options: Any) -> None:
        self.answer(found(self.offset if start is None else start, count, **options))

    def no_matched(self, next_offset: int, **options: Any) -> None:
        self.answer(answer(NO_MATCHED, next_offset, **options))


def found(offset: int, count: int = BATCH, *, tags: str | None = None, end: int = END, next_offset: int | None = None):
    stored = StoredMessage(topic="orders", body=b"x", properties={"TAGS": tags} if tags else {})
    body = b"".join(encode_message(replace(stored, queue_offset=each)) for each in range(offset, offset + count))
    return answer(FOUND, offset + count if next_offset is None else next_offset, body=body, end=end)


def answer(code: int, next_offset: int, *, body: bytes = b"", remark: str | None = None, end: int = END, broker_id=0):
    fields = {"nextBeginOffset": next_offset, "minOffset": 0, "maxOffset": end, "suggestWhichBrokerId": broker_id}
    return RemotingCommand(code, {name: str(value) for name, value in fields.items()}, body, flag=1, remark=remark)


class FakeConnection:
    """A connection to one of the queue's brokers."""

    def __init__(self, host: Host, broker_id: int, signs: bool) -> None:
        self._host, self._broker_id, self.is_signing = host, broker_id, signs

    def encode(self, command: RemotingCommand, opaque: int) -> bytes:
        return encode_command(command)

    def send(self, encode, on_answer, timeout_s, what="PULL_MESSAGE", on_late=None) -> int:
        self._host.sent_pulls.append(
            SentPull(self._broker_id, decode_command(encode(1)), on_answer, timeout_s, on_late)
        )
        self._host.has_asked.set()
        return 1


class FakeLink:
    """The way to one of the queue's brokers."""

    def __init__(self, host: Host, broker_id: int) -> None:
        self._host, self.broker_id = host, broker_id

    @property
    def connection(self) -> FakeConnection | None:
        return self._host.connections[self.broker_id] if self.broker_id in self._host.known_at else None

    async def open(self) -> None:
        self._host.connected.append(self.broker_id)
        await self._host.gate.wait()
        if self._host.connect_error is not None:
            raise self._host.connect_error
        self._host.known_at.add(self.broker_id)


class Host:
    """A fake member with its context. It records the calls of its pull loop, and the test decides the rest."""

    def __init__(self, selector: str = "*", signs: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.name = "app"
        self.config = SimpleNamespace(pull_hold_s=15.0, call_timeout_s=3.0, pull_retry_delay_s=1.0)
        self.cluster = self.member = self.subscriptions = self.tasks = self
        self.routes = SimpleNamespace(get=self._refresh)
        self.rebalance_wanted = asyncio.Event()
        self.sent_pulls: deque[SentPull] = deque()
        self.has_asked = asyncio.Event()
        self.delivered, self.moved, self.late, self.failures = [], [], [], []  # notifications
        self.refreshed, self.running, self.connected = [], [], []  # requests
        self.known_at = {0, 1}  # the broker ids with an open connection
        self.gate = asyncio.Event()  # a connection waits for it
        self.connect_error: Exception | None = None
        self.subscribed: Subscription | None = parse_subscription("orders", selector, 7)
        self.connections = {broker_id: FakeConnection(self, broker_id, signs) for broker_id in (0, 1)}

    def get(self, topic):
        return self.subscribed and SimpleNamespace(subscription=self.subscribed)

    def link(self, broker_name, broker_id):
        return FakeLink(self, broker_id)

    async def wait_registered(self, queue):
        self.refreshed.append("heartbeat")
        await asyncio.sleep(0.05)

    async def _refresh(self, topic, *, refresh):
        self.refreshed.append("route")

    def keep_running(self, work, what):
        self.running.append(self.loop.create_task(work, name=what))

    def deliver(self, window, messages):
        self.delivered += messages

    def offset_moved(self, queue, sent, answer):
        self.moved.append((sent, answer))

    def late_reset(self, queue, answer):
        self.late.append(answer)

    def emit_throttled(self, kind, text, queue):
        self.failures.append(text)

    @property
    def offsets(self) -> list[int]:
        return [message.queue_offset for message in self.delivered]


class Pulling:
    """A pull loop with its window and host."""

    def __init__(
        self, start: int = 0, *, hold_s: float = 15.0, host: Host | None = None, read_ahead: int = 2, **limits: int
    ) -> None:
        self.host = host or Host()
        self.edges: list[int] = []
        on_edge = lambda queue, offset: self.edges.append(offset)  # noqa: E731
        self.window = ProcessQueue(QUEUE, start, Limits(**limits), lambda window: self.wake(), on_edge=on_edge)
        host = self.host
        host.config.pull_hold_s = hold_s
        self.pull_loop = PullLoop(host, host.deliver, host, self.window, start, BATCH, read_ahead=read_ahead)
        self.pull_loop.pull()

    def wake(self) -> None:
        self.host.loop.call_soon(self.pull_loop.pull)

    async def next_pull(self) -> SentPull:
        """Wait for the next pull, and return it."""
        async with asyncio.timeout(600):
            while not self.host.sent_pulls:
                self.host.has_asked.clear()
                await self.host.has_asked.wait()
        return self.host.sent_pulls.popleft()

    async def pull_at(self, offset: int) -> SentPull:
        """Return the next pull at this offset. Earlier pulls, which were sent before the error, find messages."""
        while (sent := await self.next_pull()).offset != offset:
            sent.found()
        return sent

    @property
    def silent(self) -> bool:
        return not self.host.sent_pulls

    async def stays_silent(self) -> bool:
        await asyncio.sleep(100)
        return self.silent

    async def attempts(self, answer: Callable[[SentPull], None], most: int = 10_000) -> int:
        """Answer all pulls of 30 s with `answer`, and return their number."""
        count = 0
        while self.host.loop.time() < 30 and count < most:
            answer(await self.next_pull())
            count += 1
        return count

    def ack(self, *offsets: int) -> None:
        wanted = set(offsets)
        self.window.ack([each for each in self.host.delivered if not wanted or each.queue_offset in wanted])

    async def reading_ahead(self, count: int = 2, **options: Any) -> list[SentPull]:
        """Answer pulls until `count` are in flight at once, and return those."""
        for _ in range(2):
            (await self.next_pull()).found(**options)
        return [await self.next_pull() for _ in range(count)]


@pytest.mark.parametrize("signs", [False, True])
async def test_the_fields_of_a_pull(signs):
    pulling = Pulling(100, host=Host(signs=signs))
    header = (await pulling.next_pull()).header
    assert (header.consumer_group, header.topic, header.queue_id) == ("app", "orders", 0)
    assert (header.queue_offset, header.max_msg_nums) == (100, BATCH)
    assert (header.sys_flag, header.suspend_timeout_millis, header.sub_version) == (2, 15000, 7)
    assert header.commit_offset == 0


async def test_the_next_pull_is_sent_before_the_response_is_decoded():
    pulling = Pulling()
    deliver = (await pulling.next_pull()).respond_later(found(0))
    assert pulling.host.sent_pulls[0].offset == BATCH
    assert pulling.host.delivered == []
    deliver()
    assert pulling.host.offsets == list(range(BATCH))


async def test_two_pulls_are_in_flight_once_the_steps_are_known():
    pulling = Pulling()
    for why in ("nothing is known of the queue yet", "one step is no rule"):
        sent = await pulling.next_pull()
        assert pulling.silent, why
        sent.found(end=40)
    third, fourth = await pulling.next_pull(), await pulling.next_pull()
    assert (third.offset, fourth.offset) == (16, 24)
    third.found(end=40)
    assert pulling.silent, "only 8 are left after the fourth, so the broker would return fewer, and the guess be wrong"
    fourth.found(end=40)
    assert (await pulling.next_pull()).offset == 32
    assert pulling.silent


async def test_more_pulls_are_in_flight_up_to_the_end_of_the_queue():
    pulling = Pulling(read_ahead=4)
    ahead = await pulling.reading_ahead(4, end=72)
    assert [each.offset for each in ahead] == [16, 24, 32, 40]
    assert pulling.silent, "four are enough"
    for number, delivered in ((3, 16), (1, 16), (0, 32), (2, 48)):
        ahead[number].found(end=72)
        assert pulling.host.offsets == list(range(delivered)), "later messages wait for earlier ones"
    assert [(await pulling.next_pull()).offset for _ in range(2)] == [48, 56]
    assert pulling.silent, "the last 8 would be a guess"
    pulling.ack()
    assert pulling.edges[-1] == 48


async def test_a_wrong_guess_ends_all_that_follow_it():
    pulling = Pulling(read_ahead=4)
    first, second, third, fourth = await pulling.reading_ahead(4)
    third.found()
    first.found(3)
    again = await pulling.next_pull()
    assert again.offset == 19
    for each in (second, fourth, again):
        each.found()
    assert pulling.host.offsets == list(range(27))


WRONG_GUESS = {
    "fewer than expected": lambda sent: found(sent.offset, 3),
    "more than expected": lambda sent: found(sent.offset, BATCH + 1),
    "none that match": lambda sent: answer(NO_MATCHED, sent.offset + 100),
}


@pytest.mark.parametrize("early", [False, True], ids=["answered late", "answered early"])
@pytest.mark.parametrize("how", WRONG_GUESS)
async def test_a_wrong_guess_is_discarded_and_no_message_is_skipped(how, early):
    pulling = Pulling()
    third, fourth = await pulling.reading_ahead()
    if early:
        fourth.found()
    third.answer(right := WRONG_GUESS[how](third))
    if not early:
        fourth.found()
    again, next_offset = await pulling.next_pull(), int(right.fields["nextBeginOffset"])
    assert again.offset == next_offset
    again.found()
    assert pulling.host.offsets == sorted(set(pulling.host.offsets))
    assert set(range(16, next_offset)) <= set(pulling.host.offsets) or how.startswith("no")


# --- abandoned pulls

UNREADABLE = RemotingCommand(MOVED, {}, flag=1, remark="OFFSET_RESET")
LATE = {
    "found": found(24),
    "found elsewhere": found(500),
    "no new": answer(NO_NEW, 700),
    "no matched": answer(NO_MATCHED, 700),
    "offset moved": answer(MOVED, 0, remark="OFFSET_TOO_SMALL"),
    "refused": answer(1, 0),
    "fields missing": UNREADABLE,
    "timeout": RequestTimeout("PULL_MESSAGE", "a:1", 30),
    "lost": ConnectionLost("a:1", "reset"),
}


@pytest.mark.parametrize("what", LATE)
@pytest.mark.parametrize("stopped", [False, True])
async def test_the_response_to_an_abandoned_pull_changes_nothing(what, stopped):
    pulling = Pulling()
    third, fourth = await pulling.reading_ahead()
    if stopped:
        pulling.pull_loop.stop()
        pulling.window.drop()
    else:
        third.answer(answer(1, 0))
    seen, edges, next_offset = list(pulling.host.offsets), list(pulling.edges), pulling.pull_loop.next_offset
    fourth.answer(LATE[what])
    assert (pulling.host.offsets, pulling.edges, pulling.pull_loop.next_offset) == (seen, edges, next_offset)
    assert pulling.host.moved == pulling.host.late == []
    if stopped:
        third.found()
        assert await pulling.stays_silent()
        assert pulling.host.offsets == seen
    else:
        assert (await pulling.next_pull()).offset == 16


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("reset", "passed_on"), [(answer(MOVED, 5, remark="OFFSET_RESET"), [5]), (UNREADABLE, [])])
async def test_a_reset_in_the_response_to_an_abandoned_pull_is_reported(early, reset, passed_on):
    """A reset without fields stops nothing."""
    pulling = Pulling()
    third, fourth = await pulling.reading_ahead()
    if early:
        fourth.answer(reset)
        assert pulling.host.late == []
    third.answer(answer(1, 0))
    if not early:
        fourth.answer(reset)
    assert [each.next_offset for each in pulling.host.late] == passed_on
    assert pulling.host.moved == []
    assert (await pulling.next_pull()).offset == 16


@pytest.mark.parametrize("signs", [False, True])
async def test_after_a_timeout_only_a_reset_counts(signs):
    pulling = Pulling(host=Host(signs=signs))
    first = await pulling.next_pull()
    first.answer(RequestTimeout("PULL_MESSAGE", "broker-a", 30))
    second = await pulling.next_pull()
    for harmless in (found(0), answer(MOVED, 5, remark="OFFSET_TOO_SMALL"), answer(1, 0)):
        first.answer_too_late(harmless)
    assert pulling.host.late == []
    first.answer_too_late(answer(MOVED, 5, remark="OFFSET_RESET"))
    assert [each.next_offset for each in pulling.host.late] == [5]
    second.found()
    assert pulling.host.offsets == list(range(BATCH))


# --- invalid responses

UNUSABLE = {
    "backwards": answer(FOUND, 3, body=found(16).body),
    "backwards and empty": answer(NO_NEW, 3),
    "backwards unmatched": answer(NO_MATCHED, 3),
    "not forwards with messages": answer(FOUND, 16, body=found(16).body),
    "found nothing": answer(FOUND, 24),
    "negative": answer(NO_MATCHED, -1),
    "a correction to a negative offset": answer(MOVED, -1),
    "a next offset beyond the end": answer(FOUND, END + 2000, body=found(16).body),
    "nothing new, beyond the end": answer(NO_NEW, 2**63 - 1),
    "none that match, though the queue ends where it was asked": answer(NO_MATCHED, 24, end=16),
    "a correction beyond the end": answer(MOVED, END + 1),
    "a reset beyond the end": answer(MOVED, 2**62, remark="OFFSET_RESET"),
    "an end before the begin": answer(NO_MATCHED, 24, end=-1),
    "messages of elsewhere": answer(FOUND, 24, body=found(500).body),
    "a message twice": answer(FOUND, 24, body=found(16, 4).body + found(19, 5).body),
    "a message at the end of time": answer(FOUND, 24, body=found(16, 4).body + found(2**62, 1).body + found(21).body),
    "no fields": RemotingCommand(FOUND, {}, found(16).body, flag=1),
    "no next offset": RemotingCommand(NO_NEW, {"minOffset": "0", "maxOffset": "9"}, flag=1),
    "next offset that is no number": answer(MOVED, "soon", end=9),
    "garbage": answer(FOUND, 24, body=b"\xff" * 200),
    "cut in the last record": answer(FOUND, 24, body=found(16).body[:-1]),
    "cut in the middle": answer(FOUND, 24, body=found(16).body[: len(found(16).body) // 2 + 5]),
    "cut in a length": answer(FOUND, 24, body=found(16).body[:2]),
    "timeout": RequestTimeout("PULL_MESSAGE", "a:1", 30),
    "lost": ConnectionLost("a:1", "reset"),
    **{f"code {code}": answer(code, 0) for code in (1, 2, 16, 17, 23, 24, 25, 26, 27, 28, 29, 215, 501, 999, -7)},
}


@pytest.mark.parametrize("ahead", ["alone", "before a good one", "after a good one came early"])
@pytest.mark.parametrize("what", UNUSABLE)
async def test_after_an_unusable_response_the_same_offset_is_pulled(what, ahead):
    pulling = Pulling()
    third, fourth = await pulling.reading_ahead()
    if ahead == "after a good one came early":
        fourth.found()
    third.answer(UNUSABLE[what])
    if ahead == "before a good one":
        fourth.found()
    assert pulling.host.offsets == list(range(16))
    assert pulling.host.moved == []
    assert len(pulling.host.failures) == 1
    assert pulling.pull_loop.last_error
    (await pulling.pull_at(16)).found()
    assert pulling.host.offsets == list(range(24))
    assert pulling.pull_loop.last_error == ""
    pulling.ack()
    assert pulling.edges[-1] == 24


async def test_messages_outside_of_the_requested_range_are_skipped():
    """The broker returns a whole batch that is stored as one record, with messages before the requested offset."""
    pulling = Pulling(3)
    (await pulling.next_pull()).found(start=0, next_offset=5)
    assert pulling.host.offsets == [3, 4]
    (again := await pulling.next_pull()).found()
    assert again.offset == 5
    assert pulling.host.offsets == list(range(3, 13))


async def test_valid_responses_behind_an_invalid_one_are_pulled_again():
    """The loop processes both responses before it decodes the first. It must not put the second one behind the gap."""
    pulling = Pulling()
    third, fourth = await pulling.reading_ahead()
    deliver_third = third.respond_later(answer(FOUND, 24, body=b"\xff" * 200))
    deliver_fourth = fourth.respond_later(found(24))
    deliver_third()
    deliver_fourth()
    assert pulling.host.offsets == list(range(16))
    (await pulling.pull_at(16)).found()
    assert pulling.host.offsets == list(range(24))


REMEDIES = [*((code, "heartbeat") for code in (24, 25, 26)), (17, "route"), (501, "route"), (1, "")]


@pytest.mark.parametrize(("code", "remedy"), REMEDIES)
async def test_the_remedy_for_a_refusal_comes_first(code, remedy):
    pulling = Pulling()
    (await pulling.next_pull()).answer(answer(code, 0))
    assert (await pulling.next_pull()).offset == 0
    assert pulling.host.refreshed == ([remedy] if remedy else [])


@pytest.mark.parametrize("code", [24, 17])
async def test_a_member_that_ends_at_a_refusal_leaves_no_work(code, recwarn):
    pulling = Pulling()
    (await pulling.next_pull()).answer(answer(code, 0))
    pulling.pull_loop.stop()
    for task in pulling.host.running:
        task.cancel()
    await asyncio.gather(*pulling.host.running, return_exceptions=True)
    assert pulling.host.refreshed == []
    pulling.host.running.clear()
    gc.collect()
    assert not recwarn.list


PAUSES = [(answer(215, 0), 0.01, 0.1), (ConnectionLost("a:1", "x"), 0.05, 0.5), (answer(1, 0), 0.9, 2)]


@pytest.mark.parametrize(("trouble", "least_s", "most_s"), PAUSES)
async def test_a_pause_precedes_the_next_attempt(trouble, least_s, most_s):
    pulling = Pulling()
    (await pulling.next_pull()).answer(trouble)
    before = pulling.host.loop.time()
    assert pulling.silent
    await pulling.next_pull()
    assert least_s <= pulling.host.loop.time() - before <= most_s


async def test_a_broker_that_cannot_be_reached_is_tried_again():
    host = Host()
    host.known_at.clear()
    host.gate.set()
    host.connect_error = ConnectError("broker-a", "refused")
    pulling = Pulling(host=host)
    await asyncio.sleep(5)
    assert pulling.silent
    assert len(host.connected) > 5
    host.connect_error = None
    assert (await pulling.next_pull()).offset == 0


# --- responses without messages


async def test_an_empty_response_moves_the_edge_of_an_empty_window():
    pulling = Pulling()
    (await pulling.next_pull()).no_matched(50)
    assert pulling.edges == [50]
    (await pulling.next_pull()).found()
    (await pulling.next_pull()).no_matched(90)
    assert pulling.edges == [50], "at most 58 messages are unfinished"
    assert (await pulling.next_pull()).offset == 90
    pulling.ack()
    assert pulling.edges[-1] == 90


STANDS = [answer(NO_MATCHED, 500, end=0), answer(NO_MATCHED, 500, end=500)]


@pytest.mark.parametrize(("always", "least", "most"), [*((each, 10, 300) for each in STANDS), (answer(215, 0), 20, 60)])
async def test_a_broker_without_new_messages_is_pulled_with_pauses(always, least, most):
    assert least < await Pulling(500).attempts(lambda sent: sent.answer(always)) < most


@pytest.mark.parametrize("step", [1, 2])
async def test_a_queue_without_wanted_messages_is_pulled_slowly(step):
    pulling = Pulling(host=Host("Aa"))
    assert 100 < await pulling.attempts(lambda sent: sent.found(step, tags="BB", end=2**40)) < 600
    before = pulling.host.loop.time()
    for _ in range(7):
        (await pulling.next_pull()).found(step, tags="Aa", end=2**40)
    assert pulling.host.loop.time() - before < 0.5, "it continues at once"


async def test_single_messages_that_arrive_quickly_are_not_delayed():
    pulling = Pulling(read_ahead=4)
    while pulling.pull_loop.pulled < 500:
        (await pulling.next_pull()).found(1)
        pulling.ack(*pulling.host.offsets[-1:])
    assert pulling.host.loop.time() < 1


async def test_a_response_during_a_pause_is_processed_after_it():
    pulling, answered = Pulling(host=Host("Aa"), read_ahead=4), 0
    while not pulling.silent:  # until it pauses, with pulls in flight whose responses wait
        pulling.host.sent_pulls.popleft().found(1, tags="BB")
        answered += 1
    assert pulling.pull_loop.next_offset < answered
    await asyncio.sleep(5)  # meanwhile the broker holds the pulls
    assert pulling.pull_loop.next_offset == answered


# --- slaves


async def test_the_next_pull_goes_to_the_suggested_broker():
    pulling = Pulling()
    (await pulling.next_pull()).no_matched(5, broker_id=1)
    second = await pulling.next_pull()
    assert (second.broker_id, second.offset) == (1, 5)
    second.no_matched(5, broker_id=0)
    third = await pulling.next_pull()
    assert (third.broker_id, third.offset) == (0, 5)
    third.no_matched(9, broker_id=1)
    (await pulling.next_pull()).answer(ConnectionLost("b:1", "gone"))
    assert (await pulling.next_pull()).broker_id == 0


async def test_a_master_that_has_a_reset_is_pulled_once():
    pulling = Pulling()
    (await pulling.next_pull()).no_matched(5, broker_id=1)
    second = await pulling.next_pull()
    pulling.pull_loop.pull_from_master_next()
    second.no_matched(6, broker_id=1)
    third = await pulling.next_pull()
    assert (third.broker_id, third.offset) == (0, 6)
    third.no_matched(7, broker_id=1)
    assert (await pulling.next_pull()).broker_id == 1


async def test_a_response_during_a_connect_to_a_slave_is_processed():
    """A response suggests the slave while a second pull is in flight at the master. That response arrives meanwhile."""
    host = Host()
    host.known_at = {0}
    pulling = Pulling(host=host)
    third, fourth = await pulling.reading_ahead()
    third.answer(answer(FOUND, 24, body=found(16).body, broker_id=1))
    await asyncio.sleep(0)
    assert host.connected == [1]
    fourth.found()
    pulling.pull_loop.is_paused = True  # so that no further pull processes it
    host.gate.set()
    await asyncio.sleep(1)
    assert pulling.host.offsets == list(range(32))


# --- flow control


async def test_a_stuck_message_does_not_stop_a_queue_with_few_matches():
    """A response with few messages may advance far. The distance does not count as used space."""
    pulling = Pulling(host=Host("paid"), messages=100, span=1_000_000)
    for next_offset in (1000, 3000):
        (await pulling.next_pull()).found(1, next_offset=next_offset, tags="paid")
    assert pulling.window.unfinished()[0] == 2
    assert (await pulling.next_pull()).offset == 3000


async def test_a_full_window_whose_response_was_dropped_continues():
    pulling = Pulling(host=Host("Aa"), messages=2 * BATCH)
    (await pulling.next_pull()).found(tags="Aa")
    while pulling.pull_loop.next_offset <= 20 * BATCH:
        assert not pulling.silent or pulling.window.unfinished()[0] < 2 * BATCH
        (await pulling.next_pull()).found(tags="BB" if pulling.window.unfinished()[0] == BATCH else "Aa")


async def test_paused_queues_continue_at_their_offsets():
    pulling = Pulling()
    sent = await pulling.next_pull()
    pulling.pull_loop.is_paused = True
    sent.found()
    assert pulling.host.offsets == list(range(BATCH))
    assert await pulling.stays_silent()
    pulling.pull_loop.resume()
    assert (await pulling.next_pull()).offset == BATCH


async def test_a_topic_without_a_subscription_is_not_pulled():
    pulling = Pulling()
    sent = await pulling.next_pull()
    pulling.host.subscribed = None
    sent.found()
    assert await pulling.stays_silent()


async def test_a_pull_may_take_as_long_as_the_broker_may_hold_it():
    assert (await Pulling().next_pull()).timeout_s == 30, "twice the hold, as Java"
    assert (await Pulling(hold_s=1).next_pull()).timeout_s == 1 + 5 + 3, "the hold, the broker's tick, and any call's"
