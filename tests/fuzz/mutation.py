"""Random inputs: real ones with bytes changed, joined or repeated, and with other numbers and words."""

from __future__ import annotations

import random
from collections.abc import Sequence

MAX_BYTES = 64 * 1024

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    31,
    32,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)

WORDS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b'"',
    b"\\",
    b"{{",
    b"[[[[[[[[",
    b'{"a":' * 20,
    b"[" * 1000 + b"]" * 1000,
    b'{"a":' * 600 + b"1" + b"}" * 600,
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e999",
    b"-9223372036854775808",
    b"9223372036854775807",
    b"9223372036854775808",
    b"99999999999999999999",
    b"1" * 5000,
    b"NaN",
    b"\\ud800",
    b"\\u0000",
    b"[]",
    b"{}",
    b'"x"',
    b'""',
    b"0.5",
    b"\x00",
    b"\x01",
    b"\x02",
    b"\xff",
    b"\x1b[2J",
    b"\r\n",
    b'"offsetTable":{',
    b'"brokerName":',
    b'"queueId":',
    b'"topic":',
    b'"extFields":{',
    b'"code":',
    b'"queueDatas":[',
    b'"brokerAddrs":{',
    b'"0":',
    b"\xda\xa3\x20\xa7",
    b"\xda\xa3\x20\xab",
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
    b"\x78\x9c",
)


class Mutator:
    """Makes inputs from `originals`. The same seed makes the same inputs in the same order."""

    def __init__(self, originals: Sequence[bytes], seed: int) -> None:
        self._originals = list(originals) or [b""]
        self._random = random.Random(seed)

    def next(self) -> bytes:
        """Return the next input."""
        chance = self._random.random
        originals = self._originals
        data = bytearray(originals[int(chance() * len(originals))])
        for _ in range(1 + int(chance() * chance() * 8)):
            self._change(data)
        return bytes(data[:MAX_BYTES])

    def changed(self, data: bytes, most_bytes: int) -> bytes:
        """Return `data` with one change, at most `most_bytes` long."""
        result = bytearray(data)
        self._change(result)
        return bytes(result[:most_bytes])

    def _change(self, data: bytearray) -> None:
        chance = self._random.random
        size = len(data)
        at = int(chance() * (size + 1))
        match int(chance() * 9):
            case 0 if size:
                data[at % size] = int(chance() * 256)
            case 1 if size:
                data[at % size] ^= 1 << int(chance() * 8)
            case 2:
                del data[at : at + 1 + int(chance() * chance() * 64)]
            case 3:
                data[at:at] = WORDS[int(chance() * len(WORDS))]
            case 4:
                word = WORDS[int(chance() * len(WORDS))]
                data[at : at + len(word)] = word
            case 5:
                width = (1, 2, 4, 8)[int(chance() * 4)]
                number = NUMBERS[int(chance() * len(NUMBERS))] & ((1 << 8 * width) - 1)
                data[at : at + width] = number.to_bytes(width, "little" if chance() < 0.2 else "big")
            case 6:  # insert a part of another input
                other = self._originals[int(chance() * len(self._originals))]
                begin = int(chance() * (len(other) + 1))
                data[at : at + int(chance() * 40)] = other[begin : begin + int(chance() * 200)]
            case 7:  # repeat a part
                piece = bytes(data[at : at + 1 + int(chance() * 32)])
                data[at:at] = piece * int(1 + chance() * chance() * 100)
            case _:
                del data[at:]
