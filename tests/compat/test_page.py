"""Every code block of the page for those who come from rocketmq-client-python runs, as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pyrocket_consumer.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-rocketmq-client-python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PRINTED = ["0 ", "", "b'an order'", "0 ['", "", ""]
"""What each block prints, or part of it."""


@pytest.fixture(scope="module")
def orders():
    with EmbeddedCluster() as cluster:
        stop = threading.Event()
        for topic in ("orders", "audit"):
            cluster.create_topic(topic, queues=2)

        def send() -> None:
            while not stop.wait(0.05):
                for topic in ("orders", "audit"):
                    cluster.send(topic, b"an order", tags="paid")

        sending = threading.Thread(target=send)
        sending.start()
        yield cluster
        stop.set()
        sending.join()


def test_each_block_is_known():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_a_block_runs(orders, number, tmp_path):
    block = BLOCKS[number].replace("127.0.0.1:9876", orders.name_server)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert PRINTED[number] in done.stdout
