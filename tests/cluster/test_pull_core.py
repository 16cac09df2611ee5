"""The core of all pulls, as tables: responses in, results and next pulls out."""

from __future__ import annotations

import pytest

from pyrocket_consumer.cluster.pull_core import Failed, PullCore, Pulled, PullTemplate, pull_header, read_late_reset
from pyrocket_consumer.errors import BrokerError, ConnectionLost, ProtocolError, RequestTimeout
from pyrocket_consumer.model import MASTER_ID, MessageQueue, Subscription
from pyrocket_consumer.protocol.codes import PullFlag
from pyrocket_consumer.protocol.frame import BufferSlice, RemotingCommand, decode_command
from tests.for_each import for_each

QUEUE = MessageQueue("orders", "broker-a", 3)
BATCH = 8
FOUND, NO_NEW, NO_MATCHED, MOVED = 0, 19, 20, 21


def response(code, next_offset=0, *, end=1000, low=0, body=b"x", remark=None):
    fields = {"nextBeginOffset": str(next_offset), "minOffset": str(low), "maxOffset": str(end)}
    return RemotingCommand(code, fields, body if code == FOUND else b"", flag=1, remark=remark)


def growing(offset=0, **options):
    return PullCore(QUEUE, offset, BATCH, **{"read_ahead": 4, "retry_delay_s": 1.0, **options})


def range_until(end, step=BATCH, **options):
    return PullCore(QUEUE, 0, BATCH, end=end, step=step, **{"read_ahead": 4, **options})


def pull_all(core, now=0.0):
    """Send pulls while the core wants more; return their offsets."""
    offsets = []
    while (offset := core.next_pull()) is not None:
        core.sent(offset, now)
        offsets.append(offset)
    return offsets


def take(core, now=0.0):
    """Accept all results that are next; return the pauses."""
    pauses = []
    while (found := core.next_result()) is not None:
        pull, result = found
        assert isinstance(result, Pulled)
        pauses.append(core.advance(pull, result.header, now))
    return pauses


def respond(core, offset, answer, now=0.0):
    """Let the response to the pull at `offset` arrive; return the pauses of the results that are next."""
    next(pull for pull in core.in_flight if pull.offset == offset).response = answer
    return take(core, now)


def in_flight(core):
    return [pull.offset for pull in core.in_flight]


# --- results

RESULTS = {
    "messages": (response(FOUND, 16), Pulled, 16),
    "nothing new": (response(NO_NEW, 8), Pulled, 8),
    "nothing that matches": (response(NO_MATCHED, 500), Pulled, 500),
    "a correction": (response(MOVED, 3), Pulled, 3),
    "a reset": (response(MOVED, 3, remark="OFFSET_RESET"), Pulled, 3),
    "a reset of a broker that sends no range": (response(MOVED, 3, end=0, remark="OFFSET_RESET"), Pulled, 3),
    "no body": (response(FOUND, 16, body=b""), Failed, ProtocolError),
    "messages without an advance": (response(FOUND, 8), Failed, ProtocolError),
    "backwards": (response(NO_MATCHED, 7), Failed, ProtocolError),
    "beyond the end": (response(FOUND, 5000), Failed, ProtocolError),
    "no offsets": (RemotingCommand(FOUND, {}, b"x"), Failed, ProtocolError),
    "refused": (response(1), Failed, BrokerError),
    "no response": (RequestTimeout("PULL_MESSAGE", "a:1", 3.0), Failed, RequestTimeout),
}


@for_each("answer, kind, expected", RESULTS.values(), ids=list(RESULTS))
def test_the_meaning_of_a_response(answer, kind, expected):
    core = growing(8)
    core.sent(8, 0.0).response = answer
    pull, result = core.next_result()
    assert (pull.offset, type(result)) == (8, kind)
    if isinstance(result, Failed):
        assert isinstance(result.error, expected)
    else:
        assert result.header.next_offset == expected
        assert result.header.offset_reset == (answer.remark is not None)
        assert (result.count > 0) == (answer.code == FOUND)
    assert core.next_offset == 8, "only `advance` moves it"
    assert core.next_result() is None


def test_a_body_that_is_read_in_place_counts():
    core = range_until(100)
    pull = core.sent(0, 0.0)
    pull.response, pull.body = response(FOUND, 8, body=b""), BufferSlice.whole(b"x")
    assert isinstance(core.next_result()[1], Pulled)


