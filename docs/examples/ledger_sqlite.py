"""Each order is booked once, whatever happens to this process: kill it with -9, and start it again.

python ledger_sqlite.py 127.0.0.1:9876 ledger.db
"""

from __future__ import annotations

import sys

from sqlalchemy import Connection, create_engine, text

from pyrocket_consumer import Message, PushConsumer
from pyrocket_consumer.offsets import DatabaseOffsets

NAME_SERVER, FILE = sys.argv[1:3]
engine = create_engine(f"sqlite:///{FILE}")
offsets = DatabaseOffsets(engine)


def book(messages: list[Message], connection: Connection) -> None:
    """Insert a row for each order; the offset commits with them."""
    rows = [{"id": message.message_id, "body": message.body.decode()} for message in messages]
    connection.execute(text("INSERT INTO ledger(message_id, body) VALUES (:id, :body)"), rows)
    print(f"{len(rows)} booked", flush=True)


if __name__ == "__main__":
    offsets.create_tables()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS ledger(message_id TEXT, body TEXT)"))
    with PushConsumer(
        "ledger-sqlite",
        name_server=NAME_SERVER,
        orderly=True,
        listener_batch_size=64,
        consume_from="first",
        offset_store=offsets,
    ) as consumer:
        consumer.subscribe("orders", offsets.exactly_once(book))
        consumer.join()
