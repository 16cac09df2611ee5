"""The examples of docs/resets.md run unchanged."""

from __future__ import annotations

import shlex

import pytest

from tests.consuming import consuming
from tests.pages import ADDRESS, DOCS, blocks, run_python
from tests.resets import fill, wait_until_seen

PAGE = DOCS / "resets.md"
(SHELL,), (PYTHON,) = blocks(PAGE, "sh"), blocks(PAGE, "python")


QUEUES = 4


@pytest.fixture
def orders(cluster):
    fill(cluster, "orders", 20)
    return cluster


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_the_commands(orders, pyrocket, tmp_path, model):
    with consuming(orders, "orders", "orders-app", message_model=model, offset_store_dir=tmp_path) as (_, seen):
        wait_until_seen(seen, 1, 20)
        for line in SHELL.replace(ADDRESS, orders.name_server).splitlines():
            code, _, stderr = pyrocket(*shlex.split(line)[1:])
            assert code == 0, stderr
        wait_until_seen(seen, 2, 20)


@pytest.mark.live
def test_the_program(orders, tmp_path):
    with consuming(orders, "orders", "orders-app") as (_, seen):
        wait_until_seen(seen, 1, 20)
        assert run_python(PYTHON, orders, tmp_path).endswith("True\n")
        wait_until_seen(seen, 2, 20)
