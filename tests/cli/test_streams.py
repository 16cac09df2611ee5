"""What is printed comes out on any console."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrocket_consumer.cli import parser
from pyrocket_consumer.testing import EmbeddedCluster

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


@pytest.mark.parametrize("command", [*every_command(parser())], ids=lambda each: each.prog)
def test_help_is_written_in_characters_that_every_console_has(command):
    assert command.format_help().isascii()


@pytest.mark.parametrize("encoding", ["ascii", "cp437"])
@pytest.mark.parametrize("command", [[], ["consume"], ["offsets", "reset"]], ids=" ".join)
def test_help_comes_out_on_a_poor_console(command, encoding):
    done = pyrocket(encoding, *command, "--help")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"usage: pyrocket")


@pytest.mark.parametrize("encoding", ["ascii", "cp437"])
def test_what_a_console_lacks_is_written_as_an_escape(encoding):
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=1)
        cluster.send("T", "日本".encode())
        done = pyrocket(encoding, "consume", "T", "-n", cluster.name_server)
        assert (done.returncode, done.stdout) == (0, rb"T/broker-a/0@0  -  \u65e5\u672c" + b"\n")
        done = pyrocket(encoding, "offsets", "show", "日本", "T", "-n", cluster.name_server)
        assert done.returncode == 1
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
