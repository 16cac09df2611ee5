"""The blocks of docs/tutorial.md run one after the other, on the broker that the page starts."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager

import pytest

from tests.consuming import until
from tests.pages import ADDRESS, DOCS, blocks

PAGE = DOCS / "tutorial.md"
BROKER, *COMMANDS = blocks(PAGE, "sh")
CONSUME, FAIL, MEMBER, ORDERLY = blocks(PAGE, "python")
CONSUMED, CONTINUED, FAILED, SHARED, IN_ORDER = (block.splitlines() for block in blocks(PAGE, "text"))
FIRST, FOURTH, SHOW, FIFTH, EIGHT, DELIVERIES = COMMANDS


class Program:
    """A program of the page, with its output; Ctrl-C ends it."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-u", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._printed = []
        self.errors = []
        self._readers = [
            threading.Thread(target=lambda: self._printed.extend(self.process.stdout)),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr)),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def lines(self):
        """The lines; threads that print at once may mix up their ends of lines."""
        return [line for line in re.split(r"\n|(?=consumed |attempt |member )", "".join(self._printed)) if line]

    def wait_for(self, count, what):
        try:
            until(lambda: len(self.lines) >= count, what)
        except AssertionError as error:
            error.add_note(f"printed: {self.lines}, errors: {self.errors}")
            raise
        assert len(self.lines) == count

    def end(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)
        for reader in self._readers:
            reader.join()
        self.process.stdout.close()
        self.process.stderr.close()


@contextmanager
def running(*arguments):
    program = Program(*arguments)
    try:
        yield program
    finally:
        program.end()
    assert program.process.returncode in (0, 130, -signal.SIGINT), program.errors


@pytest.mark.live
@pytest.mark.slow("starts programs, and a failed message returns after ten seconds")
def test_the_tutorial(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = ADDRESS.replace("9876", port)

    def pyrocket(block):
        command = shlex.split(block.replace(ADDRESS, address))
        done = subprocess.run(
            [sys.executable, "-m", "pyrocket_consumer.cli", *command[1:]], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def python(block, name):
        (tmp_path / name).write_text(block.replace(ADDRESS, address))
        return running("-W", "error", str(tmp_path / name))

    command = shlex.split(BROKER.replace("9876", port))
    with running("-m", "pyrocket_consumer.cli", *command[1:]) as broker:
        until(lambda: any(address in line for line in broker.lines), "the broker has started")

        pyrocket(FIRST)
        with python(CONSUME, "consume.py") as consumer:
            consumer.wait_for(3, "three messages")
        assert Counter(consumer.lines) == Counter(CONSUMED)

        pyrocket(FOURTH)
        with python(CONSUME, "consume.py") as consumer:
            consumer.wait_for(1, "the message sent meanwhile")
        assert consumer.lines == CONTINUED
        assert pyrocket(SHOW).count("broker-a") == 4

        with python(FAIL, "fail.py") as consumer:
            pyrocket(FIFTH)
            consumer.wait_for(2, "a second attempt")
        assert consumer.lines == FAILED
        assert any("the warehouse does not answer" in line for line in consumer.errors)

        with python(MEMBER, "member.py") as one:
            one.wait_for(4, "four queues")
            with python(MEMBER, "member.py") as other:
                one.wait_for(6, "two queues are handed over")
                other.wait_for(2, "two queues are taken over")
                assert sorted(re.sub(r"\d+ ", "", line, count=1) for line in one.lines) == sorted(
                    re.sub(r"\d+ ", "", line, count=1) for line in SHARED
                )
                pyrocket(EIGHT)
                one.wait_for(10, "four messages")
                other.wait_for(6, "four messages")

        pyrocket(DELIVERIES)
        with python(ORDERLY, "orderly.py") as consumer:
            consumer.wait_for(4, "each message, and one of them again")
        assert consumer.lines == IN_ORDER
