"""One side of benchmarks/drop_in.py, in a process of its own: python -m benchmarks.drop_in_side TASK.

TASK is a JSON object with the fields of `Task`. The result is one JSON object, the last line of standard output. The
measurement of the native library does not import pyrocket_consumer.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.watch import SAMPLE_EVERY_S, Figures, Sample, Watch, memory_mb

WARM = 0.2, 0.9
NATIVE_SETTLES_S = 10.0
"""Seconds to wait before a shutdown. A consumer of the native library that ends sooner may abort the process."""

Callback = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one side.

    `measure`:

    * "backlog": consume `total` messages
    * "raising": consume `total` messages, raise at the first delivery of each, and wait `wait_s` for redelivery
    * "send": send `total` messages one after the other

    `side`: "api", "facade" or "native". `reads`: whether the callback reads body and a property.
    """

    side: str
    measure: str
    name_server: str
    group: str
    topic: str
    total: int
    threads: int = 8
    reads: bool = False
    wait_s: float = 40.0
    timeout_s: float = 150.0


def consumer(task: Task, callback: Callback) -> Any:
    """Return a consumer of the side, before its start. `callback` gets the message objects of that side."""
    if task.side == "api":
        from pyrocket_consumer import PushConsumer as Ours

        ours = Ours(task.group, name_server=task.name_server, consume_threads=task.threads)
        ours.subscribe(task.topic, callback)
        return ours
    if task.side == "facade":
        from pyrocket_consumer.compat.rocketmq.client import PushConsumer

        facade = PushConsumer(task.group)
        facade.set_name_server_address(task.name_server)
        facade.set_thread_count(task.threads)
        facade.subscribe(task.topic, callback)
        return facade
    from rocketmq.client import PushConsumer as Native

    native = Native(task.group)
    native.set_namesrv_addr(task.name_server)
    native.set_thread_count(task.threads)
    native.subscribe(task.topic, callback)  # 0.4.4 ignores the result
    return native


def backlog(task: Task) -> Figures:
    """Measure a backlog. Only the part between two shares of it counts."""
    counted, watch = itertools.count(), Watch(task.total)  # next() of it is atomic

    def no_op(message: Any) -> None:
        next(counted)

    def read_api(message: Any) -> None:
        message.body, message.property("region")
        next(counted)

    def read(message: Any) -> None:
        message.body, message.get_property("region")
        next(counted)

    callback = no_op if not task.reads else read_api if task.side == "api" else read
    used = consumer(task, callback)
    used.start()
    deadline = time.perf_counter() + task.timeout_s
    samples = 0
    while (sample := watch.take_sample(next(counted) - samples)).count < task.total:
        samples += 1
        if sample.at_s > deadline:
            raise TimeoutError(f"only {sample.count} of {task.total} messages came within {task.timeout_s:g} s")
        time.sleep(SAMPLE_EVERY_S)
    answer = watch.warm_part(*WARM)
    end(task, used)
    return answer


def raising(task: Task) -> Figures:
    """Count the messages that were redelivered after their callback raised."""
    lock = threading.Lock()
    raised, again = set[str](), set[str]()
    wanted = threading.Event()

    def callback(message: Any) -> None:
        message_id = message.message_id if task.side == "api" else message.id
        with lock:
            if message_id in raised:
                again.add(message_id)
            else:
                raised.add(message_id)
                raise RuntimeError("the first time")
            if len(again) == task.total:
                wanted.set()

    used = consumer(task, callback)
    used.start()
    wanted.wait(task.wait_s)
    end(task, used)
    return {"raised": len(raised), "redelivered": len(again)}


def send(task: Task) -> Figures:
    """Measure messages of 1 KB that are sent one after the other."""
    body = "x" * 1024
    sent: Callable[[], object]
    used: Any
    if task.side == "api":
        from pyrocket_consumer import Producer as Ours

        used = ours = Ours(name_server=task.name_server)
        sent = lambda: ours.send(task.topic, body.encode(), keys="k", tags="paid", properties={"region": "eu"})  # noqa: E731
    else:
        if task.side == "facade":
            from pyrocket_consumer.compat.rocketmq.client import Message, Producer

            used = Producer(task.group)
            used.set_name_server_address(task.name_server)
        else:
            from rocketmq.client import Message, Producer

            used = Producer(task.group)
            used.set_namesrv_addr(task.name_server)

        def sent() -> object:
            message = Message(task.topic)
            message.set_keys("k")
            message.set_tags("paid")
            message.set_property("region", "eu")
            message.set_body(body)
            return used.send_sync(message)

    used.start()
    for _ in range(task.total // 10):
        sent()
    before = Sample.now(0)
    for _ in range(task.total):
        sent()
    after = Sample.now(task.total)
    end(task, used)
    return {
        "messages": task.total,
        "seconds": after.at_s - before.at_s,
        "cpu_s": after.cpu_s - before.cpu_s,
        "switches": after.switches - before.switches,
    }


def end(task: Task, used: Any) -> None:
    """Shut the client down, which stores its offsets."""
    if task.side == "api":
        used.close()
        return
    if task.side == "native" and task.measure != "send":
        time.sleep(NATIVE_SETTLES_S)
    used.shutdown()


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    if task.measure == "raising":
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it prints tracebacks without end
    answer = {"backlog": backlog, "raising": raising, "send": send}[task.measure](task)
    print(json.dumps({**answer, "rss_peak_mb": memory_mb("VmHWM")}), flush=True)
    os._exit(0)  # the native library may prevent the exit of the process


if __name__ == "__main__":
    main()
