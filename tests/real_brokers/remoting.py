"""A small blocking client, with which tests prepare and read servers without the client under test."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Collection, Mapping

from pyrocket_consumer.protocol.codes import request_name
from pyrocket_consumer.protocol.frame import RemotingCommand, decode_command, encode_command, sign

_opaques = itertools.count(1)


class Refused(Exception):
    """A server responded with a code that the caller did not expect."""

    def __init__(self, what: str, address: str, code: int, remark: str | None) -> None:
        super().__init__(what, address, code, remark)
        self.code, self.remark = code, remark

    def __str__(self) -> str:
        what, address, code, remark = self.args
        return f"{address} responded to {what} with {code}: {remark}"


class Peer:
    """One server. Any thread may call it over one connection, which is opened again after it was lost."""

    def __init__(self, address: str, account: tuple[str, str] | None = None) -> None:
        """`account`: access key and secret key, where the server wants signed requests."""
        self.address, self.account = address, account
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def call(
        self,
        code: int,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        timeout_s: float = 10,
        accept: Collection[int] = (0,),
    ) -> RemotingCommand:
        """Send a request and return its response. Raise OSError without one, or Refused if `accept` lacks its code."""
        texts = {name: as_text(value) for name, value in (fields or {}).items() if value is not None}
        if self.account is not None:
            texts = sign(texts, body, *self.account)
        request = RemotingCommand(code, texts, body, next(_opaques))
        with self._lock:
            try:
                answer = self._exchange(request, timeout_s)
            except BaseException:
                self._close()
                raise
        if answer.code not in accept:
            raise Refused(request_name(code), self.address, answer.code, answer.remark)
        return answer

    def _exchange(self, request: RemotingCommand, timeout_s: float) -> RemotingCommand:
        if self._socket is None or _ended(self._socket):
            self._close()
            host, port = self.address.rsplit(":", 1)
            self._socket = socket.create_connection((host, int(port)), timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(encode_command(request))
        while True:
            prefix = _read(self._socket, 4)
            answer = decode_command(prefix + _read(self._socket, int.from_bytes(prefix)))
            if answer.is_response and answer.opaque == request.opaque:
                return answer

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def as_text(value: object) -> str:
    """Return a value as Java writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ended(connection: socket.socket) -> bool:
    """Return whether the other side has closed, because no data can arrive between two calls."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _read(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the server closed the connection")
        parts += part
    return bytes(parts)