def test_an_error_names_the_server():
    core = growing()
    core.server = "10.0.0.1:10911"
    core.sent(0, 0.0).response = response(1)
    _, result = core.next_result()
    assert isinstance(result, Failed)
    assert "10.0.0.1:10911" in str(result.error)


def test_results_come_in_order_of_offset():
    core = range_until(100)
    assert pull_all(core) == [0, 8, 16, 24]
    assert respond(core, 8, response(FOUND, 16)) == []
    assert respond(core, 16, response(FOUND, 24)) == []
    assert len(respond(core, 0, response(FOUND, 8))) == 3
    assert (core.next_offset, in_flight(core)) == (24, [24])


# --- where the next pulls begin


def test_a_growing_queue_is_pulled_ahead_after_two_equal_responses():
    core = growing()
    table = [
        ("one step is no rule", 0, response(FOUND, 8), [8]),
        ("up to four are in flight", 8, response(FOUND, 16), [16, 24, 32, 40]),
        ("one more for each response", 16, response(FOUND, 24), [48]),
        ("nothing that matches ends it", 24, response(NO_MATCHED, 32), []),
        ("not at the end of the queue", 32, response(FOUND, 40, end=56), []),
    ]
    assert pull_all(core) == [0]
    for why, offset, answer, expected in table:
        respond(core, offset, answer)
        assert pull_all(core) == expected, why
    assert in_flight(core) == [40, 48]
    assert not core.is_guess_wrong


@pytest.mark.parametrize("answer", [response(FOUND, 19), response(FOUND, 25), response(NO_MATCHED, 100)])
def test_a_wrong_guess_in_a_growing_queue_ends_the_pulls_in_flight(answer):
    core = growing(16)
    core.step, core.max_offset = BATCH, 1000
    assert pull_all(core) == [16, 24, 32, 40]
    respond(core, 16, answer)
    assert core.is_guess_wrong
    dropped = core.abandon()
    assert [pull.offset for pull in dropped] == [24, 32, 40]
    assert all(pull.abandoned for pull in dropped)
    assert pull_all(core) == [core.next_offset]


def test_a_range_is_pulled_up_to_its_end():
    core = range_until(21)
    assert pull_all(core) == [0, 8, 16]
    assert [pull.count for pull in core.in_flight] == [8, 8, 5]
    assert pull_all(range_until(100, step=0)) == [0], "with a filter, the first step is unknown"


def test_in_a_range_a_gap_is_pulled_before_the_responses_behind_it():
    core = range_until(100)
    assert pull_all(core) == [0, 8, 16, 24]
    respond(core, 0, response(FOUND, 5))
    assert (core.next_offset, core.is_guess_wrong) == (5, True)
    assert pull_all(core) == [5]
    respond(core, 8, response(FOUND, 16))
    assert (core.next_offset, in_flight(core)) == (5, [5, 8, 16, 24])
    respond(core, 5, response(FOUND, 12))
    assert (core.next_offset, in_flight(core)) == (16, [16, 24]), "they overlap"
    assert pull_all(core) == [32, 40]


def test_after_a_failure_a_range_keeps_the_messages_that_have_arrived():
    core = range_until(100)
    pull_all(core)
    respond(core, 8, response(FOUND, 16))
    core.in_flight[0].response = ConnectionLost("a:1", "gone")
    assert isinstance(core.next_result()[1], Failed)
    assert [pull.offset for pull in core.abandon(keep_found=True)] == [16, 24]
    assert pull_all(core) == [0, 16, 24]


def test_the_next_pull_goes_to_the_master_once_if_it_has_a_reset():
    core = growing()
    core.broker_id = 1
    core.pull_from_master_next()
    assert [core.sent(0, 0.0).broker_id, core.sent(8, 0.0).broker_id] == [MASTER_ID, 1]


def test_a_pull_at_the_known_end_may_be_empty():
    core = growing()
    assert not core.may_be_empty(0)
    pull_all(core)
    respond(core, 0, response(FOUND, 8, end=8))
    assert core.may_be_empty(8)
    assert (core.min_offset, core.max_offset) == (0, 8)


# --- pauses

