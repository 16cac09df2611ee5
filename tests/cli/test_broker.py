"""`pyrocket broker`: a cluster in memory, for experiments and tests."""

from __future__ import annotations

import errno
import os
import signal
import socket

import pytest

from tests.cli.shell import Running

pytestmark = pytest.mark.live


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_it_runs_on_the_given_port_until_ctrl_c(pyrocket):
    port = free_port()
    with Running("broker", "--port", str(port), "--topic", "orders:2") as running:
        assert f"name server: 127.0.0.1:{port} " in running.read(1)[0]
        where = ["orders", "-n", f"127.0.0.1:{port}"]
        assert pyrocket("produce", *where, "hello")[0] == 0
        code, printed, _ = pyrocket("consume", *where, "--from", "first", "--count", "1")
        assert (code, "hello" in printed) == (0, True)
        running.send_signal(signal.SIGINT)
        assert running.end(30) == 0


def test_a_port_in_use_is_named(pyrocket):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, stderr = pyrocket("broker", "--port", str(port))
    reason = f"port {port} cannot be used: {os.strerror(errno.EADDRINUSE)}; choose another with --port"
    assert (code, stderr) == (1, f"pyrocket: {reason}\n")
