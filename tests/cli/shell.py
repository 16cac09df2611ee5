"""The command in its own process, as a shell runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from tests.pages import ROOT

COMMAND = [sys.executable, "-m", "pyrocket_consumer.cli"]


def environment(**more: str) -> dict[str, str]:
    """Return the environment in which a process finds these sources; nothing in it names a name server."""
    kept = {name: value for name, value in os.environ.items() if name != "NAMESRV_ADDR"}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def run(*arguments: str, command: Sequence[str] = COMMAND, env: Any = None, **how: Any) -> Any:
    """Run `pyrocket …`; return the ended process, with bytes unless `how` contains `text`."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    done = subprocess.run([*command, *arguments], timeout=120, env=environment(**(env or {})), check=False, **streams)
    assert "Traceback" not in (done.stderr if how.get("text") else done.stderr.decode()), done.stderr
    return done


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


class Running:
    """The command while it runs: `read` waits for lines, `end` for its exit code."""

    def __init__(self, *arguments: str, through: Sequence[str] = (), **streams: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | streams
        self.process = subprocess.Popen(
            [*through, *COMMAND, *arguments], env=environment(PYTHONUNBUFFERED="1"), **pipes
        )
        self.send_signal = self.process.send_signal
        self.stderr = ""
        """Its standard error, after its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()

    def write(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def read(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().decode().rstrip("\n") for _ in range(count)]

    def wait_for_error_line(self, text: str) -> None:
        """Wait for the line on standard error that contains `text`."""
        assert self.process.stderr is not None
        while text not in (line := self.process.stderr.readline().decode()):
            assert line, f"{text!r} was not printed"

    def leave(self) -> None:
        """Close the output, as `head` does."""
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self, within_s: float = 15.0) -> int:
        """Wait until it ends; return its exit code."""
        assert self.process.stderr is not None
        began = time.monotonic()
        code = self.process.wait(60)
        assert time.monotonic() - began < within_s
        self.stderr = self.process.stderr.read().decode()
        assert "Traceback" not in self.stderr, self.stderr
        return code
