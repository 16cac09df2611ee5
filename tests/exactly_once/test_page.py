"""The page's code runs as a reader would run it."""

from __future__ import annotations

import sqlite3

import pytest

from tests.pages import DOCS, blocks, orders_arriving, run_pyrocket, run_python

PAGE = DOCS / "exactly-once.md"


def test_the_page_can_be_followed(tmp_path, monkeypatch):
    program, _ = blocks(PAGE, "python")  # the other one needs FastAPI
    (commands,) = blocks(PAGE, "sh")
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/billing.db")
    with orders_arriving("orders") as cluster:
        assert "booked" in run_python(program, cluster, tmp_path)
        monkeypatch.setenv("NAMESRV_ADDR", cluster.name_server)
        shown, reset = run_pyrocket(commands, cluster, tmp_path)
    assert "clustering" in shown and "in the database" in reset
    with sqlite3.connect(tmp_path / "billing.db") as connection:
        offsets = dict(connection.execute("SELECT queue_id, next_offset FROM pyrocket_offsets WHERE topic = 'orders'"))
        assert connection.execute("SELECT COUNT(*) FROM ledger").fetchone()[0] > 0
    connection.close()
    assert offsets == dict.fromkeys(range(4), 0)


@pytest.mark.parametrize("name", ["queue-fenced", "log-diverged", "store-unreachable", "Fenced", "advance"])
def test_the_page_has(name):
    assert f"`{name}" in PAGE.read_text() or f"offsets.{name}" in PAGE.read_text()
