"""The errors of mypy in users' programs, with the types of the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OPTIONS = """
    import ssl
    from datetime import datetime, timezone
    from pyrocket_consumer import (
        Admin, AsyncProducer, AsyncPushConsumer, ConsumerConfig, ConsumerEvent, MessageModel, Producer, PushConsumer,
        in_machine_rooms,
    )
    from pyrocket_consumer.offsets import MemoryOffsetStore
    from pyrocket_consumer.producer import TransactionProducer, TransactionState

    def tell(event: ConsumerEvent) -> None: ...

    PushConsumer("g", name_server="127.0.0.1:9876", message_model="broadcasting", on_event=tell)
    PushConsumer("g", name_server=["127.0.0.1:9876"], message_model=MessageModel.CLUSTERING, tls=ssl.SSLContext())
    PushConsumer("g", consume_from=datetime.now(timezone.utc), pull_batch_size={"orders": 64}, commit_interval_s=1)
    PushConsumer("g", consume_from="2026-11-21T08:00:00Z")
    PushConsumer("g", allocation=in_machine_rooms("a"), offset_store=MemoryOffsetStore(), max_reconsume_times=None)
    PushConsumer(config=ConsumerConfig(group="g", orderly=True, allocation="circle"))
    AsyncPushConsumer("g", orderly=True, auto_commit=False)
    Producer("g", name_server="127.0.0.1:9876", compression="zstd", access_key="a", secret_key="b")
    AsyncProducer("g", name_server="127.0.0.1:9876", compression="zstd", access_key="a", secret_key="b")
    TransactionProducer("g", check=lambda message: TransactionState.COMMIT, send_attempts=1)
    Admin(name_server="127.0.0.1:9876", timeout_s=5, call_timeout_s=1, tls=True)

    PushConsumer("g", consume_thread=3)  # E: call-arg
    PushConsumer("g", consume_threads="3")  # E: arg-type
    PushConsumer("g", message_model="broadcast")  # E: arg-type
    PushConsumer("g", consume_from=5)  # E: arg-type
    PushConsumer("g", allocation="averagely")  # E: arg-type
    PushConsumer("g", durability="none")  # E: arg-type
    PushConsumer("g", on_event=lambda: None)  # E: arg-type misc
    PushConsumer("g", tls="no")  # E: arg-type
    PushConsumer("g", offset_store="file")  # E: arg-type
    PushConsumer(5)  # E: arg-type
    AsyncPushConsumer("g", orderly="yes")  # E: arg-type
    Producer("g", send_timeout="3")  # E: call-arg
    Producer("g", compression="gzip")  # E: arg-type
    AsyncProducer("g", compression="gzip")  # E: arg-type
    Producer("g", consume_threads=3)  # E: call-arg
    TransactionProducer("g", check=lambda message: TransactionState.COMMIT, send_attempts="1")  # E: arg-type
    Admin(consume_threads=3)  # E: call-arg
    ConsumerConfig(group="g", message_model="broadcast")  # E: arg-type

    reveal_type(PushConsumer("g").config.shutdown_timeout_s)  # R: float
    reveal_type(Producer().send_async("orders", b"x").result())  # R: SendResult
