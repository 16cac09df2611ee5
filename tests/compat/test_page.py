"""Every code block of the page for users of rocketmq-client-python runs, as a reader would run it."""

from __future__ import annotations

import pytest

from tests.pages import DOCS, blocks, orders_arriving, run_python

BLOCKS = blocks(DOCS / "from-rocketmq-client-python.md", "python")
PRINTED = ["0 ", "", "b'an order'", "0 ['", "", ""]
"""The output of each block, or a part of it."""


@pytest.fixture
def orders():
    with orders_arriving("orders", "audit") as cluster:
        yield cluster


def test_each_block_is_known():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.live
@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_a_block_runs(orders, number, tmp_path):
    assert PRINTED[number] in run_python(BLOCKS[number], orders, tmp_path)
