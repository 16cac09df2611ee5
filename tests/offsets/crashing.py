"""Uses a store again and again, each time in a child that kills itself one file operation later. Run by test_crash.py.

Arguments: directory, durability, seed. For N = 0, 1, 2 … the child works on a copy of what the first life, which is
not killed, has left; the copies stay, as <directory>/N. Prints what each child said: what it began to write, what was
acknowledged, and before which operation it was killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys

from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.disk import LocalDisk
from tests.offsets.disks import WatchedDisk
from tests.offsets.driving import QUEUES, History, step


class SpokenHistory(History):
    """Tells what it notes, in one write: a killed process says whole lines or nothing."""

    def writing(self, queues):
        super().writing(queues)
        self._say("writing", queues)

    def acknowledged(self, queues):
        super().acknowledged(queues)
        self._say("acknowledged", queues)

    def _say(self, what, queues):
        pairs = [f"{QUEUES.index(queue)}={self.memory[queue]}" for queue in queues if queue in self.memory]
        say(f"{what} {' '.join(pairs)}")


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def live(directory: str, durability: str, seed: int, last: int) -> None:
    """Use the store; die before file operation number `last`."""

    def kill(count: int, operation: str, path: str) -> None:
        if count == last:
            name = "directory" if operation == "sync_directory" else os.path.basename(path)
            say(f"killed {operation} {name}")
            os.kill(os.getpid(), signal.SIGKILL)

    history, rng = SpokenHistory(), random.Random(seed)
    clock = lambda: rng.random() * 1e6 if rng.random() < 0.1 else 0.0  # noqa: E731
    disk = WatchedDisk(LocalDisk(), kill)
    store = LocalFileOffsetStore(directory, durability, journal_bytes=4096, disk=disk, clock=clock)
    store.load()
    history.memory = store.clone_offset_table()
    for _ in range(12):
        step(store, history, rng)
    history.writing(history.memory)
    store.close()
    history.acknowledged(history.memory)


def main(directory: str, durability: str, seed: int) -> None:
    number = 0
    while True:
        say(f"life {number}")
        place = os.path.join(directory, str(number))
        if number:
            shutil.copytree(os.path.join(directory, "0"), place)
        child = os.fork()
        if child == 0:
            live(place, durability, seed if number else seed + 1000, number)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"life {number} ended with {code}")
        if number and code == 0:
            return say("ended")
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
