"""Queue locks of orderly consumers. Source: RebalanceLockManager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pyrocket_consumer.model import MessageQueue


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_s: float


class QueueLocks:
    """The locks of each group by queue. A lock belongs to a client id, not to a connection."""

    def __init__(self, now_s: Callable[[], float], expiry_s: float) -> None:
        self._now_s = now_s
        self.expiry_s = expiry_s
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock or renew the queues that are free, expired or the client's own; return the locked ones of `queues`."""
        now, held, locks = self._now_s(), set(), self._locks.setdefault(group, {})
        for queue in queues:
            lock = locks.get(queue)
            if lock is None or lock.client_id == client_id or self._expired(lock, now):
                locks[queue] = _Lock(client_id, now)
                held.add(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release the client's locks of `queues`, and no other client's."""
        locks = self._locks.get(group, {})
        for queue in queues:
            lock = locks.get(queue)
            if lock is not None and lock.client_id == client_id:
                del locks[queue]

    def held(self, group: str) -> dict[MessageQueue, str]:
        """Return the unexpired locks of a group and their holders."""
        now = self._now_s()
        return {
            queue: lock.client_id for queue, lock in self._locks.get(group, {}).items() if not self._expired(lock, now)
        }

    def clear(self) -> None:
        """Remove all locks, as a restart does."""
        self._locks.clear()

    def _expired(self, lock: _Lock, now: float) -> bool:
        return now - lock.renewed_s > self.expiry_s
