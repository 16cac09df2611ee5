"""`pyrocket broker`: a cluster in memory to try things out with."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from pyrocket_consumer.cli import main

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_it_runs_where_it_is_told_until_ctrl_c(capsys):
    port = free_port()
    command = ["-m", "pyrocket_consumer.cli", "broker", "--port", str(port), "--topic", "orders:2"]
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert f"name server: 127.0.0.1:{port} " in process.stdout.readline()
        where = ["orders", "-n", f"127.0.0.1:{port}"]
        assert main(["produce", *where, "hello"]) == 0
        assert main(["consume", *where, "--from", "first", "--count", "1"]) == 0
        assert "hello" in capsys.readouterr().out
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["broker", "--port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"pyrocket: port {port} cannot be used: {os.strerror(errno.EADDRINUSE)}; choose another with --port\n"
    )
