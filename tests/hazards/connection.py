"""The connection of a naive member: threads that wait for responses, and one that reads them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.codes import CLIENT_VERSION
from pyrocket_consumer.protocol.frame import ONEWAY_FLAG, FrameBuffer, RemotingCommand, encode_command
from tests.real_brokers.remoting import as_text


class Refused(OSError):
    """A response with an error code. It is an OSError, so that one `except` catches every failure."""

    def __init__(self, response: RemotingCommand) -> None:
        super().__init__(f"answered {response.code}: {response.remark}")
        self.code = response.code


class Wire:
    """A connection. Any thread may call over it. Each request of the server runs on a new thread."""

    def __init__(self, address: str, on_request: Callable[[Wire, RemotingCommand], None], timeout_s: float) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._socket.settimeout(None)
        self._on_request = on_request
        self._lock = threading.Lock()
        self._opaques = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[RemotingCommand | None]] = {}
        self.lost = False
        threading.Thread(target=self._read, daemon=True, name="naive-connection").start()

    def call(
        self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"", timeout_s: float = 10.0
    ) -> RemotingCommand:
        """Send a request and return its response, with any code.

        Raises:
            OSError: the connection was lost, or the response was late (TimeoutError).
        """
        responses: SimpleQueue[RemotingCommand | None] = SimpleQueue()
        with self._lock:
            opaque = next(self._opaques)
            self._waiting[opaque] = responses
            if self.lost:
                raise ConnectionResetError("the connection is lost")
            self._socket.sendall(encode_command(_command(code, fields, body, opaque)))
        try:
            response = responses.get(timeout=timeout_s)
        except Exception:
            raise TimeoutError(f"no response to {code} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(opaque, None)
        if response is None:
            raise ConnectionResetError("the connection was lost")
        return response

    def oneway(self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"") -> None:
        """Send a request that gets no response."""
        with self._lock:
            self._socket.sendall(encode_command(_command(code, fields, body, next(self._opaques), ONEWAY_FLAG)))

    def reply(self, request: RemotingCommand, code: int = 0, remark: str | None = None, body: bytes = b"") -> None:
        """Respond to a request of the server."""
        response = request.make_response(code, remark, {}, body)
        response.opaque = request.opaque
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(encode_command(response))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        frames = FrameBuffer()
        try:
            while count := self._socket.recv_into(frames.space()):
                for command in frames.read_commands(count):
                    if command.is_response:
                        if (responses := self._waiting.get(command.opaque)) is not None:
                            responses.put(command)
                    else:
                        threading.Thread(target=self._on_request, args=(self, command), daemon=True).start()
        except (OSError, ProtocolError):
            pass
        with self._lock:
            self.lost = True
            self._socket.close()
        for responses in list(self._waiting.values()):
            responses.put(None)


def _command(
    code: int, fields: Mapping[str, object] | None, body: bytes, opaque: int, flag: int = 0
) -> RemotingCommand:
    texts = {name: as_text(value) for name, value in (fields or {}).items()}
    return RemotingCommand(int(code), texts, body, opaque, flag, version=CLIENT_VERSION)
