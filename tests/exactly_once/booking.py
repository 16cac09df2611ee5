"""Sending, and consumers that book the messages in a ledger; failures that must not show in the ledger."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, make_url

from pyrocket_consumer import ConsumerEvent, Message
from pyrocket_consumer.errors import OffsetStoreError
from tests.consuming import Events, consuming
from tests.exactly_once.ledgers import BODIES, EXACTLY_ONCE, GROUP, TOPIC, Ledger, once


def send(cluster: Any, bodies: list[str] = BODIES, queues: int = 4, topic: str = TOPIC, **options: Any) -> None:
    """Create the topic, and send a message for each body."""
    cluster.create_topic(topic, queues=queues)
    for body in bodies:
        cluster.send(topic, body.encode(), **options)


def billing(cluster: Any, ledger: Ledger, listener: Any = None, offsets: Any = None, **options: Any) -> Any:
    """A consumer whose listener books exactly once: in the ledger's database, or with other `offsets`."""
    wrapped = (offsets or ledger.offsets).exactly_once(listener or ledger.book)
    return consuming_own(cluster, ledger, wrapped, offsets, **options)


def refused(made: AbstractContextManager[Any], match: str, error: type[Exception] = OffsetStoreError) -> str:
    """Check that a consumer does not start, and return the error text."""
    with pytest.raises(error, match=match) as raised:
        made.__enter__()
    return str(raised.value)


def consuming_own(cluster: Any, ledger: Ledger, listener: Any, offsets: Any = None, **options: Any) -> Any:
    """A consumer whose listener has transactions itself, or uses its own wrapper."""
    given = {**EXACTLY_ONCE, "offset_store": offsets or ledger.offsets, **options}
    return consuming(cluster, TOPIC, GROUP, listener, **given)


def until_all(cluster: Any, ledger: Ledger, bodies: list[str] = BODIES) -> None:
    """Wait until this number of bodies is booked."""
    cluster.wait_until(lambda: len(ledger.bodies()) >= len(set(bodies)))


def until_at(cluster: Any, ledger: Ledger, next_offset: int, queues: int = 1) -> None:
    """Wait until the database has these offsets."""
    cluster.wait_until(lambda: all(ledger.offset(queue_id=each) == next_offset for each in range(queues)))


def consumed(cluster: Any, ledger: Ledger, bodies: list[str] = BODIES, queues: int = 4, **options: Any) -> None:
    """Send messages, let a consumer book them, and close it."""
    send(cluster, bodies, queues)
    with billing(cluster, ledger, **options):
        until_all(cluster, ledger, bodies)


def booked_once(
    cluster: Any,
    ledger: Ledger,
    listener: Any = None,
    *,
    queues: int = 4,
    bodies: list[str] = BODIES,
    offsets: Any = None,
    own: bool = False,
    **options: Any,
) -> None:
    """Send messages to a new topic, and check that a consumer books each once and stores the end of each queue."""
    send(cluster, bodies, queues)
    consumer = consuming_own if own else billing
    with consumer(cluster, ledger, listener, offsets, **options):
        cluster.wait_until(
            lambda: sum(each.next_offset for each in ledger.offsets.offsets(GROUP, TOPIC)) == len(bodies)
        )
    assert ledger.bodies() == once(bodies)


@contextmanager
def dead(ledger: Ledger) -> Iterator[None]:
    """Kill the server of the database, and start it again on the same port."""
    server = ledger.database.server
    assert server is not None
    server.kill()
    try:
        yield
    finally:
        server.start()
    ledger.engine.dispose()


@contextmanager
def replaced(ledger: Ledger) -> Iterator[None]:
    """Remove the file of the database, and put a copy of it in its place, as in a restore."""
    path = str(make_url(ledger.database.url).database)
    shutil.copy(path, f"{path}.copy")
    os.remove(path)
    yield
    os.replace(f"{path}.copy", path)
    ledger.engine.dispose()


def continues_after(
    trouble: Callable[[], AbstractContextManager[None]],
    cluster: Any,
    ledger: Ledger,
    events: Events,
    listener: Any = None,
    offsets: Any = None,
    **options: Any,
) -> ConsumerEvent:
    """Consume before, during and after a failure of the database, which fails no message. Return its event."""
    before, after = BODIES[:10], BODIES[10:]
    send(cluster, before)
    with billing(cluster, ledger, listener, offsets, max_reconsume_times=0, on_event=events, **options):
        until_all(cluster, ledger, before)
        with trouble():
            send(cluster, after)
            event = events.wait_for("store-unreachable")
        until_all(cluster, ledger)
    assert ledger.bodies() == once(BODIES)
    assert not events.of("listener-failed") and not events.of("message-given-up")
    return event


def failing(ledger: Ledger, *outcomes: Any, when: Callable[[list[Message]], bool] = lambda messages: True) -> Any:
    """Return a listener that books; its first calls end with `outcomes`, its `calls` are the offsets of each."""
    left = list(outcomes)

    def book(messages: list[Message], connection: Connection) -> Any:
        book.calls.append([message.queue_offset for message in messages])
        ledger.book(messages, connection)
        if not (left and when(messages)):
            return None
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome(messages, connection) if callable(outcome) else outcome

    book.calls = []
    return book
