"""The databases of the tests start, keep committed rows after a kill, and are removed."""

from __future__ import annotations

import os

import pytest
from sqlalchemy import text

from tests.databases import running


def rows(engine):
    with engine.connect() as connection:
        return connection.execute(text("SELECT a FROM t ORDER BY a")).scalars().all()


def test_committed_rows_are_readable(database):
    engine = database.engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t(a INTEGER)"))
        connection.execute(text("INSERT INTO t VALUES (1), (2)"))
    assert rows(engine) == [1, 2]
    engine.dispose()


def test_each_test_has_its_own(database):
    engine = database.engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t(a INTEGER)"))  # the previous test made the same table
    assert rows(engine) == []
    engine.dispose()


@pytest.mark.databases("postgresql", "mariadb")
def test_a_killed_server_keeps_committed_rows(database_kind):
    with running(database_kind) as server:
        engine = server.new_database().engine()
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE t(a INTEGER)"))
            connection.execute(text("INSERT INTO t VALUES (1)"))
        engine.dispose()
        server.kill()
        server.start()
        assert rows(engine) == [1]
        engine.dispose()
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