EMPTY = {
    "nothing new": (lambda offset: response(NO_NEW, offset), [0, 0, 0, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]),
    "a redirect": (lambda offset: response(NO_MATCHED, offset), [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]),
    "one message": (lambda offset: response(FOUND, offset + 1), [0, 0, 0, 0, 0.01, 0.02, 0.04, 0.08, 0.1]),
    "a full response": (lambda offset: response(FOUND, offset + BATCH), [0] * 9),
}


@for_each("answer, pauses", EMPTY.values(), ids=list(EMPTY))
def test_pauses_after_responses_that_the_broker_did_not_hold(answer, pauses):
    core = growing(read_ahead=1)
    for number, pause_s in enumerate(pauses):
        core.sent(core.next_offset, number)
        (found,) = respond(core, core.next_offset, answer(core.next_offset), number)
        assert found == pytest.approx(pause_s), number
    core.sent(core.next_offset, 100.0)
    assert respond(core, core.next_offset, response(NO_NEW, core.next_offset), 110.0) == [0], "it was held"


def test_wanted_messages_end_the_pauses():
    core = growing(read_ahead=1)
    for _ in range(50):
        core.sent(core.next_offset, 0.0)
        assert respond(core, core.next_offset, response(FOUND, core.next_offset + 1)) == [0]
        core.progressed(True)


LOST, DAMAGED, TIMEOUT = ConnectionLost("a:1", "gone"), ProtocolError("no"), RequestTimeout("PULL_MESSAGE", "a:1", 3.0)
FAILURES = {
    "lost": (LOST, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], None),
    "timeout": (TIMEOUT, [1, 1, 1, 1, 1, 1, 1], None),
    "damaged": (DAMAGED, [1, 2, 4, 8, 10, 10, 10], None),
    "busy": (response(215), [0.02, 0.02, 0.02, 0.02, 0.02, 0.04, 0.08], None),
    "refused": (response(1), [1, 1, 1, 1, 1, 1, 1], None),
    **{f"code {code}": (response(code), [0] * 7, "register") for code in (24, 25, 26, 27, 28)},
    **{f"code {code}": (response(code), [1] * 7, "refresh route") for code in (17, 29, 501)},
}


@for_each("answer, pauses, remedy", FAILURES.values(), ids=list(FAILURES))
def test_pauses_and_remedies_after_failures(answer, pauses, remedy):
    core = growing()
    for pause_s in pauses:
        core.broker_id = 1
        core.sent(0, 0.0).response = answer
        _, result = core.next_result()
        assert isinstance(result, Failed)
        assert (pytest.approx(result.pause_s), result.remedy) == (pause_s, remedy)
        assert core.broker_id == (MASTER_ID if isinstance(answer, Exception) else 1)
        assert core.next_pull() == 0
    core.progressed(False)
    core.sent(0, 0.0).response = answer
    assert core.next_result()[1].pause_s == pytest.approx(pauses[0])


# --- late resets


@pytest.mark.parametrize(
    ("late", "target"),
    [
        (response(MOVED, 5, remark="OFFSET_RESET"), 5),
        (response(MOVED, 5), None),
        (response(FOUND, 8), None),
        (response(1), None),
        (TIMEOUT, None),
        (None, None),
    ],
)
def test_of_a_late_response_only_a_reset_counts(late, target):
    reset = read_late_reset(late)
    assert (reset.next_offset if reset is not None else None) == target


def test_a_late_reset_without_fields_is_an_error():
    with pytest.raises(ProtocolError):
        read_late_reset(RemotingCommand(MOVED, {}, remark="OFFSET_RESET"))


# --- requests


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("hold_s", [0.0, 15.0])
def test_the_fields_of_a_request(is_registered, hold_s):
    subscription = Subscription("orders", "a || b", frozenset("ab"), version=7)
    header = pull_header("app", QUEUE, 100, 32, subscription, hold_s=hold_s, is_registered=is_registered)
    flags = (PullFlag.SUSPEND if hold_s else 0) | (0 if is_registered else PullFlag.SUBSCRIPTION)
    assert (header.sys_flag, header.suspend_timeout_millis) == (flags, hold_s * 1000)
    assert header.subscription == (None if is_registered else "a || b")
    assert (header.sub_version, header.expression_type, header.commit_offset) == (7, "TAG", 0)
    fields = decode_command(PullTemplate(header.to_fields()).encode(100, 1)).fields
    assert fields == header.to_fields()