"""

LISTENERS = """
    from collections.abc import Sequence
    from functools import partial
    from unittest.mock import Mock
    from pyrocket_consumer import (
        AsyncPushConsumer, ConsumeContext, ConsumeResult, Message, MessageListener, PushConsumer, Retry, Suspend
    )

    consumer, awaiting = PushConsumer("g"), AsyncPushConsumer("g")
    seen: list[Message] = []

    def plain(message: Message) -> None: ...
    def judging(message: Message) -> ConsumeResult | Retry: return Retry(delay_level=3)
    def maybe(message: Message) -> ConsumeResult | None: return None
    def suspending(message: Message) -> Suspend | None: return Suspend(2)
    def with_context(message: Message, context: ConsumeContext) -> ConsumeResult: return ConsumeResult.SUCCESS
    def with_default(message: Message, to: list[Message] = seen) -> None: ...
    def batch(messages: list[Message]) -> None: ...
    def some(messages: Sequence[Message], context: ConsumeContext) -> Retry: return Retry(messages[1:])
    def of_anything(message: object) -> None: ...
    def untyped(message): return None  # E: no-untyped-def
    async def awaited(message: Message) -> None: ...
    async def awaited_batch(messages: list[Message], context: ConsumeContext) -> Retry | None: return None
    def keeping(message: Message, into: list[Message]) -> None: ...
    async def keeping_later(message: Message, into: list[Message]) -> None: ...

    class Service:
        def handle(self, message: Message) -> None: ...
        async def handle_later(self, message: Message) -> ConsumeResult: return ConsumeResult.RETRY
        def __call__(self, message: Message, context: ConsumeContext) -> None: ...

    consumer.subscribe("a", plain)
    consumer.subscribe("a", judging, "paid || refunded")
    consumer.subscribe("a", maybe)
    consumer.subscribe("a", suspending)
    consumer.subscribe("a", with_context)
    consumer.subscribe("a", with_default)
    consumer.subscribe("a", batch)
    consumer.subscribe("a", some)
    consumer.subscribe("a", of_anything)
    consumer.subscribe("a", untyped)
    consumer.subscribe("a", awaited)
    consumer.subscribe("a", awaited_batch)
    consumer.subscribe("a", partial(keeping, into=seen))
    consumer.subscribe("a", partial(keeping_later, into=seen))
    consumer.subscribe("a", Service())
    consumer.subscribe("a", Service().handle)
    consumer.subscribe("a", Service().handle_later)
    consumer.subscribe("a", lambda message: seen.append(message))
    consumer.subscribe("a", lambda messages: seen.extend(messages))
    consumer.subscribe("a", lambda message, context: print(context))
    consumer.subscribe("a", lambda message: ConsumeResult.SUCCESS)
    consumer.subscribe("a", seen.append)
    consumer.subscribe("a", seen.extend)
    consumer.subscribe("a", print)
    consumer.subscribe("a", Mock())
    listener: MessageListener = awaited
    consumer.subscribe("a", listener)

    async def main() -> None:
        await awaiting.subscribe("a", plain)
        await awaiting.subscribe("a", awaited)
        await awaiting.subscribe("a", awaited_batch)
        await awaiting.subscribe("a", lambda message: seen.append(message))
        await awaiting.subscribe("a", len)  # E: arg-type

    def of_text(message: str) -> None: ...
    def nothing() -> None: ...
    def three(message: Message, context: ConsumeContext, more: int) -> None: ...
    def counting(messages: list[Message]) -> int: return len(messages)
    def acknowledging(message: Message) -> bool: return True
    async def answering(message: Message) -> str: return ""

    consumer.subscribe("a", of_text)  # E: arg-type
    consumer.subscribe("a", nothing)  # E: arg-type
    consumer.subscribe("a", three)  # E: arg-type
    consumer.subscribe("a", counting)  # E: arg-type
    consumer.subscribe("a", acknowledging)  # E: arg-type
    consumer.subscribe("a", answering)  # E: arg-type
    consumer.subscribe("a", 5)  # E: arg-type
    consumer.subscribe("a")  # E: call-arg
"""

PROGRAMS = {"options.py": OPTIONS, "listeners.py": LISTENERS}
EXPECTED = re.compile(r"#\s*([ER]): (.+)$")
SAID = re.compile(r"^([^:]+):(\d+): (error|note): (.*?)(?:  \[([\w-]+)\])?$")


@pytest.mark.live
@pytest.mark.slow("mypy reads the whole package")
def test_mypy_finds_exactly_the_mistakes(tmp_path):
    """`# E:` lists the errors of a line, `# R:` the type that it reveals. Other lines have none."""
    wanted: dict[tuple[str, int], set[str]] = {}
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(text := "\n".join(line[4:] for line in program.splitlines()))
        for number, line in enumerate(text.splitlines(), 1):
            if found := EXPECTED.search(line):
                wanted[name, number] = {f'Revealed type is "{found[2]}"'} if found[1] == "R" else set(found[2].split())
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *PROGRAMS],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stderr == ""
    revealed: dict[tuple[str, int], set[str]] = {}
    for line in done.stdout.splitlines():
        found = SAID.match(line)
        assert found, line
        position = found[1], int(found[2])
        if found[3] == "error":
            revealed.setdefault(position, set()).add(found[5])
        elif found[4].startswith("Revealed"):
            revealed.setdefault(position, set()).add(re.sub(r"(\w+\.)+(\w+)", r"\2", found[4]))
    assert revealed == wanted, done.stdout
