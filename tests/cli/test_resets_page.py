"""The examples of docs/resets.md run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer.cli import main
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import consuming
from tests.resetting import fill, wait_until_seen

PAGE = Path(__file__).parents[2] / "docs" / "resets.md"
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
SHELL, PYTHON = BLOCKS["sh"], BLOCKS["python"]


@pytest.fixture
def orders():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=4)
        fill(cluster, "orders", 20)
        yield cluster


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_the_commands(orders, capsys, tmp_path, model):
    with consuming(orders, "orders", "orders-app", message_model=model, offset_store_dir=tmp_path) as (_, seen):
        wait_until_seen(seen, 1, 20)
        for line in SHELL.replace("127.0.0.1:9876", orders.name_server).splitlines():
            assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
        wait_until_seen(seen, 2, 20)


def test_the_program(orders):
    with consuming(orders, "orders", "orders-app") as (_, seen):
        wait_until_seen(seen, 1, 20)
        text = PYTHON.replace("127.0.0.1:9876", orders.name_server)
        environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, timeout=60, env=environment
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("True\n")
        wait_until_seen(seen, 2, 20)
