"""Every code block of the page for those who come from rocketmq-client-python runs, as a reader would run it."""

from __future__ import annotations

import threading

import pytest

from tests.pages import DOCS, blocks, orders_arriving, run_python

BLOCKS = blocks(DOCS / "from-rocketmq-client-python.md", "python")
PRINTED = ["0 ", "", "b'an order'", "0 ['", "", ""]
"""What each block prints, or part of it."""


@pytest.fixture(scope="module")
def cluster():
    with orders_arriving() as cluster:
        cluster.create_topic("audit", queues=1)
        stop = threading.Event()

        def send() -> None:
            while not stop.wait(0.05):
                cluster.send("audit", b"seen", tags="paid")

        sending = threading.Thread(target=send)
        sending.start()
        yield cluster
        stop.set()
        sending.join()


def test_each_block_is_known():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_a_block_runs(cluster, number, tmp_path):
    assert PRINTED[number] in run_python(BLOCKS[number], cluster, tmp_path)
