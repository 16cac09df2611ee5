"""A consumer with default options, in a process of its own. It prints its state as a line of JSON five times a second.

`python -m tests.hostile.member NAME_SERVER GROUP TOPIC DIRECTORY [OPTIONS]`; it ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import selectors
import sys
import threading
import time
from collections import Counter
from typing import Any

from pyrocket_consumer import PushConsumer


class Pauses(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """The longest time, and the most CPU time, between two polls of an event loop."""

    longest_s = longest_cpu_s = 0.0
    _left = _left_cpu = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if self._left:
            kind = type(self)
            kind.longest_s = max(kind.longest_s, time.monotonic() - self._left)
            kind.longest_cpu_s = max(kind.longest_cpu_s, time.thread_time() - self._left_cpu)
        try:
            return super().select(timeout)
        finally:
            self._left, self._left_cpu = time.monotonic(), time.thread_time()


class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(Pauses())


class Lines(logging.Handler):
    """Counts log records."""

    lines = characters = longest = forged = 0

    def emit(self, entry: logging.LogRecord) -> None:
        text = self.format(entry)
        self.lines += 1
        self.characters += len(text)
        self.longest = max(self.longest, len(text))
        message = entry.getMessage()
        self.forged += "\n" in message or any(character < " " or "\x7f" <= character < "\xa0" for character in message)


def main() -> None:
    asyncio.set_event_loop_policy(Policy())
    name_server, group, topic, directory, *rest = sys.argv[1:]
    lines = Lines()
    logging.getLogger().addHandler(lines)
    logging.getLogger().setLevel(logging.INFO)
    consumed: Counter[bytes] = Counter()
    others = 0
    events: Counter[str] = Counter()

    def listen(message: Any) -> None:
        nonlocal others
        if message.body.startswith(b"honest "):
            consumed[message.body] += 1
        else:
            others += 1

    consumer = PushConsumer(
        group,
        name_server=name_server,
        consume_from="first",
        offset_store_dir=directory,
        on_event=lambda event: events.update([str(event.kind)]),
        **json.loads(rest[0] if rest else "{}"),
    )
    consumer.subscribe(topic, listen)
    consumer.start()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while True:
        last = ended.wait(0.2)
        with open("/proc/self/statm") as statm:
            rss = int(statm.read().split()[1]) * resource.getpagesize()
        report = {
            "state": str(consumer.state),
            "rss": rss,
            "threads": threading.active_count(),
            "consumed": len(consumed),
            "twice": consumed.total() - len(consumed),
            "others": others,
            "pause_s": Pauses.longest_s,
            "pause_cpu_s": Pauses.longest_cpu_s,
            "cpu_s": time.process_time(),
            "lines": lines.lines,
            "characters": lines.characters,
            "longest_line": lines.longest,
            "forged": lines.forged,
            "events": dict(Counter(dict(events)).most_common(12)),
        }
        Pauses.longest_s = Pauses.longest_cpu_s = 0.0
        print(json.dumps(report), flush=True)
        if last:
            break
    consumer.close(5)


if __name__ == "__main__":
    main()
