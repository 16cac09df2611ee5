"""One member of the demo, in a process of its own so that it can be killed. Prints a number per message consumed."""

from __future__ import annotations

import os
import sys
import threading

from pyrocket_consumer.consumer import PushConsumer
from pyrocket_consumer.model import MessageModel
from pyrocket_consumer.wire.message import Message


def main(group: str, model: str, topic: str, name_server: str, directory: str) -> None:
    """Consume until standard input ends.

    What was consumed is told before the listener returns: whatever this process has acknowledged, its parent knows.
    """

    def handle(message: Message) -> None:
        os.write(1, message.body + b"\n")

    with PushConsumer(
        group,
        name_server=name_server,
        message_model=MessageModel(model),
        consume_from="first",
        offset_store_dir=directory,
        commit_interval_s=0.5,
        rebalance_interval_s=2,
    ) as consumer:
        consumer.subscribe(topic, handle)
        os.write(1, b"ready\n")
        threading.Thread(target=close_at_end_of_input, args=(consumer,), daemon=True).start()
        consumer.join()


def close_at_end_of_input(consumer: PushConsumer) -> None:
    """Close the consumer when the parent closes our standard input, or is gone."""
    sys.stdin.read()
    consumer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
