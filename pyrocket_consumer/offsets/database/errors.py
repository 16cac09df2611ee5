"""Classify database errors by the codes of their drivers."""

from __future__ import annotations

import os
import sqlite3
from typing import Literal

ErrorKind = Literal["retry", "locked", "disconnected", "unavailable", "aborted", "listener"]
"""The kinds of errors:

* "retry": the transaction conflicts with another one
* "locked": another session keeps a row locked
* "disconnected": there is no connection
* "unavailable": the database cannot be used now
* "aborted": an earlier error has ended the transaction
* "listener": the listener caused the error
"""

_SQLSTATES: dict[str, ErrorKind] = {
    "40001": "retry",
    "40P01": "retry",  # serialization failure, deadlock
    "08": "disconnected",
    "53300": "disconnected",
    "57P": "disconnected",  # connection, too many of them, shutdown
    "53": "unavailable",  # resources
    "40003": "unavailable",
    "25006": "unavailable",
    "25P03": "unavailable",  # read-only: a standby after a failover
    "55P03": "locked",
    "25P02": "aborted",
}

_MYSQL_CODES: dict[int, ErrorKind] = {
    **dict.fromkeys((1213, 1020), "retry"),
    **dict.fromkeys((1205, 3572), "locked"),
    **dict.fromkeys(
        (0, 1040, 1053, 1077, 1079, 1129, 1152, 1158, 1159, 1160, 1161, 1203, 1290, 1792, 1836, 1927), "unavailable"
    ),
    **dict.fromkeys((2002, 2003, 2006, 2012, 2013, 2055, 3159, 4031), "disconnected"),
}

_SQLITE_CODES: dict[int, ErrorKind] = {
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "retry"),
    **dict.fromkeys(
        (
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ),
        "unavailable",
    ),
    sqlite3.SQLITE_CANTOPEN: "disconnected",
}


def classify_driver_error(error: BaseException | None, dialect: str) -> ErrorKind | None:
    """Return the kind of a driver's error, by its code; None if it is unknown."""
    if isinstance(error, sqlite3.Error):
        return _SQLITE_CODES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    code = error.args[0] if error is not None and error.args else None
    # MySQL's own codes are more specific than the SQLSTATE, which many errors share.
    if dialect in ("mysql", "mariadb") and code in _MYSQL_CODES:
        return _MYSQL_CODES[code]
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(code, dict):
        state = code.get("C")  # pg8000
    if isinstance(state, str):
        return next((_SQLSTATES[state[:size]] for size in (5, 3, 2) if state[:size] in _SQLSTATES), "listener")
    return "disconnected" if _is_disconnected(error) else None


def is_file_replaced(error: BaseException | None, path: object) -> bool:
    """Return whether the error means that another file is at the path of a SQLite database now.

    Its connections can no longer write. While there is no file, keep them: a new one would create an empty file.
    """
    if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY_DBMOVED:
        return False
    name = str(path)
    return os.path.exists(name.removeprefix("file:").partition("?")[0] if name.startswith("file:") else name)


def _is_disconnected(error: BaseException | None) -> bool:
    """Return whether psycopg lost its connection, or could not connect. Such an error has no SQLSTATE."""
    return type(error).__name__ == "OperationalError" and type(error).__module__.startswith("psycopg")
