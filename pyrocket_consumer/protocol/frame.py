"""Frames: length, header (JSON or ROCKETMQ) and body; and the signing of requests.

Source: RemotingCommand, RocketMQSerializable, NettyDecoder; AclClientRPCHook, AclUtils, AclSigner. Requests are signed
in the same way for ACL 1.0 and 2.0.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import orjson

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.codes import CLIENT_VERSION, LANGUAGE_NAMES, LanguageCode, RequestCode
from pyrocket_consumer.text import truncate

ACCESS_KEY = "AccessKey"
SECURITY_TOKEN = "SecurityToken"  # noqa: S105  # the name of a field
SIGNATURE = "Signature"
SIGNED = frozenset({ACCESS_KEY, SECURITY_TOKEN, SIGNATURE})
"""The fields that signing adds. No text shows their values."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""The default size of the largest frame that either side sends, including its length field."""

MAX_REQUEST_BYTES = 1024 * 1024
"""The largest body of a server's request, for example a reset of 4,000 queues. Stored messages may be larger."""

_MESSAGE_REQUESTS = frozenset((RequestCode.CHECK_TRANSACTION_STATE, RequestCode.CONSUME_MESSAGE_DIRECTLY))

JSON_HEADER = 0
BINARY_HEADER = 1

RESPONSE_FLAG = 1
ONEWAY_FLAG = 2

_MAX_REPR_CHARS = 200  # of a field or of the remark

MAX_HEADER_BYTES = 1024 * 1024
"""The largest header. The response to a batch of 10,000 messages contains their ids, 57 bytes each with IPv6."""

_MAX_LENIENT_BYTES = (
    64 * 1024
)  # of a header that only the slow reader accepts, because a text has half of a surrogate pair
_MAX_HEADER_VALUES = 50_000  # of a longer header
_MAX_FIELDS = 1024  # real headers have at most thirty

_PREFIX = struct.Struct(">II")  # bytes that follow; header type << 24 | header length
_BINARY_FIXED = struct.Struct(">hBhiii")  # code, language, version, opaque, flag, remark length


