"""Fixtures of databases: SQLite in a file, and servers of PostgreSQL and MariaDB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.databases import Database, Server

SQLITE = "sqlite"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "databases(*kinds): the databases a test is about: sqlite, postgresql, mariadb")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture `database` on each kind of this machine; in CI on all kinds."""
    if "database_kind" not in metafunc.fixturenames:
        return
    from tests.databases import KINDS, why_missing

    only = metafunc.definition.get_closest_marker("databases")
    kinds = [kind for kind in KINDS if only is None or kind in only.args]
    chosen = [kind for kind in kinds if os.environ.get("CI") == "true" or not why_missing(kind)]
    costs = {kind: () if kind == SQLITE else pytest.mark.real for kind in chosen}
    # without any kind it is skipped with a reason
    metafunc.parametrize("database_kind", [pytest.param(kind, marks=costs[kind]) for kind in chosen])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print after a run of many tests which databases this machine lacks, because their tests are silently skipped."""
    if not config.getoption("numprocesses", None) or config.option.markexpr == "unit":
        return
    from tests.databases import KINDS, why_missing

    for kind in KINDS:
        if why := why_missing(kind):
            terminalreporter.write_sep("=", f"{kind} WAS NOT TESTED", yellow=True, bold=True)
            terminalreporter.write_line(why)


@pytest.fixture(scope="session")
def database_servers() -> Iterator[dict[str, Server]]:
    """Database servers of this worker by kind, each started by the first test that needs it."""
    from tests.databases import running

    with ExitStack() as stack:

        class Servers(dict[str, "Server"]):
            def __missing__(self, kind: str) -> Server:
                self[kind] = stack.enter_context(running(kind, syncs=False))
                return self[kind]

        yield Servers()


@pytest.fixture
def database(database_kind: str, database_servers: dict[str, Server], tmp_path: Path) -> Database:
    """Return an empty database of each kind; with the mark `databases("postgresql")` only of that kind."""
    from sqlalchemy import make_url

    from tests.databases import Database

    if database_kind == SQLITE:
        return Database(SQLITE, make_url(f"sqlite:///{tmp_path}/app.db"))
    return database_servers[database_kind].new_database()
