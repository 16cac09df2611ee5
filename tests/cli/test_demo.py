"""The whole demo: its results for killed members, and for their ledger."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing

import pytest

from pyrocket_consumer.cli.demo import Ledger, report
from tests.cli.shell import run

WITHOUT = "import sys; sys.modules['sqlalchemy'] = None\n"
"""Hides SQLAlchemy, as if it were not installed."""

HINT = "pip install 'pyrocket-consumer[sql]' shows a ledger"


def demo(*arguments, before=""):
    """Run it with 600 messages; return the ended process."""
    code = f"{before}import sys; from pyrocket_consumer.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "demo", "--messages", "600"]
    return run(*arguments, command=command, text=True)


def rows(printed):
    return [line.split() for line in printed.splitlines()]


@pytest.mark.live
@pytest.mark.slow("members are killed while 600 messages are consumed")
def test_after_a_kill_the_ledger_is_equal_to_what_was_sent():
    done = demo()
    assert done.returncode == 0, done.stderr
    for victim in ("clustering-1", "broadcasting-1", "ledger-1"):
        assert f"kill -9 {victim}\n" in done.stderr
    assert ["600", "600", "0", "0"] in rows(done.stdout)
    assert "the ledger is equal to what was sent" in done.stdout
    assert HINT not in done.stdout


@pytest.mark.live
@pytest.mark.slow("members are killed while 600 messages are consumed")
@pytest.mark.parametrize("output", ["table", "json"])
def test_without_sqlalchemy_there_is_no_ledger(output):
    done = demo("-o", output, before=WITHOUT)
    assert (done.returncode, "ledger" in done.stderr) == (0, False), done.stderr
    if output == "json":
        assert json.loads(done.stdout)["ledger"] is None
    else:
        assert [line for line in done.stdout.splitlines() if "ledger" in line] == [done.stdout.splitlines()[-1]]
        assert done.stdout.splitlines()[-1].startswith(HINT)


@pytest.mark.parametrize(
    ("booked", "row"),
    [
        ([b"0", b"2"], ["3", "2", "1", "0"]),
        ([b"0", b"1", b"2", b"1"], ["3", "4", "0", "1"]),
        ([b"0", b"0", b"2"], ["3", "3", "1", "1"]),
        ([b"0", b"1", b"2", b"3"], ["3", "4", "0", "0"]),
    ],
    ids=["one missing", "one twice", "one missing and one twice", "one that was not sent"],
)
def test_a_ledger_that_differs_is_reported(tmp_path, capsys, booked, row):
    ledger = Ledger(tmp_path / "ledger.db")
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection, connection:
        connection.executemany("INSERT INTO ledger(body) VALUES (?)", [(body,) for body in booked])
    groups = [
        {"group": model, "sent": 3, "consumed": 3, "repeated": 0, "lost": 0} for model in ("clustering", "broadcasting")
    ]
    file = {"path": "offsets.json", "offsets": {"T/broker-a/0": 3}, "sum": 3}
    result = {"groups": groups, "file": file, "ledger": ledger.compare_with({b"0", b"1", b"2"})}
    assert report(result, "table") == 3
    printed = capsys.readouterr().out
    assert row in rows(printed)
    assert "the ledger is not equal to what was sent" in printed
