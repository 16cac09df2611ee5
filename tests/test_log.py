"""No error text and no traceback forges a line of a log."""

from __future__ import annotations

import asyncio
import io
import logging
import re

import pytest
from sqlalchemy import create_engine, text

from pyrocket_consumer.text import PACKAGE_LOG, logger
from tests.consuming import Events, RecordingListener, consuming

FORGED = "12\r\n2026-11-24 22:00:00,000 CRITICAL billing: paid twice\x1b[2J\x1b]0;x\x07\x9b2J\u2028Traceback\x85\x0cend"
LONGEST = 40_000

RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ pyrocket_consumer\.")
"""The start of a record in the log of these tests."""


@pytest.fixture
def written():
    """The log of the package, as `logging.basicConfig` would have it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    PACKAGE_LOG.addHandler(handler)
    yield stream
    PACKAGE_LOG.removeHandler(handler)


def assert_fit(stream: io.StringIO) -> str:
    """Check that each line starts a record, or is marked as a line of its traceback."""
    whole = stream.getvalue()
    for line in whole.removesuffix("\n").split("\n"):
        assert line.isprintable(), repr(line)
        assert RECORD.match(line) or line.startswith("  | "), line
    return whole


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("kind", ["listener", "orderly", "order_by"])
def test_a_body_in_a_listener_error_forges_no_log_line(embedded, written, kind):
    def fails(message):
        try:
            raise LookupError(message.body.decode())
        except LookupError as error:
            error.add_note(message.body.decode())
            raise ValueError(f"(driver) {message.body.decode()}\n[parameters: …]") from error

    options = {"listener": {}, "orderly": {"orderly": True}, "order_by": {"orderly": True, "order_by": fails}}[kind]
    embedded.send("orders", FORGED.encode())
    events = Events()
    with consuming(embedded, "orders", "g", fails, on_event=events, **options):
        events.wait_for("listener-failed")
    whole = assert_fit(written)
    for line in ("  | Traceback", "in fails", "LookupError: 12", "direct cause", "ValueError: (driver) 12"):
        assert line in whole, whole


def test_an_error_of_sqlalchemy_forges_no_log_line_and_hides_bodies(embedded, written, tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path}/app.db", hide_parameters=True)

    def books(message):
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO absent VALUES (:body)"), {"body": message.body.decode()})

    embedded.send("orders", f"secret of a customer {FORGED}".encode())
    events = Events()
    with consuming(embedded, "orders", "g", books, on_event=events):
        event = events.wait_for("listener-failed")
    engine.dispose()
    whole = assert_fit(written)
    assert "no such table: absent" in whole and "[SQL: INSERT INTO absent" in whole
    assert "secret" not in whole + str(event)


def test_an_error_of_on_event_forges_no_log_line(embedded, written):
    def fails(event):
        raise ValueError(FORGED)

    embedded.create_topic("orders")
    with consuming(embedded, "orders", "g", on_event=fails):
        embedded.wait_until(lambda: "on_event raised" in written.getvalue())
    assert "  | ValueError: 12" in assert_fit(written)


def test_a_long_traceback_is_truncated_and_keeps_its_last_frames(written):
    def fails(depth):
        if depth:
            return fails(depth - 1)
        raise ValueError("first" + "\n" * 100_000 + FORGED * 10_000)

    def begins():
        try:
            fails(5)
        except ValueError as error:
            raise LookupError("last" + "y" * 1_000_000) from error

    def notes():
        error = raised(ExceptionGroup(FORGED, [raised(ValueError(FORGED))] * 5000))
        error.add_note(FORGED * 10_000)
        raise error

    def goes_deep():
        def one(depth):
            other(depth)

        def other(depth):  # two functions alternate, so that a traceback has each call
            if depth > 300:
                raise ValueError("deep")
            one(depth + 1)

        one(0)

    for function in (begins, notes, goes_deep):
        try:
            function()
        except Exception:
            logger("test").exception("failed")
        whole = assert_fit(written)
        assert len(whole) < LONGEST
        assert f"in {function.__name__}" in whole
        if function is begins:
            assert all(line in whole for line in ("in fails", "ValueError: first", "LookupError: last"))
            assert "more characters)" in whole
        written.seek(0)
        written.truncate()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_whose_repr_fails_is_logged(written, error):
    class Unshown(Exception):
        def __str__(self) -> str:
            raise error("not shown")

        __repr__ = __str__

    problem = raised(Unshown())
    logger("test").error("failed: %r", problem, exc_info=problem)
    logger("test").error("failed: %d", "none")
    whole = assert_fit(written)
    assert whole.count("ERROR") == 2 and "Unshown" in whole


def test_an_error_whose_repr_fails_does_not_end_the_listener(embedded, written):
    class Unshown(SystemExit):
        def __repr__(self) -> str:
            raise ValueError("not shown")

    async def ends():
        raise Unshown

    async def begins(message):
        begins.task = asyncio.ensure_future(ends())
        begins.task.add_done_callback(lambda task: task.exception())
        seen(message)

    seen = RecordingListener()
    embedded.send("orders", b"one")
    with consuming(embedded, "orders", "g", begins):
        seen.wait_for(1)
        embedded.wait_until(lambda: "a task that a listener began" in written.getvalue())
        embedded.send("orders", b"two")
        seen.wait_for(2)
    assert_fit(written)


def test_a_log_record_keeps_its_exception_for_handlers(caplog):
    problem = raised(ValueError(FORGED))
    logger("test").error("failed", exc_info=problem)
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[1] is problem
