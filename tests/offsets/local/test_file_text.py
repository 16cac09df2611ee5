"""H42: offsets.json as each client and each release writes it, and damaged texts.

The store reads the file of every client, and writes it as Java does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyrocket_consumer import MessageQueue, OffsetStoreCorrupt, ProtocolError
from pyrocket_consumer.offsets import LocalFileOffsetStore, MemoryOffsetStore, QueueReset
from pyrocket_consumer.offsets.local.offsets_json import decode_checkpoint
from tests.consuming import consuming, until
from tests.for_each import for_each
from tests.hazards.members import faulty
from tests.offsets.local.driving import encode_offsets, put
from tests.real_brokers import JavaOffsetStore

TOPIC, BROKER = "broadcast-test-topic", "broker-a"
IP = "127.0.0.1"

OURS = LocalFileOffsetStore
MakeStore = Callable[[Path], Any]
Offsets = dict[int, int]
"""The offset of each queue id, in the order of the text."""

SAMPLE = {2: 102, 1: 101, 0: 100}


def key(queue_id: int, indent: str = "") -> str:
    return f'{{{indent}"brokerName":"{BROKER}",{indent}"queueId":{queue_id},{indent}"topic":"{TOPIC}"'


def fastjson(offsets: Offsets, before: str) -> bytes:
    entries = ",".join(before + key(each, "\n\t\t\t") + f"\n\t\t}}:{offset}" for each, offset in offsets.items())
    return ('{\n\t"offsetTable":{' + entries + "\n\t}\n}").encode()


def fastjson_1(offsets: Offsets) -> bytes:
    """As Java up to 5.3 writes it."""
    return fastjson(offsets, "")


def fastjson_2(offsets: Offsets) -> bytes:
    """As Java from 5.4 on writes it."""
    return fastjson(offsets, "\n\t\t")


def go(offsets: Offsets) -> bytes:
    """As the Go client writes it. Each key is a string with JSON in it."""
    entries = ",".join(f"{json.dumps(key(queue_id) + '}')}:{offset}" for queue_id, offset in offsets.items())
    return ('{"offsetTable":{' + entries + "}}").encode()


def compact(offsets: Offsets) -> bytes:
    """As in the bodies of requests."""
    return re.sub(rb"\s", b"", fastjson_1(offsets))


FIELDS = rb'("brokerName":"[^"]*"),("queueId":\d+)'
SPELLINGS: dict[str, Callable[[Offsets], bytes]] = {
    "fastjson 1": fastjson_1,
    "fastjson 2": fastjson_2,
    "compact": compact,
    "Go": go,
    "with a last line end": lambda offsets: fastjson_1(offsets) + b"\n",
    "byte order mark": lambda offsets: b"\xef\xbb\xbf" + fastjson_1(offsets),
    "byte order mark of Go": lambda offsets: b"\xef\xbb\xbf" + go(offsets),
    "CRLF": lambda offsets: fastjson_2(offsets).replace(b"\n", b"\r\n") + b"\r\n",
    "spaces": lambda offsets: compact(offsets).replace(b":", b" : ").replace(b",", b" , "),
    "other order of fields": lambda offsets: re.sub(FIELDS, rb'\2,"new":[{}],\1', compact(offsets)),
    "another order in one": lambda offsets: re.sub(FIELDS, rb'\2,"x":[null],\1', compact(offsets), count=1),
    "Go in another order": lambda offsets: re.sub(FIELDS.replace(b'"', rb'\\"'), rb"\2,\1", go(offsets), count=1),
    "another table": lambda offsets: compact(offsets)[:-1] + b',"version":3}',
    "escapes": lambda offsets: compact(offsets).replace(b"broker-a", b"\\u0062roker-a"),
}


def test_the_golden_texts_are_the_ones_java_wrote():
    assert hashlib.sha1(fastjson_1(SAMPLE)).hexdigest() == "7f7bd5a107ba54fb156602eae970a828dcb96981"
    assert hashlib.sha1(fastjson_2(SAMPLE)).hexdigest() == "1c7454a2ebb2b249dcdeefaecedee627090dc0e0"


def test_the_text_is_byte_for_byte_that_of_java():
    assert encode_offsets(table(SAMPLE)) == fastjson_1(SAMPLE)
    assert encode_offsets({}) == b'{\n\t"offsetTable":{}\n}'


@for_each("count", [255, 256, 257, 1000])
def test_large_tables_are_one_entry_after_the_other(count):
    offsets = {number: number for number in range(count)}
    in_text = {MessageQueue(TOPIC, "broker-%d", number): number for number in offsets}
    assert encode_offsets(in_text) == fastjson_1(offsets).replace(BROKER.encode(), b"broker-%d")


class FileOfAnotherClient(MemoryOffsetStore):
    """Reads offsets.json at the start, as other clients do. They differ in `parse` and `number`."""

    number: Callable[[bytes], int] = staticmethod(int)

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._file = directory / "offsets.json"

    def load(self) -> None:
        for queue, offset in self.parse(self._file.read_bytes()).items():
            self.update_offset(queue, offset)
        self.persist_all()

    def parse(self, text: bytes) -> dict[MessageQueue, int]:
        """Find entries like `{…}:number`, as a client that splits the text does. No entry means no offsets."""
        found = {}
        for fields, number in re.findall(rb"\{([^{}]*)\}\s*:\s*(\d+)", text):
            names = dict(re.findall(rb'"(\w+)"\s*:\s*"?([^",\s]*)', fields))
            queue = MessageQueue(names[b"topic"].decode(), names[b"brokerName"].decode(), int(names[b"queueId"]))
            found[queue] = self.number(number)
        return found


class NumbersAreDoubles(FileOfAnotherClient):
    """Numbers of JSON as many libraries read them."""

    number = staticmethod(lambda digits: min(int(float(digits)), 2**63 - 1))


class NumbersAreInts(FileOfAnotherClient):
    """fastjson 2.0.43."""

    number = staticmethod(lambda digits: int(digits) & 0x7FFFFFFF)


def fresh(tmp_path: Path, text: bytes) -> Path:
    """Return a directory with `text` as offsets.json and no other file."""
    directory = Path(mkdtemp(dir=tmp_path))
    (directory / "offsets.json").write_bytes(text)
    return directory


def table(offsets: Offsets) -> dict[MessageQueue, int]:
    return {MessageQueue(TOPIC, BROKER, queue_id): offset for queue_id, offset in offsets.items()}


def read(make_store: MakeStore, directory: Path) -> dict[MessageQueue, int]:
    with make_store(directory) as store:
        return dict(store.clone_offset_table())


@pytest.mark.hazard("H42")
@pytest.mark.parametrize("member", [OURS, faulty(FileOfAnotherClient, "written as Go")])
def test_every_spelling_of_the_file_is_read(tmp_path, member):
    """The store reads the file of every client: Java of both eras, the Go client, with a byte order mark or CRLF.

    Faulty: a reader that knows one spelling of the keys. Java 5.5.0 finds no offsets in the Go client's file.
    """
    for name, spell in SPELLINGS.items():
        assert read(member, fresh(tmp_path, spell(SAMPLE))) == table(SAMPLE), f"written as {name}"


@pytest.mark.hazard("H42")
@pytest.mark.parametrize(
    "member", [OURS, *(faulty(kind, "an offset has changed") for kind in (NumbersAreDoubles, NumbersAreInts))]
)
def test_large_offsets_are_exact(tmp_path, member):
    """Offsets up to 2^63 - 1 are read exactly.

    Faulty: a reader that turns numbers into doubles, or into 32 bits (fastjson 2.0.43).
    """
    offsets = dict(enumerate([2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 0]))
    for name in ("fastjson 1", "fastjson 2", "compact"):
        assert read(member, fresh(tmp_path, SPELLINGS[name](offsets))) == table(offsets), "an offset has changed"


def refuses(make_store: MakeStore, directory: Path, what: str) -> None:
    try:
        found = read(make_store, directory)
    except OffsetStoreCorrupt:
        return
    raise AssertionError(f"{what} was read as {found}")


@pytest.mark.hazard("H42")
@pytest.mark.parametrize(
    "member", [OURS, faulty(FileOfAnotherClient, r"fastjson 1 cut after \d+ bytes was read as \{Mess")]
)
def test_a_text_cut_anywhere_is_damaged_never_shorter(tmp_path, member):
    """The store refuses a file that is cut anywhere, or uses the backup. It never reads a shorter table from it.

    Faulty: a reader that accepts the entries before the cut.
    """
    directory = fresh(tmp_path, b"")
    for name in ("fastjson 1", "fastjson 2", "Go"):
        text = SPELLINGS[name]({0: 12, 1: 11})
        for length in reversed(range(len(text))):
            (directory / "offsets.json").write_bytes(text[:length])
            refuses(member, directory, f"{name} cut after {length} bytes")
            assert (directory / "offsets.json").read_bytes() == text[:length], "the refused file must be kept"


@for_each("text", [compact(SAMPLE), encode_offsets({})])
def test_the_other_texts_are_damaged_too_when_they_are_cut(text):
    for length in range(len(text)):
        with pytest.raises(ProtocolError):
            decode_checkpoint(text[:length])


GOOD = fastjson_1(SAMPLE)
NO_TABLES = {
    "empty": b"",
    "null": b"null",
    "no table": b"{}",
    "a list": b"[]",
    "a list as table": b'{"offsetTable":[]}',
    "a number as key": b'{"offsetTable":{5:6}}',
    "a word as key": b'{"offsetTable":{"x":6}}',
    "zeros after a power failure": b"\0" * 512,
    "a boost archive of the C++ client": b"22 serialization::archive 17 0 0 1 0 0 0 6 orders",
    "another charset": GOOD.decode().encode("utf-16"),
    "no UTF-8": b"\xff" + GOOD,
    "two texts": GOOD * 2,
    "text and more": GOOD + b"x",
    "text and a zero": GOOD + b"\0",
    "half an offset": GOOD.replace(b":101", b":1.5"),
    "an offset of 64 bits": GOOD.replace(b":101", b":9223372036854775808"),
    "a truth as offset": GOOD.replace(b":101", b":true"),
    "a negative queue": GOOD.replace(b'"queueId":1', b'"queueId":-2'),
    "a queue of 32 bits": GOOD.replace(b'"queueId":1', b'"queueId":2147483648'),
    "a text as queue": GOOD.replace(b'"queueId":1', b'"queueId":"1"'),
    "a number as topic": GOOD.replace(f'"topic":"{TOPIC}"'.encode(), b'"topic":7'),
    "a long name": GOOD.replace(b"broker-a", b"x" * 5000),
}


@pytest.mark.hazard("H42")
@pytest.mark.parametrize("member", [OURS, faulty(FileOfAnotherClient, "empty was read as {}")])
def test_a_text_in_another_format_is_damaged_never_empty(tmp_path, member):
    """A file of another format or charset stops the start with the reason. It never means "no offsets".

    Faulty: a reader that finds no offsets, and begins as if the group were new.
    """
    for name, text in NO_TABLES.items():
        refuses(member, fresh(tmp_path, text), name)


@pytest.mark.hazard("H42")
@pytest.mark.parametrize(
    ("store", "name"),
    [(None, "fastjson 2"), (None, "Go"), faulty(FileOfAnotherClient, "messages were skipped", "Go")],
)
def test_a_consumer_continues_from_the_file_of_another_client(embedded, names, tmp_path, name, store):
    """After a change of client or release a broadcasting member continues at the offsets of the file.

    Faulty: Java 5.5.0 with a Go client's file silently starts at the end.
    """
    topic, group = names.topic(), names.group()
    embedded.create_topic(topic, queues=3)
    embedded.send(topic, count=9)
    directory = tmp_path / f"{IP}@DEFAULT" / group
    directory.mkdir(parents=True)
    text = SPELLINGS[name]({0: 0, 1: 1, 2: 2}).replace(TOPIC.encode(), topic.encode())
    (directory / "offsets.json").write_bytes(text)
    options: dict[str, Any] = {"message_model": "broadcasting", "offset_store_dir": tmp_path, "client_ip": IP}
    if store is not None:
        options |= {"offset_store": store(directory)}
    with consuming(embedded, topic, group, consume_from="last", **options) as (consumer, seen):
        embedded.send(topic, b"now", count=3)
        seen.wait(lambda seen: seen.bodies.count(b"now") == 3)
        until(lambda: not any(each.unfinished for each in consumer.progress().values()), "those before are consumed")
        places = dict.fromkeys(range(3), 0)
        for message in seen.messages:
            places[message.queue.queue_id] += message.body == b"-"
        assert places == {0: 3, 1: 2, 2: 1}, "messages were skipped"


class WritesLikeGo(MemoryOffsetStore):
    """Writes keys as strings."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._file = directory / "offsets.json"

    def close(self) -> None:
        self._file.write_bytes(go({queue.queue_id: offset for queue, offset in self.clone_offset_table().items()}))


