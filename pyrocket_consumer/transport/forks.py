"""Closes sockets and replaces locks in forked children.

A broker keeps a member while any process has its connection open. A thread that held a lock in the parent does not run
in the child, and would never release it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HasSocket(Protocol):
    """An object with an open or closed socket."""

    def fileno(self) -> int:
        """Return the file descriptor of the socket, -1 if it is closed."""


class HasLocks(Protocol):
    """An object whose locks other threads of the parent may hold at the fork."""

    def renew_locks(self) -> None:
        """Replace all locks by new ones."""


_with_locks: weakref.WeakSet[HasLocks] = weakref.WeakSet()
_open_sockets: weakref.WeakSet[HasSocket] = weakref.WeakSet()


def close_in_children(connection: HasSocket) -> None:
    """Have later forked children close their copy of this socket. The socket of this process stays open."""
    _open_sockets.add(connection)


def renew_locks_in_children(owner: HasLocks) -> None:
    """Have later forked children replace the locks of `owner`."""
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
        # Send neither a shutdown nor a TLS alert, so that the peer notices nothing. Keep the descriptor in use, because
        # the child's copies of the parent's objects close it when they are garbage-collected.
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
