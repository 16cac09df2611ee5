"""Lanes: the messages of a queue, or of one key in it, that wait for their listener in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from hashlib import sha256
from typing import Any

from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.protocol.properties import PropertyName
from pyrocket_consumer.text import safe_repr

MIN_KNOWN_KEYS = 64
"""The number of lanes of a queue that are kept without a check for idle ones."""

MAX_KEY_CHARS = 128
"""Longer keys are replaced by a digest, so that a lane needs little memory for any key."""

LONG_KEY_SHOWN_CHARS = 80

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""The repr of keys of these types runs no code of users."""

Entry = tuple[Listener, list[Message]]
"""Some messages and their listener. A retry queue has messages of several topics and listeners."""


class Lane:
    """The waiting messages of one key in one queue, or of the whole queue. Only the I/O thread changes it."""

    __slots__ = ("_key", "_text", "waiting", "holder", "out_count")

    def __init__(self, key: Hashable, text: str | None = None) -> None:
        """Create an empty lane. `text` is given if the key itself must not be kept, or its repr must not be called."""
        self._key = key
        self._text = text
        self.waiting: deque[Entry] = deque()
        self.holder: object | None = None  # the chunk that has its messages, its pause, or the giving up of messages
        self.out_count = 0  # the number of messages that its chunk has and has not reported

    @property
    def text(self) -> str:
        """The key as text for events."""
        return safe_repr(self._key) if self._text is None else self._text

    @property
    def is_idle(self) -> bool:
        """Whether the lane has no unfinished messages."""
        return self.holder is None and not self.waiting

    def insert(self, entries: list[Entry]) -> None:
        """Add messages in order of offset, usually at the head."""
        waiting = self.waiting
        if entries and waiting and waiting[0][1][0].queue_offset < entries[-1][1][-1].queue_offset:
            each = [(listener, [message]) for listener, messages in (*entries, *waiting) for message in messages]
            self.waiting = deque(sorted(each, key=lambda entry: entry[1][0].queue_offset))
        else:
            waiting.extendleft(reversed(entries))

    def take(self, limit: int) -> list[Message]:
        """Remove the first messages of one listener, and return them. There must be some."""
        waiting = self.waiting
        listener, taken = waiting.popleft()
        if waiting and len(taken) < limit:
            taken = taken[:]
            while waiting and len(taken) < limit and waiting[0][0] is listener:
                taken += waiting.popleft()[1]
        if len(taken) > limit:
            waiting.appendleft((listener, taken[limit:]))
            taken = taken[:limit]
        return taken

    def remove(self, gone: list[Message]) -> None:
        """Remove messages at any position."""
        ids = {id(message) for message in gone}
        before, self.waiting = self.waiting, deque()
        for listener, messages in before:
            if kept := [message for message in messages if id(message) not in ids]:
                self.waiting.append((listener, kept))


class KeylessLane(Lane):
    """The lane of one message whose key could not be read."""

    __slots__ = ()

    def __init__(self, error: BaseException) -> None:
        super().__init__(None, f"<no key: {safe_repr(error)}>")


