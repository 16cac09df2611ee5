"""Ids of messages and the hosts in them: offset message ids of brokers, and unique keys of producers.

Source: MessageDecoder, MessageClientIDSetter.
"""

from __future__ import annotations

import ipaddress
import secrets
import struct
import threading
import time
from collections.abc import Callable

from pyrocket_consumer.errors import ConfigError, ProtocolError

_PORT_OFFSET = struct.Struct(">Iq")
_TAIL = struct.Struct(">HIIH")  # process id, process value, milliseconds of the month, counter


def encode_host(host: str) -> bytes:
    """Return the bytes of "ip:port" or "[ip6]:port" in a record: the address, and the port as 4 bytes.

    Raises:
        ConfigError: the text is not an address and a port.
    """
    ip, _, port = host.rpartition(":")
    try:
        return ipaddress.ip_address(ip.strip("[]")).packed + struct.pack(">I", int(port))
    except (ValueError, struct.error) as error:
        raise ConfigError(f"host {host!r} is not like 10.0.0.1:10911 or [2001:db8::1]:10911: {error}") from error


def decode_host(data: bytes) -> str:
    """Return "ip:port" or "[ip6]:port" for the 8 or 20 bytes of a host in a record."""
    port = int.from_bytes(data[-4:])
    if len(data) == 8:
        return f"{data[0]}.{data[1]}.{data[2]}.{data[3]}:{port}"
    return f"[{ipaddress.IPv6Address(data[:16])}]:{port}"


def offset_message_id(host: str, port: int, commit_log_offset: int) -> str:
    """Return the offset message id: the address of the broker, and the offset of the message in its commit log.

    Source: MessageDecoder.createMessageId.
    """
    return (ipaddress.ip_address(host).packed + _PORT_OFFSET.pack(port, commit_log_offset)).hex().upper()


def parse_offset_message_id(message_id: str) -> tuple[str, int, int]:
    """Return the host, port and commit log offset in an offset message id.

    A unique key has the same format and cannot be distinguished; the result for it is meaningless.

    Raises:
        ProtocolError: not 32 or 56 hexadecimal digits.
    """
    try:
        data = bytes.fromhex(message_id)
    except ValueError:
        data = b""
    if len(data) not in (16, 28) or len(message_id) != 2 * len(data):
        raise ProtocolError(f"message id {message_id!r:.80} is not 32 or 56 hexadecimal digits")
    port, commit_log_offset = _PORT_OFFSET.unpack(data[-12:])
    return str(ipaddress.ip_address(data[:-12])), port, commit_log_offset


class UniqueIds:
    """Makes the unique keys (UNIQ_KEY) of a producer's messages. Thread-safe.

    They are unique among the processes of a host if the process values differ, for up to 65,536 ids per millisecond.
    Source: MessageClientIDSetter.
    """

    def __init__(
        self, ip: str, pid: int, process_value: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Make ids for the process `pid` at address `ip`; `clock` returns seconds since the epoch.

        Create the object in the process that uses it, because a fork copies the process value and the counter.
        """
        self._ip = ipaddress.ip_address(ip).packed
        self._pid = pid & 0xFFFF
        self._process_value = secrets.randbits(32) if process_value is None else process_value & 0xFFFFFFFF
        self._clock = clock
        self._lock = threading.RLock()  # reentrant, because a signal handler may send while it is held
        self._counter = 0
        self._month_start_ms = self._month_end_ms = 0

    def next(self) -> str:
        """Return a new id: 32 hexadecimal digits, or 56 with an IPv6 address."""
        now_ms = int(self._clock() * 1000)
        with self._lock:
            if not self._month_start_ms <= now_ms < self._month_end_ms:
                self._month_start_ms, self._month_end_ms = _month_of(now_ms)
            counter, self._counter = self._counter, (self._counter + 1) & 0xFFFF
            since_ms = now_ms - self._month_start_ms
        return (self._ip + _TAIL.pack(self._pid, self._process_value, since_ms & 0xFFFFFFFF, counter)).hex().upper()


def _month_of(now_ms: int) -> tuple[int, int]:
    """Return the start of the month of `now_ms` and of the next one, at local midnight, in milliseconds."""
    year, month = time.localtime(now_ms / 1000)[:2]

    def start(month: int) -> int:
        return int(time.mktime((year, month, 1, 0, 0, 0, 0, 0, -1))) * 1000

    return start(month), start(month + 1)
