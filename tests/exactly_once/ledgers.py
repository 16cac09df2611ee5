"""What tests of effects that happen once share: a table of effects, listeners that write there, and its sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from pyrocket_consumer import ConsumerEvent, Message
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.consuming import Events, consuming
from tests.databases import KINDS, Database

INSERT = text("INSERT INTO ledger(body, queue_id, queue_offset) VALUES (:body, :queue_id, :queue_offset)")

every_database = pytest.mark.databases(*KINDS)

EXACTLY_ONCE = {"orderly": True, "listener_batch_size": 8}

TOPIC, GROUP = "orders", "billing"
BODIES = [str(number) for number in range(100)]


class Ledger:
    """Effects in a database, and the offsets beside them."""

    def __init__(self, database: Database, **options: Any) -> None:
        self.database = database
        self.engine: Engine = database.engine()
        with self.engine.begin() as connection:  # nothing keeps an effect from being there twice
            connection.execute(text("CREATE TABLE ledger(body VARCHAR(64), queue_id INTEGER, queue_offset BIGINT)"))
        self.offsets = DatabaseOffsets(self.engine, **options)
        self.offsets.create_tables()

    def book(self, messages: list[Message], connection: Connection) -> None:
        """A listener with an effect for each message."""
        connection.execute(INSERT, [row(message) for message in messages])

    def rows(self) -> list[tuple[str, int, int]]:
        """Return all effects, in order of queue and offset."""
        return [tuple(each) for each in self.query("SELECT * FROM ledger ORDER BY queue_id, queue_offset")]

    def bodies(self) -> Counter[str]:
        """Return how often each body has its effect."""
        return Counter(body for body, _, _ in self.rows())

    def query(self, statement: str, **values: Any) -> list[Any]:
        """Return the rows of a query."""
        with self.engine.connect() as connection:
            return list(connection.execute(text(statement), values))

    def execute(self, statement: str, **values: Any) -> None:
        """Do something in a transaction of its own."""
        with self.engine.begin() as connection:
            connection.execute(text(statement), values)

    def offset(self, group: str = GROUP, queue_id: int = 0, topic: str = TOPIC) -> int | None:
        """Return where a queue stands."""
        found = [each for each in self.offsets.offsets(group, topic) if each.queue.queue_id == queue_id]
        return found[0].next_offset if found else None


def row(message: Message) -> dict[str, Any]:
    """Return the effect of a message."""
    return {"body": message.body.decode(), "queue_id": message.queue.queue_id, "queue_offset": message.queue_offset}


@contextmanager
def ledger_in(database: Database, **options: Any) -> Iterator[Ledger]:
    """A ledger in an empty database."""
    ledger = Ledger(database, **options)
    try:
        yield ledger
    finally:
        ledger.engine.dispose()


def once(bodies: list[str]) -> Counter[str]:
    """Return what a ledger is to hold."""
    return Counter(dict.fromkeys(bodies, 1))


def send(cluster: Any, bodies: list[str] = BODIES, queues: int = 4, topic: str = TOPIC, **options: Any) -> None:
    """Create the topic, and send a message for each body."""
    cluster.create_topic(topic, queues=queues)
    for body in bodies:
        cluster.send(topic, body.encode(), **options)


def billing(cluster: Any, ledger: Ledger, listener: Any = None, offsets: Any = None, **options: Any) -> Any:
    """A consumer whose listener books exactly once: in the ledger's database, or as other `offsets` have it."""
    wrapped = (offsets or ledger.offsets).exactly_once(listener or ledger.book)
    return consuming_own(cluster, ledger, wrapped, offsets, **options)


def consuming_own(cluster: Any, ledger: Ledger, listener: Any, offsets: Any = None, **options: Any) -> Any:
    """A consumer whose listener has transactions of its own, or wraps by itself."""
    given = {**EXACTLY_ONCE, "offset_store": offsets or ledger.offsets, **options}
    return consuming(cluster, TOPIC, GROUP, listener, **given)


def until_all(cluster: Any, ledger: Ledger, bodies: list[str] = BODIES) -> None:
    """Wait until as many bodies are booked."""
    cluster.wait_until(lambda: len(ledger.bodies()) >= len(set(bodies)))


def until_at(cluster: Any, ledger: Ledger, next_offset: int, queues: int = 1) -> None:
    """Wait until each queue stands there in the database."""
    cluster.wait_until(lambda: all(ledger.offset(queue_id=each) == next_offset for each in range(queues)))


def consumed(cluster: Any, ledger: Ledger, bodies: list[str] = BODIES, queues: int = 4, **options: Any) -> None:
    """Send messages, and have a consumer book them, which ends then."""
    send(cluster, bodies, queues)
    with billing(cluster, ledger, **options):
        until_all(cluster, ledger, bodies)


def booked_once(
    cluster: Any, ledger: Ledger, listener: Any = None, *, queues: int = 4, bodies: list[str] = BODIES,
    offsets: Any = None, own: bool = False, **options: Any,
) -> None:
    """Send messages to a new topic: a consumer books each once, and stands at the end of each queue."""
    send(cluster, bodies, queues)
    consumer = consuming_own if own else billing
    with consumer(cluster, ledger, listener, offsets, **options):
        cluster.wait_until(
            lambda: sum(each.next_offset for each in ledger.offsets.offsets(GROUP, TOPIC)) == len(bodies)
        )
    assert ledger.bodies() == once(bodies)


@contextmanager
def dead(ledger: Ledger) -> Iterator[None]:
    """The server of the database has been killed; it starts again on the same port."""
    server = ledger.database.server
    assert server is not None
    server.kill()
    try:
        yield
    finally:
        server.start()
    ledger.engine.dispose()


def goes_on_after(
    trouble: Callable[[], AbstractContextManager[None]], cluster: Any, ledger: Ledger, events: Events,
    listener: Any = None, offsets: Any = None,
) -> ConsumerEvent:
    """Consume before, in and after trouble of the database, which is nobody's failure; return what is said of it."""
    before, after = BODIES[:10], BODIES[10:]
    send(cluster, before)
    with billing(cluster, ledger, listener, offsets, max_reconsume_times=0, on_event=events):
        until_all(cluster, ledger, before)
        with trouble():
            send(cluster, after)
            told = events.wait_for("store-unreachable")
        until_all(cluster, ledger)
    assert ledger.bodies() == once(BODIES)
    assert not events.of("listener-failed") and not events.of("message-given-up")
    return told


def failing(ledger: Ledger, *outcomes: Any, when: Callable[[list[Message]], bool] = lambda messages: True) -> Any:
    """Return a listener that books; its first calls end with `outcomes`, and are in its `failed`."""
    left = list(outcomes)

    def book(messages: list[Message], connection: Connection) -> Any:
        ledger.book(messages, connection)
        if not (left and when(messages)):
            return None
        book.failed.append(messages)
        if isinstance(outcome := left.pop(0), Exception):
            raise outcome
        return outcome

    book.failed = []
    return book
