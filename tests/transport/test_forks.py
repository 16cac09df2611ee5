"""Sockets and forks: a child closes its copies, and the peer does not notice."""

from __future__ import annotations

import os
import socket

import pytest

from pyrocket_consumer.transport.forks import close_in_children

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture
def pair():
    ours, peer = socket.socketpair()
    with ours, peer:
        close_in_children(ours)
        yield ours, peer


def in_a_child(work) -> int:
    """Run `work` in a forked child, and return the exit code: 0 if it returns true."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_child_has_no_copy_and_the_parent_continues(pair):
    ours, peer = pair

    def is_gone() -> bool:
        try:
            ours.getpeername()
        except OSError:
            return True
        return False

    assert in_a_child(is_gone) == 0
    ours.sendall(b"still there")
    assert peer.recv(100) == b"still there"
    assert in_a_child(lambda: ours.close() or True) == 0, "its object may close what it believes it has"
    ours.sendall(b"and again")
    assert peer.recv(100) == b"and again"
    assert ours.fileno() >= 0


def test_the_childs_own_files_never_get_the_number(pair):
    ours, _ = pair

    def own_files_stay() -> bool:
        own = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
        ours.close()
        return all(os.fstat(each) for each in own)

    assert in_a_child(own_files_stay) == 0
    assert ours.fileno() >= 0


def test_a_closed_socket_is_skipped(pair):
    ours, peer = pair
    ours.close()
    peer.close()
    assert in_a_child(lambda: True) == 0
    assert ours.fileno() == -1
