"""An eager reader of records, independent of the product, for comparisons; and records to read."""

from __future__ import annotations

import ipaddress
from collections import namedtuple

from hypothesis import strategies as st

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import StoredMessage

QUEUE = MessageQueue("orders", "broker-a", 3)

WORKED_RECORD = bytes.fromhex(
    "00000092 daa320a7 58932aac 00000003 00000000"
    "000000000000002a 0000000000001000 00000000"
    "0000018bcfe56800 0a000009 0000c350"
    "0000018bcfe56805 0a000001 00002a9f"
    "00000000 0000000000000000"
    "00000002 6869"
    "01 54"
    "0034 544147530154616741 02"
    "554e49515f4b455901304130303030303931323637313842344141433230303030303030303030324102"
)
"""Topic T, body hi, queue 3, queue offset 42; 146 bytes."""

ODD_PROPERTIES = [
    b"",
    b"\x01",
    b"\x02",
    b"\x01\x02",
    b"a\x01\x02",
    b"\x01b\x02",
    b"a\x01b",
    b"a\x01b\x02c",
    b"a\x01b\x01c\x02",
    b"a",
    b"\xff",
    b"TAGS\x01b\x02TAGS\x01\x02",
    b"TAGS\x01\x02TAGS\x01b\x02",
    b"TAGS\x01b\x02a\x01b\x02TAGS\x01cd\x02",
    b"a\x01b\x02a\x01c\x02",
    b"a\x01b\x02a\x01\x02",
    b"a\x01\x02a\x01b\x02",
    b"a\x01b\x02\x02\x02c\x01d\x02",
    b"\xff\x01\xfe\x02",
    b"\xe2\x82\x01a\x02",
    b"a\x01\xf0\x9f\x98\x02b\x01\xf0\x9f\x98\x80\x02",
    b"TAGS\x01\xf0\x9f\x98\x80\x02",
    b"a\x01\xed\xa0\x80\x02",
    b"a\x01\xed\x9f\xbf\x02",
    b"a\x01\xe0\x9f\xbf\x02",
    b"a\x01\xf4\x8f\xbf\xbf\x02",
    b"a\x01\xf4\x90\x80\x80\x02",
    b"a\x01\xf0\x8f\xbf\xbf\x02",
    b"a\x01\xc0\x80\x02",
    b"\xff\x01one\x02\xfe\x01two\x02",
    *(b"n" * count + b"\x01v\x02" for count in (47, 48, 300)),
    b"TAGS\x01" + b"x" * 65_530,
]
"""Properties as no sender should write them."""


Record = namedtuple(
    "Record",
    "data magic body_crc queue_id flag queue_offset commit_log_offset sys_flag born_at_ms born_host stored_at_ms"
    " store_host reconsume_times prepared_transaction_offset stored_body topic properties_text",
)
"""The parts of a record in their order."""


class _Reader:
    def __init__(self, data: bytes, start: int) -> None:
        self.data, self.position = data, start

    def bytes(self, length: int) -> bytes:
        self.position += length
        assert self.position <= len(self.data)
        return self.data[self.position - length : self.position]

    def number(self, length: int, signed: bool = True) -> int:
        return int.from_bytes(self.bytes(length), "big", signed=signed)

    def host(self, v6: int) -> str:
        ip = ipaddress.ip_address(self.bytes(16 if v6 else 4))
        return f"[{ip}]:{self.number(4)}" if v6 else f"{ip}:{self.number(4)}"


def read_records(data: bytes) -> list[Record]:
    """Return every record in `data` with all its fields."""
    records, start = [], 0
    while start < len(data):
        reader = _Reader(data, start)
        size, magic = reader.number(4), reader.number(4, signed=False)
        crc, queue_id, flag, queue_offset = reader.number(4), reader.number(4), reader.number(4), reader.number(8)
        commit_log_offset, sys_flag, born_at_ms = reader.number(8), reader.number(4), reader.number(8)
        born_host, stored_at_ms, store_host = reader.host(sys_flag & 16), reader.number(8), reader.host(sys_flag & 32)
        reconsume_times, prepared, body = reader.number(4), reader.number(8), reader.bytes(reader.number(4))
        topic = reader.bytes(reader.number(1 if magic == 0xDAA320A7 else 2)).decode()
        properties = reader.bytes(reader.number(2)).decode()
        assert reader.position == start + size
        records.append(
            Record(
                data[start : reader.position],
                magic,
                crc,
                queue_id,
                flag,
                queue_offset,
                commit_log_offset,
                sys_flag,
                born_at_ms,
                born_host,
                stored_at_ms,
                store_host,
                reconsume_times,
                prepared,
                body,
                topic,
                properties,
            )
        )
        start = reader.position
    return records


def read_properties(text: str) -> dict[str, str]:
    """Return the properties in `text` by the rules of Java's reader, step by step."""
    properties = {}
    index = 0
    while index < len(text):
        end = text.find("\x02", index)
        if end < 0:
            end = len(text)
        if end - index >= 3:
            separator = text.find("\x01", index)
            if index < separator < end - 1:
                properties[text[index:separator]] = text[separator + 1 : end]
        index = end + 1
    return properties


characters = st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"])
property_maps = st.dictionaries(st.text(characters, min_size=1), st.text(characters, min_size=1), max_size=8)
i32 = st.integers(-(2**31), 2**31 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
times_ms = st.integers(0, 4_000_000_000_000)
hosts = st.one_of(
    st.builds("{}:{}".format, st.ip_addresses(v=4), st.integers(0, 65535)),
    st.builds("[{}]:{}".format, st.ip_addresses(v=6), st.integers(0, 65535)),
)
topics = st.text("ABCxyz019_-%|", min_size=1, max_size=300)


def stored_messages() -> st.SearchStrategy[StoredMessage]:
    """Return messages with any value that a record can have, not compressed."""
    return st.builds(
        StoredMessage,
        topic=topics,
        body=st.binary(max_size=300),
        properties=property_maps,
        queue_id=i32,
        queue_offset=i64,
        commit_log_offset=i64,
        flag=i32,
        sys_flag=st.sampled_from([0, 2, 4, 8, 12, 64, 128, 0x300, 0x700]),
        born_at_ms=times_ms,
        born_host=hosts,
        stored_at_ms=times_ms,
        store_host=hosts,
        reconsume_times=i32,
        prepared_transaction_offset=i64,
    )
