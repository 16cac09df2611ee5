import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.protocol.ids import (
    UniqueIds,
    decode_host,
    encode_host,
    offset_message_id,
    parse_offset_message_id,
)
from tests.for_each import for_each
from tests.protocol.records import hosts


@for_each(
    "host, message_id",
    [
        ("10.0.0.1", "0A00000100002A9F0000000000001000"),
        ("2001:db8::1", "20010DB800000000000000000000000100002A9F0000000000001000"),
    ],
)
def test_an_offset_id_contains_the_location_of_a_message(host, message_id):
    assert offset_message_id(host, 10911, 4096) == message_id
    assert parse_offset_message_id(message_id) == parse_offset_message_id(message_id.lower()) == (host, 10911, 4096)


@given(st.ip_addresses(), st.integers(0, 65535), st.integers(0, 2**63 - 1))
def test_offset_ids_come_back(host, port, offset):
    assert parse_offset_message_id(offset_message_id(str(host), port, offset)) == (str(host), port, offset)


@for_each("text", ["", "0A", "0A00000100002A9F000000000000100", "0A00000100002A9F 0000000000001000", "é" * 32])
def test_an_invalid_offset_id_is_refused(text):
    with pytest.raises(ProtocolError, match="hexadecimal"):
        parse_offset_message_id(text)


@pytest.fixture
def time_zone(monkeypatch):
    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@for_each(
    "zone, expected", [("UTC0", "0A000009126718B4AAC247B76000002A"), ("CST-8", "0A000009126718B4AAC2496ED400002A")]
)
def test_a_unique_key_holds_address_process_time_and_counter(time_zone, zone, expected):
    time_zone(zone)
    ids = UniqueIds("10.0.0.9", 4711, 0x18B4AAC2, clock=lambda: 1_700_000_000.0)
    made = [ids.next() for _ in range(43)]
    assert made[0] == expected[:-4] + "0000"
    assert made[42] == expected


def test_the_time_restarts_with_each_month(time_zone):
    time_zone("UTC0")
    now = 1_701_388_799.999  # one millisecond before December 2023
    ids = UniqueIds("10.0.0.9", 1, 0, clock=lambda: now)
    assert int(ids.next()[20:28], 16) == 30 * 86_400_000 - 1
    now += 0.001
    assert int(ids.next()[20:28], 16) == 0
    now = 1_704_067_200.0  # and the year
    assert int(ids.next()[20:28], 16) == 0
    now = 1_698_796_800.0 + 5  # a clock set back
    assert int(ids.next()[20:28], 16) == 5000


def test_the_counter_wraps():
    ids = UniqueIds("10.0.0.9", 1, 0, clock=lambda: 1_700_000_000.0)
    made = [ids.next() for _ in range(65_537)]
    assert made[65_535].endswith("FFFF")
    assert made[65_536] == made[0]


def test_ids_of_an_ipv6_host_are_longer_and_a_process_id_is_cut():
    made = UniqueIds("2001:db8::1", 0x12345, 7, clock=lambda: 1_700_000_000.0).next()
    assert len(made) == 56
    assert made.startswith("20010DB80000000000000000000000012345" + "00000007")


@pytest.mark.live
def test_threads_never_get_the_same_id():
    ids = UniqueIds("10.0.0.9", 1)
    with ThreadPoolExecutor(4) as threads:
        made = threads.map(lambda _: [ids.next() for _ in range(2000)], range(4))
    assert len({message_id for mine in made for message_id in mine}) == 8000


@given(hosts)
def test_hosts_come_back(host):
    assert decode_host(encode_host(host)) == host


@for_each("text", ["", "10.0.0.1", "localhost:10911", "10.0.0.1:x", "10.0.0.1:-1", "10.0.0:1"])
def test_an_invalid_host_is_refused(text):
    with pytest.raises(ConfigError, match=r"is not like 10\.0\.0\.1:10911"):
        encode_host(text)
