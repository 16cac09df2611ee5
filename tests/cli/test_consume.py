"""`pyrocket consume`: what it prints, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture
def orders():
    with EmbeddedCluster(delay_scale=0.01) as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", lambda number: b"m%d" % number, count=5, tags="paid")
        yield cluster


def consume(cluster, *arguments):
    """Run it as from a shell; returns what it printed, and what it told beside."""
    command = [sys.executable, "-m", "pyrocket_consumer.cli", "consume", "orders", "-n", cluster.name_server]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--from", "first", *arguments], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_it_ends_after_so_many_and_leaves_the_others_to_the_next(orders):
    printed, beside = consume(orders, "--count", "2")
    assert printed == ["orders/broker-a/0@0  paid  m0", "orders/broker-a/0@1  paid  m1"]
    assert beside == "consuming orders as pyrocket-cli; Ctrl-C ends\n"
    printed, _ = consume(orders, "--count", "3", "-o", "json")
    assert sorted(json.loads(line)["body"] for line in printed) == ["m2", "m3", "m4"]
