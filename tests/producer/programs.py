"""What tests of whole programs share: running one, and what a producer's threads are called."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading


def run_program(program: str, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own, to its end."""
    command = [sys.executable, *flags, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def producer_threads() -> list[threading.Thread]:
    """Return the threads of producers that run."""
    return [each for each in threading.enumerate() if each.name in ("pyrocket-io", "pyrocket-callbacks")]
