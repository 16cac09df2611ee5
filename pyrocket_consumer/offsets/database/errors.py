"""What the errors of databases mean, by the codes that their drivers give them."""

from __future__ import annotations

import sqlite3
from typing import Literal

Verdict = Literal["again", "locked", "gone", "away", "broken", "theirs"]
"""What an error says: this transaction met another; one that lasts; there is no connection; the database cannot be used
now; an error of before has ended the transaction; it is the listener's own."""

_SQLSTATES: dict[str, Verdict] = {
    "40001": "again",
    "40P01": "again",  # serialization failure, deadlock
    "08": "gone",
    "53300": "gone",
    "57P": "gone",  # connection, too many of them, shutdown
    "53": "away",  # resources
    "40003": "away",
    "25006": "away",
    "25P03": "away",  # read-only: a standby after a fail-over
    "55P03": "locked",
    "25P02": "broken",
}

_MYSQL_CODES: dict[int, Verdict] = {
    **dict.fromkeys((1213, 1020), "again"),
    **dict.fromkeys((1205, 3572), "locked"),
    **dict.fromkeys(
        (0, 1040, 1053, 1077, 1079, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1290, 1792, 1836, 1927), "away"
    ),
    **dict.fromkeys((2002, 2003, 2006, 2012, 2013, 2055, 3159, 4031), "gone"),
}

_SQLITE_CODES: dict[int, Verdict] = {
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "again"),
    **dict.fromkeys(
        (
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ),
        "away",
    ),
    sqlite3.SQLITE_CANTOPEN: "gone",
}


def driver_verdict(error: BaseException | None, dialect: str) -> Verdict | None:
    """Return what the driver's own error says, by its code."""
    if isinstance(error, sqlite3.Error):
        return _SQLITE_CODES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    code = error.args[0] if error is not None and error.args else None
    if dialect in ("mysql", "mariadb") and code in _MYSQL_CODES:  # their states say less: many errors share one
        return _MYSQL_CODES[code]
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(code, dict):
        state = code.get("C")  # pg8000
    if isinstance(state, str):
        return next((_SQLSTATES[state[:size]] for size in (5, 3, 2) if state[:size] in _SQLSTATES), "theirs")
    return "gone" if _is_disconnected(error) else None


def _is_disconnected(error: BaseException | None) -> bool:
    """Tell whether psycopg lost its connection, or got none: there is no SQLSTATE then."""
    return type(error).__name__ == "OperationalError" and type(error).__module__.startswith("psycopg")
