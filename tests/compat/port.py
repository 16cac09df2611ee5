"""Make a cluster's name server reachable for a while at the port that the samples contain."""

from __future__ import annotations

import errno
import socket
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

PORT = 9876
TURN_TIMEOUT_S = 600
CONNECT_TIMEOUT_S = 10


@contextmanager
def name_server_at_its_port(name_server: str) -> Iterator[None]:
    """Forward connections to 127.0.0.1:9876 to a name server. Only one test of this machine can do so at a time."""
    host, port = name_server.rsplit(":", 1)
    with (
        FileLock(Path(tempfile.gettempdir()) / f"pyrocket-port-{PORT}.lock", timeout=TURN_TIMEOUT_S),
        _listening((host, int(port))) as relay,
    ):
        thread = threading.Thread(target=relay.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            relay.shutdown()
            thread.join()
            relay.disconnect()


def _listening(target: tuple[str, int]) -> _Relay:
    try:
        return _Relay(target)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise AssertionError(f"127.0.0.1:{PORT} is taken, and the samples name it: end who listens there") from error


class _Relay(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._open = set[socket.socket]()
        super().__init__(("127.0.0.1", PORT), _Connection)

    def opened(self, *ends: socket.socket) -> None:
        self._open.update(ends)

    def disconnect(self) -> None:
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    server: _Relay

    def handle(self) -> None:
        with socket.create_connection(self.server.target, CONNECT_TIMEOUT_S) as beyond:
            beyond.settimeout(None)
            self.server.opened(self.request, beyond)
            back = threading.Thread(target=_copy, args=(beyond, self.request), daemon=True)
            back.start()
            _copy(self.request, beyond)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
