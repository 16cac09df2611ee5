"""Texts of servers and listeners forge no line of a log, move no cursor, and fill no disk."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest

import pyrocket_consumer
from pyrocket_consumer import Admin, ClientClosed, ConsumerEvent, Producer, PushConsumer, RocketError, SendError
from pyrocket_consumer.errors import BrokerError, ConnectError
from pyrocket_consumer.model import EventKind
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer
from pyrocket_consumer.text import escape_controls, escape_json_controls, safe_repr
from tests.consuming import Events, consuming

FORGED = "no\r\n2026-11-23 06:00:00 ERROR root: all offsets are lost\x1b[2J\x9b2J\x7f\u202etxt\u2028next\x00"
HUGE = FORGED + "x" * 300_000
LONGEST = 1500


def assert_fit(*texts: object) -> None:
    for text in map(str, texts):
        assert len(text) < LONGEST, f"{len(text)} characters: {text[:200]!r}"
        assert text.isprintable(), text[:400]
        assert len(text.splitlines()) <= 1


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("pyrocket_consumer")]


def test_a_remark_of_a_broker_is_one_short_line(embedded, caplog):
    caplog.set_level(logging.DEBUG)
    embedded.create_topic("orders")
    embedded.broker("broker-a").on(RequestCode.SEND_MESSAGE_V2, answer(13, HUGE), times=None)
    with Producer(name_server=embedded.name_server) as producer, pytest.raises(SendError) as raised:
        producer.send("orders", b"one")
    assert_fit(raised.value, repr(raised.value), *raised.value.attempts, *logged(caplog))
    assert "all offsets are lost" in str(raised.value), "its text is shown"
    assert "more characters)" in str(raised.value), "and that there is more"
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_remark_of_a_name_server_is_one_short_line(embedded):
    embedded.name_server_node.on(RequestCode.GET_BROKER_CLUSTER_INFO, answer(1, HUGE), times=None)
    with Admin(name_server=embedded.name_server) as admin, pytest.raises(RocketError) as raised:
        admin.lag("g")
    assert_fit(raised.value, repr(raised.value))


def test_events_and_their_log_lines_are_one_short_line(embedded, caplog):
    caplog.set_level(logging.DEBUG)
    embedded.send("orders", b"one")
    events = Events()
    embedded.broker("broker-a").on(RequestCode.PULL_MESSAGE, answer(1, HUGE), times=3)
    with consuming(embedded, "orders", "g", on_event=events):
        events.wait_for("broker-unreachable")
    assert_fit(*events.all, *(event.text for event in events.all), *logged(caplog))


def test_a_text_of_a_listener_forges_no_log_line(embedded, caplog):
    embedded.send("orders", b"one")
    events = Events()

    class Odd(Exception):
        def __repr__(self) -> str:
            return HUGE

    def raises(message):
        raise Odd(HUGE)

    with consuming(embedded, "orders", "g", raises, on_event=events):
        events.wait_for("listener-failed")
    assert_fit(*events.all, *logged(caplog))


def test_a_text_quoted_by_another_error_is_escaped():
    for error in (RocketError(FORGED), ConnectError(FORGED, FORGED), BrokerError(1, FORGED, FORGED)):
        assert_fit(error, repr(error))
    assert_fit(ConsumerEvent(EventKind.OFFSET_RESET, FORGED, None, {"topic": FORGED}))


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_value_is_shown_as_one_short_line_whatever_it_does(error):
    class Odd:
        def __repr__(self) -> str:
            return HUGE

    class Unshown:
        def __repr__(self) -> str:
            raise error("not shown")

    assert_fit(safe_repr(Odd()), safe_repr(type(FORGED[:-1], (Unshown,), {})()), safe_repr(10**5000))
    assert safe_repr(Odd()).endswith(f"… ({len(HUGE) - 80} more characters)")
    assert safe_repr(Unshown()) == "<Unshown, whose repr raises>"
    assert safe_repr("as short as this") == "'as short as this'"


def test_letters_of_all_languages_are_unchanged():
    for text in ("订单　已付", "ناقص", "naïve – 10 €", "👩‍🚀", "a\\b"):
        assert escape_controls(text) == text
        assert str(RocketError(text)) == text


def test_json_stays_the_same_value():
    value = {"body": FORGED, "lone": "\ud800", "all": "".join(map(chr, range(0xA0)))}
    text = escape_json_controls(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(text) == value
    assert text.replace("\n", "").isprintable()


def test_every_log_of_the_package_has_records_of_one_line():
    folder = Path(pyrocket_consumer.__file__).parent
    others = [path for path in folder.rglob("*.py") if "getLogger" in path.read_text() and path.name != "text.py"]
    assert not others, "they create a logger themselves; use text.logger"


def test_the_old_name_of_client_closed_still_works():
    assert pyrocket_consumer.ConsumerClosed is ClientClosed
    old = pickle.loads(b"cpyrocket_consumer.errors\nConsumerClosed\n(Vthe consumer is closed\ntR.")
    assert (type(old), str(old)) == (ClientClosed, "the consumer is closed")
    with pytest.raises(pyrocket_consumer.ConsumerClosed):
        PushConsumer("orders-app", name_server="127.0.0.1:1").join()
