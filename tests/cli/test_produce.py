"""`pyrocket produce`: it sends messages, and always prints their number at its end."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys

import pytest

from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import answer
from tests.cli.shell import Running, pipe_without_reader, run
from tests.consuming import until
from tests.for_each import for_each

not_on_windows = pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals and terminals")


def command(cluster, *arguments):
    return ["produce", "orders", "-n", cluster.name_server, *arguments]


class ProduceProcess(Running):
    """The running command, which reads standard input."""

    def __init__(self, cluster, *arguments):
        super().__init__(*command(cluster, *arguments, "-"))
        self._cluster = cluster

    def give(self, text, stored):
        self.write(text)
        until(lambda: len(bodies(self._cluster)) == stored, f"{stored} are stored")


def on_sends(cluster, fault, **options):
    for code in (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2):
        cluster.broker("broker-a").on(code, fault, **options)


def counted(count):
    return "1 message" if count == 1 else f"{count} messages"


def stopped(count, last=""):
    """Return its standard error if it stops after `count` lines."""
    last = last or f"line {count} of standard input"
    return f"pyrocket: stopped, {counted(count)} sent to orders; the last was {last}\n"


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


@for_each("given, expected", LINES)
def test_each_nonempty_line_is_a_body(cluster, pyrocket, given, expected):
    before = len(bodies(cluster))
    assert pyrocket(*command(cluster, "-"), given=given) == (0, f"{counted(len(expected))} sent to orders\n", "")
    assert bodies(cluster)[before:] == expected


def test_json_ends_with_the_number_of_sent_messages(cluster, pyrocket):
    code, printed, stderr = pyrocket(*command(cluster, "first", "-", "-o", "json"), given=b"\na\n\nb\n")
    *stored, summary = map(json.loads, printed.splitlines())
    assert (code, stderr, [each["offset"] for each in stored]) == (0, "", [0, 1, 2])
    assert summary == {"topic": "orders", "sent": 3, "last": "line 4 of standard input", "stopped_by": None}


def test_messages_of_one_sharding_key_are_in_one_queue(cluster, pyrocket):
    cluster.create_topic("orders", queues=8)
    assert pyrocket(*command(cluster, "a", "b", "c", "--sharding-key", "customer-7"))[0] == 0
    stored = cluster.messages("orders")
    assert {message.property("__SHARDINGKEY") for message in stored} == {"customer-7"}
    assert (len(stored), len({message.queue for message in stored})) == (3, 1)


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_broker_that_refuses_in_the_middle(cluster, pyrocket, output):
    refuse, left = answer(ResponseCode.NO_PERMISSION, "the topic is read only"), iter("ab")

    def accept_two(exchange):
        exchange.handle(exchange.answer) if next(left, "") else refuse(exchange)

    on_sends(cluster, accept_two, times=None)
    code, printed, stderr = pyrocket(*command(cluster, "-", "-o", output), given=b"a\n\nb\nc\nd\n")
    ended, why = stderr.splitlines(keepends=True)
    assert (code, ended) == (1, stopped(2, "line 3 of standard input"))
    assert "the topic is read only" in why
    if output == "table":
        assert printed == ""
    else:
        summary = json.loads(printed.splitlines()[-1])
        assert (summary["sent"], summary["last"]) == (2, "line 3 of standard input")
        assert "the topic is read only" in summary["stopped_by"]


@pytest.mark.slow("waits until the broker is given up")
@pytest.mark.live
def test_a_broker_that_stops(cluster):
    with ProduceProcess(cluster) as reading:
        reading.give(b"a\nb\n", 2)
        cluster.broker("broker-a").stop()
        reading.give(b"c\n", 2)
        assert reading.end() == 1
    assert stopped(2) in reading.stderr


@not_on_windows
@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_while_it_waits_for_input(cluster, number):
    with ProduceProcess(cluster) as reading:
        reading.give(b"a\nb\n", 2)
        reading.send_signal(number)
        assert (reading.end(), reading.stderr) == (1, stopped(2))


@not_on_windows
@pytest.mark.live
def test_a_message_in_flight_at_a_signal_is_counted(cluster):
    held = []
    on_sends(cluster, lambda exchange: exchange.handle(lambda reply: held.append((exchange, reply))))
    with ProduceProcess(cluster) as reading:
        reading.give(b"a\nb\n", 1)
        until(lambda: held, "it is stored, and not answered")
        reading.send_signal(signal.SIGTERM)
        exchange, reply = held[0]
        cluster.call(lambda: exchange.later(0.3, lambda: exchange.answer(reply)))
        assert (reading.end(), reading.stderr) == (1, stopped(1))
    assert bodies(cluster) == [b"a"]


@pytest.mark.live
def test_a_reader_that_leaves(cluster):
    with ProduceProcess(cluster, "-o", "json") as reading:
        reading.give(b"a\n", 1)
        reading.read(1)  # or the command would notice at once
        reading.leave()
        reading.give(b"b\n", 2)
        assert (reading.end(), reading.stderr) == (1, stopped(2))


@pytest.mark.live
@pytest.mark.parametrize("output", ["table", "json"])
def test_a_count_that_cannot_be_written_is_printed_on_stderr(cluster, output):
    with open("/dev/full", "wb") as full:
        done = run(*command(cluster, "-o", output, "a"), stdout=full)
    full = "pyrocket: standard output or input: No space left on device\n"
    assert (done.returncode, done.stderr.decode()) == (1, stopped(1, "argument 1") + full)


@pytest.mark.live
def test_a_reader_that_leaves_before_the_count(cluster):
    with pipe_without_reader() as writer:
        done = run(*command(cluster, "a"), stdout=writer)
    assert (done.returncode, done.stderr.decode()) == (1, stopped(1, "argument 1"))


@pytest.mark.live
def test_a_line_that_is_too_long_is_named_and_not_kept_whole(cluster):
    with ProduceProcess(cluster) as reading:
        reading.give(b"a\n" + b"x" * (4 * 1024 * 1024 + 2), 1)
        code = reading.end()  # it does not wait for the end of the line
    ended, why = reading.stderr.splitlines(keepends=True)
    assert (code, ended) == (1, stopped(1))
    assert why.startswith("pyrocket: line 2 of standard input has more than 4194304 bytes"), why


@pytest.mark.live
def test_input_that_cannot_be_read_as_lines(cluster, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        assert run(*command(cluster, "a", "-"), stdin=folder).returncode == 1
    finally:
        os.close(folder)


@not_on_windows
@pytest.mark.live
def test_a_terminal_user_learns_how_to_end(cluster):
    ours, theirs = pty.openpty()
    with Running(*command(cluster, "-"), stdin=theirs) as typing:
        os.close(theirs)
        typing.wait_for_error_line("one message per line, until Ctrl-D")
        os.write(ours, b"typed\n\x04")
        assert typing.end() == 0
        os.close(ours)
    assert bodies(cluster) == [b"typed"]
