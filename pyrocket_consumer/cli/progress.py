"""The progress lines of a long command."""

from __future__ import annotations

import sys
import time

from pyrocket_consumer.text import escape_controls


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