@pytest.mark.hazard("H42")
@pytest.mark.parametrize("durability", ["fsync", "checkpoint"])
def test_java_and_the_store_read_each_others_files(real_version, durability):
    """Java of either era reads the file that the store writes, so that a group may change its clients back.

    Faulty: the Go client's file, which Java cannot read from 5.4 on.
    """
    offsets = table({0: 5, 1: 2**40}) | {MessageQueue("%RETRY%g", "broker-b", 0): 2**63 - 1}
    first = next(iter(offsets))
    with JavaOffsetStore(real_version, "g") as java:
        with LocalFileOffsetStore(java.path.parent, durability) as store:
            for queue, offset in offsets.items():
                store.update_offset(queue, offset)
            store.persist_all()
        java.load()
        assert java.clone_offset_table() == offsets, "Java does not find the offsets"

        java.update_offset(first, 70)
        java.persist_all(list(offsets))
        with LocalFileOffsetStore(java.path.parent, durability, on_unreadable="raise") as store:
            assert store.found.source == "file"
            assert store.clone_offset_table() == offsets | {first: 70}
            store.update_offset(first, 71)
            store.persist_resets({first: QueueReset(9, 1234)})  # the epochs are in a separate table
            if durability == "checkpoint":
                for offset in range(100, 105):  # Java sees every persist at once
                    put(store, first, offset)
                    assert java.read_offset(first, "READ_FROM_STORE") == offset
                put(store, first, 9)
        java.load()
        assert java.clone_offset_table() == offsets | {first: 9}


