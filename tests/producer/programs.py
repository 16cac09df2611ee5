"""What tests of whole programs share: running one, threads, and how long something may take."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


def run_program(program: str, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own, to its end."""
    command = [sys.executable, *flags, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def producer_threads() -> list[threading.Thread]:
    """Return the threads of producers that run."""
    return [each for each in threading.enumerate() if each.name in ("pyrocket-io", "pyrocket-callbacks")]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail what takes longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@contextmanager
def in_a_thread(work: Callable[..., object], *arguments: object) -> Iterator[threading.Thread]:
    """Do something on another thread, which must end soon after what is done meanwhile."""
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
