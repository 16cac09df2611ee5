"""Compression of message bodies: zlib, LZ4 frames, zstd. Source: CompressorFactory, MessageSysFlag."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import ModuleType

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.protocol.codes import SysFlag

MAX_BODY_BYTES = 64 * 1024 * 1024
"""The default limit of a decompressed body. By default brokers accept messages of up to 4 MiB."""


class Compression(StrEnum):
    """The compression that a producer uses. zlib needs no package, and every consumer reads it."""

    ZLIB = "zlib"
    LZ4 = "lz4"
    ZSTD = "zstd"


def compress(body: bytes, kind: Compression | str = Compression.ZLIB, level: int = 5) -> tuple[bytes, int]:
    """Return the compressed `body` and the sysFlag bits of the compression. `level` is for zlib and zstd.

    Raises:
        ConfigError: `kind` is unknown, or its package is not installed; the text has the pip command.
    """
    try:
        kind = Compression(kind)
    except ValueError:
        raise ConfigError(f"compression {kind!r} is unknown; 'zlib', 'lz4' and 'zstd' are known") from None
    if kind is Compression.ZLIB:
        return zlib.compress(body, level), SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZLIB
    if kind is Compression.LZ4:
        compressed: bytes = _lz4().compress(body)
        return compressed, SysFlag.COMPRESSED | SysFlag.COMPRESSION_LZ4
    compressed = _zstd().ZstdCompressor(level=level).compress(body)
    return compressed, SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZSTD


class BodyTooLarge(ProtocolError):
    """A message contains more bytes than the reader allows, so the reader can never read it."""


def decompress(body: bytes, sys_flag: int, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the decompressed body; `body` itself if `sys_flag` has no compression.

    Raises:
        ProtocolError: the bytes are damaged; or contain more than `max_bytes`, which is a BodyTooLarge.
        ConfigError: the package for this compression is not installed; the text has the pip command.
    """
    if not sys_flag & SysFlag.COMPRESSED:
        return body
    parts, length, suspicious = list[bytes](), 0, _USUAL_RATIO * len(body) + _PIECE_BYTES
    for piece in _pieces_reader(sys_flag)(body, min(suspicious, max_bytes) + 1):
        length += len(piece)
        if length > max_bytes:
            parts.clear()  # the traceback of the error keeps this frame alive
            raise _too_large(body, max_bytes)
        parts.append(piece)
        if length > suspicious:
            del piece
            parts.clear()
            return _decompress_to_size(body, sys_flag, max_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decompressed_size(body: bytes, sys_flag: int, max_bytes: int = MAX_BODY_BYTES) -> int:
    """Return the size of the decompressed body without keeping it in memory. Raises the same as `decompress`."""
    if not sys_flag & SysFlag.COMPRESSED:
        return len(body)
    length = 0
    for piece in _pieces_reader(sys_flag)(body, _PIECE_BYTES):
        length += len(piece)
        if length > max_bytes:
            raise _too_large(body, max_bytes)
    return length


_USUAL_RATIO = 64
"""A body with a larger ratio is measured first, because allocators keep the memory of many pieces for each thread."""


def _decompress_to_size(body: bytes, sys_flag: int, max_bytes: int) -> bytes:
    size = decompressed_size(body, sys_flag, max_bytes)
    kind = sys_flag & _KIND
    if kind == SysFlag.COMPRESSION_ZSTD:
        plain: bytes = _zstd().ZstdDecompressor(max_window_size=MAX_BODY_BYTES).decompress(body, max_output_size=size)
        if len(plain) == size:  # else the body has several frames
            return plain
    elif kind != SysFlag.COMPRESSION_LZ4:
        return zlib.decompress(body, bufsize=size)
    buffer, index = bytearray(size), 0
    with memoryview(buffer) as view:
        for piece in _pieces_reader(sys_flag)(body, _PIECE_BYTES):
            view[index : index + len(piece)] = piece
            index += len(piece)
    return bytes(buffer)


_MAX_RATIO = {
    0: 1032,
    SysFlag.COMPRESSION_ZLIB: 1032,
    SysFlag.COMPRESSION_LZ4: 255,
    SysFlag.COMPRESSION_ZSTD: 32768,
}
"""The largest ratio of decompressed to compressed bytes, by compression."""


def max_decompressed_size(stored_bytes: int, sys_flag: int) -> int:
    """Return the most bytes that a body of `stored_bytes` can contain. This is fast, but far above the usual size."""
    return (stored_bytes + 64) * _MAX_RATIO.get(sys_flag & SysFlag.COMPRESSION_MASK, 1)


def _too_large(body: bytes, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"compressed body of {len(body)} bytes holds more than {max_bytes}")


def _pieces_reader(sys_flag: int) -> Callable[[bytes, int], Iterator[bytes]]:
    """Return a function that decompresses a body in pieces of about the requested size."""
    found = _PIECES.get(sys_flag & _KIND)
    if found is None:
        kind = (sys_flag & _KIND) >> 8
        raise ProtocolError(f"compression type {kind} of sysFlag {sys_flag:#x} is unknown; 0 to 3 are known")
    return found


def _damaged(kind: Compression, body: bytes, reason: object) -> ProtocolError:
    return ProtocolError(f"{kind} body of {len(body)} bytes cannot be decompressed: {reason}")


def _zlib_pieces(body: bytes, piece_bytes: int) -> Iterator[bytes]:
    stream, rest = zlib.decompressobj(), body
    try:
        while not stream.eof:
            piece = stream.decompress(rest, piece_bytes)
            yield piece
            rest = stream.unconsumed_tail
            if not stream.eof and not rest and len(piece) < piece_bytes:
                raise _damaged(Compression.ZLIB, body, "it is cut short")
    except zlib.error as error:
        raise _damaged(Compression.ZLIB, body, error) from error


def _lz4_pieces(body: bytes, piece_bytes: int) -> Iterator[bytes]:
    stream = _lz4().LZ4FrameDecompressor()
    space, rest = 8 * len(body) + 1024, body  # it allocates all the space that it may use, so begin with a little
    try:
        while not stream.eof:
            piece = stream.decompress(rest, min(space, piece_bytes))
            yield piece
            if not stream.eof and not piece:
                raise _damaged(Compression.LZ4, body, "it is cut short")
            rest = b""
            space *= 8
    except RuntimeError as error:
        raise _damaged(Compression.LZ4, body, error) from error
    # No writer appends a second frame. An error is safer than a body without its end.
    if stream.unused_data and stream.unused_data.startswith(_LZ4_MAGIC):
        raise _damaged(Compression.LZ4, body, "it is more than one frame")


_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_PIECE_BYTES = 256 * 1024

_ZSTD_INPUT_BYTES = 1024
"""The most input per call. A block of 4 bytes can contain 128 KiB, so this limits the memory above `max_bytes`."""

_ZSTD_KEPT_BYTES = 8 * 1024 * 1024
"""A context keeps the memory of its largest frame. After a larger frame than this, the context is dropped."""

_contexts = threading.local()  # to create a context costs more than most bodies; only one thread may use it


def _zstd_pieces(body: bytes, piece_bytes: int) -> Iterator[bytes]:
    input_bytes = min(_ZSTD_INPUT_BYTES, max(len(body) // 8, 64)) if piece_bytes > _PIECE_BYTES else 32
    zstd = _zstd()
    context = getattr(_contexts, "zstd", None)
    if context is None:
        context = _contexts.zstd = zstd.ZstdDecompressor(max_window_size=MAX_BODY_BYTES)
    start = length = 0
    complete = False
    try:
        while start < len(body) and not (complete and body[start : start + 4] != _ZSTD_MAGIC):
            # Use streams, because Java writes no content size; several, because a body may have several frames.
            stream = context.decompressobj()
            while start < len(body) and not stream.eof:
                piece = body[start : start + input_bytes]
                plain = stream.decompress(piece)
                length += len(plain)
                yield plain
                start += len(piece) - len(stream.unused_data)
            complete = stream.eof
    except zstd.ZstdError as error:
        raise _damaged(Compression.ZSTD, body, error) from error
    finally:
        if length > _ZSTD_KEPT_BYTES:
            _contexts.zstd = None
    if not complete:
        raise _damaged(Compression.ZSTD, body, "it is cut short")


_KIND = int(SysFlag.COMPRESSION_MASK)
_PIECES: dict[int, Callable[[bytes, int], Iterator[bytes]]] = {
    0: _zlib_pieces,  # clients before 4.9.4 set no compression type
    int(SysFlag.COMPRESSION_ZLIB): _zlib_pieces,
    int(SysFlag.COMPRESSION_LZ4): _lz4_pieces,
    int(SysFlag.COMPRESSION_ZSTD): _zstd_pieces,
}


def _lz4() -> ModuleType:
    try:
        import lz4.frame
    except ImportError as error:
        raise _missing("lz4") from error
    module: ModuleType = lz4.frame
    return module


def _zstd() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise _missing("zstd") from error
    return zstandard


def _missing(extra: str) -> ConfigError:
    return ConfigError(f"{extra} compression is not installed: pip install pyrocket-consumer[{extra}]")
