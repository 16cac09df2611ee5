"""Standard output and error, for terminals, files and pipes: lines, JSON, tables, progress, and interrupts."""

from __future__ import annotations

import codecs
import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from pyrocket_consumer.text import escape_controls, escape_json_controls


def escape_unencodable() -> None:
    """Write characters that the console's encoding lacks as escapes, so that no text is an error."""
    if sys.stderr is None:  # it is closed, and errors must not go to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_line(text: str = "") -> None:
    """Print a line at once. Control characters in it are escaped, so it stays one line."""
    print(escape_controls(text), flush=True)


def print_to_stderr(text: str) -> None:
    """Print such a line on standard error."""
    print(escape_controls(text), file=sys.stderr, flush=True)


def print_json(value: object, indent: int | None = None) -> None:
    """Print JSON that is valid on any console. The console's own escapes would make it invalid."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    text = json.dumps(value, ensure_ascii=codecs.lookup(encoding).name != "utf-8", indent=indent)
    print(escape_json_controls(text), flush=True)


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns of numbers are aligned to the right."""
    texts = [[escape_controls(str(cell)) for cell in row] for row in rows]
    numeric = [all(isinstance(row[index], (int, float)) for row in rows) for index in range(len(heads))]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=escape_controls(title), title_justify="left")
            for head, right in zip(heads, numeric, strict=True):
                table.add_column(head, justify="right" if right else "left")
            for row in texts:
                table.add_row(*row)
            Console(markup=False, emoji=False).print(table)  # brackets are text
            return
    widths = [max(len(head), *(len(row[index]) for row in texts), 0) for index, head in enumerate(heads)]
    print_line(title)
    for row in [list(heads), ["-" * width for width in widths], *texts]:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        print_line("  " + "  ".join(cells).rstrip())


class Progress:
    """Prints lines on standard error, each with the seconds since the start."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._began = time.monotonic()

    def print_line(self, text: str, is_transient: bool = False) -> None:
        """Print a line. On a terminal the next line replaces a transient one; elsewhere few of those are printed."""
        if self._quiet:
            return
        line = f"{time.monotonic() - self._began:5.1f} s  {escape_controls(text)}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}" + ("" if is_transient else "\n"))
        elif not is_transient or int(time.monotonic() * 4) % 8 == 0:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


def is_output_closed() -> bool:
    """Return whether the reader of stdout has closed it, as after `| head -2`; False if unknown."""
    return _poll_output("", 0) not in (None, 0)


def wait_writable(within_s: float) -> bool:
    """Wait until a line can be written, or the reader has closed stdout. Return False if a pipe stays full."""
    return _poll_output("POLLOUT", within_s) != 0


def _poll_output(event: str, within_s: float) -> int | None:
    """Return the events that the system reports for stdout, 0 without one within the time; None without `poll`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), getattr(select, event) if event else 0)
    except (AttributeError, OSError, ValueError):
        return None
    return next((events for _, events in poll.poll(within_s * 1000)), 0)


class Interrupts:
    """Makes Ctrl-C and SIGTERM raise KeyboardInterrupt in the main thread. Within `deferred()` it waits for the end.

    A second signal raises at once.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._is_deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # a shell's background jobs ignore Ctrl-C
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
        """Defer the first signal until the end of this block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self.is_pending:
            raise KeyboardInterrupt


def discard_output() -> None:
    """Discard the rest of the output, because its flush at the end of the process would raise again."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass
