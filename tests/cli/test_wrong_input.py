"""Mistakes of a new user at the shell. One sentence has the value, the allowed values, and the remedy."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading

import pytest

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
from tests.for_each import for_each
from tests.offsets.local.driving import encode_offsets, read_store

TOPIC, QUEUES = "T", 2
AWAY = ["-n", "127.0.0.1:1"]
TABLE = {MessageQueue("T", "broker-a", 0): 5}


@pytest.fixture
def fail_with(pyrocket, monkeypatch):
    """Run `pyrocket …`; return the exit code and the one sentence on stderr."""
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        code, printed, stderr = pyrocket(*arguments)
        assert printed == ""
        *usage, sentence = stderr.splitlines()
        assert not usage or usage[0].startswith("usage: pyrocket"), stderr
        assert sentence.startswith("pyrocket"), stderr
        return code, sentence

    return run


@pytest.fixture
def store(tmp_path):
    """Make a directory of a store with one offset, or with this text in its file; return its path."""

    def make(name, text=None):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "offsets.json").write_bytes(encode_offsets(TABLE) if text is None else text)
        return directory

    return make


NAME_SERVED = [
    ["produce", "T", "hello"],
    ["consume", "T"],
    ["offsets", "show", "G", "T"],
    ["offsets", "lag", "G"],
    ["offsets", "reset", "G", "T", "--to", "earliest"],
    ["offsets", "forget-reset", "G", "T"],
]


@for_each("command", NAME_SERVED, ids=" ".join)
def test_a_name_server_that_is_missing_wrong_or_unreachable(fail_with, command):
    code, sentence = fail_with(*command)
    assert (code, "no name server" in sentence) == (2, True)
    assert "-n host:9876" in sentence and "NAMESRV_ADDR" in sentence, sentence
    for wrong in ("localhost", "127.0.0.1:99999", "127.0.0.1:9876;bad"):
        code, sentence = fail_with(*command, "-n", wrong)
        assert code == 2
        assert f"{wrong.rpartition(';')[2]!r} is not host:port with a port from 1 to 65535" in sentence
    code, sentence = fail_with(*command, "-n", "127.0.0.1:1")
    assert (code, "cannot connect to 127.0.0.1:1" in sentence, "check the address" in sentence) == (1, True, True)


@pytest.mark.live
@pytest.mark.slow("a name server has 3 s")
def test_a_name_server_that_does_not_respond(fail_with):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = "{}:{}".format(*silent.getsockname())
        code, sentence = fail_with("produce", "T", "hello", "-n", where)
    assert code == 1
    seconds = r"(3|2\.\d+)"  # the rest of the timeout after connecting
    assert re.search(f"{where}: no response within {seconds} s: it is busy or failing, or another program", sentence)


@pytest.mark.live
def test_an_address_where_something_else_listens(fail_with):
    def answer_http(listening):
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = "{}:{}".format(*listening.getsockname())
        threading.Thread(target=answer_http, args=(listening,), daemon=True).start()
        code, sentence = fail_with("consume", "T", "-n", where)
        listening.shutdown(socket.SHUT_RDWR)
    assert code == 1
    assert f"{where} sent data that is not a frame of RocketMQ's remoting protocol" in sentence
    assert "b'HTTP'" in sentence and "check the address. Another server listens there" in sentence


def test_known_groups_are_shown_nearest_first_and_counted(fail_with, cluster):
    for number in range(30):
        cluster.broker("broker-a").create_group(f"other-{number}")
    cluster.broker("broker-a").create_group("orders-app")
    code, sentence = fail_with("offsets", "lag", "order-app", "-n", cluster.name_server)
    assert code == 2
    assert "(known: orders-app, " in sentence
    assert re.search(r" and 1\d more\)$", sentence), sentence


@for_each(
    "command, value, remedy",
    [
        (["produce", "nowhere", "x"], "'nowhere'", "create the topic, or check its name"),
        (["produce", "a b", "x"], "'a b'", "use a-z A-Z 0-9 _ - % |"),
        (["produce", "T", ""], "body is empty", "send at least one byte"),
        (["produce", "T", "x", "--tag", ""], "tags is empty", "leave it out"),
        (["produce", "T", "x", "--tag", "a||b"], "'a||b'", "a message has one tag, without '||'"),
        (["produce", "T", "x", "--key", ""], "a key is empty", "leave it out"),
        (["produce", "T", "x", "--key", "a b"], "'a b'", "replace it"),
        (["produce", "T", "x", "--sharding-key", ""], "sharding_key", "leave it out"),
        (["consume", "a b"], "'a b'", "use a-z A-Z 0-9 _ - % |"),
        (["consume", ""], "topic is empty", "give it a name"),
        (["consume", "T", "--group", "a b"], "'a b'", "use a-z A-Z 0-9 _ - % |"),
        (["consume", "T", "--group", ""], "group is empty", "give it a name"),
        (["consume", "T", "--selector", "||"], "'||' names no tag", "use '*' for every message, or tags joined"),
        (["offsets", "show", "G", "nowhere"], "'nowhere'", "create the topic, or check its name"),
        (["offsets", "show", "G", "T"], "group 'G'", "check its name"),
        (["offsets", "lag", "G!"], "'G!'", "use a-z A-Z 0-9 _ - % |"),
        (["offsets", "reset", "G", "T", "--to", "earliest"], "group 'G'", "check its name"),
        (["offsets", "reset", "G", "T", "--queue", "broker-a/9=1"], "broker-a/9", "its queues: broker-a/0, broker-a/1"),
        (["offsets", "forget-reset", "G", "nowhere"], "'nowhere'", "create the topic, or check its name"),
        (["offsets", "forget-reset", "G", "T"], "no broker knows group 'G'", "check its name"),
    ],
)
def test_values_that_the_cluster_or_the_protocol_does_not_allow(fail_with, cluster, command, value, remedy):
    code, sentence = fail_with(*command, "-n", cluster.name_server)
    assert code == (1 if value == "'nowhere'" else 2), "a topic may come yet; the rest is wrong for good"
    assert value in sentence and remedy in sentence, sentence


@for_each(
    "command, value, allowed",
    [
        (["explode"], "'explode'", "choose from"),
        (["produce", "T"], "BODY", "are required"),
        (["consume", "T", "--from", "yesterday"], "'yesterday'", "use 'first' or 'earliest'"),
        (["consume", "T", "--count", "0"], "'0'", "a whole number above zero"),
        (["demo", "--messages", "0"], "'0'", "a whole number above zero"),
        (["demo", "--rate", "x"], "'x'", "a whole number above zero"),
        (["offsets", "lag", "G", "--max", "x"], "'x'", "a whole number"),
        (["offsets", "reset", "G", "T", "--to", "latest", "--wait", "x"], "'x'", "a number of seconds from 0"),
        (["offsets", "reset", "G", "T", "--to", "latest", "--wait", "-5"], "'-5'", "a number of seconds from 0"),
        (["offsets", "reset", "G", "T", "--to", "latest", "--wait", "nan"], "'nan'", "a number of seconds from 0"),
        (["offsets", "reset", "G", "T", "--to", "latest", "--model", "x"], "'x'", "choose from"),
        (["consume", "T", *AWAY, "--offset", "1"], "--offset N needs exactly one queue", ""),
        (
            ["consume", "T", *AWAY, "--offset", "1", "--queue", "broker-a/0", "--queue", "broker-a/1"],
            "--offset N needs exactly one queue",
            "",
        ),
        (["consume", "T", *AWAY, "--offset", "1", "--queue", "broker-a/0", "--from", "first"], "", "without --from"),
        (["consume", "T", *AWAY, "--queue", "broker-a/0", "--group", "g"], "--queue", "without --group"),
        (["consume", "T", *AWAY, "--queue", "0"], "'0' is not like broker-a/3", ""),
        (["consume", "T", *AWAY, "--selector", "a", "--sql", "b = 1"], "--sql", "exclude each other"),
        (["consume", "T", *AWAY, "--selector", "a\udcff"], r"'a\udcff'", "UTF-8 cannot encode; remove it"),
        (["consume", "T", *AWAY, "--sql", "a\udcff"], r"'a\udcff'", "UTF-8 cannot encode; remove it"),
        (["consume", "T", *AWAY, "--sql", "a\udcff", "--group", "g"], r"'a\udcff'", "UTF-8 cannot encode; remove it"),
        (["consume", "T", *AWAY, "--offset", "-1"], "-1", "not a whole number"),
        (["offsets", "explode"], "'explode'", "invalid choice"),
        (["offsets", "reset", "G", "T", *AWAY], "the target is missing", "--to earliest"),
        (
            ["offsets", "reset", "G", "T", "--to", "begin"],
            "PLACE='begin' is not allowed; use 'first' or 'earliest'",
            "",
        ),
        (["offsets", "reset", "G", "T", "--to", "2026-11-21T08:00:00"], "2026-11-21T08:00:00", "has no time zone"),
        (["offsets", "reset", "G", "T", "--queue", "broker-a"], "'broker-a'", "is not like broker-a/3"),
        (["offsets", "reset", "G", "T", "--queue", "broker-a/0=x"], "broker-a/0=x", "is not like broker-a/3"),
        (
            ["offsets", "reset", "G", "T", *AWAY, "--queue", "broker-a/0=1", "--to", "latest"],
            "--to",
            "give either --to",
        ),
        (
            ["offsets", "reset", "G", "T", *AWAY, "--queue", "broker-a/0=1", "--queue", "broker-a/0=0"],
            "--queue 'broker-a/0' is given 2 times",
            "give it once",
        ),
        (
            ["offsets", "reset", "G", "T", *AWAY, "--queue", "broker-a/0=1", "--queue", "broker-a/0"],
            "--queue 'broker-a/0' is given 2 times",
            "give it once",
        ),
        (
            ["offsets", "reset", "G", "T", *AWAY, "--to", "first", "--queue", "broker-a/0", "--queue", "broker-a/00"],
            "--queue 'broker-a/0' is given 2 times",
            "give it once",
        ),
        (
            ["consume", "T", *AWAY, "--queue", "broker-a/0", "--queue", "broker-a/0", "--offset", "1"],
            "--queue 'broker-a/0' is given 2 times",
            "give it once",
        ),
        (["broker", "--topic", "T", "--topic", "T:8"], "--topic 'T' is given 2 times", "give it once"),
        (["offsets", "reset", "G", "T", "--to", "latest", "--wait", "250"], "--wait: '250'", "from 0 to 120"),
        (["offsets", "reset", "G", "T", "--to", "latest", "--wait", "120.1"], "--wait: '120.1'", "from 0 to 120"),
        (["offsets", "adopt", "here"], "directory", "are required"),
        (["broker", "--brokers", "0"], "'0'", "a whole number above zero"),
        (["broker", "--port", "0"], "'0'", "a port from 1 to 65535"),
        (["broker", "--port", "99999"], "'99999'", "a port from 1 to 65535"),
        (["broker", "--topic", ""], "topic is empty", "give it a name"),
        (["broker", "--topic", ":4"], "topic is empty", "give it a name"),
        (["broker", "--topic", "a b"], "'a b'", "use a-z A-Z 0-9 _ - % |"),
        (["broker", "--topic", "T:0"], "'T:0'", "like orders or orders:4, with 1 to 10000 queues"),
        (["broker", "--topic", "T:x"], "'T:x'", "like orders or orders:4, with 1 to 10000 queues"),
        (["broker", "--topic", "T:99999999"], "'T:99999999'", "like orders or orders:4, with 1 to 10000 queues"),
        (["broker", "--brokers", "27"], "brokers=27; give 1 to 26", ""),
    ],
)
def test_wrong_usage(fail_with, command, value, allowed):
    code, sentence = fail_with(*command)
    assert (code, value in sentence, allowed in sentence) == (2, True, True), sentence


LONG = "9" * 5000


@for_each(
    "command, allowed",
    [
        (["consume", "T", "--count", LONG], "a whole number above zero of at most 19 digits"),
        (["consume", "T", "--offset", LONG], "a whole number from 0 of at most 19 digits"),
        (["consume", "T", "--queue", f"broker-a/{LONG}"], "like broker-a/3"),
        (["consume", "T", "--from", LONG], "use 'first' or 'earliest'"),
        (["demo", "--messages", LONG], "a whole number above zero of at most 19 digits"),
        (["offsets", "lag", "G", "--max", LONG], "a whole number from 0 of at most 19 digits"),
        (["offsets", "reset", "G", "T", "--queue", f"broker-a/{LONG}"], "like broker-a/3 or broker-a/3=120"),
        (["offsets", "reset", "G", "T", "--queue", f"broker-a/0={LONG}"], "like broker-a/3 or broker-a/3=120"),
        (["offsets", "reset", "G", "T", "--queue", f"{LONG}/0=x"], "like broker-a/3 or broker-a/3=120"),
        (["offsets", "reset", "G", "T", "--to", LONG], "use 'first' or 'earliest'"),
        (["offsets", "reset", "G", "T", "--to", "first", "--wait", LONG], "a number of seconds from 0 to 120"),
        (["broker", "--brokers", LONG], "a whole number above zero of at most 19 digits"),
        (["broker", "--port", LONG], "a port from 1 to 65535"),
        (["broker", "--topic", f"T:{LONG}"], "like orders or orders:4, with 1 to 10000 queues"),
        (["broker", "--topic", f"{LONG}"], "has 5000 characters"),
    ],
)
def test_a_value_of_thousands_of_digits_is_named_in_a_short_line(fail_with, command, allowed):
    code, sentence = fail_with(*command)
    assert (code, allowed in sentence) == (2, True), sentence
    assert len(sentence) < 400, sentence


def test_the_limit_of_wait_is_in_the_help(pyrocket):
    _, printed, _ = pyrocket("offsets", "reset", "--help")
    assert "from 0 to 120" in " ".join(printed.split())


@pytest.mark.skipif(sys.platform == "win32", reason="there arguments are text")
def test_a_body_that_is_not_text_is_sent_as_it_is(cluster, pyrocket):
    assert pyrocket("produce", "T", os.fsdecode(b"\xff\xfe"), "-n", cluster.name_server)[0] == 0
    member = ["--from", "first", "--count", "1", "--group", "bytes"]
    code, printed, _ = pyrocket("consume", "T", "-n", cluster.name_server, *member)
    assert (code, r"\xff\xfe" in printed) == (0, True), printed


@for_each("orphan, value", [("/nowhere", "/nowhere"), ("a-file", "a-file"), ("empty", "empty")])
def test_only_a_store_can_be_adopted(fail_with, tmp_path, orphan, value):
    (tmp_path / "a-file").write_text("")
    (tmp_path / "empty").mkdir(exist_ok=True)
    code, sentence = fail_with("offsets", "adopt", str(tmp_path / orphan), str(tmp_path / "new"))
    assert (code, f"{value} is no offset store" in sentence) == (1, True)
    assert "name the directory with offsets.json in it: DIRECTORY/CLIENT-ID/GROUP" in sentence
    assert not (tmp_path / "new").exists()


@for_each("text", [b"", b"{not json", b"[]", b'{"offsetTable":5}'], ids=str)
def test_a_store_that_is_damaged_is_not_adopted(fail_with, tmp_path, store, text):
    damaged = store(f"damaged-{len(text)}", text)
    code, sentence = fail_with("offsets", "adopt", str(damaged), str(tmp_path / "new"))
    assert (code, f"offset store {damaged}: offsets.json" in sentence) == (1, True)
    assert "Restore the file from a copy" in sentence
    assert (damaged / "offsets.json").read_bytes() == text


def test_a_target_that_cannot_be_written_is_refused(fail_with, tmp_path, store):
    old, used = store("old"), store("used")
    (tmp_path / "file").write_text("")
    code, sentence = fail_with("offsets", "adopt", str(old), str(tmp_path / "file"))
    assert (code, f"offset store {tmp_path / 'file'} cannot be opened: " in sentence) == (1, True)
    code, sentence = fail_with("offsets", "adopt", str(old), str(old))
    assert code == 1
    assert "cannot adopt itself; name the store left behind first, then the one used now" in sentence
    code, sentence = fail_with("offsets", "adopt", str(old), str(used))
    assert (code, f"{used} holds offsets of 1 queues already" in sentence, "--replace" in sentence) == (1, True, True)
    with LocalFileOffsetStore(old):
        code, sentence = fail_with("offsets", "adopt", str(old), str(tmp_path / "new"))
    assert (code, f"{old} is in use" in sentence, "stop it" in sentence) == (1, True, True)
    assert read_store(old).offsets == read_store(used).offsets == TABLE


def test_a_store_that_cannot_be_renamed_is_still_adopted(fail_with, tmp_path, store):
    old = store("x" * 250)
    code, sentence = fail_with("offsets", "adopt", str(old), str(tmp_path / "new"))
    assert code == 1
    assert f"the offsets of {old} are in {tmp_path / 'new'} now, but it could not be renamed" in sentence
    assert sentence.endswith("move it away yourself")
    assert read_store(tmp_path / "new").offsets == read_store(old).offsets == TABLE


def test_the_current_directory_can_be_adopted(tmp_path, store, monkeypatch, pyrocket):
    monkeypatch.chdir(store("old"))
    code, printed, _ = pyrocket("offsets", "adopt", ".", "../new")
    (kept,) = tmp_path.glob("old.adopted-*")
    assert (code, str(kept) in printed) == (0, True), printed
    assert read_store(tmp_path / "new").offsets == TABLE
