"""A consumer in a process of its own: prints what it consumes, one line a message, before it acknowledges."""

from __future__ import annotations

import json
import os
import sys
import time

from pyrocket_consumer import PushConsumer


def main(topic: str, options: dict) -> None:
    pause_s = options.pop("listener_s", 0)

    def handle(message):
        os.write(1, b"begun %s\n" % message.body)
        time.sleep(pause_s)
        os.write(1, b"%s\n" % message.body)

    consumer = PushConsumer(**options)
    with consumer:
        consumer.subscribe(topic, handle)
        os.write(1, b"ready\n")
        consumer.join()
        os.write(1, b"joined\n")
    os.write(1, b"closed\n")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
