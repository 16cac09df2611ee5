"""What tests of order by key share. The body of a message is its key and a number, with a colon between."""

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
    """Send messages as a producer sends them: those of a key go to one queue."""
    with Producer(name_server=cluster.name_server) as producer:
        for number in range(first, first + count):
            key = f"m{number % keys}"
            producer.send(topic, f"{key}:{number}".encode(), sharding_key=key)


class KeyedListener(RecordingListener):
    """A listener that notices when two calls of a key overlap: of what `key` makes of a message."""

    def __init__(self, judge=lambda message: None, key=key_of):
        super().__init__(judge)
        self.overlaps, self._key = [], key
        self._running = Counter()
        self._lock = threading.Lock()

    def __call__(self, message):
        key = self._key(message)
        with self._lock:
            self._running[key] += 1
            if self._running[key] > 1:
                self.overlaps.append(key)
        try:
            return super().__call__(message)
        finally:
            with self._lock:
                self._running[key] -= 1

    def of(self, key):
        """Return the offsets of a key, in the order in which they came."""
        return [message.queue_offset for message in list(self.messages) if self._key(message) == key]

    def check(self):
        """Each key came in order, one call at a time: after a message the next one, or again one of before."""
        assert not self.overlaps
        offsets = defaultdict(list)
        for message in list(self.messages):
            offsets[message.queue, self._key(message)].append(message.queue_offset)
        for key, came in offsets.items():
            place = {offset: number for number, offset in enumerate(sorted(set(came)))}
            assert place[came[0]] == 0, (key, came)
            assert all(place[after] <= place[before] + 1 for before, after in pairwise(came)), (key, came)
