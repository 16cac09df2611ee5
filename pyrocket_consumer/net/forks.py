"""What a forked child must not keep: a connection lives, and with it a membership, while any process has it open."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HasSocket(Protocol):
    """Something with a socket, open or closed by now."""

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 if it is closed."""


_of_this_process: weakref.WeakSet[HasSocket] = weakref.WeakSet()


def close_in_children(connection: HasSocket) -> None:
    """Have children that are forked from now on close their copy of a socket. It stays this process's."""
    _of_this_process.add(connection)


def _after_fork_in_child() -> None:
    connections = list(_of_this_process)
    _of_this_process.clear()
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
