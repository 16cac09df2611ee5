"""A consumer in a separate process that writes a ledger in one of several ways. Only one of them is right."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from sqlalchemy import Connection, create_engine, text

from pyrocket_consumer import Message, PushConsumer
from pyrocket_consumer.offsets import DatabaseOffsets
from tests.exactly_once.ledgers import INSERT, row

WAYS = ("exactly-once", "commit-after", "known-elsewhere")


def book(messages: list[Message], connection: Connection) -> None:
    """Write an effect for each message, with a short pause before and after it."""
    time.sleep(random.uniform(0, 0.002))
    connection.execute(INSERT, [row(each) for each in messages])
    time.sleep(random.uniform(0, 0.002))


def main(way: str, url: str, topic: str, options: dict[str, Any]) -> None:
    """Consume until the process is killed."""
    engine = create_engine(url)
    offsets = DatabaseOffsets(engine)

    def commit_after(messages: list[Message]) -> None:
        """Control: the effect is committed first, and the consumer commits the offset later."""
        with engine.begin() as connection:
            book(messages, connection)

    def known_elsewhere(messages: list[Message]) -> None:
        """Control: consumed messages are recorded, but not in the transaction of the effect."""
        with engine.connect() as connection:
            known = set(connection.execute(text("SELECT body FROM processed")).scalars())
        if fresh := [message for message in messages if message.body.decode() not in known]:
            with engine.begin() as connection:
                book(fresh, connection)
            time.sleep(random.uniform(0, 0.05))
            with engine.begin() as connection:
                rows = [{"body": message.body.decode()} for message in fresh]
                connection.execute(text("INSERT INTO processed VALUES (:body)"), rows)

    listeners = {"commit-after": commit_after, "known-elsewhere": known_elsewhere}
    exactly_once = way == "exactly-once"
    store = {"offset_store": offsets} if exactly_once else {}
    with PushConsumer(**options, **store, orderly=True) as consumer:
        consumer.subscribe(topic, offsets.exactly_once(book) if exactly_once else listeners[way])
        print("ready", flush=True)
        consumer.join()


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
