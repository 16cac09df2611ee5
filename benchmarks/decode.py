"""How much faster are messages decoded lazily than eagerly, and how close is that to the minimum of any decoder?

    python -m benchmarks.decode [--rounds N] [--json FILE]

Each round decodes one response of 32 records with 8 properties in several ways, in random order. A ratio is the time of
the eager decoder divided by that of the other in the same round; 10 means ten times faster.

Then the program measures each step of a message with the C extension and without it. It imports the package twice, once
each way, and both copies execute each step in turn, on 1 KB messages with five properties. That ratio is the time
without the extension divided by the time with it.

Only ratios are results, because times vary on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import random
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from benchmarks.arguments import new_file, one_or_more
from benchmarks.environment import environment, header
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import StoredMessage, decode_messages, encode_message

QUESTION = (__doc__ or "").partition("\n")[0]

QUEUE = MessageQueue("orders", "broker-a", 3)
MESSAGES = 32
BODY_BYTES = (100, 1024, 10240)
FIVE = ("UNIQ_KEY", "CLUSTER", "KEYS", "TAGS", "region")


def pull_body(body_bytes: int, names: tuple[str, ...] = ()) -> bytes:
    """Return the body of a pull response: 32 records with these of their properties, or all."""
    text = json.dumps({f"field{n}": f"value {n}" for n in range(body_bytes // 16)}).encode()
    return b"".join(
        encode_message(
            StoredMessage(
                topic="orders",
                body=text.ljust(body_bytes)[:body_bytes],
                properties={name: value for name, value in _properties(n).items() if name in names or not names},
                queue_id=3,
                queue_offset=1000 + n,
                commit_log_offset=10**9 + n * body_bytes,
                born_at_ms=1_700_000_000_000,
                born_host="10.0.0.9:50000",
                stored_at_ms=1_700_000_000_005,
                store_host="10.0.0.1:10911",
            )
        )
        for n in range(MESSAGES)
    )


def _properties(number: int) -> dict[str, str]:
    return {
        "MSG_REGION": "DefaultRegion",
        "UNIQ_KEY": f"0A000009126718B4AAC24496ED40{number:04X}",
        "CLUSTER": "DefaultCluster",
        "KEYS": f"order-{number} customer-{number}",
        "TAGS": "paid",
        "TRACE_ON": "true",
        "region": "eu-central-1",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }


def decode_eagerly(data: bytes) -> list[dict[str, Any]]:
    """Decode in the obvious way: field by field, everything at once."""
    messages, start = [], 0

    def number(place: int, length: int) -> int:
        return int.from_bytes(data[start + place : start + place + length], "big", signed=True)

    def host(place: int) -> str:
        return ".".join(str(byte) for byte in data[start + place : start + place + 4]) + f":{number(place + 4, 4)}"

    while start < len(data):
        body_end = start + 88 + number(84, 4)
        topic_end = body_end + 1 + data[body_end]
        properties = {}
        for item in data[topic_end + 2 : start + number(0, 4)].decode().split("\x02"):
            if item:
                name, value = item.split("\x01", 1)
                properties[name] = value
        messages.append(
            {
                "body_crc": number(8, 4),
                "queue_id": number(12, 4),
                "flag": number(16, 4),
                "queue_offset": number(20, 8),
                "commit_log_offset": number(28, 8),
                "sys_flag": number(36, 4),
                "born_at_ms": number(40, 8),
                "born_host": host(48),
                "stored_at_ms": number(56, 8),
                "store_host": host(64),
                "reconsume_times": number(72, 4),
                "prepared_transaction_offset": number(76, 8),
                "body": data[start + 88 : body_end],
                "topic": data[body_end + 1 : topic_end].decode(),
                "properties": properties,
                "offset_message_id": (data[start + 64 : start + 72] + data[start + 28 : start + 36]).hex().upper(),
            }
        )
        start += number(0, 4)
    return messages


_FIXED = struct.Struct(">IIIiiqqiq8sq8siqI")


def decode_eagerly_with_struct(data: bytes) -> list[tuple[Any, ...]]:
    """Decode the fixed fields with one call, and everything at once."""
    messages, start = [], 0
    while start < len(data):
        fields = _FIXED.unpack_from(data, start)
        body_end = start + 88 + fields[14]
        topic_end = body_end + 1 + data[body_end]
        text = data[topic_end + 2 : start + fields[0]].decode()
        properties = dict([item.split("\x01", 1) for item in text.split("\x02") if item])
        messages.append((fields, data[start + 88 : body_end], data[body_end + 1 : topic_end].decode(), properties))
        start += fields[0]
    return messages


_SIZE = struct.Struct(">I")


def walk_lengths(data: bytes) -> None:
    """Do the minimum of any decoder: find the start of each record."""
    start, size, unpack = 0, len(data), _SIZE.unpack_from
    while start < size:
        start += unpack(data, start)[0]


read_all = operator.attrgetter(
    "body_crc",
    "queue",
    "flag",
    "queue_offset",
    "commit_log_offset",
    "sys_flag",
    "born_at_ms",
    "born_host",
    "stored_at_ms",
    "store_host",
    "reconsume_times",
    "prepared_transaction_offset",
    "body",
    "topic",
    "properties",
    "offset_message_id",
)


def decode_and_touch_body(data: bytes) -> None:
    for message in decode_messages(data, QUEUE):
        message.queue_offset  # noqa: B018
        message.body  # noqa: B018


def decode_and_touch_tags(data: bytes) -> None:
    for message in decode_messages(data, QUEUE):
        message.tags  # noqa: B018


def decode_and_touch_all(data: bytes) -> None:
    """Read the same fields as the eager decoder."""
    for message in decode_messages(data, QUEUE):
        read_all(message)


EAGER = "eager"
WAYS: dict[str, Callable[[bytes], object]] = {
    EAGER: decode_eagerly,
    "eager, struct": decode_eagerly_with_struct,
    "lazy": lambda data: decode_messages(data, QUEUE),
    "lazy + offset, body": decode_and_touch_body,
    "lazy + tags": decode_and_touch_tags,
    "lazy + everything": decode_and_touch_all,
    "walk lengths": walk_lengths,
}


def measure(data: bytes, rounds: int, repeats: int = 10) -> dict[str, list[float]]:
    """Return microseconds per message of every way, round by round."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    ways = list(WAYS.items())
    for _ in range(rounds):
        random.shuffle(ways)
        for way, decode in ways:
            begin = time.perf_counter()
            for _ in range(repeats):
                decode(data)
            times[way].append((time.perf_counter() - begin) / repeats / MESSAGES * 1e6)
    return times


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p5": round(ordered[len(ordered) // 20], 3),
        "p95": round(ordered[-1 - len(ordered) // 20], 3),
    }


def bench_decode(rounds: int) -> list[dict[str, Any]]:
    """Measure every way for every size of body."""
    results: list[dict[str, Any]] = []
    for body_bytes in BODY_BYTES:
        data = pull_body(body_bytes)
        measure(data, 3)  # warm up
        times = measure(data, rounds)
        for way, values in times.items():
            ratios = [eager / value for eager, value in zip(times[EAGER], values, strict=True)]
            results.append(
                {"way": way, "body_bytes": body_bytes, "times_quicker": summary(ratios), "us": summary(values)}
            )
    return results


# --- with the extension and without


@dataclass(frozen=True, slots=True)
class Package:
    """One of the two copies of the package, with the modules that the steps use."""

    message: ModuleType
    process_queue: ModuleType

    @classmethod
    def imported(cls) -> Package:
        home = "pyrocket_consumer"
        return cls(import_module(f"{home}.protocol.message"), import_module(f"{home}.consumer.window.process_queue"))

    @classmethod
    def without_extension(cls) -> Package:
        """Return a second copy, imported as in a process with PYROCKET_PURE=1. The first one is not changed."""

        def taken_out() -> dict[str, ModuleType]:
            names = [name for name in sys.modules if name.partition(".")[0] == "pyrocket_consumer"]
            return {name: sys.modules.pop(name) for name in names}

        first, before = taken_out(), os.environ.get("PYROCKET_PURE")
        os.environ["PYROCKET_PURE"] = "1"
        try:
            return cls.imported()
        finally:
            taken_out()
            sys.modules.update(first)
            os.environ.pop("PYROCKET_PURE")
            if before is not None:
                os.environ["PYROCKET_PURE"] = before

    def decode(self, data: bytes) -> Any:
        return self.message.decode_messages(data, QUEUE)

    def window(self, messages: Any, data: bytes) -> Any:
        """Return a window with the messages, all of them unfinished."""
        window = self.process_queue.ProcessQueue(QUEUE, messages[0].queue_offset, self.process_queue.Limits())
        window.put(messages, messages[-1].queue_offset + 1, len(data))
        return window


def read_bodies(messages: Any) -> None:
    for message in messages:
        message.body  # noqa: B018


def read_properties(messages: Any) -> None:
    for message in messages:
        message.properties  # noqa: B018


def read_one_property(messages: Any) -> None:
    for message in messages:
        message.property("region")


def read_both(messages: Any) -> None:
    for message in messages:
        message.body, message.properties  # noqa: B018


Step = Callable[[Package, bytes], Callable[[], object]]
"""Prepares a step, and returns the function to measure, which handles 32 messages."""


def _of_decoded(act: Callable[[Any], object]) -> Step:
    def ready(package: Package, data: bytes) -> Callable[[], object]:
        messages = package.decode(data)
        return lambda: act(messages)

    return ready


def _ack(package: Package, data: bytes) -> Callable[[], object]:
    messages = package.decode(data)
    ack = package.window(messages, data).ack
    return lambda: ack(messages, 0.0001, MESSAGES)


STEPS: Mapping[str, Step] = {
    "decode": lambda package, data: lambda: package.decode(data),
    "body": _of_decoded(read_bodies),
    "five properties": _of_decoded(read_properties),
    "one property": _of_decoded(read_one_property),
    "all": lambda package, data: lambda: read_both(package.decode(data)),
    "ack": _ack,
}


def bench_steps(rounds: int, packages: Mapping[str, Package], repeats: int = 20) -> list[dict[str, Any]]:
    """Measure every step with each package in turn. Return nanoseconds per message."""
    data, results = pull_body(1024, FIVE), list[dict[str, Any]]()
    for name, step in STEPS.items():
        times: dict[str, list[float]] = {how: [] for how in packages}
        for turn in range(rounds + 3):  # the first ones warm up
            for how in random.sample(list(packages), len(packages)):
                ready = [step(packages[how], data) for _ in range(repeats)]
                begin = time.perf_counter_ns()
                for act in ready:
                    act()
                taken = time.perf_counter_ns() - begin
                if turn >= 3:
                    times[how].append(taken / repeats / MESSAGES)
        result: dict[str, Any] = {"step": name, "ns": {how: summary(values) for how, values in times.items()}}
        if "accelerated" in times:
            pairs = zip(times["pure"], times["accelerated"], strict=True)
            result["times_quicker"] = summary([pure / quick for pure, quick in pairs])
        results.append(result)
    return results


def steps_table(steps: Sequence[Mapping[str, Any]], packages: Sequence[str]) -> Iterator[str]:
    """Return the figures of the steps as lines."""
    both = len(packages) > 1
    yield ""
    times = "".join(f"{how + ', ns':>18}" for how in packages)
    yield f"{'step, 1 KB, five properties':28}{times}" + ("    pure ÷ accelerated" if both else "")
    for each in steps:
        times = "".join(f"{each['ns'][how]['median']:>18.0f}" for how in packages)
        yield f"  {each['step']:26}{times}" + (f"{each['times_quicker']['median']:>22.1f}" if both else "")
    if not both:
        yield "The C extension is not built, or switched off: only pure Python was measured."


def main() -> None:
    arguments = argparse.ArgumentParser(description=QUESTION)
    arguments.add_argument("--rounds", type=one_or_more, default=60, help="rounds per size of body (60)")
    arguments.add_argument("--json", type=new_file, metavar="FILE", help="write the results there too")
    options = arguments.parse_args()

    facts = environment()
    print(header(facts))
    print(f"{MESSAGES} messages per answer, {options.rounds} rounds")
    results = bench_decode(options.rounds)
    print(f"{'body':>6}  {'way':20} {'times quicker than eager':>26} {'us per message':>22}")
    for result in results:
        ratio, us = result["times_quicker"], result["us"]
        print(
            f"{result['body_bytes']:>6}  {result['way']:20} {ratio['median']:>9.1f} (p5 {ratio['p5']:.1f})".ljust(56)
            + f"{us['median']:>9.2f} (p95 {us['p95']:.2f})"
        )
    packages = {"accelerated": Package.imported()} if facts["accelerated"] else {}
    packages["pure"] = Package.without_extension()
    steps = bench_steps(options.rounds, packages)
    print(*steps_table(steps, list(packages)), sep="\n")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            answer = {"question": QUESTION, "environment": facts, "messages": MESSAGES, "rounds": options.rounds}
            json.dump(answer | {"results": results, "steps": steps}, file, indent=1)


if __name__ == "__main__":
    main()
