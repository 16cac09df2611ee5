"""Output is readable on any console."""

from __future__ import annotations

import argparse
import base64
import io
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrocket_consumer.cli import main, parser
from tests.cli.shell import COMMAND, Running, pipe_without_reader, run
from tests.for_each import for_each

TOPIC = "T"
BODY = "gr\u00fcn \u20ac \U0001f600"
CONSUME = ["consume", "T", "--count", "1"]
AS_MEMBER = [*CONSUME, "--group", "G", "--from", "first"]
SHOW = ["offsets", "show", "G", "T"]
has_a_shell = pytest.mark.skipif(sys.platform == "win32", reason="there is no such shell")


@pytest.fixture
def orders(cluster):
    cluster.send("T", BODY.encode())
    cluster.broker("broker-a").create_group("G")
    return cluster


@pytest.fixture
def console(monkeypatch):
    """Run `pyrocket …` on a console with this encoding; return the exit code, and the bytes of both streams."""

    def run(encoding, *arguments):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
        with monkeypatch.context() as patched:
            for name, stream in zip(("stdout", "stderr"), streams, strict=True):
                patched.setattr(sys, name, stream)
            try:
                code = main(arguments)
            except SystemExit as ended:
                code = int(ended.code or 0)
        return code, *(stream.buffer.getvalue() for stream in streams)

    return run


def every_command(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from every_command(command)


@for_each("command", [*every_command(parser())], ids=lambda each: each.prog)
def test_help_is_written_in_characters_that_every_console_has(command):
    assert command.format_help().isascii()


@for_each("encoding", ["ascii", "cp437"])
@for_each("command", [[], ["consume"], ["offsets", "reset"]], ids=" ".join)
def test_help_can_be_printed_on_an_ascii_console(console, command, encoding):
    code, printed, stderr = console(encoding, *command, "--help")
    assert (code, stderr) == (0, b"")
    assert printed.startswith(b"usage: pyrocket")


@for_each("encoding", ["ascii", "cp437"])
def test_characters_that_a_console_lacks_are_escaped(cluster, console, encoding):
    cluster.create_topic(encoding, queues=1)
    cluster.send(encoding, "日本".encode())
    lacking = rb"/broker-a/0@0  -  \u65e5\u672c" + b"\n"
    assert console(encoding, "consume", encoding, "-n", cluster.name_server) == (0, encoding.encode() + lacking, b"")
    code, _, stderr = console(encoding, "offsets", "show", "日本", "T", "-n", cluster.name_server)
    assert (code, rb"'\u65e5\u672c' has a character that is not allowed" in stderr) == (2, True), stderr


@for_each("encoding", ["ascii", "cp437", "latin-1", "utf-8"])
def test_json_is_json_on_any_console(orders, console, encoding):
    _, printed, _ = console(encoding, *CONSUME, "-o", "json", "-n", orders.name_server)
    assert json.loads(printed.decode(encoding))["body"] == BODY


@pytest.mark.live
def test_a_process_writes_escapes_as_well(orders):
    """The environment sets the encoding."""
    done = run(*CONSUME, "-n", orders.name_server, env={"PYTHONIOENCODING": "ascii"})
    assert done.stdout == rb"T/broker-a/0@0  -  gr\xfcn \u20ac \U0001f600" + b"\n"


def test_a_body_that_is_no_text_can_be_restored_from_json(orders, pyrocket):
    orders.send("T", b"caf\xe9")
    orders.send("T", rb"caf\xe9")
    shown = pyrocket("consume", "T", "-o", "json", "-n", orders.name_server)[1].splitlines()
    text, no_text, escaped = (json.loads(line) for line in shown)
    assert base64.b64decode(no_text["body_base64"]) == b"caf\xe9"
    assert (escaped["body"], "body_base64" in escaped, "body_base64" in text) == ("caf\\xe9", False, False)


@pytest.mark.live
@pytest.mark.parametrize("output", ["table", "json"])
def test_a_reader_that_has_left_is_no_traceback(orders, output):
    orders.broker("broker-a").commit("G", "T", {0: 0})
    with pipe_without_reader() as writing:
        done = run(*SHOW, "-o", output, "-n", orders.name_server, stdout=writing)
    assert (done.returncode, done.stderr) == (1, b"")


def redirected(cluster, command, how):
    """Run `pyrocket …` in a shell that redirects; return the ended process."""
    line = shlex.join([*COMMAND, *command, "-n", cluster.name_server])
    return run(command=["sh", "-c", f"{line} {how}"])


@pytest.mark.live
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", [CONSUME, AS_MEMBER, SHOW], ids=" ".join)
def test_a_disk_that_is_full_is_one_sentence(orders, command):
    done = redirected(orders, command, ">/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"pyrocket: standard output or input: No space left on device"
    assert orders.committed("G", "T").get(0, 0) == 0, "it was not printed"


@has_a_shell
@pytest.mark.live
@pytest.mark.parametrize("command", [CONSUME, AS_MEMBER, SHOW], ids=" ".join)
def test_with_a_closed_output_nothing_is_consumed(orders, command):
    done = redirected(orders, command, ">&-")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"pyrocket: standard output is closed; send it somewhere, to /dev/null for example\n"
    assert orders.committed("G", "T") == {}


@has_a_shell
@pytest.mark.live
def test_an_input_that_is_closed_is_one_sentence(orders):
    done = redirected(orders, ["produce", "T", "-"], "<&-")
    assert (done.returncode, b"- reads standard input, which is closed" in done.stderr) == (1, True)


@has_a_shell
@pytest.mark.live
def test_errors_do_not_go_to_stdout(orders):
    done = redirected(orders, ["offsets", "show", "nobody", "T"], "2>&-")
    assert (done.returncode, done.stdout) == (2, b"")


@has_a_shell
@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize(
    ("command", "begun", "code"),
    [
        pytest.param(["broker"], b"name server:", 0, id="broker"),
        pytest.param(
            ["demo", "--messages", "600", "--rate", "100"],
            b"kill -9",
            1,
            id="demo",
            marks=pytest.mark.slow("until the first member is killed"),
        ),
    ],
)
def test_a_signal_ends_it_without_a_traceback(command, begun, code, number):
    with Running(*command, stderr=subprocess.STDOUT) as running:
        stderr = b""
        while begun not in stderr:
            piece = running.process.stdout.read1()
            assert piece, stderr
            stderr += piece
        running.send_signal(number)
        stderr += running.process.stdout.read()
        assert (running.process.wait(60), b"Traceback" in stderr) == (code, False), stderr
