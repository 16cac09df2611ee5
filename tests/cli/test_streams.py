"""What is printed comes out on any console."""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrocket_consumer.cli import parser
from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each

ROOT = Path(__file__).parents[2]


def every_command(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from every_command(command)


def pyrocket(encoding, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    return subprocess.run(
        [sys.executable, "-m", "pyrocket_consumer.cli", *arguments], capture_output=True, timeout=60, env=environment
    )


@for_each("command", [*every_command(parser())], ids=lambda each: each.prog)
def test_help_is_written_in_characters_that_every_console_has(command):
    assert command.format_help().isascii()


@for_each("encoding", ["ascii", "cp437"])
@for_each("command", [[], ["consume"], ["offsets", "reset"]], ids=" ".join)
def test_help_comes_out_on_a_poor_console(command, encoding):
    done = pyrocket(encoding, *command, "--help")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"usage: pyrocket")


@for_each("encoding", ["ascii", "cp437"])
def test_what_a_console_lacks_is_written_as_an_escape(encoding):
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=1)
        cluster.send("T", "日本".encode())
        done = pyrocket(encoding, "consume", "T", "-n", cluster.name_server)
        assert (done.returncode, done.stdout) == (0, rb"T/broker-a/0@0  -  \u65e5\u672c" + b"\n")
        done = pyrocket(encoding, "offsets", "show", "日本", "T", "-n", cluster.name_server)
        assert done.returncode == 2
        assert rb"'\u65e5\u672c' has a character that is not allowed" in done.stderr


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_reader_that_has_left_is_no_traceback(output):
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=1)
        cluster.broker("broker-a").create_group("G")
        cluster.broker("broker-a").commit("G", "T", {0: 0})
        reading, writing = os.pipe()
        os.close(reading)
        try:
            command = [sys.executable, "-m", "pyrocket_consumer.cli", "offsets", "show", "G", "T", "-o", output]
            done = subprocess.run(
                [*command, "-n", cluster.name_server], stdout=writing, stderr=subprocess.PIPE, timeout=60,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        finally:
            os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def run(cluster, command, *, shell="", **how):
    """Run `pyrocket …` in a shell that redirects its output; returns the ended process."""
    line = f"{shlex.join([sys.executable, '-m', 'pyrocket_consumer.cli', *command, '-n', cluster.name_server])} {shell}"
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT), **how}
    )


CONSUME = ["consume", "T", "--count", "1"]
AS_MEMBER = [*CONSUME, "--group", "G", "--from", "first"]


@pytest.fixture
def orders():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=1)
        cluster.send("T", "gr\u00fcn \u20ac \U0001f600".encode())
        cluster.broker("broker-a").create_group("G")
        yield cluster


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", [CONSUME, AS_MEMBER, ["offsets", "show", "G", "T"]], ids=" ".join)
def test_a_disk_that_is_full_is_one_sentence(orders, command):
    done = run(orders, command, shell=">/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"pyrocket: standard output or input: No space left on device"
    assert b"Traceback" not in done.stderr
    assert orders.committed("G", "T").get(0, 0) == 0, "it was not printed"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such shell")
@pytest.mark.parametrize("command", [CONSUME, AS_MEMBER, ["offsets", "show", "G", "T"]], ids=" ".join)
def test_an_output_that_is_closed_is_one_sentence_and_nothing_is_consumed(orders, command):
    done = run(orders, command, shell=">&-")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"pyrocket: standard output is closed; send it somewhere, to /dev/null for example\n"
    assert orders.committed("G", "T") == {}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such shell")
def test_an_input_that_is_closed_is_one_sentence(orders):
    done = run(orders, ["produce", "T", "-"], shell="<&-")
    assert (done.returncode, b"- reads standard input, which is closed" in done.stderr) == (1, True)
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such shell")
def test_what_belongs_to_errors_does_not_go_to_the_output(orders):
    done = run(orders, ["offsets", "show", "nobody", "T"], shell="2>&-")
    assert (done.returncode, done.stdout) == (2, b"")


@for_each("encoding", ["ascii", "cp437", "latin-1", "utf-8"])
def test_json_is_json_on_any_console(orders, encoding):
    done = run(orders, [*CONSUME, "-o", "json"], PYTHONIOENCODING=encoding)
    assert json.loads(done.stdout.decode(encoding))["body"] == "gr\u00fcn \u20ac \U0001f600"


def test_a_body_that_is_no_text_can_be_restored_from_json(orders):
    orders.send("T", b"caf\xe9")
    orders.send("T", rb"caf\xe9")
    shown = run(orders, ["consume", "T", "-o", "json"]).stdout.splitlines()
    text, no_text, escaped = (json.loads(line) for line in shown)
    assert base64.b64decode(no_text["body_base64"]) == b"caf\xe9"
    assert (escaped["body"], "body_base64" in escaped, "body_base64" in text) == ("caf\\xe9", False, False)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize(
    ("command", "begun", "code"),
    [(["broker"], b"name server:", 0), (["demo", "--messages", "600", "--rate", "100"], b"kill -9", 1)],
    ids=["broker", "demo"],
)
def test_a_signal_ends_it_without_a_traceback(command, begun, code, number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("NAMESRV_ADDR", None)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "pyrocket_consumer.cli", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip
    with process:
        told = b""
        while begun not in told:
            piece = process.stdout.read1()
            assert piece, told
            told += piece
        process.send_signal(number)
        told += process.stdout.read()
        assert (process.wait(60), b"Traceback" in told) == (code, False), told
