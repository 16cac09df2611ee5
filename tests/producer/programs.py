"""Helpers for tests of whole programs: run a program, list threads, and limit the time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


def run_program(program: str, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter until it ends."""
    command = [sys.executable, *flags, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def producer_threads() -> list[threading.Thread]:
    """Return the running threads of producers."""
    return [each for each in threading.enumerate() if each.name in ("pyrocket-io", "pyrocket-callbacks")]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail a block that takes longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@contextmanager
def in_a_thread(work: Callable[..., object], *arguments: object) -> Iterator[threading.Thread]:
    """Run a function on another thread. It must end soon after the block."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def in_threads(work: Callable[[], object], count: int) -> Iterator[None]:
    with ExitStack() as threads:
        for _ in range(count):
            threads.enter_context(in_a_thread(work))
        yield
