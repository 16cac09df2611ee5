"""Figures of the shape of the product: python -m tests.shape

They show how much a reader has to know: modules, lines, Protocols, and tables with queues as keys. The last figures are
the modules that one message and one reset pass.
"""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pyrocket_consumer
from pyrocket_consumer import MessageQueue, PushConsumer
from pyrocket_consumer.testing import EmbeddedCluster

ROOT = Path(pyrocket_consumer.__file__).parents[1]
PRODUCT = Path(pyrocket_consumer.__file__).parent
TABLES = {"dict", "set", "mapping", "defaultdict", "weakvaluedictionary", "weakkeydictionary", "ordereddict"}
KEYS = {"MessageQueue", "ProcessQueue", "HeldQueue", "CommitRecord"}
TOPIC, QUEUE = "shape", MessageQueue("shape", "broker-a", 0)


def sources() -> dict[str, str]:
    """Return the source of each module of the product, by its path."""
    files = [*PRODUCT.rglob("*.py"), *(ROOT / "pyspark_rocketmq").rglob("*.py")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}


def protocols() -> list[str]:
    """Return the Protocol classes."""
    return [
        f"{path}: {node.name}"
        for path, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and "Protocol" in {ast.unparse(base).split("[")[0] for base in node.bases}
    ]


def tables() -> list[str]:
    """Return the attributes of a consumer's objects that are tables with queues or windows as keys."""
    return [
        f"{path}: {node.target.attr}"
        for path, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if path.startswith("pyrocket_consumer/consumer/")
        and isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and any(map(_is_table, ast.walk(node.annotation)))
    ]


def _is_table(annotation: ast.AST) -> bool:
    if not isinstance(annotation, ast.Subscript):
        return False
    kind = ast.unparse(annotation.value).rpartition(".")[2].lower()
    key = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
    return kind in TABLES and ast.unparse(key) in KEYS


class Call(NamedTuple):
    """A call of a function of the product."""

    thread: str
    module: str
    function: str


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Record the calls of the product in this thread, and in all that start meanwhile."""
    calls: list[Call] = []
    inside, testing = str(PRODUCT), str(PRODUCT / "testing")

    def record(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(inside) and not file.startswith(testing):
            thread, module = threading.current_thread().name, str(Path(file).relative_to(PRODUCT))
            calls.append(Call(thread, module, frame.f_code.co_qualname))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Paths:
    """The calls for one message and for one reset, in a consumer that runs."""

    def __init__(self) -> None:
        self.message: list[Call] = []
        """From the response of the broker to the listener. The next pull is sent on the way."""
        self.reset: list[Call] = []
        """From the request of the program to the first pull at the new offset."""

    @classmethod
    def measure(cls) -> Paths:
        paths, begun = cls(), threading.Semaphore(0)
        with recorded_calls() as calls, EmbeddedCluster() as cluster:
            cluster.create_topic(TOPIC, queues=1)

            def listen(message: object) -> None:
                if not paths.reset:
                    paths.message = [call for call in calls if call.thread.startswith("pyrocket")]
                begun.release()

            options = {"name_server": cluster.name_server, "consume_from": "first", "commit_interval_s": 3600}
            with PushConsumer(TOPIC, **options) as consumer:  # type: ignore[arg-type]
                consumer.subscribe(TOPIC, listen)
                for _ in range(3):
                    time.sleep(0.5)  # nothing else happens
                    calls.clear()
                    cluster.send(TOPIC, b"body")
                    assert begun.acquire(timeout=30)
                time.sleep(0.5)
                calls.clear()
                paths.reset = calls
                consumer.reset_offsets(TOPIC, {QUEUE: 2})
                assert begun.acquire(timeout=30)
            begin = next(index for index, call in enumerate(calls) if call.function == "Resets.move_held")
            end = next(i for i, call in enumerate(calls) if i > begin and call.function == "PullLoop._send_pull")
            paths.reset = [call for call in calls[begin : end + 1] if call.thread.startswith("pyrocket")]
        return paths


def modules_of(calls: list[Call], package: str = "") -> list[str]:
    """Return the modules of `package` in the order in which they are first called."""
    return list(dict.fromkeys(call.module for call in calls if call.module.startswith(package)))


def main() -> None:
    found, paths = sources(), Paths.measure()
    print(f"modules: {len(found)}")
    print(f"lines: {sum(source.count(chr(10)) for source in found.values())}")
    for title, items in (("Protocols", protocols()), ("tables with queues as keys", tables())):
        print(f"{title}: {len(items)}", *items, sep="\n    ")
    for title, calls in (("a message", paths.message), ("a reset", paths.reset)):
        all_modules, own = modules_of(calls), modules_of(calls, "consumer/")
        print(f"{title}: {len(calls)} calls, {len(all_modules)} modules, {len(own)} of them in consumer/")
        print(*all_modules, sep="\n    ")


if __name__ == "__main__":
    main()
