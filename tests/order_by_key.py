"""Messages and a listener for tests of order by key. A body is a key, a colon and a number."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from itertools import pairwise

from pyrocket_consumer import Producer
from tests.consuming import RecordingListener


def key_of(message):
    """Return the key of a message."""
    return message.body.partition(b":")[0].decode()


def send_keys(cluster, topic, count, keys=4, first=0):
    """Send messages with a producer, which sends the messages of a key to one queue."""
    with Producer(name_server=cluster.name_server) as producer:
        for number in range(first, first + count):
            key = f"m{number % keys}"
            producer.send(topic, f"{key}:{number}".encode(), sharding_key=key)


class KeyedListener(RecordingListener):
    """A listener that records overlapping calls of one key, which `key` returns for a message."""

    def __init__(self, judge=lambda message: None, key=key_of):
        super().__init__(judge)
        self.overlaps, self._key = [], key
        self.running = Counter()
        self._lock = threading.Lock()

    def __call__(self, message):
        key = self._key(message)
        with self._lock:
            self.running[key] += 1
            if self.running[key] > 1:
                self.overlaps.append(key)
        try:
            return super().__call__(message)
        finally:
            with self._lock:
                self.running[key] -= 1

    def of(self, key):
        """Return the offsets of a key, in the order of delivery."""
        return [message.queue_offset for message in list(self.messages) if self._key(message) == key]

    def check(self):
        """Check that each key was delivered in order, one call at a time; earlier messages may repeat."""
        assert not self.overlaps
        offsets = defaultdict(list)
        for message in list(self.messages):
            offsets[message.queue, self._key(message)].append(message.queue_offset)
        for key, delivered in offsets.items():
            rank = {offset: number for number, offset in enumerate(sorted(set(delivered)))}
            assert rank[delivered[0]] == 0, (key, delivered)
            assert all(rank[after] <= rank[before] + 1 for before, after in pairwise(delivered)), (key, delivered)
