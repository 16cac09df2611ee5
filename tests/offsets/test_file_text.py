"""H42: offsets.json as every client and every release has written it, and what is no such text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from pyrocket_consumer import MessageQueue, OffsetStoreCorrupt
from pyrocket_consumer.offsets import LocalFileOffsetStore, MemoryOffsetStore, QueueReset
from tests.consuming import consuming, until
from tests.hazards.members import faulty
from tests.offsets.driving import put
from tests.real_brokers import JavaOffsetStore

TOPIC, BROKER = "orders", "broker-a"
IP = "127.0.0.1"

MakeStore = Callable[[Path], Any]


def key(queue_id: int, indent: str = "") -> str:
    return f'{{{indent}"brokerName":"{BROKER}",{indent}"queueId":{queue_id},{indent}"topic":"{TOPIC}"'


def fastjson_1(offsets: list[int]) -> str:
    """As Java up to 5.3 writes it."""
    indent = "\n\t\t\t"
    return '{\n\t"offsetTable":{' + ",".join(
        f"{key(queue_id, indent)}\n\t\t}}:{offset}" for queue_id, offset in enumerate(offsets)
    ) + "\n\t}\n}"  # fmt: skip


def fastjson_2(offsets: list[int]) -> str:
    """As Java from 5.4 on writes it."""
    indent = "\n\t\t\t"
    return '{\n\t"offsetTable":{' + ",".join(
        f"\n\t\t{key(queue_id, indent)}\n\t\t}}:{offset}" for queue_id, offset in enumerate(offsets)
    ) + "\n\t}\n}"  # fmt: skip


def go(offsets: list[int]) -> str:
    """As the Go client writes it: each key is a text that holds JSON."""
    keys = [json.dumps(key(queue_id) + "}") for queue_id in range(len(offsets))]
    return '{"offsetTable":{' + ",".join(f"{text}:{offset}" for text, offset in zip(keys, offsets, strict=True)) + "}}"


def compact(offsets: list[int]) -> str:
    return re.sub(r"\s", "", fastjson_1(offsets))


SPELLINGS: dict[str, Callable[[list[int]], bytes]] = {
    "fastjson 1": lambda offsets: fastjson_1(offsets).encode(),
    "fastjson 2": lambda offsets: fastjson_2(offsets).encode(),
    "compact": lambda offsets: compact(offsets).encode(),
    "Go": lambda offsets: go(offsets).encode(),
    "byte order mark": lambda offsets: b"\xef\xbb\xbf" + fastjson_1(offsets).encode(),
    "CRLF": lambda offsets: fastjson_2(offsets).replace("\n", "\r\n").encode() + b"\r\n",
    "other order of fields": lambda offsets: re.sub(
        r'("brokerName":"[^"]*"),("queueId":\d+)', r'\2,"new":[{}],\1', compact(offsets)
    ).encode(),
}


class FileOfAnotherClient(MemoryOffsetStore):
    """Reads offsets.json at the start, as other clients do: `parse` is where they differ."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._file = directory / "offsets.json"

    def load(self) -> None:
        for queue, offset in self.parse(self._file.read_bytes()).items():
            self.update_offset(queue, offset)
        self.persist_all()

    def parse(self, text: bytes) -> dict[MessageQueue, int]:
        """Take what looks like `{…}:number`, as a client that splits the text does; nothing found is no offsets."""
        found = {}
        for fields, number in re.findall(rb"\{([^{}]*)\}\s*:\s*(\d+)", text):
            names = dict(re.findall(rb'"(\w+)"\s*:\s*"?([^",\s]*)', fields))
            queue = MessageQueue(names[b"topic"].decode(), names[b"brokerName"].decode(), int(names[b"queueId"]))
            found[queue] = self.number(number)
        return found

    def number(self, digits: bytes) -> int:
        return int(digits)


class NumbersAreDoubles(FileOfAnotherClient):
    """Numbers of JSON as many libraries read them."""

    def number(self, digits: bytes) -> int:
        return min(int(float(digits)), 2**63 - 1)


class NumbersAreInts(FileOfAnotherClient):
    """fastjson 2.0.43."""

    def number(self, digits: bytes) -> int:
        return int(digits) & 0x7FFFFFFF


def ours(directory: Path) -> LocalFileOffsetStore:
    return LocalFileOffsetStore(directory)


def fresh(tmp_path: Path, text: bytes) -> Path:
    """Return a directory that holds `text` as offsets.json and nothing else."""
    directory = Path(mkdtemp(dir=tmp_path))
    (directory / "offsets.json").write_bytes(text)
    return directory


def table(offsets: list[int]) -> dict[MessageQueue, int]:
    return {MessageQueue(TOPIC, BROKER, queue_id): offset for queue_id, offset in enumerate(offsets)}


def read(make_store: MakeStore, directory: Path) -> dict[MessageQueue, int]:
    with make_store(directory) as store:
        return dict(store.clone_offset_table())


