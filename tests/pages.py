"""Runs the code blocks of pages as a reader does, with a cluster that receives orders."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import until

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ADDRESS = "127.0.0.1:9876"
"""The name server's address in the pages."""


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page that are in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def title(block: str) -> str:
    """Return the name of a block in the list of tests: its first line that is not an import."""
    return next(line for line in block.splitlines() if line and not line.startswith(("import", "from")))[:40]


@contextmanager
def orders_arriving(*topics: str) -> Iterator[EmbeddedCluster]:
    """Run a cluster with these topics (default: `orders`) and a thread that sends to them."""
    with EmbeddedCluster() as cluster:
        stop = threading.Event()
        for topic in topics or ["orders"]:
            cluster.create_topic(topic, queues=4)

        def send() -> None:
            while not stop.wait(0.05):
                for topic in topics or ["orders"]:
                    cluster.send(topic, b"an order", count=4, tags="paid")

        sending = threading.Thread(target=send)
        sending.start()
        try:
            yield cluster
        finally:
            stop.set()
            sending.join()


def run_python(block: str, cluster: EmbeddedCluster, directory: Path, logged: str | None = None) -> str:
    """Run a block in a separate process, and return its output.

    A block that consumes without end gets SIGTERM after its first line. Each must end with 0 and without a warning,
    except log lines that contain `logged`.
    """
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", block.replace(ADDRESS, cluster.name_server)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env=_environment(),
    )
    first = ""
    try:
        if "consumer.join()" in block:
            assert process.stdout is not None
            first = process.stdout.readline()
            until(lambda: process.poll() is not None or _takes_sigterm(process), "join has begun")
            process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    unexpected = [line for line in errors.splitlines() if logged is None or logged not in line]
    assert (process.returncode, unexpected) == (0, []), f"it ended with {process.returncode}: {errors}"
    return first + printed


def run_pyrocket(block: str, cluster: EmbeddedCluster, directory: Path) -> list[str]:
    """Run a block of `pyrocket …` commands, one in each line, and return their outputs."""
    printed = []
    for line in block.replace(ADDRESS, cluster.name_server).splitlines():
        assert line.startswith("pyrocket "), line
        command = line.replace("pyrocket", f"{sys.executable} -m pyrocket_consumer.cli", 1)
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=60, cwd=directory, env=_environment()
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return printed


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


def _takes_sigterm(process: subprocess.Popen[str]) -> bool:
    """Return whether the process has a SIGTERM handler, as during `join()`; True on systems without /proc."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return True
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
