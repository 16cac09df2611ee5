"""Committed offsets of groups, and the marks of server-side resets. Source: ConsumerOffsetManager."""

from __future__ import annotations

Key = tuple[str, str]
"""Topic and group."""


class ConsumerOffsets:
    """Committed offsets per (topic, group) and queue, the state last flushed to "disk", and reset marks.

    Any value is stored, also negative ones and queue ids that do not exist, as brokers do.
    """

    def __init__(self) -> None:
        self._offsets: dict[Key, dict[int, int]] = {}
        self._flushed: dict[Key, dict[int, int]] = {}
        self._marks: dict[Key, dict[int, int]] = {}
        self._pulled: dict[tuple[str, str, int], int] = {}

    def commit(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        self._offsets.setdefault((topic, group), {})[queue_id] = offset

    def committed(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return the stored offset, which may be negative; None if there is no offset."""
        return self._offsets.get((topic, group), {}).get(queue_id)

    def table(self, topic: str, group: str) -> dict[int, int]:
        return dict(self._offsets.get((topic, group), {}))

    def items(self) -> list[tuple[Key, dict[int, int]]]:
        return [(key, dict(table)) for key, table in self._offsets.items()]

    def pulled(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Remember the offset of the group's last pull of a queue."""
        self._pulled[topic, group, queue_id] = offset

    def last_pulled(self, topic: str, group: str, queue_id: int) -> int:
        return self._pulled.get((topic, group, queue_id), 0)

    def topics_of(self, group: str) -> set[str]:
        return {topic for topic, its_group in self._offsets if its_group == group}

    def groups_of(self, topic: str) -> set[str]:
        return {group for its_topic, group in self._offsets if its_topic == topic}

    def remove(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Remove the offsets and marks of a topic, of a group, or of one group in one topic."""
        for table in (self._offsets, self._marks):
            for key in [key for key in table if topic in (None, key[0]) and group in (None, key[1])]:
                del table[key]

    # --- marks of server-side resets: in memory only

    def mark(self, topic: str, group: str, queue_id: int, target: int) -> None:
        self._marks.setdefault((topic, group), {})[queue_id] = target

    def marked(self, topic: str, group: str, queue_id: int) -> int | None:
        return self._marks.get((topic, group), {}).get(queue_id)

    def take_mark(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return a queue's mark and erase it."""
        if not self._marks:
            return None
        return self._marks.get((topic, group), {}).pop(queue_id, None)

    # --- the disk

    def flush(self) -> None:
        """Write the offsets to "disk": a kill loses only later commits."""
        self._flushed = {key: dict(table) for key, table in self._offsets.items()}

    def restart(self, lose_unflushed: bool) -> None:
        """Load the offsets after a stop, or after a kill that lost unflushed ones. Marks are lost in both cases."""
        if lose_unflushed:
            self._offsets = {key: dict(table) for key, table in self._flushed.items()}
        self._marks.clear()

    def copy_from(self, other: ConsumerOffsets) -> None:
        """Copy another broker's offsets, as a slave does from its master."""
        self._offsets = {key: dict(table) for key, table in other._offsets.items()}

    def clear(self) -> None:
        self._offsets.clear()
        self._flushed.clear()
        self._marks.clear()
