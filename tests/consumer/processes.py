"""Child processes, and waits for their output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.consuming import QUICK, WAIT_S
from tests.pages import ROOT


class Child:
    """A process, and the lines it has printed."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._open = 2
        """The outputs that are still open."""
        pipes, env = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}, {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen([sys.executable, *arguments], text=True, env=env, **pipes)
        outputs = ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in outputs]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines: list[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def wait(self, reached: Callable[[list[str]], bool], timeout_s: float = WAIT_S) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: reached(self.lines) or not self._open, timeout_s):
                raise AssertionError(f"printed so far: {self.lines[-10:]} {self.errors[-10:]}")
        assert reached(self.lines), (self.lines[-10:], self.errors[-20:])

    def wait_for_line(self, line: str, timeout_s: float = WAIT_S) -> None:
        self.wait(lambda lines: line in lines, timeout_s)

    @property
    def bodies(self) -> Counter[str]:
        return Counter(line for line in list(self.lines) if line.startswith("m"))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for the end and all output; return the exit code. A close may take 30 s, and 15 s for the last calls."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGUSR1)  # members print their stacks; other programs end
            with suppress(AssertionError):
                self.wait(lambda lines: any("Current thread" in line for line in self.errors), 10)
            self.process.kill()
            for reader in self._readers:
                reader.join(10)
            printed = "\n".join([*self.lines[-5:], *self.errors])
            raise AssertionError(f"no end within {timeout_s:g} s; printed:\n{printed}") from None
        for reader in self._readers:
            reader.join(timeout_s)
        return code


@contextmanager
def member(cluster, topic: str, group: str, **options) -> Iterator[Child]:
    """Run a consumer of `topic` in its own process."""
    whole = {"group": group, "name_server": cluster.name_server, **QUICK, **options}
    child = Child("-m", "tests.consumer.member", topic, json.dumps(whole))
    try:
        child.wait_for_line("ready")
        yield child
    finally:
        if child.process.poll() is None:
            child.process.kill()
        child.ended()
