"""Standard output and error, whatever is at their other end."""

from __future__ import annotations

import codecs
import io
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from pyrocket_consumer.text import escape_controls, escape_json_controls


def escape_unencodable() -> None:
    """Have what a console's encoding lacks written as an escape, so that no text is an error."""
    if sys.stderr is None:  # it is closed: what belongs there must not go to what is read
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_line(text: str = "") -> None:
    """Print a line at once. Whoever wrote parts of it, it moves no cursor and makes no second line."""
    print(escape_controls(text), flush=True)


def print_to_stderr(text: str) -> None:
    """Print such a line on standard error."""
    print(escape_controls(text), file=sys.stderr, flush=True)


def print_json(value: object, indent: int | None = None) -> None:
    """Print JSON that comes out whole: an escape of the console's, instead of JSON's, would make it none."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    text = json.dumps(value, ensure_ascii=codecs.lookup(encoding).name != "utf-8", indent=indent)
    print(escape_json_controls(text), flush=True)


def is_output_closed() -> bool:
    """Tell whether nobody reads our output any more, as after `| head -2`; False where that cannot be known."""
    return _poll_output("", 0) not in (None, 0)


def wait_writable(within_s: float) -> bool:
    """Wait until a line can be written, or nobody reads: a pipe may be full. True where that cannot be known."""
    return _poll_output("POLLOUT", within_s) != 0


def _poll_output(is_pending: str, within_s: float) -> int | None:
    """Return what the system tells of our output, 0 if nothing within the time; None where it has no `poll`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), getattr(select, is_pending) if is_pending else 0)
    except (AttributeError, OSError, ValueError):
        return None
    return next((events for _, events in poll.poll(within_s * 1000)), 0)


class Interrupts:
    """Has Ctrl-C and SIGTERM raise KeyboardInterrupt in the main thread, but not within `deferred()`: after it.

    A second one raises at once.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._is_deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # a shell has its background jobs ignore Ctrl-C
                self._before[number] = handler
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_deferred or self.is_pending:
            raise KeyboardInterrupt
        self.is_pending = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """What is done within is done whole."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self.is_pending:
            raise KeyboardInterrupt


def discard_output() -> None:
    """Have the rest of the output go nowhere: else its flush at the end of the process is an error once more."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass
