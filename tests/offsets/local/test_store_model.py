"""Random operations compared with a dictionary, with restarts, kills and failures; and eight threads at once."""

from __future__ import annotations

import errno
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyrocket_consumer.errors import OffsetStoreUnwritable
from pyrocket_consumer.model import MessageQueue
from tests.offsets.local.disks import WRITES, FailureHook, MemoryDisk, WatchedDisk
from tests.offsets.local.driving import DURABILITIES, MEMORY, STORE, open_store, read_store, update
from tests.trials import trials

QUEUES = [MessageQueue(topic, broker, n) for topic in ("orders", "%RETRY%g") for broker in ("a", "b") for n in range(2)]
queues = st.sampled_from(QUEUES)


class StoreAgainstDictionaries(RuleBasedStateMachine):
    """`memory` and `stored` have the expected offsets. After a failure `stored` is uncertain until a write succeeds."""

    @initialize(durability=st.sampled_from(DURABILITIES), links=st.booleans())
    def begin(self, durability, links):
        self.disk, self.failing, self.now = MemoryDisk(), FailureHook(), 0.0
        self.disk.has_links = links
        self.durability = durability
        self.memory, self.stored, self.certain = {}, {}, True
        self.open()

    def open(self):
        watched = WatchedDisk(self.disk, self.failing)
        self.store = open_store("/s", self.durability, journal_bytes=4096, disk=watched, clock=lambda: self.now)

    def persisting(self, chosen, persist):
        try:
            persist()
        except OffsetStoreUnwritable:
            assert self.failing.error
            self.certain = False
            return False
        self.stored |= {queue: self.memory[queue] for queue in chosen if queue in self.memory}
        return True

    @rule(queue=queues, offset=st.integers(0, 2**63 - 1), increase_only=st.booleans())
    def update(self, queue, offset, increase_only):
        self.store.update_offset(queue, offset, increase_only)
        if not increase_only or offset > self.memory.get(queue, -1):
            self.memory[queue] = offset

    @rule(queue=queues)
    def persist(self, queue):
        self.persisting([queue], lambda: self.store.persist(queue))

    @rule(chosen=st.sets(queues))
    def persist_some(self, chosen):
        self.persisting(chosen, lambda: self.store.persist_all(chosen))

    @rule()
    def persist_all(self):
        if self.persisting(QUEUES, self.store.persist_all) and not self.failing.error:
            self.certain = True

    @rule(queue=queues)
    def remove(self, queue):
        if self.persisting([queue], lambda: self.store.remove_offset(queue)):
            self.memory.pop(queue, None)

    @precondition(lambda self: self.certain)
    @rule(queue=queues)
    def read(self, queue):
        assert self.store.read_offset(queue, MEMORY) == self.memory.get(queue)
        found = self.memory.get(queue, self.stored.get(queue))
        assert self.store.read_offset(queue) == found
        if found is not None:
            self.memory[queue] = found
        assert self.store.read_offset(queue, STORE) == self.stored.get(queue)

    @rule()
    def time_passes(self):
        self.now += 3

    @rule(number=st.sampled_from([None, errno.ENOSPC, errno.EIO]), takes_no_new_files_only=st.booleans())
    def the_disk(self, number, takes_no_new_files_only):
        self.failing.error = number
        operations = ("create",) if takes_no_new_files_only else WRITES
        self.failing.when = lambda operation, path: operation in operations

    @precondition(lambda self: not self.failing.error)
    @rule()
    def restart(self):
        self.store.close()
        self.stored |= self.memory
        self.memory, self.certain = dict(self.stored), True
        self.open()

    @precondition(lambda self: self.failing.error)
    @rule()
    def restart_after_trouble(self):
        """Expect each offset that `close` has stored. Offsets that it could not store may be there or not."""
        closed = self.persisting(QUEUES, self.store.close)
        self.failing.error = None
        self.open()
        found = self.store.clone_offset_table()
        if closed:
            assert found.items() >= self.memory.items()
        self.memory, self.stored, self.certain = found, dict(found), True

    @precondition(lambda self: not self.failing.error and self.certain)
    @rule()
    def kill(self):
        self.disk = self.disk.after_kill()
        self.memory = dict(self.stored)
        self.open()

    @invariant()
    def memory_is_as_expected(self):
        if hasattr(self, "store"):
            assert self.store.clone_offset_table() == self.memory


