"""What a forked child must not keep: sockets and locks.

A membership lives while any process has its connection open. A thread that held a lock in the parent does not run in
the child, and would never release it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HasSocket(Protocol):
    """Something with a socket, open or closed by now."""

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 if it is closed."""


class HasLocks(Protocol):
    """Something that threads of the parent may be in the middle of."""

    def renew_locks(self) -> None:
        """Have new locks, which nobody holds."""


_with_locks: weakref.WeakSet[HasLocks] = weakref.WeakSet()
_open_sockets: weakref.WeakSet[HasSocket] = weakref.WeakSet()


def close_in_children(connection: HasSocket) -> None:
    """Have children that are forked from now on close their copy of a socket. It stays this process's."""
    _open_sockets.add(connection)


def renew_locks_in_children(owner: HasLocks) -> None:
    """Have children that are forked from now on begin with locks of `owner` that nobody holds."""
    _with_locks.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_with_locks):
        owner.renew_locks()
    connections = list(_open_sockets)
    _open_sockets.clear()
    descriptors = [descriptor for connection in connections if (descriptor := connection.fileno()) >= 0]
    if not descriptors:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        # Neither a shutdown nor a word of TLS: the peer notices nothing. And the number stays taken: the objects that
        # the child has of its parent believe that it is theirs, and close it when they go.
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
