"""Java virtual machines as child processes, which never outlive the test process, and their output."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

from tests.real_brokers.jars import class_path, java_tool
from tests.real_brokers.remoting import as_text

T = TypeVar("T")

_OPENED = [
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.util=ALL-UNNAMED",
]
_SMALL_AND_QUICK = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-Xshare:auto"]
_LOGBACK = """<configuration>
<appender name="f" class="ch.qos.logback.core.FileAppender"><file>{file}</file>
<encoder><pattern>%d %p %c{{1}} - %m%n</pattern></encoder></appender>
<root level="INFO"><appender-ref ref="f"/></root>
</configuration>
"""

_alive: weakref.WeakSet[JavaProcess] = weakref.WeakSet()


def new_directory(name: str) -> Path:
    """Return a new temporary directory; remove it with `remove_directory`."""
    sweep_directories()
    return Path(tempfile.mkdtemp(prefix=f"pyrocket-real-{os.getpid()}-{name}-"))


def sweep_directories() -> None:
    """Remove the directories that killed processes have left."""
    for left in Path(tempfile.gettempdir()).glob("pyrocket-real-*"):
        pid = left.name.split("-")[2]
        if pid.isdigit() and not _runs(int(pid)):
            remove_directory(left)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # any other error means that another user owns it
    return True


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


class JavaProcess:
    """One Java virtual machine, with its own directory for everything that it writes.

    It halts when its standard input ends, so it does not outlive the test process. It has its own session, so that
    Ctrl-C in a terminal reaches the tests only.
    """

    def __init__(
        self,
        version: str,
        main: str,
        arguments: Sequence[str],
        directory: Path,
        *,
        options: Sequence[str] = ("-Xmx128m",),
        with_parent: bool = True,
        piped: bool = False,
    ) -> None:
        """Start `main` of a RocketMQ release. Output goes to `log`, standard output to a pipe if `piped`.

        `with_parent=False` is for programs that watch their standard input themselves.
        """
        home = directory / "home"
        (home / "conf").mkdir(parents=True, exist_ok=True)
        for name in ("namesrv", "broker", "tools"):  # 4.9.7 does not start without them
            (home / "conf" / f"logback_{name}.xml").write_text(_LOGBACK.format(file=directory / "rocketmq.log"))
        self.log = directory / "output.log"
        watched = ["WithParent", main] if with_parent else [main]
        command = [
            java_tool("java"),
            *_SMALL_AND_QUICK,
            *_OPENED,
            *options,
            f"-Duser.home={directory}",
            f"-Djava.io.tmpdir={directory}",
            f"-Drocketmq.client.localOffsetStoreDir={directory / 'offsets'}",
            "-cp",
            class_path(version),
            *watched,
            *arguments,
        ]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                cwd=directory,
                env={**os.environ, "ROCKETMQ_HOME": str(home)},
                start_new_session=True,
            )
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        _alive.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the process and return its exit code; raise TimeoutExpired after `timeout_s`."""
        code = self._process.wait(timeout_s)
        for pipe in filter(None, (self.stdin, self.stdout)):
            with suppress(OSError):  # the reader of buffered output is gone
                pipe.close()
        return code

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self._process.kill()
        self.wait(30)

    def stop(self, timeout_s: float = 45) -> None:
        """Send SIGTERM and wait; send SIGKILL after `timeout_s`."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of the output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@atexit.register
def _kill_all() -> None:
    for process in list(_alive):
        if process.running:
            process.kill()


class ControlledClient(ABC):
    """A client that emits events and takes commands, inside a `with` block."""

    wait_until: Callable[..., Any]
    """Calls a function after each event until its value is true, and returns that. Raises after a timeout."""

    @abstractmethod
    def all_events(self) -> list[dict[str, Any]]:
        """Return the events so far, oldest first."""

    def results(self) -> list[dict[str, Any]]:
        """Return the events that report results of commands."""
        return self.all_events()

    @abstractmethod
    def send_command(self, command: Mapping[str, object]) -> None:
        """Send a command, and do not wait for its result."""

    @abstractmethod
    def close(self) -> None:
        """Shut the client down."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of_kind(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind, oldest first."""
        return [each for each in self.all_events() if each["event"] == event]

    def wait_for(self, event: str, count: int = 1, timeout_s: float = 60) -> dict[str, Any]:
        """Wait for the `count`-th event of a kind, and return it."""
        found = self.wait_until(lambda: self.of_kind(event)[count - 1 : count], f"event {event} {count}", timeout_s)
        return dict(found[0])

    def run_command(self, command: Mapping[str, object], timeout_s: float = 60) -> dict[str, Any]:
        """Send a command, wait for its result, and return that event; raise AssertionError for a failure.

        Only one command may run at a time.
        """
        before = len(self.results())
        self.send_command(command)
        what = f"answer to {dict(command)}"
        answer = dict(self.wait_until(lambda: self.results()[before : before + 1], what, timeout_s)[0])
        assert answer["event"] != "failed", answer["error"]
        return answer


class Program(ControlledClient):
    """One of the programs in `java/`. It reads commands as query strings and writes events as JSON objects."""

    def __init__(self, version: str, main: str, options: Mapping[str, object]) -> None:
        self.directory = new_directory(main.lower())
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._ended = False
        self.process = JavaProcess(version, main, [_query(options)], self.directory, with_parent=False, piped=True)
        self._reader = threading.Thread(target=self._read, name=f"read-{main}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                if line.startswith(b'{"event":'):  # logging libraries write there, too
                    with self._changed:
                        self.events.append(json.loads(line))
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def all_events(self) -> list[dict[str, Any]]:
        return self.events

    def wait_until(self, ready: Callable[[], T], what: str, timeout_s: float = 60) -> T:
        """Return the first true value of `ready()`; raise AssertionError after `timeout_s` or the program's end."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (value := ready()):
                left = deadline - time.monotonic()
                if left <= 0 or self._ended:
                    state = f"it ended with {self.process.exit_code}" if self._ended else f"waited {timeout_s:g} s"
                    output = f"last events {self.events[-5:]}; output:\n{self.process.tail()}"
                    raise AssertionError(f"{what}: {state}; {output}")
                self._changed.wait(left)
        return value

    def send_command(self, command: Mapping[str, object]) -> None:
        assert self.process.stdin is not None
        line = _query(command).encode() + b"\n"
        with self._writing:
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def close(self) -> None:
        """Close the program's input, so that it shuts down, and wait for its end."""
        if self.process.running:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self._reader.join(30)  # its output ends when it ends
                self.process.wait(5 if not self._reader.is_alive() else 0)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._reader.join()
        self.process.wait(5)
        remove_directory(self.directory)


def _query(values: Mapping[str, object]) -> str:
    return urlencode({name: as_text(value) for name, value in values.items() if value is not None})
