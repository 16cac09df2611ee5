"""Temporary databases for tests: SQLite in a file, and servers of PostgreSQL and MariaDB on the loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

SERVERS = ("postgresql", "mariadb")
KINDS = ("sqlite", *SERVERS)
START_TIMEOUT_S = 60.0

_PATHS = {
    "postgresql": ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin"),
    "mariadb": ("/usr/sbin", "/usr/libexec", "/opt/homebrew/opt/mariadb/bin"),
}


class CannotRun(Exception):
    """The database server is not installed."""


def program(kind: str, name: str) -> str:
    """Return the path of a server's program; raise CannotRun if it is not installed."""
    found = shutil.which(name)
    for candidate in reversed([] if found else [each for glob in _PATHS[kind] for each in Path("/").glob(glob[1:])]):
        found = found or shutil.which(name, path=str(candidate))
    if found is None:
        raise CannotRun(f"{name} of {kind} was not found; 'make system-packages' installs it")
    return found


def why_missing(kind: str) -> str:
    """Return the reason why a kind of database cannot run here, or ""."""
    try:
        for name in {"postgresql": ("postgres", "initdb"), "mariadb": ("mariadbd",)}.get(kind, ()):
            program(kind, name)
    except CannotRun as error:
        return str(error)
    return ""


class Database:
    """A database for one test."""

    def __init__(self, kind: str, url: URL, server: Server | None = None) -> None:
        self.kind = kind
        self.server = server
        self.url = url.render_as_string(hide_password=False)
        driver = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}.get(kind)
        self.async_url = url.set(drivername=driver).render_as_string(hide_password=False) if driver else None

    def __repr__(self) -> str:
        return f"Database({self.url})"

    def engine(self, **options: object) -> Engine:
        """Return an engine, which the caller must dispose of."""
        return create_engine(self.url, **options)


def _ends_with_parent() -> list[str]:
    """Return a command prefix that ends the command with the test process, if the system has one."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


class Server:
    """A server with its own directory, port and processes.

    Committed rows survive a kill of its processes. With `syncs` they also survive a loss of power.
    """

    def __init__(self, kind: str, directory: Path, syncs: bool = True) -> None:
        self.kind, self._syncs, self._directory = kind, syncs, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, object] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        if os.geteuid() == 0:  # neither server runs as root
            account = pwd.getpwnam("nobody")
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(directory, account.pw_uid, account.pw_gid)
        self._data = directory / "data"
        getattr(self, f"_make_{kind}")()

    def _make_postgresql(self) -> None:
        self._run(program(self.kind, "initdb"), "-D", self._data, "-A", "trust", "-U", "app", "--no-sync", "-E", "UTF8")
        self._command = [
            program(self.kind, "postgres"),
            "-D",
            self._data,
            "-h",
            "127.0.0.1",
            "-p",
            self.port,
            "-k",
            self._directory,
            *([] if self._syncs else ["-c", "fsync=off", "-c", "full_page_writes=off"]),
        ]
        self._url = make_url(f"postgresql+psycopg://app@127.0.0.1:{self.port}/postgres")

    def _make_mariadb(self) -> None:
        (self._directory / "init.sql").write_text(
            "CREATE USER IF NOT EXISTS app@'127.0.0.1' IDENTIFIED BY 'app';\n"
            "GRANT ALL ON *.* TO app@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        self._run(
            program(self.kind, "mariadb-install-db"),
            "--no-defaults",
            f"--datadir={self._data}",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
            f"--tmpdir={self._directory}",
        )
        self._command = [
            program(self.kind, "mariadbd"),
            "--no-defaults",
            f"--datadir={self._data}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            f"--socket={self._directory}/socket",
            f"--init-file={self._directory}/init.sql",
            f"--pid-file={self._directory}/pid",
            "--skip-name-resolve",
            "--innodb-buffer-pool-size=32M",
            f"--tmpdir={self._directory}",  # because a starting server removes the files of others in the default one
            *([] if self._syncs else ["--innodb-flush-log-at-trx-commit=2", "--innodb-flush-method=nosync"]),
        ]
        self._url = make_url(f"mysql+pymysql://app:app@127.0.0.1:{self.port}/mysql?charset=utf8mb4")

    def _run(self, *command: object) -> None:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=self._directory, **self._as)
        if done.returncode:
            raise AssertionError(f"{command[0]} failed: {done.stdout}{done.stderr}")

    @property
    def pid(self) -> int:
        """The server's process, which leads its own process group."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start with the same port and data as before. Return when the server responds."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with (self._directory / "log").open("ab") as output:
                self._process = subprocess.Popen(
                    [*_ends_with_parent(), *map(str, self._command)],
                    stdout=output,
                    stderr=output,
                    cwd=self._directory,
                    start_new_session=True,
                    **self._as,
                )
            if self._answers(deadline):
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.kind} did not start: {(self._directory / 'log').read_text()[-2000:]}")
            time.sleep(0.2)  # a killed process may still hold its memory

    def _answers(self, deadline: float) -> bool:
        engine = create_engine(self._url)
        try:
            while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
                try:
                    with engine.connect() as connection:
                        connection.execute(text("SELECT 1"))
                        return True
                except DBAPIError:
                    time.sleep(0.05)
            return False
        finally:
            engine.dispose()

    def kill(self) -> None:
        """Kill the processes, as a loss of power does."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Let the server shut down quickly."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT if self.kind == "postgresql" else signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(START_TIMEOUT_S)
            self.kill()

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    def new_database(self) -> Database:
        """Return an empty database."""
        if not self.is_running:
            self.start()
        name = f"test_{uuid4().hex[:12]}"
        engine = create_engine(self._url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return Database(self.kind, self._url.set(database=name), self)


@contextmanager
def running(kind: str, syncs: bool = True) -> Iterator[Server]:
    """Run a server, and remove its files at the end. Raise CannotRun if it is not installed.

    Without `syncs` it does not wait for the disk.
    """
    directory = Path(tempfile.mkdtemp(prefix="pyrocket-", dir="/tmp"))  # the path of a socket must be short
    server: Server | None = None
    try:
        directory.chmod(0o755)
        server = Server(kind, directory, syncs)
        server.start()
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(directory, ignore_errors=True)
