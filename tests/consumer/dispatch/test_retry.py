"""Failed messages that are sent back: each stays unfinished until a broker has it, after any error."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pyrocket_consumer import errors
from pyrocket_consumer.consumer.context.statistics import Counts
from pyrocket_consumer.consumer.context.tasks import Tasks
from pyrocket_consumer.consumer.dispatch.retry import LOCAL_RETRY_S, SEND_BACK_LIMIT, Retries
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import BrokerError, ConnectError, ConnectionLost, FlowControl, RequestTimeout
from pyrocket_consumer.model import PERM_READ, BrokerData, EventKind, MessageQueue, QueueData, TopicRoute
from pyrocket_consumer.protocol.message import Message, decode_properties
from tests.consumer.windows import QUEUE, window_of

RETRY = "%RETRY%app"

BUSY = FlowControl(2, "busy", "a:1")
REFUSED = BrokerError(1, "no", "a:1")
SILENT = RequestTimeout("CONSUMER_SEND_MSG_BACK", "a:1", 3)
LOST = ConnectionLost("a:1", "x")
AWAY = ConnectError("broker 'a'", "no known route names an address of its master")


def route(perm: int = 6, masters: bool = True) -> TopicRoute:
    brokers = tuple(BrokerData("c", name, {0 if masters else 1: f"{name}:1"}) for name in "ab")
    return TopicRoute(RETRY, tuple(QueueData(name, 1, 1, perm) for name in "ab"), brokers)


class Member:
    """A fake member with its brokers. It gives the prepared answers, and repeats the last one."""

    def __init__(self, *send_backs: Exception | None, sends: Any = ()) -> None:
        self.config = SimpleNamespace(broadcasting=False, most_attempts=16, orderly=False)
        self.name, self.loop, self.rng = "app", asyncio.get_running_loop(), random.Random(1)
        self.cluster = self.routes = self
        self.tasks = Tasks(self.loop, self.report_unexpected)
        self.answers = {"send_back": list(send_backs) or [None], "send": list(sends) or [None]}
        self.found: Any = route()
        self.calls: list[tuple[float, str, str]] = []
        self.sent, self.delivered = [], []
        self.fails_at_once = lambda window, message: None
        self.late: list[Any] = []  # called when a response arrives too late
        self.emitted, self.surprises = [], []
        self.under_way = self.most_under_way = 0
        self.call_s = 0.0
        self.retries = Retries(self, None, Counts())  # type: ignore[arg-type]
        self.retries.deliver = self.deliver

    def broker(self, name: str) -> Any:
        async def send_back(group, message, delay_level, limit, *, on_late):
            self.late.append(on_late)
            await self._call("send_back", name)

        async def send(header, body):
            self.sent.append((header, body))
            await self._call("send", name)

        return SimpleNamespace(send_back=send_back, send=send)

    async def fail(self, window: ProcessQueue, *messages: Message, level: int = 0) -> None:
        """Let messages fail, and wait until their send-backs have ended."""
        self.retries.add(window, [(message, level) for message in messages])
        await self.settled()

    async def settled(self) -> None:
        while self.retries.in_flight:
            await asyncio.sleep(0.01)

    def fails_again(self) -> None:
        """From now on, let messages fail as soon as they are delivered."""
        self.fails_at_once = lambda window, message: self.retries.add(window, [(message, 0)])

    async def _call(self, what: str, name: str) -> None:
        self.calls.append((self.loop.time(), what, name))
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        await asyncio.sleep(self.call_s)
        self.under_way -= 1
        answers = self.answers[what]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is not None:
            raise answer

    async def get(self, topic):
        assert topic == RETRY
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def emit(self, kind, text, *others, **more):
        self.emitted.append(kind)

    emit_throttled = emit

    def deliver(self, window, messages):
        self.delivered += messages
        for message in messages:
            self.fails_at_once(window, message)

    def report_unexpected(self, what, error):
        self.surprises.append(error)

    @property
    def kinds_of_calls(self) -> list[str]:
        return [what for _, what, _ in self.calls]


def record(offset: int) -> dict[str, Any]:
    properties = {"UNIQ_KEY": f"id{offset}", "TAGS": "t", "TRAN_MSG": "true", "own": "x"}
    return {"body": b"paid", "flag": 7, "born_at_ms": 1234, "reconsume_times": 2, "properties": properties}


def filled(count: int = 1, queue: MessageQueue = QUEUE) -> tuple[ProcessQueue, list[Message]]:
    return window_of(count, queue, record=record)


async def sent_back(member: Member, delay_level: int = 0) -> tuple[ProcessQueue, list[Message]]:
    """Let a message fail, and wait until its send-back has ended. Return its window and the message."""
    window, messages = filled()
    await member.fail(window, messages[0], level=delay_level)
    return window, messages


async def test_a_busy_broker_is_asked_again_after_a_pause():
    member = Member(BUSY, BUSY, None)
    window, messages = await sent_back(member)
    times = [at for at, _, _ in member.calls]
    assert member.kinds_of_calls == ["send_back"] * 3
    assert times[1] - times[0] < times[2] - times[1]
    assert window.commit_offset() == 1


@pytest.mark.parametrize("trouble", [REFUSED, AWAY, BUSY], ids=str)
async def test_a_refused_send_back_becomes_a_new_message(trouble):
    member = Member(trouble)
    window, messages = await sent_back(member)
    assert window.commit_offset() == 1
    ((header, body),) = member.sent
    properties = decode_properties(header.properties)
    assert (header.topic, header.producer_group, body) == (RETRY, "app", b"paid")
    assert (header.reconsume_times, header.max_reconsume_times) == (3, 16)
    assert (header.flag, header.born_timestamp) == (7, 1234)
    assert (properties["RETRY_TOPIC"], properties["ORIGIN_MESSAGE_ID"]) == ("orders", "id0")
    assert (properties["DELAY"], properties["TAGS"], properties["own"]) == ("5", "t", "x")
    assert "TRAN_MSG" not in properties


@pytest.mark.parametrize(("delay_level", "delay", "limit"), [(7, "7", 16), (0, "5", 16), (-1, "5", 0)])
async def test_a_send_back_has_the_requested_delay_level(delay_level, delay, limit):
    member = Member(REFUSED)
    window, messages = await sent_back(member, delay_level)
    ((header, _),) = member.sent
    assert (decode_properties(header.properties)["DELAY"], header.max_reconsume_times) == (delay, limit)


async def test_another_broker_is_tried():
    member = Member(REFUSED, sends=[BUSY, None])
    window, messages = await sent_back(member)
    assert {name for _, what, name in member.calls if what == "send"} == {"a", "b"}
    assert window.commit_offset() == 1


NOBODY = {
    "no master": route(masters=False),
    "read only": route(PERM_READ),
    "no queue": TopicRoute(RETRY),
    "no route": errors.RouteNotFound(RETRY, "ns:1"),
    "no name server": AWAY,
}


@pytest.mark.parametrize("found", NOBODY)
async def test_a_message_that_no_broker_accepts_is_repeated_here(found):
    member = Member(AWAY)
    member.found = NOBODY[found]
    window, messages = await sent_back(member)
    assert window.commit_offset() == 0
    assert member.emitted == [EventKind.SEND_BACK_FAILED]
    assert member.delivered == []
    await asyncio.sleep(LOCAL_RETRY_S + 0.1)
    assert member.delivered == messages
    assert messages[0].reconsume_times == 3
    assert window.commit_offset() == 0
    assert member.surprises == []


@pytest.mark.parametrize("trouble", [SILENT, LOST], ids=["silent", "lost"])
@pytest.mark.parametrize("kind", ["send_back", "send"])
async def test_a_send_back_that_may_have_worked_is_not_sent_otherwise(kind, trouble):
    member = Member(trouble) if kind == "send_back" else Member(REFUSED, sends=[trouble])
    window, messages = await sent_back(member)
    assert member.kinds_of_calls == (["send_back"] if kind == "send_back" else ["send_back", "send"])
    assert member.emitted == [EventKind.SEND_BACK_FAILED]
    assert window.commit_offset() == 0


async def test_unanswered_attempts_have_growing_pauses():
    member = Member(SILENT)
    member.fails_again()
    await sent_back(member)
    await asyncio.sleep(2000)
    pauses = [round(after - before) for before, after in pairwise(at for at, _, _ in member.calls)]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300]


async def test_a_late_answer_counts():
    member = Member(SILENT)
    window, messages = await sent_back(member)
    member.late[0]()
    assert window.commit_offset() == 1
    assert member.emitted == [EventKind.SEND_BACK_FAILED, EventKind.MESSAGE_SENT_BACK]
    member.late[0]()
    await asyncio.sleep(60)
    assert (member.delivered, len(member.emitted), len(member.calls)) == ([], 2, 1)


def copies_of(message: Message, count: int = 1) -> tuple[ProcessQueue, list[Message]]:
    """A window of the retry topic with copies of a message that send-backs have created."""
    properties = {**message.properties, "RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": message.offset_message_id}

    def copy(offset: int) -> dict[str, Any]:
        return {**record(offset), "reconsume_times": 3, "properties": properties, "commit_log_offset": 1000 + offset}

    return window_of(count, MessageQueue(RETRY, "a", 0), record=copy)


async def test_one_of_several_copies_of_a_message_is_sent_back():
    """They prove that the unanswered send-backs were executed. Otherwise each copy would create more copies."""
    member, (window, messages) = Member(SILENT), filled(2)
    await member.fail(window, messages[0])
    other, copies = copies_of(messages[0], 3)
    await member.fail(other, copies[0])
    assert window.commit_offset() == 1, "the copy represents it"
    assert len(member.calls) == 1, "and waits as long"
    await member.fail(other, copies[1], copies[2])
    assert other.commit_offset() == 2
    member.answers["send_back"] = [None]
    await asyncio.sleep(6)
    assert other.commit_offset() == 3
    assert len(member.calls) == 2
    assert (window.commit_offset(), member.delivered) == (1, []), "the other message was not touched"


async def test_a_copy_waits_no_longer_than_for_the_response():
    member = Member(SILENT, None)
    window, messages = await sent_back(member)
    other, copies = copies_of(messages[0])
    await member.fail(other, copies[0])
    await asyncio.sleep(1)
    member.late[0]()
    await asyncio.sleep(0.1)
    assert (window.commit_offset(), other.commit_offset()) == (1, 1)


@pytest.mark.parametrize("given_up", [False, True])
async def test_an_older_copy_is_replaced_by_a_newer_one(given_up):
    """If the queue of that copy has ended, it represents no others."""
    member, (window, messages) = Member(SILENT), filled()
    other, copies = copies_of(messages[0])
    await member.fail(other, copies[0])
    if given_up:
        other.drop()
    await member.fail(window, messages[0])
    assert window.commit_offset() == (0 if given_up else 1)
    assert given_up or other.commit_offset() == 0


async def test_messages_that_only_look_alike_are_sent_back_each():
    """The items of an inner batch share one commit log offset, and have no checksums."""
    member, alike = Member(SILENT), {"body": b"", "commit_log_offset": 7, "born_at_ms": 1}
    window, messages = window_of(3, record=lambda offset: alike)
    await member.fail(window, *messages)
    assert len(member.calls) == 3
    assert window.unfinished()[0] == 3


async def test_a_message_is_not_delivered_again_while_its_call_runs():
    member, (window, messages) = Member(REFUSED, sends=[REFUSED]), filled()
    member.retries.add(window, [(messages[0], 3)], running=True)
    await asyncio.sleep(3 * LOCAL_RETRY_S)
    assert member.kinds_of_calls.count("send_back") == 3
    assert member.delivered == []
    member.retries.add(window, [(messages[0], 0)])  # it has failed finally
    await asyncio.sleep(LOCAL_RETRY_S)
    assert member.delivered == messages


async def test_a_send_back_of_a_dropped_queue_counts_until_the_end():
    member, (window, messages) = Member(), filled()
    member.call_s = 1.0
    member.retries.add(window, [(messages[0], 0)])
    await asyncio.sleep(0.5)
    assert window.unfinished()[0] == 1, "not before the copy arrives"
    window.drop()
    await member.settled()
    assert window.fence() == 1


@pytest.mark.parametrize(
    ("delay_level", "limit", "kind"),
    [
        (0, 3, "message-sent-back"),
        (0, None, "message-sent-back"),
        *((level, limit, "message-given-up") for level, limit in [(0, 2), (0, 0), (5, 2), (-1, 16)]),
    ],
)
@pytest.mark.parametrize("refused", [False, True], ids=["send-back", "new message"])
async def test_a_message_sent_to_the_dead_letters_is_reported_as_given_up(delay_level, limit, kind, refused):
    member = Member(REFUSED if refused else None)
    member.config.most_attempts = limit
    window, messages = await sent_back(member, delay_level)
    assert messages[0].reconsume_times == 2
    assert member.emitted == [kind]


async def test_attempts_made_here_do_not_count_for_the_broker():
    member = Member(AWAY, None, sends=[AWAY])
    member.config.most_attempts = 3
    member.fails_again()
    await sent_back(member)
    await asyncio.sleep(10)
    assert member.emitted == [EventKind.SEND_BACK_FAILED, EventKind.MESSAGE_SENT_BACK]


async def test_giving_up_waits_longer_each_time_it_is_not_answered():
    member, (window, messages) = Member(SILENT, SILENT, REFUSED, SILENT, None, sends=[REFUSED]), filled()
    pauses = [await member.retries.give_up(window, messages[0]) for _ in range(5)]
    assert pauses == [1, 2, 1, 4, 0]
    assert window.commit_offset() == 1
    assert member.emitted.count(EventKind.MESSAGE_GIVEN_UP) == 1


async def test_a_late_answer_to_giving_up_counts():
    member, (window, messages) = Member(SILENT), filled()
    assert await member.retries.give_up(window, messages[0]) == 1
    member.late[0]()
    assert await member.retries.give_up(window, messages[0]) == 0
    assert len(member.calls) == 1


async def test_a_message_finished_meanwhile_is_not_repeated_here():
    member = Member(REFUSED, sends=[REFUSED])
    consumed, (one,) = await sent_back(member)
    lost, _ = await sent_back(member)
    consumed.ack([one])
    lost.drop()
    await asyncio.sleep(LOCAL_RETRY_S + 0.1)
    assert member.delivered == []


async def test_finished_messages_are_not_sent_back():
    member, (window, messages) = Member(), filled(2)
    window.ack(messages[:1])
    member.retries.add(window, [(messages[0], 0)])
    window.drop()
    await member.fail(window, messages[1])
    assert member.calls == []


async def test_concurrent_send_backs_are_limited():
    member, (window, messages) = Member(), filled(3 * SEND_BACK_LIMIT)
    member.call_s = 1.0
    await member.fail(window, *messages)
    assert member.most_under_way == SEND_BACK_LIMIT
    assert window.commit_offset() == 3 * SEND_BACK_LIMIT


async def test_a_broker_that_does_not_answer_delays_no_other():
    """A cancelled message stays unfinished."""
    member, (window, messages) = Member(), filled(2 * SEND_BACK_LIMIT)
    member.call_s = 3600.0
    member.retries.add(window, [(message, 0) for message in messages])
    await asyncio.sleep(1)
    member.call_s = 0.1
    other, (message,) = filled(queue=MessageQueue("orders", "b", 0))
    member.retries.add(other, [(message, 0)])
    await asyncio.sleep(1)
    assert other.commit_offset() == 1
    member.retries.cancel()
    await member.settled()
    assert window.commit_offset() == 0
    assert member.surprises == []


async def test_a_bug_is_reported_as_unexpected():
    member = Member(ZeroDivisionError())
    window, messages = await sent_back(member)
    assert [type(error) for error in member.surprises] == [ZeroDivisionError]
    assert window.commit_offset() == 0
