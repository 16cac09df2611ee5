"""Every code block of the README runs, as a reader would run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import until

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text for language, text in BLOCKS if language == "sh"]
ADDRESS = "127.0.0.1:9876"


def title(block: str) -> str:
    return next(line for line in block.splitlines() if line and not line.startswith(("import", "from")))[:40]


@pytest.fixture
def orders():
    """A cluster with the topic of the README, and a producer that goes on sending."""
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=4)
        stop = threading.Event()

        def send() -> None:
            while not stop.wait(0.05):
                cluster.send("orders", b"an order", count=4, tags="paid")

        sending = threading.Thread(target=send)
        sending.start()
        yield cluster
        stop.set()
        sending.join()


def run(block: str, cluster: EmbeddedCluster, directory: Path) -> subprocess.Popen[str]:
    text = block.replace(ADDRESS, cluster.name_server).replace("/tmp/price-cache", str(directory))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(README.parent)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, cwd=directory,
    )


def takes_sigterm(process: subprocess.Popen[str]) -> bool:
    """Whether the process has a handler for SIGTERM, as it has while it joins a consumer; always where /proc is not."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return True
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("block", PYTHON, ids=title)
def test_a_python_block_runs(block, orders, tmp_path):
    endless = "consumer.join()" in block
    process = run(block, orders, tmp_path)
    try:
        if endless:
            assert process.stdout is not None
            assert "b'an order'" in process.stdout.readline()
            until(lambda: takes_sigterm(process), "join has begun")
            process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert (process.returncode, errors) == (0, "")
    if "print(" in block:
        assert endless or printed


def test_the_shell_blocks_name_targets_that_exist():
    """`make demo` and `make test` are run by CI; here: that they are what make offers."""
    targets = [line.split()[1] for block in SHELL for line in block.splitlines() if line.startswith("make ")]
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=README.parent, check=True, capture_output=True)


def test_the_pyrocket_commands_run(orders, tmp_path):
    (block,) = [block for block in SHELL if "pyrocket " in block]
    for line in block.replace(ADDRESS, orders.name_server).splitlines():
        command = line.replace("pyrocket", f"{sys.executable} -m pyrocket_consumer.cli", 1)
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=60, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(README.parent)},
        )
        assert done.returncode == 0, done.stderr
        assert "orders" in done.stdout
