"""What tests of order by key share. The body of a message is its key and a number, with a colon between."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from itertools import pairwise

from tests.consuming import Seen


def key_of(message):
    """Return the key of a message."""
    return message.body.partition(b":")[0].decode()


class ByKey(Seen):
    """A listener that notices when two calls of a key overlap."""

    def __init__(self, judge=lambda message: None):
        super().__init__(judge)
        self.overlaps = []
        self._running = Counter()
        self._lock = threading.Lock()

    def __call__(self, message):
        key = key_of(message)
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
        return [message.queue_offset for message in list(self.messages) if key_of(message) == key]

    def check(self):
        """Each key came in order, one call at a time: after a message the next one, or again one of before."""
        assert not self.overlaps
        offsets = defaultdict(list)
        for message in list(self.messages):
            offsets[message.queue, key_of(message)].append(message.queue_offset)
        for key, came in offsets.items():
            place = {offset: number for number, offset in enumerate(sorted(set(came)))}
            assert place[came[0]] == 0, (key, came)
            assert all(place[after] <= place[before] + 1 for before, after in pairwise(came)), (key, came)
