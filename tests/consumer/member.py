"""A consumer in a process of its own: prints what it consumes, one line a message, before it acknowledges."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time

from pyrocket_consumer import PushConsumer


def tell_when_joined() -> None:
    """Print "ready" once the main thread's `join()` has begun: it is what changes how SIGTERM is taken."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.005)
    os.write(1, b"ready\n")


def main(topic: str, options: dict) -> None:
    faulthandler.register(signal.SIGUSR1)  # tells what every thread does, when the end does not come
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who started us may have ignored it
    pause_s = options.pop("listener_s", 0)

    def handle(message):
        os.write(1, b"begun %s\n" % message.body)
        time.sleep(pause_s)
        os.write(1, b"%s\n" % message.body)

    consumer = PushConsumer(**options)
    with consumer:
        consumer.subscribe(topic, handle)
        threading.Thread(target=tell_when_joined, daemon=True).start()
        consumer.join()
        os.write(1, b"joined\n")
    os.write(1, b"closed\n")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
