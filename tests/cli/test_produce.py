"""`pyrocket produce`: what it sends, and that it tells how much, however it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer.cli import main
from pyrocket_consumer.testing import EmbeddedCluster, answer
from pyrocket_consumer.wire.codes import RequestCode, ResponseCode
from tests.consuming import until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def orders():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        yield cluster


def command(cluster, *arguments):
    return [sys.executable, "-m", "pyrocket_consumer.cli", "produce", "orders", "-n", cluster.name_server, *arguments]


def produce(cluster, *arguments, given=b""):
    """Run it as from a shell; returns the exit code, what it printed, and what it told beside."""
    done = subprocess.run(
        command(cluster, *arguments), input=given, capture_output=True, timeout=60, env=ENVIRONMENT
    )
    assert b"Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Running:
    """The command while it reads what `write` gives it."""

    def __init__(self, cluster, *arguments):
        self._cluster = cluster
        self._process = subprocess.Popen(
            command(cluster, *arguments, "-"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        )  # fmt: skip
        self.send_signal = self._process.send_signal

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.kill()
        self._process.communicate()

    def write(self, text, stored):
        self._process.stdin.write(text)
        self._process.stdin.flush()
        until(lambda: len(bodies(self._cluster)) == stored, f"{stored} are stored")

    def leave(self):
        """Read no more, as `head` does."""
        self._process.stdout.close()

    def end(self):
        code = self._process.wait(60)
        told = self._process.stderr.read().decode()
        assert "Traceback" not in told, told
        return code, told


def bodies(cluster):
    return [message.body for message in cluster.messages("orders")]


LINES = [
    (b"a\nb\n", [b"a", b"b"]),
    (b"a\r\nb\r\n", [b"a", b"b"]),
    (b"a\n\nb", [b"a", b"b"]),
    (b"a\r\n\r\nb\r\n", [b"a", b"b"]),
    (b"a\rb\r\r\n \n", [b"a\rb\r", b" "]),
    (b"a\r", [b"a\r"]),
    (b"\xff\xfe\0\n", [b"\xff\xfe\0"]),
    (b"\n\r\n", []),
    (b"", []),
]


@pytest.mark.parametrize(("given", "expected"), LINES, ids=lambda each: repr(each))
def test_a_body_is_a_line_without_its_end_and_an_empty_line_is_none(orders, given, expected):
    count = f"{len(expected)} {'message' if len(expected) == 1 else 'messages'}"
    assert produce(orders, "-", given=given) == (0, f"{count} sent to orders\n", "")
    assert bodies(orders) == expected


def test_json_ends_with_how_many_were_sent(orders):
    code, printed, beside = produce(orders, "first", "-", "-o", "json", given=b"\na\n\nb\n")
    *stored, summary = map(json.loads, printed.splitlines())
    assert (code, beside, [each["offset"] for each in stored]) == (0, "", [0, 1, 2])
    assert summary == {"topic": "orders", "sent": 3, "last": "line 4 of standard input", "stopped_by": None}


def test_messages_of_one_sharding_key_are_in_one_queue(orders):
    orders.create_topic("keyed", queues=8)
    arguments = ["produce", "-n", orders.name_server, "keyed", "a", "b", "c", "--sharding-key", "customer-7"]
    assert main(arguments) == 0
    stored = orders.messages("keyed")
    assert {message.property("__SHARDINGKEY") for message in stored} == {"customer-7"}
    assert len({message.queue for message in stored}) == 1


def refuse_after(orders, count):
    """Have the broker refuse what comes after so many messages."""
    refusal = answer(ResponseCode.NO_PERMISSION, "the topic is read only")
    left = iter(range(count))

    def accept_some(exchange):
        if next(left, None) is None:
            refusal(exchange)
        else:
            exchange.handle(exchange.answer)

    for code in (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2):
        orders.broker("broker-a").on(code, accept_some, times=None)


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_broker_that_refuses_in_the_middle(orders, output):
    refuse_after(orders, 2)
    code, printed, beside = produce(orders, "-", "-o", output, given=b"a\n\nb\nc\nd\n")
    told, why = beside.splitlines()
    assert code == 1
    assert told == "pyrocket: stopped, 2 messages sent to orders; the last was line 3 of standard input"
    assert "the topic is read only" in why
    if output == "table":
        assert printed == ""
    else:
        summary = json.loads(printed.splitlines()[-1])
        assert (summary["sent"], summary["last"]) == (2, "line 3 of standard input")
        assert "the topic is read only" in summary["stopped_by"]


def test_a_broker_that_goes_away(orders):
    with Running(orders) as running:
        running.write(b"a\nb\n", 2)
        orders.broker("broker-a").stop()
        running.write(b"c\n", 2)
        code, told = running.end()
    assert code == 1
    assert "pyrocket: stopped, 2 messages sent to orders; the last was line 2 of standard input" in told.splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_while_it_waits_for_input(orders, number):
    with Running(orders) as running:
        running.write(b"a\nb\n", 2)
        running.send_signal(number)
        assert running.end() == (
            1, "pyrocket: stopped, 2 messages sent to orders; the last was line 2 of standard input\n"
        )  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_a_message_on_its_way_at_a_signal_is_counted(orders):
    held = []
    for code in (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2):
        orders.broker("broker-a").on(code, lambda exchange: exchange.handle(
            lambda reply: held.append((exchange, reply))
        ))  # fmt: skip
    with Running(orders) as running:
        running.write(b"a\nb\n", 1)
        until(lambda: held, "it is stored, and not answered")
        running.send_signal(signal.SIGTERM)
        exchange, reply = held[0]
        orders.call(lambda: exchange.later(0.3, lambda: exchange.answer(reply)))
        assert running.end() == (
            1, "pyrocket: stopped, 1 message sent to orders; the last was line 1 of standard input\n"
        )  # fmt: skip
    assert bodies(orders) == [b"a"]


def test_a_reader_that_leaves(orders):
    with Running(orders, "-o", "json") as running:
        running.write(b"a\n", 1)
        running.leave()
        running.write(b"b\n", 2)
        assert running.end() == (
            1, "pyrocket: stopped, 2 messages sent to orders; the last was line 2 of standard input\n"
        )  # fmt: skip


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_count_that_cannot_be_written_is_told_beside(orders, output):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command(orders, "-o", output, "a"), stdout=full, stderr=subprocess.PIPE, timeout=60, env=ENVIRONMENT
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        "pyrocket: stopped, 1 message sent to orders; the last was argument 1",
        "pyrocket: standard output or input: No space left on device",
    ]


def test_a_reader_that_leaves_before_the_count(orders):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command(orders, "a"), stdout=writer, stderr=subprocess.PIPE, timeout=60, env=ENVIRONMENT
        )
    finally:
        os.close(writer)
    told = b"pyrocket: stopped, 1 message sent to orders; the last was argument 1\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_line_that_is_too_long_is_named_and_not_kept_whole(orders):
    with Running(orders) as running:
        running.write(b"a\n" + b"x" * (4 * 1024 * 1024 + 2), 1)
        code, told = running.end()  # the input goes on: it does not wait for the line's end
    stopped, why = told.splitlines()
    assert (code, stopped.endswith("1 message sent to orders; the last was line 1 of standard input")) == (1, True)
    assert why.startswith("pyrocket: line 2 of standard input has more than 4194304 bytes"), why


def test_input_that_is_no_file_of_lines(orders, tmp_path):
    with subprocess.Popen(
        command(orders, "a", "-"), stdin=os.open(tmp_path, os.O_RDONLY), stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        told = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert "Traceback" not in told, told


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
def test_who_types_is_told_how_to_end(orders):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(orders, "-"), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        os.close(theirs)
        assert process.stderr.readline() == b"a message a line, until Ctrl-D\n"
        os.write(ours, b"typed\n\x04")
        assert process.wait(60) == 0
        os.close(ours)
    assert bodies(orders) == [b"typed"]
