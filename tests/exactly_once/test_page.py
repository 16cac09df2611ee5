"""The code and the examples of the page run as a reader runs them, and survive a kill."""

import re
import shlex
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from tests.consumer.processes import Child
from tests.consuming import until
from tests.exactly_once.ledgers import once
from tests.pages import ADDRESS, DOCS, ROOT, _takes_sigterm, blocks, orders_arriving, run_pyrocket, run_python

PAGE = DOCS / "exactly-once.md"
PROGRAM, OWN_TRANSACTION, LIFESPAN = blocks(PAGE, "python")
BROKER, PROGRAMS, PRODUCE, *OFFSETS = blocks(PAGE, "sh")


def runs_programs(test):
    """Mark a test that starts programs, which consume for a while."""
    return pytest.mark.live(pytest.mark.slow("starts programs, which consume for a while")(test))


def in_file(path, statement):
    """Return the rows of a query of an SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def ended(child, reached, what):
    """Wait until a program has finished its work, and shut it down. Return its error output."""
    until(reached, what)
    until(lambda: _takes_sigterm(child.process), "join has begun")
    child.process.terminate()
    assert child.ended() == 0
    return child.errors


def killed(*arguments):
    """Start a program, and kill it after it has consumed a message."""
    child = Child(*arguments)
    child.wait(lambda lines: len(lines) >= 3)
    child.process.kill()
    child.process.wait()


@pytest.fixture
def balances(database):
    """Return the accounts of the database, by name."""
    engine = database.engine()

    def read(statement="SELECT name, balance FROM accounts"):
        with engine.connect() as connection:
            return dict(connection.execute(text(statement)).all())

    yield read
    engine.dispose()


@runs_programs
def test_the_page_can_be_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/billing.db")
    with orders_arriving("orders") as cluster:
        assert "booked" in run_python(PROGRAM, cluster, tmp_path)
        monkeypatch.setenv("NAMESRV_ADDR", cluster.name_server)
        for commands in OFFSETS:
            shown, reset = run_pyrocket(commands, cluster, tmp_path)
            assert "Group billing in topic orders" in shown and "in the database" in reset
    file = tmp_path / "billing.db"
    offsets = dict(in_file(file, "SELECT queue_id, next_offset FROM pyrocket_offsets WHERE topic = 'orders'"))
    assert in_file(file, "SELECT COUNT(*) FROM ledger") > [(0,)]
    assert offsets == dict.fromkeys(range(4), 0)


@runs_programs
def test_a_transaction_of_the_listener(tmp_path):
    before, consuming, after = PROGRAM.partition("with PushConsumer")
    program = before + OWN_TRANSACTION + consuming + after.replace("offsets.exactly_once(book)", "book")
    assert program.count("def book(") == 2 and "exactly_once" not in program
    with orders_arriving("orders") as cluster:
        assert "booked" in run_python(program, cluster, tmp_path)
    offsets = in_file(tmp_path / "billing.db", "SELECT SUM(next_offset) FROM pyrocket_offsets WHERE topic = 'orders'")
    assert offsets == in_file(tmp_path / "billing.db", "SELECT COUNT(*) FROM ledger") > [(0,)]


@pytest.fixture
def broker():
    """The commands of the page that are not its programs."""
    (command,) = BROKER.splitlines()
    child = Child("-m", "pyrocket_consumer.cli", *shlex.split(command.replace(" --port 9876", ""))[1:])
    child.wait(lambda lines: any("name server: " in line for line in lines))
    (address,) = re.findall(r"name server: (\S+)", "\n".join(child.lines))
    yield SimpleNamespace(name_server=address)
    child.process.terminate()
    assert (child.ended(), child.errors) == (0, [])


def followed(broker, tmp_path, program, target):
    """Start a program with the command of the page, send its messages, and end it when all are consumed."""
    (line,) = [line for line in PROGRAMS.splitlines() if f"/{program}.py" in line]
    python, path, name_server, placeholder = line.split()
    assert (python, name_server) == ("python", ADDRESS)
    child = Child("-W", "error", str(ROOT / path), broker.name_server, target or str(tmp_path / placeholder))
    run_pyrocket(PRODUCE, broker, tmp_path)
    sent = 3 if target else 2
    errors = ended(child, lambda: sum(int(line.split()[0]) for line in list(child.lines)) == sent, "all is consumed")
    assert errors == []
    return tmp_path / placeholder


@runs_programs
@pytest.mark.parametrize("kind", ["sqlite", "asyncio", "django"])
def test_a_program_can_be_followed(broker, tmp_path, kind):
    file = followed(broker, tmp_path, f"ledger_{kind}", None)
    assert sorted(in_file(file, "SELECT body FROM ledger")) == [("a lamp",), ("two books",)]


@pytest.mark.databases("postgresql")
def test_the_program_for_postgresql_can_be_followed(broker, tmp_path, database, balances):
    followed(broker, tmp_path, "ledger_postgres", database.url)
    assert balances() == {"alice": 3, "bob": 7}


# --- killed with -9 in the middle, and started again


@runs_programs
@pytest.mark.parametrize("kind", ["sqlite", "asyncio", "django"])
def test_the_ledger_in_a_file(embedded, tmp_path, kind):
    embedded.create_topic("orders", queues=4)
    program = str(DOCS / "examples" / f"ledger_{kind}.py")
    arguments = ["-W", "error", program, embedded.name_server, str(tmp_path / "ledger.db")]
    bodies = [f"order {number}" for number in range(4000)]
    for half in (bodies[:2000], bodies[2000:]):
        for body in half:
            embedded.send("orders", body.encode())
        killed(*arguments)

    def booked():
        return [body for (body,) in in_file(tmp_path / "ledger.db", "SELECT body FROM ledger")]

    assert ended(Child(*arguments), lambda: len(booked()) >= len(bodies), "all is booked") == []
    assert Counter(booked()) == once(bodies)


@pytest.mark.databases("postgresql")
def test_the_accounts_in_postgresql(embedded, database, balances):
    """Also when killed. Its calls lock the same rows at once, but without a deadlock."""
    embedded.create_topic("payments", queues=4)
    for number in range(400):
        for _ in range(1 + (number % 10 == 0)):  # some messages were sent twice
            embedded.send("payments", f"a{number % 7}:{number}".encode(), properties={"UNIQ_KEY": f"payment-{number}"})
    arguments = [str(DOCS / "examples" / "ledger_postgres.py"), embedded.name_server, database.url]
    killed(*arguments)
    right = {f"a{rest}": sum(range(rest, 400, 7)) for rest in range(7)}
    ended(Child(*arguments), lambda: sum(balances().values()) >= sum(right.values()), "all is booked")
    assert balances() == right
    found = "SELECT datname, deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert [*balances(found).values()] == [0]


# --- the rest of the page


def test_each_program_is_in_the_page():
    programs = Counter(path.stem for path in (DOCS / "examples").glob("ledger_*.py"))
    assert Counter(re.findall(r"examples/(\w+)\.py ", PROGRAMS)) == programs
    assert Counter(re.findall(r"\(examples/(\w+)\.py\)", PAGE.read_text())) == programs


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


@runs_programs
def test_an_application_of_fastapi_books_as_long_as_it_lives(tmp_path):
    """Runs the application's lifespan as a server does."""
    shutil.copy(DOCS / "examples" / "ledger_asyncio.py", tmp_path)
    with orders_arriving("orders") as cluster:
        assert "booked" in run_python(LIFESPAN + RUN_LIFESPAN, cluster, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "queue-fenced",
        "log-diverged",
        "store-unreachable",
        "foreign-member",
        "offset-apart",
        "message-left-out",
        "listener-failed",
        "Fenced",
        "OffsetStoreError",
        "ConfigError",
        "advance",
    ],
)
def test_the_page_documents_each_name(name):
    assert f"`{name}" in PAGE.read_text() or f"offsets.{name}" in PAGE.read_text()
