"""One member of the demo, in its own process so that the demo can kill it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyrocket_consumer.consumer import PushConsumer
from pyrocket_consumer.model import MessageModel
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.message import Message

if TYPE_CHECKING:
    from sqlalchemy import Connection


def main(group: str, kind: str, topic: str, name_server: str, directory: str) -> None:
    """Consume until standard input ends."""
    listener, options = ledger_listener(directory) if kind == "ledger" else printing_listener(kind, directory)
    with PushConsumer(
        group, name_server=name_server, consume_from="first", rebalance_interval_s=2, **options
    ) as consumer:
        consumer.subscribe(topic, listener)
        os.write(1, b"ready\n")
        threading.Thread(target=close_at_end_of_input, args=(consumer,), daemon=True).start()
        consumer.join()


def printing_listener(model: str, directory: str) -> tuple[Callable[[Message], None], dict[str, Any]]:
    """Return a listener that prints the number in each message, and the options it needs.

    It prints before it returns, so the parent process knows every message that this process has acknowledged.
    """

    def print_number(message: Message) -> None:
        os.write(1, message.body + b"\n")

    return print_number, {"message_model": MessageModel(model), "offset_store_dir": directory, "commit_interval_s": 0.5}


def ledger_listener(directory: str) -> tuple[Callable[[list[Message]], Any], dict[str, Any]]:
    """Return a listener that inserts the messages into the ledger, exactly once, and the options it needs."""
    from sqlalchemy import URL, create_engine, text

    offsets = DatabaseOffsets(create_engine(URL.create("sqlite", database=f"{directory}/ledger.db")))
    insert = text("INSERT INTO ledger(body) VALUES (:body)")

    def book(messages: list[Message], connection: Connection) -> None:
        connection.execute(insert, [{"body": message.body} for message in messages])

    return offsets.exactly_once(book), {"orderly": True, "listener_batch_size": 64, "offset_store": offsets}


def close_at_end_of_input(consumer: PushConsumer) -> None:
    """Close the consumer when the parent process closes the standard input of this one, or ends."""
    sys.stdin.read()
    consumer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