@pytest.mark.hazard("H42")
@pytest.mark.parametrize("member", [ours, faulty(FileOfAnotherClient, "written as Go")])
def test_every_spelling_of_the_file_is_read(tmp_path, member):
    """The file is read whoever wrote it: Java of both eras, the Go client, with a byte order mark or CRLF.

    Faulty: a reader that knows one spelling of the keys; Java 5.5.0 takes the Go client's file for no offsets.
    """
    for name, spell in SPELLINGS.items():
        assert read(member, fresh(tmp_path, spell([102, 101, 0]))) == table([102, 101, 0]), f"written as {name}"


@pytest.mark.hazard("H42")
@pytest.mark.parametrize(
    "member", [ours, *(faulty(kind, "an offset has changed") for kind in (NumbersAreDoubles, NumbersAreInts))]
)
def test_large_offsets_are_exact(tmp_path, member):
    """Offsets up to 2^63 - 1 are read exactly.

    Faulty: numbers that become doubles, or 32 bits wide (fastjson 2.0.43).
    """
    offsets = [2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 0]
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
    "member", [ours, faulty(FileOfAnotherClient, r"fastjson 1 cut after \d+ bytes was read as \{Mess")]
)
def test_a_text_cut_anywhere_is_damaged_never_shorter(tmp_path, member):
    """A file that ends too early is refused (or its backup used), wherever it ends; it is never a shorter table.

    Faulty: a reader that takes what it finds.
    """
    for name in ("fastjson 1", "fastjson 2", "Go"):
        text = SPELLINGS[name]([12, 11])
        for length in reversed(range(len(text))):
            directory = fresh(tmp_path, text[:length])
            refuses(member, directory, f"{name} cut after {length} bytes")
            assert (directory / "offsets.json").read_bytes() == text[:length], "it is left for whoever looks at it"


NO_TABLES = {
    "empty": b"",
    "null": b"null",
    "no table": b"{}",
    "zeros after a power failure": b"\0" * 512,
    "a boost archive of the C++ client": b"22 serialization::archive 17 0 0 1 0 0 0 6 orders",
    "another charset": fastjson_1([102]).encode("utf-16"),
    "two texts": fastjson_1([102]).encode() * 2,
}


@pytest.mark.hazard("H42")
@pytest.mark.parametrize("member", [ours, faulty(FileOfAnotherClient, "empty was read as {}")])
def test_what_is_no_table_is_damaged_never_empty(tmp_path, member):
    """A file of another format or charset stops the start with the reason; it is never taken for "no offsets".

    Faulty: a reader that finds nothing, and begins as if the group were new.
    """
    for name, text in NO_TABLES.items():
        refuses(member, fresh(tmp_path, text), name)


@pytest.mark.hazard("H42")
@pytest.mark.parametrize(
    ("store", "name"),
    [(None, "fastjson 2"), (None, "Go"), faulty(FileOfAnotherClient, "messages were skipped", "Go")],
)
def test_a_consumer_goes_on_from_the_file_of_another_client(embedded, names, tmp_path, name, store):
    """After a change of client or release a broadcasting member goes on where the file says.

    Faulty: Java 5.5.0 with a Go client's file starts at the end, in silence.
    """
    topic, group = names.topic(), names.group()
    embedded.create_topic(topic, queues=3)
    embedded.send(topic, count=9)
    directory = tmp_path / f"{IP}@DEFAULT" / group
    directory.mkdir(parents=True)
    (directory / "offsets.json").write_bytes(SPELLINGS[name]([0, 1, 2]).replace(TOPIC.encode(), topic.encode()))
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
    """Writes keys that are texts."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._file = directory / "offsets.json"

    def close(self) -> None:
        offsets = self.clone_offset_table()
        self._file.write_text(go([offsets[queue] for queue in sorted(offsets)]))


@pytest.mark.hazard("H42")
@pytest.mark.parametrize("durability", ["fsync", "checkpoint"])
def test_java_reads_what_we_wrote_and_we_what_java_wrote(real_version, durability):
    """Java of either era reads the file we write, so that a group may change its clients back.

    Faulty: the Go client's file, from 5.4 on.
    """
    offsets = table([5, 2**40]) | {MessageQueue("%RETRY%g", "broker-b", 0): 2**63 - 1}
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
            store.persist_resets({first: QueueReset(9, 1234)})  # epochs are in a table of their own
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
def test_java_reads_not_what_go_wrote(real_version, store):
    offsets = table([5, 2**40, 2**63 - 1])
    with JavaOffsetStore(real_version, "app") as java:
        java.path.parent.mkdir(parents=True, exist_ok=True)
        with store(java.path.parent) as written:
            for queue, offset in offsets.items():
                written.update_offset(queue, offset)
        java.load()
        assert java.clone_offset_table() == offsets, "Java does not find the offsets"
