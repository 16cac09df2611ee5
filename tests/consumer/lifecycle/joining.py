"""A process that gets a signal at every step of `join()`, one after the other, and prints each result."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from pyrocket_consumer import PushConsumer
from pyrocket_consumer.testing import EmbeddedCluster

TIMEOUT_S = 30.0


def join_with_a_signal(consumer: PushConsumer, number: int, step: int) -> bool:
    """Join, and send signal `number` at this step, unless it would end the process. Return whether the step exists.

    Ctrl-C raises at every step. SIGTERM raises while `join()` handles it.
    """
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += 1
        if steps == step and signal.getsignal(number) is not signal.SIG_DFL:
            signal.raise_signal(number)
        return trace

    sys.settrace(trace)
    try:
        consumer.join(0.001)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        sys.settrace(None)
    return steps >= step


def ends(work: Any) -> bool:
    """Return whether `work` ends on its own thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return not thread.is_alive()


def check(what: bool, text: str) -> None:
    if not what:
        print(text, flush=True)
        os._exit(1)


def main(number: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with EmbeddedCluster() as cluster:
        consumer = PushConsumer("group", name_server=cluster.name_server).start()
        step, was_there = 0, True
        while was_there:
            step += 1
            print(f"step {step}", flush=True)
            was_there = join_with_a_signal(consumer, number, step)
            check(ends(lambda: consumer.join(0.001)), f"join hangs after a signal at step {step}")
        waiter = threading.Thread(target=consumer.join)
        waiter.start()
        check(ends(consumer.close), "close hangs")
        waiter.join(TIMEOUT_S)
        check(not waiter.is_alive(), "join does not see the end")
    print("through", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
