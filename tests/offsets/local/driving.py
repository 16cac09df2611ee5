"""Shared by tests of stores: random operations, and the offsets that a restart may find after a crash."""

from __future__ import annotations

import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from typing import Any

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, ReadOffsetType
from pyrocket_consumer.offsets.local.disk import Disk
from pyrocket_consumer.offsets.local.offsets_json import encode_epochs, entry_template, fill_templates
from pyrocket_consumer.offsets.local.recovery import RecoveredStore, recover

MEMORY, STORE = ReadOffsetType.READ_FROM_MEMORY, ReadOffsetType.READ_FROM_STORE
DURABILITIES = ["fsync", "process", "checkpoint"]
ORDERS = [MessageQueue("orders", "broker-a", number) for number in range(8)]
QUEUE = ORDERS[0]
QUEUES = [MessageQueue(topic, broker, n) for topic in ("orders", "bills") for broker in ("a", "b") for n in range(3)]


def open_store(
    directory: str | os.PathLike[str] = "/s", durability: str = "fsync", **options: Any
) -> LocalFileOffsetStore:
    store = LocalFileOffsetStore(directory, durability, **options)
    store.load()
    return store


def update(store: LocalFileOffsetStore, queues: Iterable[MessageQueue], offset: int) -> None:
    """Set one offset for several queues, in memory."""
    for queue in queues:
        store.update_offset(queue, offset)


def put(store: LocalFileOffsetStore, queue: MessageQueue, offset: int) -> None:
    store.update_offset(queue, offset)
    store.persist(queue)


def read_store(directory: str | os.PathLike[str]) -> RecoveredStore:
    """Return the contents of the store in `directory` without locking it; its owner may be writing."""
    # Read the journal first. If the owner then writes a checkpoint, that has all offsets of these frames.
    journal, main, backup = (
        Disk().read(os.path.join(directory, name)) for name in ("offsets.journal", "offsets.json", "offsets.json.bak")
    )
    return recover(main, backup, journal)


def encode_offsets(offsets: Mapping[MessageQueue, int], epochs: Mapping[MessageQueue, int] | None = None) -> bytes:
    """Return the offsets.json that a store with these offsets and epochs writes."""
    templates = [entry_template(queue.topic, queue.broker_name) for queue in offsets]
    return fill_templates(
        templates, [queue.queue_id for queue in offsets], list(offsets.values()), encode_epochs(epochs or {})
    )


def leave_offsets(
    directory: str | os.PathLike[str], queues: Iterable[MessageQueue], offset: int, **options: Any
) -> None:
    """Open a store, set offsets, and close it."""
    with LocalFileOffsetStore(directory, **options) as store:
        update(store, queues, offset)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read every directory, so be another user meanwhile."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(12345)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def flip_bit(data: bytes, byte: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[byte] ^= 1 << bit
    return bytes(damaged)


def run_in_fork(work: Callable[[Callable[[Any], None]], object]) -> tuple[list[Any], int]:
    """Run `work(send)` in a forked child. Return all objects that it sent, and its exit code."""
    reading, writing = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # threads of other tests may still run; the child needs none of them
        child = os.fork()
    if child == 0:
        try:
            work(writing.send)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    writing.close()
    reports = []
    with reading, suppress(EOFError):
        while True:
            reports.append(reading.recv())
    return reports, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class History:
    """For each queue, the value last acknowledged as durable, and the values written since. A restart may find each."""

    def __init__(self) -> None:
        self.possible: dict[MessageQueue, list[int | None]] = {queue: [None] for queue in QUEUES}
        self.memory: dict[MessageQueue, int] = {}

    def update(self, queue: MessageQueue, offset: int) -> None:
        self.memory[queue] = offset

    def writing(self, queues: Iterable[MessageQueue]) -> None:
        """Note that a persist of `queues` begins, so that a restart may find their new values."""
        for queue in queues:
            if queue in self.memory:
                self.possible[queue].append(self.memory[queue])

    def acknowledged(self, queues: Iterable[MessageQueue]) -> None:
        """Note that the persist has returned, so that a restart may find no earlier value."""
        for queue in queues:
            if queue in self.memory:
                self.possible[queue] = [self.memory[queue]]

    def violations(self, found: dict[MessageQueue, int]) -> list[str]:
        """Return the offsets in `found` that contradict the history."""
        wrong = [
            f"{queue}: found {found.get(queue)}, possible {values}"
            for queue, values in self.possible.items()
            if found.get(queue) not in values
        ]
        return wrong + [f"{queue}: never written" for queue in found.keys() - self.possible.keys()]

    def killed(self, found: dict[MessageQueue, int]) -> None:
        """Note the offsets that a new process has found after a kill. They may be unsynced, and lost at a power cut."""
        self.memory = dict(found)

    def restarted(self, found: dict[MessageQueue, int]) -> None:
        """Note the offsets that a new process has found."""
        self.memory = dict(found)
        self.possible = {queue: [found.get(queue)] for queue in QUEUES}


def step(store: LocalFileOffsetStore, history: History, rng: random.Random) -> None:
    """Do one random operation on the store, and note it in the history."""
    choice = rng.random()
    queue = rng.choice(QUEUES)
    if choice < 0.75:
        base = history.memory.get(queue, 0)
        offset = rng.randrange(base) if base and rng.random() < 0.1 else base + rng.randint(1, 1000)
        store.update_offset(queue, offset)
        history.update(queue, offset)
        if rng.random() < 0.8:
            history.writing([queue])
            store.persist(queue)
            history.acknowledged([queue])
    elif choice < 0.9:
        several = rng.sample(QUEUES, rng.randint(0, len(QUEUES)))
        history.writing(several)
        store.persist_all(several)
        history.acknowledged(several)
    else:
        history.writing([queue])
        store.remove_offset(queue)
        history.acknowledged([queue])
        history.memory.pop(queue, None)
