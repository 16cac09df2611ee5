"""The page's code runs as a reader would run it."""

from __future__ import annotations

import shutil
import sqlite3

import pytest

from tests.pages import DOCS, blocks, orders_arriving, run_pyrocket, run_python

PAGE = DOCS / "exactly-once.md"


def test_the_page_can_be_followed(tmp_path, monkeypatch):
    program = blocks(PAGE, "python")[0]
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


RUN_LIFESPAN = """
import asyncio, sqlite3

def count():
    with sqlite3.connect("ledger.db", timeout=30) as connection:
        return connection.execute("SELECT COUNT(*) FROM ledger").fetchone()[0]

async def serve():
    async with asyncio.timeout(60), app.router.lifespan_context(app):
        while count() < 20:
            await asyncio.sleep(0.05)

asyncio.run(serve())
"""


def test_an_application_of_fastapi_books_as_long_as_it_lives(tmp_path):
    """What a server does with the application's lifespan, without a server."""
    program = blocks(PAGE, "python")[1] + RUN_LIFESPAN
    shutil.copy(DOCS / "examples" / "ledger_asyncio.py", tmp_path)
    with orders_arriving("orders") as cluster:
        assert "booked" in run_python(program, cluster, tmp_path)


@pytest.mark.parametrize("name", ["queue-fenced", "log-diverged", "store-unreachable", "Fenced", "advance"])
def test_the_page_has(name):
    assert f"`{name}" in PAGE.read_text() or f"offsets.{name}" in PAGE.read_text()
