import subprocess
import sys
import zlib

import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.compression import BodyTooLarge, Compression, compress, decompress, decompressed_size
from tests.for_each import for_each

KINDS = list(Compression)
ZLIB, LZ4, ZSTD = 0x301, 0x101, 0x201

# From Java's compressors.
JAVA_LZ4_HI = bytes.fromhex("04224d186070730200008068690000 0000")
JAVA_LZ4_50X = bytes.fromhex("04224d186070730b0000001f7801001950787878787800000000")
JAVA_ZSTD_50X = bytes.fromhex("28b52ffd0058440000107878010045000b010000")


@for_each(
    "body, sys_flag, plain",
    [
        (JAVA_LZ4_HI, LZ4, b"hi"),
        (JAVA_LZ4_50X, LZ4, b"x" * 50),
        (JAVA_ZSTD_50X, ZSTD, b"x" * 50),
        (zlib.compress(b"hi", 5), ZLIB, b"hi"),
        (zlib.compress(b"hi", 5), SysFlag.COMPRESSED, b"hi"),  # written before 4.9.4
        (b"hi", 0, b"hi"),
        (b"hi", SysFlag.COMPRESSION_LZ4, b"hi"),  # the type without COMPRESSED has no effect
    ],
)
def test_bodies_of_java_producers_are_read(body, sys_flag, plain):
    assert decompress(body, sys_flag) == plain


@given(st.sampled_from(KINDS), st.binary(max_size=2000) | st.binary(max_size=20).map(lambda part: part * 5000))
@settings(max_examples=90, deadline=None)
def test_what_is_compressed_comes_back(kind, body):
    compressed, flags = compress(body, kind)
    assert flags == {"zlib": ZLIB, "lz4": LZ4, "zstd": ZSTD}[kind]
    assert decompress(compressed, flags) == body


def test_a_body_of_several_frames_is_read_to_its_end_or_refused():
    first, second = zstandard.compress(b"a" * 3000), zstandard.compress(bytes(range(256)) * 20)
    assert decompress(first + second, ZSTD) == b"a" * 3000 + bytes(range(256)) * 20
    with pytest.raises(ProtocolError, match="cut short"):
        decompress(first + second[:-1], ZSTD)
    with pytest.raises(ProtocolError, match="more than one frame"):
        decompress(JAVA_LZ4_HI + JAVA_LZ4_HI, LZ4)


def test_bytes_after_the_end_are_ignored_and_zlib_is_as_in_java():
    assert compress(b"hi")[0].startswith(b"\x78\x5e")
    for kind in KINDS:
        compressed, flags = compress(b"hello", kind)
        assert decompress(compressed + b"\0\0", flags) == b"hello"


@for_each("kind", KINDS)
def test_a_damaged_body_is_refused_and_the_next_one_is_read(kind):
    body = bytes(range(256)) * 40
    compressed, flags = compress(body, kind)
    for damaged in [b"", b"garbage", compressed[:4], compressed[:-1], compressed[: len(compressed) // 2]]:
        with pytest.raises(ProtocolError, match=f"{kind} body of {len(damaged)} bytes cannot be decompressed"):
            decompress(damaged, flags)
        assert decompress(compressed, flags) == body


@for_each("kind", KINDS)
def test_the_body_limit_is_exact_also_for_measured_sizes(kind):
    compressed, flags = compress(b"x" * 100_000, kind)
    assert len(decompress(compressed, flags, max_bytes=100_000)) == 100_000
    for limit in (99_999, 5000, 1, 0):
        with pytest.raises(ProtocolError, match=f"holds more than {limit}"):
            decompress(compressed, flags, max_bytes=limit)
    body, flags = compress(bytes(range(256)) * 4096, kind)
    assert decompressed_size(body, flags) == 1 << 20
    with pytest.raises(BodyTooLarge, match="holds more than 1000"):
        decompressed_size(body, flags, 1000)


def test_an_unknown_kind_is_refused():
    for kind in (0x400, 0x500, 0x600, 0x700):
        with pytest.raises(ProtocolError, match=f"compression type {kind >> 8} "):
            decompress(b"hi", kind | SysFlag.COMPRESSED)
    with pytest.raises(ConfigError, match="'zlib', 'lz4' and 'zstd'"):
        compress(b"hi", "brotli")


@for_each("module, extra, sys_flag", [("lz4.frame", "lz4", LZ4), ("zstandard", "zstd", ZSTD)])
def test_without_the_package_the_error_names_it(monkeypatch, module, extra, sys_flag):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    command = rf"pip install pyrocket-consumer\[{extra}\]"
    with pytest.raises(ConfigError, match=command):
        decompress(b"x", sys_flag)
    with pytest.raises(ConfigError, match=command):
        compress(b"x", extra)
    assert decompress(*compress(b"x")) == b"x"  # zlib needs nothing


BOMB = """
import resource, sys
from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.compression import decompress
import lz4.frame, zstandard
body, sys_flag = sys.stdin.buffer.read(), int(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decompress(body, sys_flag)
except ProtocolError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


def _zeros(compressor, mebibytes):
    begin = compressor.begin() if hasattr(compressor, "begin") else b""
    parts = [compressor.compress(bytes(1 << 20)) for _ in range(mebibytes)]
    return begin + b"".join(parts) + compressor.flush()


@pytest.mark.live
@pytest.mark.slow("each packs 400 MB")
@for_each(
    "make_body, sys_flag",
    [
        (lambda: _zeros(zlib.compressobj(9), 400), ZLIB),
        (lambda: _zeros(lz4.frame.LZ4FrameCompressor(), 400), LZ4),
        (lambda: _zeros(zstandard.ZstdCompressor().compressobj(), 400), ZSTD),
        (lambda: b"\x28\xb5\x2f\xfd\x00\x58" + b"\x02\x00\x10x" * 100_000, ZSTD),  # 4 bytes hold 128 KiB
    ],
    ids=["zlib", "lz4", "zstd", "zstd of repeats"],
)
def test_a_decompression_bomb_takes_memory_up_to_the_limit(make_body, sys_flag):
    child = subprocess.run(
        [sys.executable, "-c", BOMB, str(sys_flag)], input=make_body(), capture_output=True, timeout=60, check=True
    )
    grown_kib, _, error = child.stdout.decode().partition(" ")
    assert "holds more than 67108864" in error
    assert int(grown_kib) < 300 * 1024
