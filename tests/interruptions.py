"""Interruptions of a start: a signal handler, or a fork."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from pyrocket_consumer.testing import EmbeddedCluster, Gate


@contextlib.contextmanager
def name_servers_held(cluster: EmbeddedCluster) -> Iterator[Gate]:
    """Let name servers hold all requests until the gate is open."""
    gate = Gate()
    cluster.name_server_node.on(None, gate, times=None)
    try:
        yield gate
    finally:
        cluster.name_server_node.clear_faults()
        gate.open()


@contextlib.contextmanager
def signal_once_held(gate: Gate, handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle` in a signal handler, on the main thread, as soon as the gate holds a request."""
    main = threading.main_thread().ident
    assert main is not None

    def send_signal() -> None:
        gate.wait_held(1)
        signal.pthread_kill(main, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda number, frame: handle())
    sender = threading.Thread(target=send_signal)
    try:
        sender.start()
        yield
        sender.join()
    finally:
        signal.signal(signal.SIGALRM, before)


def fork_child(work: Callable[[], object], timeout_s: int = 25) -> int:
    """Fork a child that does `work`, and return its process id. It exits with 0, or by a signal if `work` hangs."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout_s)
        work()
        code = 0
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """Wait for a child, and return its exit code: 0 after `work`."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