@dataclass(slots=True, repr=False)
class RemotingCommand:
    """One request or response. `fields` is the header's string map (extFields), `header_type` its received format."""

    code: int
    fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: str = "PYTHON"
    version: int = CLIENT_VERSION
    header_type: int = JSON_HEADER
    skipped_body_bytes: int = 0
    """The size of a body that is too large for its request, so it was skipped."""

    def __repr__(self) -> str:
        fields = {
            name: "***" if name in SIGNED else truncate(value, _MAX_REPR_CHARS) for name, value in self.fields.items()
        }
        remark = f", remark={truncate(self.remark, _MAX_REPR_CHARS)!r}" if self.remark else ""
        return (
            f"RemotingCommand(code={self.code}, opaque={self.opaque}, flag={self.flag}, fields={fields!r}, "
            f"body=<{len(self.body)} bytes>{remark})"
        )

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)

    def make_response(
        self, code: int = 0, remark: str | None = None, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Return a response to this request, with the same opaque and the response flag."""
        return RemotingCommand(code, fields or {}, body, self.opaque, RESPONSE_FLAG, remark)


def encode_command(
    command: RemotingCommand, header_type: int = JSON_HEADER, max_frame_bytes: int = MAX_FRAME_BYTES
) -> bytes:
    """Return the whole frame of `command`. Every server reads JSON headers, which are also faster.

    Raises:
        ProtocolError: the frame would be larger than `max_frame_bytes`, or a field cannot be written.
    """
    header = _json_header(command) if header_type == JSON_HEADER else _binary_header(command)
    body = command.body
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are sent: shorten the message's properties"
        )
    if _PREFIX.size + len(header) + len(body) > max_frame_bytes:
        raise ProtocolError(
            f"frame of {_PREFIX.size + len(header) + len(body)} bytes; at most max_frame_bytes={max_frame_bytes} are "
            "sent. Send less at a time, or pass a larger value if the servers accept it (default 16 MiB)"
        )
    return _PREFIX.pack(4 + len(header) + len(body), header_type << 24 | len(header)) + header + body


def _json_header(command: RemotingCommand) -> bytes:
    header: dict[str, object] = {"code": command.code}
    if command.fields:
        header["extFields"] = command.fields
    header["flag"] = command.flag
    header["language"] = command.language
    header["opaque"] = command.opaque
    if command.remark is not None:
        header["remark"] = command.remark
    header["serializeTypeCurrentRPC"] = "JSON"
    header["version"] = command.version
    try:
        return orjson.dumps(header)
    except orjson.JSONEncodeError as error:
        raise ProtocolError(f"header cannot be written: {error}") from error


def _binary_header(command: RemotingCommand) -> bytes:
    try:
        language = LanguageCode[command.language]
    except KeyError:
        language = LanguageCode.OTHER
    try:
        remark = (command.remark or "").encode()
        entries = b"".join(
            struct.pack(">h", len(name)) + name + struct.pack(">i", len(value)) + value
            for name, value in ((name.encode(), value.encode()) for name, value in command.fields.items())
            if value  # servers read an empty value as null, and would then sign the text "null"
        )
        fixed = _BINARY_FIXED.pack(command.code, language, command.version, command.opaque, command.flag, len(remark))
    except (struct.error, UnicodeEncodeError) as error:
        raise ProtocolError(f"binary header cannot be written: {error}") from error
    return fixed + remark + struct.pack(">i", len(entries)) + entries


def prepare_header(code: int, fixed: Mapping[str, str], changing: bytes) -> bytes:
    """Return the JSON header of a frequent request, with placeholders of `changing`, and one for the opaque number.

    `fixed` are the fields that never change.
    """
    head = b'{"code":%d,"extFields":{%b' % (code, orjson.dumps(fixed)[1:-1])
    tail = b'},"flag":0,"language":"%b","opaque":' % LanguageCode.PYTHON.name.encode()
    end = b',"serializeTypeCurrentRPC":"JSON","version":%d}' % CLIENT_VERSION
    # Escape % in names, such as those of retry topics, because only the template's own % are placeholders.
    return head.replace(b"%", b"%%") + changing + tail + b"%d" + end


def decode_command(frame: bytes) -> RemotingCommand:
    """Return the command in one whole frame, including its length field.

    Raises:
        ProtocolError: the bytes are not a frame. Close the connection, as servers do.
    """
    if len(frame) < _PREFIX.size:
        raise ProtocolError(f"frame of {len(frame)} bytes is shorter than its prefix")
    length, word = _PREFIX.unpack_from(frame)
    if length + 4 != len(frame):
        raise ProtocolError(f"frame has the length {length}, but {len(frame) - 4} bytes follow")
    _check_prefix(length, word, MAX_FRAME_BYTES)
    return _decode(memoryview(frame), 4, length, word)


def _decode(data: memoryview, start: int, length: int, word: int) -> RemotingCommand:
    """Decode the frame whose header word is at `start`; `length` counts from there."""
    body_start, end = start + 4 + (word & 0xFFFFFF), start + length
    body = bytes(data[body_start:end]) if body_start < end else b""
    return _decode_header(data[start + 4 : body_start], word >> 24, body)


def _decode_header(header: memoryview, header_type: int, body: bytes = b"") -> RemotingCommand:
    if header_type == JSON_HEADER:
        return _decode_json_header(header, body)
    if header_type == BINARY_HEADER:
        return _decode_binary_header(bytes(header), body)
    raise ProtocolError(f"header type {header_type} is unknown; 0 (JSON) and 1 (ROCKETMQ) are known")


def _decode_json_header(data: memoryview, body: bytes) -> RemotingCommand:
    if len(data) > _MAX_LENIENT_BYTES and bytes(data).count(b",") > _MAX_HEADER_VALUES:
        raise ProtocolError(f"header of {len(data)} bytes with more than {_MAX_HEADER_VALUES} values")
    try:
        header = orjson.loads(data)  # any depth is safe, because only `_text` and `_describe` read nested values
    except orjson.JSONDecodeError as error:
        if len(data) > _MAX_LENIENT_BYTES:
            raise ProtocolError(f"header of {len(data)} bytes is not JSON: {error!s:.100}") from None
        header = fastjson.loads_lenient(bytes(data))
    try:
        fields = header.get("extFields")
        command = RemotingCommand(
            header["code"],
            fields if fields is not None else {},
            body,
            header.get("opaque", 0),
            header.get("flag", 0),
            header.get("remark"),
            header.get("language") or "OTHER",
            header.get("version", 0),
        )
    except (KeyError, AttributeError) as error:
        raise ProtocolError(f"header is not a command: {bytes(data[:80])!r}") from error
    _check_types(command)
    return command


def _check_types(command: RemotingCommand) -> None:
    code, opaque, flag, fields, version = command.code, command.opaque, command.flag, command.fields, command.version
    if not (type(code) is type(opaque) is type(flag) is type(version) is int and type(fields) is dict):
        raise ProtocolError(
            f"header has a field of the wrong type: code={_describe(code)} opaque={_describe(opaque)} "
            f"flag={_describe(flag)} version={_describe(version)} extFields={_describe(fields)}"
        )
    if type(command.language) is not str or (command.remark is not None and type(command.remark) is not str):
        raise ProtocolError(
            f"header has a field of the wrong type: language={_describe(command.language)} "
            f"remark={_describe(command.remark)}"
        )
    if len(fields) > _MAX_FIELDS:
        raise ProtocolError(f"header of {len(fields)} fields; at most {_MAX_FIELDS} are read")
    for value in fields.values():
        if type(value) is not str:  # accept numbers and booleans, as Java does
            command.fields = {str(name): _text(value) for name, value in fields.items() if value is not None}
            break


def _describe(value: object) -> str:
    return f"{value!r:.20}" if isinstance(value, (int, float, str)) else type(value).__name__


def _text(value: object) -> str:
    return value if isinstance(value, str) else fastjson.dumps(value).decode()


def _decode_binary_header(data: bytes, body: bytes) -> RemotingCommand:
    try:
        code, language, version, opaque, flag, remark_length = _BINARY_FIXED.unpack_from(data)
        index = _BINARY_FIXED.size
        remark, index = _read_bytes(data, index, remark_length)
        (fields_length,) = struct.unpack_from(">i", data, index)
        entries, _ = _read_bytes(data, index + 4, fields_length)
        fields, index, left = {}, 0, _MAX_FIELDS
        while index < len(entries):
            if not left:
                raise ProtocolError(f"header of more than {_MAX_FIELDS} fields")
            left -= 1
            (name_length,) = struct.unpack_from(">h", entries, index)
            name, index = _read_bytes(entries, index + 2, name_length)
            (value_length,) = struct.unpack_from(">i", entries, index)
            value, index = _read_bytes(entries, index + 4, value_length)
            fields[name.decode()] = value.decode()
        return RemotingCommand(
            code,
            fields,
            body,
            opaque,
            flag,
            remark.decode() or None,
            LANGUAGE_NAMES.get(language, "OTHER"),
            version,
            BINARY_HEADER,
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"binary header of {len(data)} bytes is not a command: {error}") from error


def _read_bytes(data: bytes, start: int, length: int) -> tuple[bytes, int]:
    if length < 0 or start + length > len(data):
        raise ProtocolError(f"binary header wants {length} bytes at {start} of {len(data)}")
    return data[start : start + length], start + length


class FrameBuffer:
    """Splits a byte stream into commands, and keeps only incomplete ones.

    Receive bytes directly into it: write into `space()`, then call `read_commands()` with their number. It skips the
    body of a request above `largest_request`, unless that is a message, without keeping it in memory.
    """

    __slots__ = (
        "_buffer",
        "_view",
        "_start",
        "_end",
        "_max_frame_bytes",
        "_largest_request",
        "_is_accepted",
        "_bytes_to_skip",
    )

    INITIAL_BYTES = 512 * 1024
    MIN_SPACE_BYTES = 128 * 1024  # a wake-up for few bytes costs as much as one for many

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES, *, largest_request: int | None = None) -> None:
        self._buffer = bytearray(self.INITIAL_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._max_frame_bytes = max_frame_bytes
        self._largest_request = max_frame_bytes if largest_request is None else largest_request
        self._is_accepted = False  # whether the incomplete large frame is to be kept
        self._bytes_to_skip = 0  # further bytes of a frame that is not kept

    def space(self) -> memoryview:
        """Return free space for received bytes; never empty."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > 4 * self.INITIAL_BYTES:  # free the memory of an earlier large frame
                self._resize(self.INITIAL_BYTES)
        elif len(self._buffer) - self._end < self.MIN_SPACE_BYTES:
            self._make_space()
        return self._view[self._end :]

    def _make_space(self) -> None:
        held = self._end - self._start
        wanted = held + self.MIN_SPACE_BYTES
        if held >= 4:  # the length was checked when it arrived
            frame = 4 + int.from_bytes(self._view[self._start : self._start + 4])
            wanted = max(wanted, min(frame, 2 * len(self._buffer)))  # allocate only in proportion to the received bytes
        if wanted <= len(self._buffer):
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        else:
            self._resize(wanted + self.INITIAL_BYTES // 4)

    def _resize(self, size: int) -> None:
        held = bytes(self._view[self._start : self._end])
        self._buffer = bytearray(max(size, self.INITIAL_BYTES))
        self._view = memoryview(self._buffer)
        self._view[: len(held)] = held
        self._start, self._end = 0, len(held)

    def read_commands(self, count: int, most: int = sys.maxsize) -> list[RemotingCommand]:
        """Accept `count` bytes written into `space()`, and return the commands that are complete now.

        If it returns `most` commands, there may be more; `read_commands(0)` returns them.

        Raises:
            ProtocolError: the stream does not contain frames. It cannot be read any further.
        """
        self._end += count
        if self._bytes_to_skip:
            skipped = min(self._bytes_to_skip, self._end - self._start)
            self._start += skipped
            self._bytes_to_skip -= skipped
        commands: list[RemotingCommand] = []
        view, start, end = self._view, self._start, self._end
        unpack, size, max_frame_bytes = _PREFIX.unpack_from, _PREFIX.size, self._max_frame_bytes
        while end - start >= size and len(commands) < most:
            length, word = unpack(view, start)
            _check_prefix(length, word, max_frame_bytes)
            if length > self._largest_request and not self._is_accepted:
                request = self._skip_large_request(view[start + size : end], length, word)
                if request is not None:
                    commands.append(request)
                    start += 4 + length
                    self._bytes_to_skip = max(start - end, 0)
                    start = min(start, end)
                    continue
            if end - start < 4 + length:
                break
            commands.append(_decode(view, start + 4, length, word))
            start += 4 + length
            self._is_accepted = False
        self._start = start
        return commands

    def _skip_large_request(self, received: memoryview, length: int, word: int) -> RemotingCommand | None:
        """Return the command of a large request without its body, to skip the body.

        Return None if the frame is to be kept or its header is incomplete. `received` are the bytes of header and body
        so far.
        """
        header_bytes = word & 0xFFFFFF
        if len(received) < header_bytes:
            return None
        self._is_accepted = True
        command = _decode_header(received[:header_bytes], word >> 24)
        body_bytes = length - 4 - header_bytes
        if command.is_response or command.code in _MESSAGE_REQUESTS or body_bytes <= self._largest_request:
            return None
        self._is_accepted = False
        command.skipped_body_bytes = body_bytes
        return command


@dataclass(slots=True)
class BufferSlice:
    """The bytes of `data` from `start` to before `stop`. The owner of `data` may move them."""

    data: bytes | bytearray
    start: int
    stop: int

    @classmethod
    def whole(cls, data: bytes) -> BufferSlice:
        """Return all of `data`."""
        return cls(data, 0, len(data))

    def __len__(self) -> int:
        return self.stop - self.start

    def __bytes__(self) -> bytes:
        return bytes(memoryview(self.data)[self.start : self.stop])


class ZeroCopyFrames:
    """Splits a byte stream into commands like `FrameBuffer`, but does not copy their bodies.

    This saves copies of data that is read once and soon. A body stays valid until a `release_except()` that does not
    name it. No bytes are received into the last byte of `data`, so a reader of the bodies may overwrite it.
    """

    __slots__ = ("data", "_view", "_start", "_end", "_max_frame_bytes")

    INITIAL_BYTES = 4 * 1024 * 1024
    MIN_SPACE_BYTES = 256 * 1024

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self.data = bytearray(self.INITIAL_BYTES)
        self._view = memoryview(self.data)
        self._start = self._end = 0  # of the incomplete frame

    def _replace_buffer(self, size: int) -> None:
        """Receive into a new buffer from now on. Returned bodies keep the old one."""
        tail = bytes(self._view[self._start : self._end])
        self.data = bytearray(size)
        self._view = memoryview(self.data)
        self._view[: len(tail)] = tail
        self._start, self._end = 0, len(tail)

    def space(self) -> memoryview:
        """Return free space for received bytes; never empty."""
        if len(self.data) - 1 - self._end < self.MIN_SPACE_BYTES:
            held = self._end - self._start
            wanted = held + self.MIN_SPACE_BYTES
            if held >= 4:  # the length was checked when it arrived
                frame = 4 + int.from_bytes(self._view[self._start : self._start + 4])
                # A peer may announce a large frame and send little, so allocate in proportion to the received bytes.
                wanted = max(wanted, min(frame, 2 * len(self.data)))
            self._replace_buffer(max(wanted + self.MIN_SPACE_BYTES, self.INITIAL_BYTES))
        return self._view[self._end : -1]

    def read_commands(self, count: int) -> list[tuple[RemotingCommand, BufferSlice]]:
        """Accept `count` bytes written into `space()`, and return the commands that are complete now.

        Each command has an empty `body`, and comes with a slice of its body.

        Raises:
            ProtocolError: the stream does not contain frames. It cannot be read any further.
        """
        self._end += count
        found = []
        view, start, end = self._view, self._start, self._end
        unpack, size, max_frame_bytes = _PREFIX.unpack_from, _PREFIX.size, self._max_frame_bytes
        while end - start >= size:
            length, word = unpack(view, start)
            _check_prefix(length, word, max_frame_bytes)
            stop = start + 4 + length
            if stop > end:
                break
            body = start + size + (word & 0xFFFFFF)
            found.append((_decode_header(view[start + size : body], word >> 24), BufferSlice(self.data, body, stop)))
            start = stop
        self._start = start
        return found

    def release_except(self, wanted: Iterable[BufferSlice]) -> None:
        """Reuse the memory of returned bodies, except those in `wanted`, which are moved."""
        view, index = self._view, 0
        for extent in sorted((each for each in wanted if each.data is self.data), key=lambda each: each.start):
            size = len(extent)
            if extent.start != index:
                view[index : index + size] = view[extent.start : extent.stop]
                extent.start, extent.stop = index, index + size
            index += size
        tail = self._end - self._start
        if self._start != index:
            view[index : index + tail] = view[self._start : self._end]
            self._start, self._end = index, index + tail
        if not index and len(self.data) > 2 * self.INITIAL_BYTES and tail < self.MIN_SPACE_BYTES:
            self._replace_buffer(self.INITIAL_BYTES)  # free the memory of earlier large frames


def frame_error(address: str, damage: ProtocolError) -> ProtocolError:
    """Return the error for a peer that has sent something other than frames."""
    return ProtocolError(
        f"{address} sent data that is not a frame of RocketMQ's remoting protocol ({damage}); check the address. "
        "Another server listens there, such as an HTTP server or a gRPC proxy, or the network has damaged the data"
    )


def _check_prefix(length: int, word: int, max_frame_bytes: int) -> None:
    if not 4 <= length <= max_frame_bytes - 4:
        raise ProtocolError(
            f"frame of {length} bytes, beginning with {length.to_bytes(4)!r}; "
            f"4 to {max_frame_bytes - 4} are allowed (max_frame_bytes={max_frame_bytes}; pass more if servers send it)"
        )
    header = word & 0xFFFFFF
    if header > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {header} bytes; at most {MAX_HEADER_BYTES} are read")
    if 4 + header > length:
        raise ProtocolError(f"header of {header} bytes in a frame of {length}")


# --- signing


def sign(
    fields: dict[str, str], body: bytes, access_key: str, secret_key: str, security_token: str | None = None
) -> dict[str, str]:
    """Return `fields` with the access key and the signature. Call this last before a request is encoded.

    A field that is added later invalidates the signature. With the binary header, no field may be empty.
    """
    signed = {name: value for name, value in fields.items() if name != SIGNATURE}
    signed[ACCESS_KEY] = access_key
    if security_token:
        signed[SECURITY_TOKEN] = security_token
    signed[SIGNATURE] = signature(signed, body, secret_key)
    return signed


def signature(fields: dict[str, str], body: bytes, secret_key: str) -> str:
    """Return the signature of a request: HMAC-SHA1 over the values, sorted by name, and the body."""
    text = "".join(fields[name] for name in sorted(fields, key=_utf16) if name != SIGNATURE).encode()
    return base64.b64encode(hmac.new(secret_key.encode(), text + body, hashlib.sha1).digest()).decode()


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be")  # Java sorts by UTF-16 units