class Lanes:
    """The lanes of one window. Confined to the I/O thread, except where a worker is named."""

    def __init__(self, window: ProcessQueue, former: list[Lanes]) -> None:
        """Create lanes that wait for the running calls of `former` windows of the queue."""
        self.window = window
        self.by_key: dict[Hashable, Lane] = {}  # used by the worker that reads keys, if there is one
        self.ready: deque[Lane] = deque()  # they wait for a worker
        self.paused: dict[Lane, asyncio.TimerHandle] = {}
        self.giving_up: set[Lane] = set()  # their first messages are being sent to the dead letters
        self.chunks: set[Any] = set()  # the chunks that workers have
        self.former = former
        self.arrived: deque[tuple[Listener, Message]] = deque()  # messages whose keys were not read yet
        self.is_finding_keys = False
        self.uncommitted: list[Entry] = []  # consumed, not committed by the listener; used by the worker of the lane
        self.is_closed = False
        self.is_touched = False  # reports of workers have changed it
        self.check_timer: asyncio.TimerHandle | None = None  # checks whether a listener holds up the queue
        self.reported: object = None  # the last reason that was reported
        self._prune_above = MIN_KNOWN_KEYS

    def calls(self) -> int:
        """Return the number of chunks with a call that runs or may still begin, and of lanes that give messages up."""
        held = [chunk for chunk in self.chunks if chunk.is_held()]
        return len(self.giving_up) + len(held)

    def must_wait(self) -> bool:
        """Return whether calls of former windows still run."""
        if self.former:
            self.former = [each for each in self.former if each.calls()]
        return bool(self.former)

    def close(self) -> None:
        """Begin nothing more, because the window has ended."""
        self.is_closed = True
        self.cancel_timers()

    def cancel_timers(self) -> None:
        """Cancel the pauses and the check."""
        if self.check_timer is not None:
            self.check_timer.cancel()
        for pause in self.paused.values():
            pause.cancel()
        self.paused.clear()

    # --- lanes of keys

    def lane_of(self, key: Hashable) -> Lane:
        """Return the lane of a key."""
        lane = self.by_key.get(key)
        return self._find_or_add(key) if lane is None else lane

    def _find_or_add(self, key: Hashable) -> Lane:
        """Return the lane of a key that is not in `by_key` itself."""
        known = self.by_key
        if (type(key) is str or type(key) is bytes) and len(key) > MAX_KEY_CHARS:
            digest = _digest(key)
            lane = known.get(digest)
            if lane is None:
                text = f"{key[:LONG_KEY_SHOWN_CHARS]!r}… ({len(key) - LONG_KEY_SHOWN_CHARS} more characters)"
                lane = known[digest] = Lane(None, text)
            return lane
        lane = known[key] = Lane(key) if type(key) in _PLAIN else Lane(None, safe_repr(key))
        return lane

    def prune(self) -> None:
        """Remove idle lanes from time to time. Do not call it while a message is between its key and its lane."""
        known = self.by_key
        if len(known) > self._prune_above:
            for key in [key for key, lane in known.items() if lane.is_idle]:
                try:
                    del known[key]
                except BaseException:  # noqa: S110 - keep a key that is no longer hashable
                    pass
            self._prune_above = max(MIN_KNOWN_KEYS, 2 * len(known))

    def clear_if_idle(self) -> None:
        """Remove all lanes if they are many and all idle, without calling code of keys."""
        if len(self.by_key) > MIN_KNOWN_KEYS and not (
            self.chunks or self.ready or self.paused or self.arrived or self.is_finding_keys or self.giving_up
        ):
            self.by_key.clear()
            self._prune_above = MIN_KNOWN_KEYS

    # --- messages

    def add(self, lane: Lane, listener: Listener, message: Message) -> None:
        """Add a message at the end of the lane of its key."""
        message._key_lane = lane
        waiting = lane.waiting
        if waiting and waiting[-1][1][-1].queue_offset > message.queue_offset:  # its key could not be read at first
            lane.insert([(listener, [message])])
            return
        waiting.append((listener, [message]))
        if lane.holder is None and len(waiting) == 1:
            self.ready.append(lane)

    def add_all(self, listener: Listener, messages: list[Message]) -> None:
        """Add messages at the end of the only lane, that of the whole queue. There must be some."""
        lane = self.lane_of(None)
        if lane.is_idle:
            self.ready.append(lane)
        lane.waiting.append((listener, messages))

    def release(self, lane: Lane) -> None:
        """Release a lane from its holder."""
        lane.holder, lane.out_count = None, 0
        if lane.waiting:
            self.ready.append(lane)


def _digest(key: str | bytes) -> tuple[type, bytes]:
    """Return the replacement of a long key. Text and bytes differ."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    return type(key), sha256(data).digest()


def sharding_key(message: Message) -> Hashable:
    """Return the key that the message was sent with, None without one. A damaged record has a unique key."""
    try:
        return message.property(PropertyName.SHARDING_KEY) or None
    except ProtocolError:
        return message.queue_offset
