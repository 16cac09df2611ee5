"""A consumer in its own process. It prints each message that it consumes on one line, before it acknowledges it."""

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
    """Print "ready" once the main thread's `join()` has begun, because `join()` changes the handling of SIGTERM."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.005)
    os.write(1, b"ready\n")


def main(topic: str, options: dict) -> None:
    faulthandler.register(signal.SIGUSR1)  # prints the stack of every thread if the process hangs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may have ignored it
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