TestStoreAgainstDictionaries = pytest.mark.search(StoreAgainstDictionaries.TestCase)
TestStoreAgainstDictionaries.settings = settings(max_examples=trials(80), stateful_step_count=40, deadline=None)


@pytest.mark.hazard("H14")
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.live
@pytest.mark.slow("eight threads have the disk flush each of their files")
def test_eight_threads_persist_at_once(tmp_path, durability):
    """The files have each offset that a thread has persisted, whatever other threads persist at the same time."""
    # Each thread has its own queues, and shares one queue with all others. The switch interval is short.
    shared = MessageQueue("shared", "broker-a", 0)
    rounds = 60
    store, wrong = open_store(tmp_path, durability, journal_bytes=4096), []

    def work(number):
        rng = random.Random(number)
        mine = [MessageQueue("orders", f"broker-{number}", each) for each in range(3)]
        for offset in range(rounds, 0, -1):  # corrections lower the offset; no persist of another thread may undo them
            queue = rng.choice(mine)
            store.update_offset(queue, offset)
            store.update_offset(shared, rounds + 1 - offset, increase_only=True)
            if rng.random() < 0.2:
                store.remove_offset(queue)
                if store.read_offset(queue, MEMORY) is not None:
                    wrong.append((queue, offset, "in memory"))
            elif rng.random() < 0.3:
                store.persist_all(rng.choice([None, [*mine, shared]]))
            else:
                store.persist(queue)
                store.persist(shared)
            if store.read_offset(queue, STORE) != offset:
                wrong.append((queue, offset))
            if offset % 20 == 0 and read_store(tmp_path).offsets.get(queue) != offset:
                wrong.append((queue, offset, "on disk"))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8), timeout=120))
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert read_store(tmp_path).offsets[shared] == rounds
    store.close()


class SlowFlush:
    """A store whose next flush of the journal takes until `go_on` is set."""

    def __init__(self):
        self.begun, self.go_on, self.on_time = threading.Event(), threading.Event(), []
        self.slow = False
        self.store = open_store(disk=WatchedDisk(MemoryDisk(), self._hook))
        update(self.store, QUEUES, 1)
        self.store.persist_all()
        self.slow = True

    def _hook(self, count, operation, path):
        if self.slow and operation == "sync" and path.endswith(".journal") and not self.begun.is_set():
            self.begun.set()
            self.on_time.append(self.go_on.wait(60))

    def persisting(self, queue, offset):
        """Return a thread that persists `offset`."""
        self.store.update_offset(queue, offset)
        thread = threading.Thread(target=self.store.persist, args=(queue,))
        thread.start()
        return thread


def test_updating_does_not_wait_for_a_slow_disk():
    """While a flush hangs, callers can read and write memory. A `persist` returns only after the flush."""
    bench = SlowFlush()
    store, (first, second, third, *_) = bench.store, QUEUES
    threads = [bench.persisting(first, 2)]
    assert bench.begun.wait(30)
    threads += [bench.persisting(queue, 3) for queue in (second, third, second)]
    store.update_offset(second, 4)
    assert store.read_offset(second, MEMORY) == 4
    assert store.clone_offset_table()[third] == 3
    threads[1].join(0.05)
    assert all(thread.is_alive() for thread in threads)
    bench.go_on.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert bench.on_time == [True]
    store.close()


class Interrupted(Exception):
    """Raised by a signal handler."""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread on this system")
@pytest.mark.live
def test_an_interrupted_wait_for_a_flush_blocks_no_other_caller():
    bench = SlowFlush()
    store, (first, second, third, *_) = bench.store, QUEUES
    waiting, interrupted = threading.Event(), threading.Event()

    def on_signal(number, frame):
        if waiting.is_set():
            waiting.clear()
            raise Interrupted

    def send_signals():
        while not interrupted.wait(0.02):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, on_signal)
    sender = threading.Thread(target=send_signals)
    try:
        threads = [bench.persisting(first, 2)]
        assert bench.begun.wait(30)
        store.update_offset(second, 3)
        sender.start()
        with pytest.raises(Interrupted):
            waiting.set()
            store.persist(second)
        interrupted.set()
        sender.join(30)
        threads.append(bench.persisting(third, 4))
        bench.go_on.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        store.persist(second)
    finally:
        interrupted.set()
        bench.go_on.set()
        signal.signal(signal.SIGUSR1, before)
    assert [store.read_offset(queue, STORE) for queue in (first, second, third)] == [2, 3, 4]
    store.close()
