"""The examples run as programs of their own, are killed with -9 in the middle, and started again."""

from __future__ import annotations

import sqlite3
from collections import Counter

import pytest
from sqlalchemy import text

from tests.consuming import until
from tests.exactly_once.ledgers import once
from tests.pages import DOCS, _takes_sigterm
from tests.consumer.processes import Child


@pytest.mark.live
@pytest.mark.parametrize("kind", ["sqlite", "asyncio", "django"])
def test_the_ledger_in_a_file(embedded, tmp_path, kind):
    embedded.create_topic("orders", queues=4)
    program = str(DOCS / "examples" / f"ledger_{kind}.py")
    arguments = ["-W", "error", program, embedded.name_server, str(tmp_path / "ledger.db")]
    bodies = [f"order {number}" for number in range(4000)]
    for half in (bodies[:2000], bodies[2000:]):
        for body in half:
            embedded.send("orders", body.encode())
        child = Child(*arguments)
        child.wait(lambda lines: len(lines) >= 3)
        child.process.kill()
        child.process.wait()
    child = Child(*arguments)

    def booked():
        with sqlite3.connect(tmp_path / "ledger.db") as connection:
            found = [body for (body,) in connection.execute("SELECT body FROM ledger")]
        connection.close()
        return found

    embedded.wait_until(lambda: len(booked()) >= len(bodies))
    until(lambda: _takes_sigterm(child.process), "join has begun")
    child.process.terminate()
    assert (child.ended(), child.errors) == (0, [])
    assert Counter(booked()) == once(bodies)


@pytest.mark.databases("postgresql")
def test_the_accounts_in_postgresql(embedded, database):
    """Killed, too; and though its calls lock the same rows at once, none waits for another that waits for it."""
    embedded.create_topic("payments", queues=4)
    for number in range(400):
        for _ in range(1 + (number % 10 == 0)):  # some were sent twice
            embedded.send("payments", f"a{number % 7}:{number}".encode(), properties={"UNIQ_KEY": f"payment-{number}"})
    arguments = [str(DOCS / "examples" / "ledger_postgres.py"), embedded.name_server, database.url]
    child = Child(*arguments)
    child.wait(lambda lines: len(lines) >= 3)
    child.process.kill()
    child.process.wait()
    child = Child(*arguments)
    engine = database.engine()

    def balance():
        with engine.connect() as connection:
            return dict(connection.execute(text("SELECT name, balance FROM accounts")).all())

    def deadlocks():
        with engine.connect() as connection:
            found = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            return connection.execute(text(found)).scalar()

    right = {f"a{rest}": sum(range(rest, 400, 7)) for rest in range(7)}
    embedded.wait_until(lambda: sum(balance().values()) >= sum(right.values()))
    until(lambda: _takes_sigterm(child.process), "join has begun")
    child.process.terminate()
    assert child.ended() == 0
    assert balance() == right
    assert deadlocks() == 0
    engine.dispose()
