"""A process that gets a signal at every step of `join()`, one after the other, and tells what has become of each."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from pyrocket_consumer import PushConsumer

PATIENCE_S = 30.0


def joined_with_a_signal(number: int, step: int) -> tuple[PushConsumer, bool]:
    """Join a consumer, and send signal `number` at the given step. Returns it, and whether there was such a step."""
    consumer = PushConsumer("group", name_server="127.0.0.1:1")
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += 1
        if steps == step:
            signal.raise_signal(number)
        return trace

    sys.settrace(trace)
    try:
        consumer.join(0.001)
    except KeyboardInterrupt:
        pass  # it came before join had begun, or after its end
    finally:
        sys.settrace(None)
    return consumer, steps >= step


def ends(work: Any) -> bool:
    """Whether `work` comes to its end on a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def main(number: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    step, was_there = 0, True
    while was_there:
        step += 1
        print(f"step {step}", flush=True)
        consumer, was_there = joined_with_a_signal(number, step)
        if not ends(consumer.close) or not ends(consumer.join):
            print(f"stuck after a signal at step {step}", flush=True)
            os._exit(1)
    print("through", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
