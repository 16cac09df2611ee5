"""Random calls of the local store's public interface, on a real disk, compared with a small model.

Three objects compete for one store: two in this process, and one in another process. They are opened, closed, opened
again and recreated, from any working directory. The other process is killed. The lock, files or the directory vanish.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import warnings
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyrocket_consumer.errors import OffsetStoreError, OffsetStoreLocked
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore, QueueReset, ReadOffsetType
from tests.trials import trials

pytestmark = pytest.mark.search

QUEUES = [MessageQueue(topic, "broker-a", number) for topic in ("orders", "%RETRY%g") for number in range(2)]
IN_MEMORY = "/dev/shm"  # a flush is free there, all processes see the same files, and no test simulates a power loss
NOTICED_WITHIN_S = 1.0
"""How soon an owner that writes has noticed what was removed."""


class StoreHere:
    """A store of this process. `now` is the time of its clock."""

    def __init__(self, directory: str) -> None:
        self.now = 0.0
        self.store = LocalFileOffsetStore(directory, clock=lambda: self.now)

    def call(self, now: float, name: str, *arguments: Any) -> Any:
        self.now = now
        return getattr(self.store, name)(*arguments)

    def end(self) -> None:
        try:
            self.store.close()
        except OffsetStoreError:
            pass


class StoreInChild:
    """A store of another process, a child of this one."""

    def __init__(self, directory: str) -> None:
        self._process, served = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests may still run
            self._pid = os.fork()
        if self._pid == 0:
            try:
                self._process.close()
                self._serve(StoreHere(directory), served)
            finally:
                os._exit(0)
        served.close()

    @staticmethod
    def _serve(store: StoreHere, served: Any) -> None:
        while True:
            answer: Any
            try:
                answer = store.call(*served.recv())
            except EOFError:
                return
            except Exception as error:
                answer = error
            served.send(answer)

    def call(self, now: float, name: str, *arguments: Any) -> Any:
        self._process.send((now, name, *arguments))
        answer = self._process.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Kill the process, so that its lock and its unstored offsets are lost."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._process.close()


@dataclass
class ExpectedStore:
    """A store object and its expected state. `stored` is its view of the files; another owner may change them."""

    name: str
    store: StoreHere | StoreInChild
    is_open: bool = False
    was_open: bool = False
    taken_at: float | None = None
    has_noticed: bool = False
    memory: dict[MessageQueue, int] = field(default_factory=dict)
    stored: dict[MessageQueue, int] = field(default_factory=dict)
    epochs: dict[MessageQueue, int] = field(default_factory=dict)


names = st.sampled_from(["a", "b", "c", "owner", "owner"])
queues, offsets = st.sampled_from(QUEUES), st.integers(0, 2**63 - 1)


class StoreAlone(RuleBasedStateMachine):
    """The model: `disk` has the offsets that the next `load` should find; `owner` may write, unless it is None."""

    def __init__(self) -> None:
        super().__init__()
        self.began_in = os.getcwd()
        self.base = Path(tempfile.mkdtemp(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None))
        self.home, self.elsewhere = self.base / "home", self.base / "elsewhere"
        for directory in (self.home, self.elsewhere):
            directory.mkdir()
        with LocalFileOffsetStore(self.elsewhere / "offsets") as another:
            another.update_offset(QUEUES[0], 777)
        self.directory = self.home / "offsets"
        self.now, self.copies = 0.0, 0
        self.disk: dict[MessageQueue, int] = {}
        self.epochs: dict[MessageQueue, int] = {}
        self.owner: ExpectedStore | None = None
        self.lock_is_there = True
        self.files_are_there = True
        self.removed_at = 0.0
        self.has_new_owner_written = True
        os.chdir(self.home)
        self.known = {name: ExpectedStore(name, self.make(name)) for name in "abc"}

    def teardown(self) -> None:
        os.chdir(self.began_in)
        for each in self.known.values():
            each.store.end()
        with LocalFileOffsetStore(self.elsewhere / "offsets") as another:
            assert another.clone_offset_table() == {QUEUES[0]: 777}
        shutil.rmtree(self.base)

    def make(self, name: str) -> StoreHere | StoreInChild:
        directory = "offsets" if Path.cwd() == self.home else str(self.directory)
        return StoreInChild(directory) if name == "c" else StoreHere(directory)

    def named(self, name: str) -> ExpectedStore:
        """Return the object of that name, which is the owner in most cases."""
        if name != "owner":
            return self.known[name]
        return self.owner or self.known["a"]

    # -- ownership

    @rule(name=names)
    def open(self, name: str) -> None:
        each = self.named(name)
        try:
            each.store.call(self.now, "load")
        except OffsetStoreLocked:
            assert each.has_noticed if each.is_open else self.owner is not None and self.lock_is_there
            return
        if each.is_open:
            assert not each.has_noticed
            return
        if self.owner is not None:
            assert not self.lock_is_there, f"{each.name} has taken what {self.owner.name} has"
            self.owner.taken_at, self.has_new_owner_written = self.now, False
            if not self.files_are_there:
                self.disk, self.epochs = {}, {}
        each.memory = dict(self.disk) if each.was_open else self.disk | each.memory
        each.stored, each.epochs = dict(self.disk), dict(self.epochs)
        each.is_open = each.was_open = True
        each.taken_at, each.has_noticed = None, False
        self.owner, self.lock_is_there, self.files_are_there = each, True, True

    @rule(name=names)
    def close(self, name: str) -> None:
        each = self.named(name)
        try:
            each.store.call(self.now, "close")
        except OffsetStoreLocked:
            assert each.taken_at is not None
        else:
            assert each.taken_at is None
        each.is_open, each.taken_at = False, None
        if self.owner is each:
            self.disk, self.epochs = each.stored | each.memory, dict(each.epochs)
            self.owner, self.has_new_owner_written = None, True
            self.lock_is_there = self.files_are_there = True

    @precondition(lambda self: self.no_former_owner_writes())
    @rule(name=names)
    def recreate(self, name: str) -> None:
        """Replace a closed object by a new one. If it is the other process, kill that first."""
        each = self.named(name)
        if each.name == "c":
            each.store.end()
            if self.owner is each:
                self.owner = None
                if not self.files_are_there:
                    self.disk, self.epochs, self.files_are_there = {}, {}, True
        elif each.is_open:
            return
        self.known[each.name] = ExpectedStore(each.name, self.make(each.name))

    # -- contents

    @rule(name=names, queue=queues, offset=offsets, increase_only=st.booleans())
    def update(self, name: str, queue: MessageQueue, offset: int, increase_only: bool) -> None:
        each = self.named(name)
        each.store.call(self.now, "update_offset", queue, offset, increase_only)
        if not increase_only or offset > each.memory.get(queue, -1):
            each.memory[queue] = offset

    def writing(self, each: ExpectedStore, call: str, *arguments: Any) -> bool:
        """Make a call that writes, and return whether it has written. An owner always does, another object never."""
        try:
            each.store.call(self.now, call, *arguments)
        except OffsetStoreLocked:
            assert each.is_open and each.taken_at is not None
            each.has_noticed = True
            each.memory = each.store.call(self.now, "clone_offset_table")
            return False
        except OffsetStoreError:
            assert not each.is_open
            return False
        assert each.is_open and not each.has_noticed
        assert each.taken_at is None or self.now - each.taken_at < NOTICED_WITHIN_S
        return True

    def written(self, each: ExpectedStore) -> None:
        """Note what is on the disk after a call that wrote."""
        if self.owner is not each:
            return
        self.has_new_owner_written = True
        self.lock_is_there = self.lock_is_there or (self.directory / "offsets.lock").exists()
        self.files_are_there = self.files_are_there or (self.directory / "offsets.json").exists()
        if self.now - self.removed_at >= NOTICED_WITHIN_S:
            assert self.lock_is_there and self.files_are_there
        if self.files_are_there:
            self.disk, self.epochs = dict(each.stored), dict(each.epochs)

    def persisting(self, each: ExpectedStore, chosen: list[MessageQueue], call: str, *arguments: Any) -> bool:
        done = self.writing(each, call, *arguments)
        if done:
            each.stored |= {queue: each.memory[queue] for queue in chosen if queue in each.memory}
            self.written(each)
        return done

    @rule(name=names, queue=queues, offset=offsets)
    def update_and_persist(self, name: str, queue: MessageQueue, offset: int) -> None:
        self.update(name, queue, offset, False)
        self.persisting(self.named(name), [queue], "persist", queue)

    @rule(name=names, chosen=st.none() | st.lists(queues))
    def persist_all(self, name: str, chosen: list[MessageQueue] | None) -> None:
        self.persisting(self.named(name), QUEUES if chosen is None else chosen, "persist_all", chosen)

    @rule(name=names, queue=queues)
    def remove(self, name: str, queue: MessageQueue) -> None:
        """Remove an offset. A store that is not open ignores a queue that memory never had."""
        each = self.named(name)
        if queue not in each.memory and queue not in each.stored:
            return
        if self.persisting(each, [queue], "remove_offset", queue):
            each.memory.pop(queue, None)

    @rule(name=names, queue=queues, offset=st.none() | offsets, epoch=st.integers(1, 2**62))
    def reset(self, name: str, queue: MessageQueue, offset: int | None, epoch: int) -> None:
        each = self.named(name)
        if self.writing(each, "persist_resets", {queue: QueueReset(offset, epoch)}):
            each.epochs[queue] = epoch
            if offset is not None:
                each.memory[queue] = each.stored[queue] = offset
            self.written(each)

    @rule(name=names, queue=queues, kind=st.sampled_from(ReadOffsetType))
    def read(self, name: str, queue: MessageQueue, kind: ReadOffsetType) -> None:
        each = self.named(name)
        in_memory = each.memory.get(queue)
        is_known = kind is ReadOffsetType.READ_FROM_MEMORY or (
            in_memory is not None and kind is ReadOffsetType.MEMORY_FIRST_THEN_STORE
        )
        try:
            found = each.store.call(self.now, "read_offset", queue, kind)
        except OffsetStoreError:
            assert not each.is_open and not is_known
            return
        assert each.is_open or is_known
        if is_known:
            assert found == in_memory
        else:
            assert found == each.stored.get(queue)
            if in_memory is None and found is not None:
                each.memory[queue] = found

    # -- accidents

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(home=st.booleans())
    def change_directory(self, home: bool) -> None:
        os.chdir(self.home if home else self.elsewhere)

    def no_former_owner_writes(self) -> bool:
        """Check that no former owner still writes, and that no write of one can be found."""
        return self.has_new_owner_written and all(
            each.taken_at is None or each.has_noticed for each in self.known.values()
        )

    @precondition(lambda self: self.no_former_owner_writes() and self.directory.exists())
    @rule(what=st.sampled_from(["lock", "files", "directory"]), seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def remove_files(self, what: str, seconds: float) -> None:
        lock, directory = self.directory / "offsets.lock", self.directory
        if what == "directory":
            shutil.rmtree(directory)
        elif what == "lock":
            lock.unlink(missing_ok=True)
        else:
            for path in directory.glob("offsets.j*"):
                path.unlink()
        self.removed_at, self.now = self.now, self.now + seconds
        if self.owner is None:
            if what != "lock":
                self.disk, self.epochs = {}, {}
            return
        if what != "files":
            self.lock_is_there = False
        if what != "lock":
            self.files_are_there = self.files_are_there and not self.owner.stored and not self.owner.epochs

    @precondition(lambda self: self.no_former_owner_writes() and self.files_are_there and self.directory.exists())
    @rule()
    def a_copy_of_the_directory_holds_what_was_acknowledged(self) -> None:
        self.copies += 1
        copy = self.base / f"copy-{self.copies}"
        shutil.copytree(self.directory, copy)
        with LocalFileOffsetStore(copy, on_unreadable="raise") as store:
            assert store.clone_offset_table() == self.disk
            assert {queue: epoch for queue in QUEUES if (epoch := store.reset_epoch(queue))} == self.epochs

    @invariant()
    def memory_and_epochs_are_as_expected(self) -> None:
        for each in self.known.values():
            assert each.store.call(self.now, "clone_offset_table") == each.memory, each.name


TestStoreAlone = StoreAlone.TestCase
TestStoreAlone.settings = settings(max_examples=trials(100), stateful_step_count=40, deadline=None)
