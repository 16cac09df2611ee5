"""Bodies of messages, compressed and back: zlib, LZ4 frames, zstd. Source: CompressorFactory, MessageSysFlag."""

from __future__ import annotations

import threading
import zlib
from enum import StrEnum
from types import ModuleType

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.wire.codes import SysFlag

MAX_BODY_BYTES = 64 * 1024 * 1024
"""The longest body `decompress` gives; brokers take 4 MiB unless told otherwise."""


class Compression(StrEnum):
    """How a producer compresses bodies. zlib needs nothing installed, and every consumer reads it."""

    ZLIB = "zlib"
    LZ4 = "lz4"
    ZSTD = "zstd"


def compress(body: bytes, kind: Compression | str = Compression.ZLIB, level: int = 5) -> tuple[bytes, int]:
    """Return `body` compressed and the sysFlag bits that say how. `level` is for zlib and zstd.

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


def decompress(body: bytes, sys_flag: int, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the body a producer compressed; `body` itself when `sys_flag` says it did not.

    Raises:
        ProtocolError: the bytes are damaged, or hold more than `max_bytes`.
        ConfigError: the package for this compression is not installed; the text has the pip command.
    """
    if not sys_flag & SysFlag.COMPRESSED:
        return body
    kind = sys_flag & SysFlag.COMPRESSION_MASK
    if kind in (0, SysFlag.COMPRESSION_ZLIB):  # 0: written before 4.9.4
        plain = _decompress_zlib(body, max_bytes)
    elif kind == SysFlag.COMPRESSION_LZ4:
        plain = _decompress_lz4(body, max_bytes)
    elif kind == SysFlag.COMPRESSION_ZSTD:
        plain = _decompress_zstd(body, max_bytes)
    else:
        raise ProtocolError(f"compression type {kind >> 8} of sysFlag {sys_flag:#x} is unknown; 0 to 3 are known")
    if len(plain) > max_bytes:
        raise ProtocolError(f"compressed body of {len(body)} bytes holds more than {max_bytes}")
    return plain


def _damaged(kind: Compression, body: bytes, reason: object) -> ProtocolError:
    return ProtocolError(f"{kind} body of {len(body)} bytes cannot be decompressed: {reason}")


def _decompress_zlib(body: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise _damaged(Compression.ZLIB, body, error) from error
    if not stream.eof and len(plain) <= max_bytes:
        raise _damaged(Compression.ZLIB, body, "it is cut short")
    return plain


def _decompress_lz4(body: bytes, max_bytes: int) -> bytes:
    stream = _lz4().LZ4FrameDecompressor()
    parts: list[bytes] = []
    length, room = 0, 8 * len(body) + 1024  # it takes the room it is given, so a little at first
    try:
        while length <= max_bytes:
            parts.append(stream.decompress(b"" if parts else body, min(room, max_bytes + 1 - length)))
            length += len(parts[-1])
            if stream.eof or not parts[-1]:
                break
            room *= 8
    except RuntimeError as error:
        raise _damaged(Compression.LZ4, body, error) from error
    if not stream.eof and length <= max_bytes:
        raise _damaged(Compression.LZ4, body, "it is cut short")
    if stream.unused_data and stream.unused_data.startswith(_LZ4_MAGIC):  # no writer does it; nothing may get lost
        raise _damaged(Compression.LZ4, body, "it is more than one frame")
    return b"".join(parts)


_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_ZSTD_INPUT_BYTES = 1024
"""Input given at a time. A block of 4 bytes can hold 128 KiB, so this is what bounds the memory beyond `max_bytes`."""

_contexts = threading.local()  # a context costs more than most bodies, and serves one thread at a time


def _decompress_zstd(body: bytes, max_bytes: int) -> bytes:
    zstd = _zstd()
    context = getattr(_contexts, "zstd", None)
    if context is None:
        context = _contexts.zstd = zstd.ZstdDecompressor(max_window_size=MAX_BODY_BYTES)
    parts: list[bytes] = []
    start = length = 0
    complete = False
    try:
        while start < len(body) and not (complete and body[start : start + 4] != _ZSTD_MAGIC) and length <= max_bytes:
            # Streams, because Java writes no content size; more than one, because a body may be several frames.
            stream = context.decompressobj()
            while start < len(body) and not stream.eof and length <= max_bytes:
                piece = body[start : start + _ZSTD_INPUT_BYTES]
                parts.append(stream.decompress(piece))
                length += len(parts[-1])
                start += len(piece) - len(stream.unused_data)
            complete = stream.eof
    except zstd.ZstdError as error:
        raise _damaged(Compression.ZSTD, body, error) from error
    if not complete and length <= max_bytes:
        raise _damaged(Compression.ZSTD, body, "it is cut short")
    return b"".join(parts)


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