@pytest.mark.hazard("H42")
@pytest.mark.versions("5.5.0")
@pytest.mark.parametrize("store", [faulty(WritesLikeGo, "Java does not find the offsets")])
def test_java_does_not_read_the_file_of_go(real_version, store):
    offsets = table({0: 5, 1: 2**40, 2: 2**63 - 1})
    with JavaOffsetStore(real_version, "app") as java:
        java.path.parent.mkdir(parents=True, exist_ok=True)
        with store(java.path.parent) as written:
            for queue, offset in offsets.items():
                written.update_offset(queue, offset)
        java.load()
        assert java.clone_offset_table() == offsets, "Java does not find the offsets"


def test_no_broker_name_is_empty_and_a_negative_offset_none():
    text = b'{"offsetTable":{{"queueId":1,"topic":"t"}:5,{"brokerName":"b","queueId":1,"topic":"t"}:-1}}'
    assert decode_checkpoint(text)[0] == {MessageQueue("t", "", 1): 5}


names = st.text(max_size=12).filter(lambda text: text.encode("utf-8", "replace").decode() == text)
queues = st.builds(MessageQueue, names, names, st.integers(-1, 2**31 - 1))


@pytest.mark.slow("writes and reads many tables")
@given(st.dictionaries(queues, st.integers(0, 2**63 - 1), max_size=8))
def test_any_table_is_read_back_unchanged(table):
    assert decode_checkpoint(encode_offsets(table))[0] == table


@given(
    st.dictionaries(queues, st.integers(0, 2**63 - 1), max_size=8),
    st.dictionaries(st.builds(MessageQueue, names, names, st.integers(0, 2**31 - 1)), st.integers(1, 2**63 - 1)),
)
def test_any_table_with_epochs_is_read_back_unchanged(table, epochs):
    assert decode_checkpoint(encode_offsets(table, epochs)) == (table, epochs)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    try:
        table = decode_checkpoint(data)[0]
    except ProtocolError:
        return
    assert b"offsetTable" in data or table  # only a table in the text may be empty


@given(st.data())
def test_a_changed_byte_is_refused_or_read_as_its_new_value(data):
    text = bytearray(data.draw(st.sampled_from([spell(SAMPLE) for spell in (fastjson_1, fastjson_2, compact, go)])))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        table = decode_checkpoint(bytes(text))[0]
    except ProtocolError:
        return
    assert all(type(offset) is int and offset >= 0 for offset in table.values())
