"""The compiled part and the Python code behave the same."""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import os
import struct
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pyrocket_consumer
from pyrocket_consumer.protocol import accelerator
from pyrocket_consumer.protocol.codes import SysFlag
from pyrocket_consumer.protocol.message import BatchItem, Message, StoredMessage, encode_batch, encode_message
from tests.for_each import for_each
from tests.fuzz.mutation import Mutator
from tests.interpreters import pythons
from tests.protocol import both
from tests.protocol.building import ROOT, copied
from tests.protocol.records import ODD_PROPERTIES
from tests.protocol.test_fuzz_message import COMPRESSED_RECORDS, SMALL_BODIES
from tests.trials import trials


@pytest.fixture(params=[True, False], ids=["in-python", "compiled"])
def which(request):
    return both.copy(pure=request.param)


def read_by_both(data: bytes, most: int | None = None) -> object:
    """Return the messages that both copies read in `data`."""
    in_python = both.messages_of(both.copy(pure=True), data, most)
    assert both.messages_of(both.copy(pure=False), data, most) == in_python
    return in_python


def records(*messages: StoredMessage) -> bytes:
    return b"".join(map(encode_message, messages))


def with_properties(text: bytes) -> bytes:
    record = encode_message(StoredMessage("T", b"body"))[:-2]
    whole = record + struct.pack(">H", len(text)) + text
    return struct.pack(">I", len(whole)) + whole[4:]


# --- the same values and errors


def two_records() -> bytes:
    return records(StoredMessage("T", b"x" * 50, {"A": "1"}), StoredMessage("T", b"y" * 50, {"A": "2"}))


def inputs() -> Iterator[bytes]:
    """Responses of real brokers, unusual records, odd properties, more names than the cache, and truncated data."""
    yield from SMALL_BODIES + COMPRESSED_RECORDS
    for message in (
        StoredMessage("T" * 128, b"a long topic", {"A": "1"}),
        StoredMessage("T", b"", {}),
        StoredMessage("T", b"hosts", {"A": "1"}, born_host="[::1]:1"),
        StoredMessage("T", b"hosts", {"A": "1"}, store_host="[::1]:1"),
        StoredMessage("T", b"hosts", {"A": "1"}, born_host="[::1]:1", store_host="[fe80::1]:2"),
        StoredMessage("T", b"x", {"é": "ü", "name": "\U0001f600"}),
        StoredMessage("T", encode_batch([BatchItem(b"1"), BatchItem(b"2")]), sys_flag=0xC0, queue_offset=2**63 - 1),
        StoredMessage("T", b"not packed at all", sys_flag=SysFlag.COMPRESSED),
        StoredMessage("T", b"x", queue_offset=-1, sys_flag=-(2**31)),
        StoredMessage("T", b"x" * 100_000, {"a": "b" * 30_000}),
    ):
        yield records(message, StoredMessage("T", b"usual"), message)
    yield from map(with_properties, ODD_PROPERTIES)
    names = ({f"name-{number}-{each}": str(number) for each in range(20)} for number in range(100))
    yield records(*(StoredMessage("T", b"x", each) for each in names))
    yield from (two_records()[:cut] for cut in range(0, 300, 7))


@for_each("data", inputs, ids=lambda data: f"{len(data)} bytes {data[-50:]!r}")
def test_whatever_comes_is_read_the_same(data):
    is_read = isinstance(read_by_both(data), tuple)
    assert is_read or data not in SMALL_BODIES + COMPRESSED_RECORDS


@for_each("most", [1, 2, 1023, 1024, 1025, None])
def test_as_many_records_as_a_pull_requests_are_read_the_same(most):
    read_by_both(records(StoredMessage("T", b"x")) * 1025, most)


@pytest.mark.search
def test_damaged_data_reads_the_same():
    """Each byte of a record is changed to the most harmful values."""
    whole = records(StoredMessage("T", b"x" * 20, {"AB": "1", "C": "2"}), StoredMessage("T", b"y"))
    for index in range(len(whole)):
        for value in (0, 1, 2, 0x7F, 0x80, 0xFF):
            read_by_both(whole[:index] + bytes([value]) + whole[index + 1 :])


@pytest.mark.search
def test_random_damage_reads_the_same():
    originals = [*SMALL_BODIES[:20], *COMPRESSED_RECORDS, with_properties(b"a\x01b\x02c\x01d\x02" * 10)]
    mutator = Mutator(originals, seed=14)
    for _ in range(trials(3000)):
        read_by_both(mutator.next())


# --- the same Message


def one(which, **parts):
    decode = which.module("protocol.message").decode_messages
    return decode(encode_message(StoredMessage(**{"topic": "T", "body": b"body", **parts})))[0]


def test_a_message_is_what_users_know(which):
    message = one(which, properties={"TAGS": "a"})
    kind = which.module("protocol.message").Message
    assert type(message) is kind and isinstance(message, kind) and kind.__name__ == "Message"
    assert kind.__module__ == "pyrocket_consumer.protocol.message"
    assert message == message and message != one(which) and len({message, one(which)}) == 2
    assert repr(message) == "<Message T queue=T//0 offset=0 bytes=105>" or repr(message).startswith("<Message T ")
    assert message.property("TAGS") == "a" and message.properties == {"TAGS": "a"}
    assert message.properties is message.properties and message.body is message.body
    with pytest.raises(TypeError):
        weakref.ref(message)
    for name in ("body", "properties", "topic", "queue", "anything"):
        with pytest.raises(AttributeError):
            setattr(message, name, b"other")
    empty = kind()  # without a record
    for name in ("body", "properties", "topic", "born_at"):
        with pytest.raises(AttributeError):
            getattr(empty, name)
    with pytest.raises(AttributeError):
        empty.property("TAGS")


def test_property_accepts_its_argument_by_position_and_name(which):
    message = one(which, properties={"TAGS": "a"})
    assert message.property(name="TAGS") == message.property("TAGS") == "a"
    assert list(inspect.signature(message.property).parameters) == ["name"]
    for names, named in (((), {}), (("TAGS", "KEYS"), {}), ((), {"named": "TAGS"}), (("TAGS",), {"name": "TAGS"})):
        with pytest.raises(TypeError):
            message.property(*names, **named)
    for name in (b"TAGS", 5, ["TAGS"], None):
        with pytest.raises(TypeError):
            message.property(name)


def test_a_message_can_be_derived_from(which):
    class Kept(which.module("protocol.message").Message):
        def shout(self):
            return self.body.upper()

    made = which.module("protocol.record" if which.pure else "protocol.accelerator").make_record
    data = encode_message(StoredMessage("T", b"body", {"TAGS": "a"}))
    kept = made(Kept, data, 0, 88 + 4, len(data), 0, 0, None, None)
    kept.mine = [kept]
    assert (kept.shout(), kept.tags, kept.topic) == (b"BODY", "a", "T")
    kept.sign = Sign()
    seen = weakref.ref(kept.sign)
    del kept
    gc.collect()
    assert seen() is None


class Sign:
    """An object that shows whether it, or the object that refers to it, was garbage-collected."""


def in_properties(message, sign):
    message.properties.update(circle=message, sign=sign)


def in_its_lane(message, sign):
    message._key_lane, sign.message = sign, message
    assert message._key_lane is sign


@for_each("bind", [in_properties, in_its_lane])
def test_a_message_in_a_circle_is_collected(which, bind):
    sign = Sign()
    seen = weakref.ref(sign)
    bind(one(which, properties={"TAGS": "a"}), sign)
    del sign
    gc.collect()
    assert seen() is None


@pytest.mark.live
@pytest.mark.slow("the memory of the process tells only of much that was read")
def test_nothing_is_left_of_what_was_read(which):
    """Repeated reads leak no memory, for valid and for refused data."""
    decode = which.module("protocol.message").decode_messages
    good = records(*(StoredMessage("T", b"x" * 1000, {f"name-{each}": "v" * 50, "é": "ü"}) for each in range(32)))
    inputs = [good, good[:-5], with_properties(b"\xff\x01\xfe\x02" * 50), *COMPRESSED_RECORDS]

    def read() -> None:
        for data in inputs:
            messages = both.outcome(lambda data=data: decode(data))
            for message in messages if isinstance(messages, list) else ():
                both.all_of(message)

    assert both.grown_kib(read, 30, 300) < 4 * 1024


ENDLESS_NAMES = """
import resource
from pyrocket_consumer.protocol.message import StoredMessage, decode_messages, encode_message

def read(numbers):
    for number in numbers:
        record = encode_message(StoredMessage("T", b"", {f"name-{number}-{each}": "v" for each in range(10)}))
        assert len(decode_messages(record)[0].properties) == 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = read(range(2_000))
print(read(range(2_000, 12_000)) - before)
"""


@pytest.mark.live
@pytest.mark.slow("each Python reads 12 000 messages")
@for_each("version", pythons)
def test_names_that_producers_choose_are_not_kept(version):
    """Some versions of Python never free interned strings. To read messages, only this package is needed."""
    both.copy(pure=False)
    response = python("-c", ENDLESS_NAMES, executable=pythons()[version], PYTHONPATH=str(ROOT))
    assert response.returncode == 0, response.stderr
    assert int(response.stdout) < 4 * 1024


@pytest.mark.live
def test_threads_read_the_same_message(which):
    """If many threads read one message at once, each gets the same complete values."""
    start = threading.Barrier(4)

    def read(message):
        start.wait()
        return message.body, message.property("name-7"), dict(message.properties), message.tags

    with ThreadPoolExecutor(4) as threads:
        for _ in range(trials(200)):
            message = one(which, body=b"x" * 500, properties={f"name-{each}": "v" * each for each in range(1, 20)})
            found = list(threads.map(read, [message] * 4))
            assert len(found) == 4 and all(each == found[0] for each in found)


# --- functions


def test_what_is_finished_counts_once(which):
    mark_done = which.module("protocol.accelerator").mark_done
    messages = [one(which, queue_offset=each) for each in range(3)]
    assert mark_done(messages[:2]) == 2
    assert mark_done(iter(messages)) == 1
    assert mark_done(messages) == mark_done([]) == 0
    with pytest.raises((TypeError, AttributeError)):
        mark_done([object()])


@for_each(
    "offsets, rises", [([], True), ([5], True), ([1, 2, 9], True), ([1, 1], False), ([2, 1], False), ([1, 3, 2], False)]
)
def test_rising_offsets_are_recognized(which, offsets, rises):
    messages = [one(which, queue_offset=each) for each in offsets]
    assert which.module("protocol.accelerator").are_offsets_rising(messages) is rises


@for_each("indexes", [(-1, 88, 91), (0, 88, 92), (0, -1, 91), (0, 89, 91), (1, 89, 91), (0, 0, 0), (0, 2**40, 2**41)])
def test_the_compiled_part_makes_no_record_outside_the_bytes(indexes):
    which = both.copy(pure=False)
    start, body_end, end = indexes
    with pytest.raises(ValueError, match="no record"):
        which.module("protocol.accelerator").make_record(
            which.module("protocol.message").Message, bytes(91), start, body_end, end, 0, 0, None, None
        )


@for_each("kind", [object, Message, int, "Message", None])
def test_the_compiled_part_makes_only_its_own_records(kind):
    which = both.copy(pure=False)  # it has another Message class
    accelerator = which.module("protocol.accelerator")
    with pytest.raises(TypeError, match="not a type of Record"):
        accelerator.make_record(kind, bytes(91), 0, 88, 91, 0, 0, None, None)
    with pytest.raises(TypeError, match="not a type of Record"):
        accelerator.decode_records(kind, [], bytes(91), 0, 0, None, int)


def test_a_wrong_end_of_a_record_is_refused_by_the_compiled_part():
    which = both.copy(pure=False)
    kind, cut = which.module("protocol.message").Message, which.module("protocol.accelerator").decode_records
    for end in (0, -5, "x", None, 2**80):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            cut(kind, [], bytes(200), 0, 100, None, lambda start, end=end: end)
    assert cut(kind, [], bytes(200), 0, 100, None, lambda start: 10**6) == 10**6, "behind the data: it ends the reading"


# --- which of the two is used

PRINT_STATE = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
import pyrocket_consumer
from pyrocket_consumer.protocol import accelerator
from pyrocket_consumer.testing import message
print(pyrocket_consumer.ACCELERATED, accelerator.REASON, message(topic="T", body=b"x").body)
"""


def python(*command: str, executable: str = sys.executable, cwd: Path = ROOT, **variables: str) -> Any:
    """Run Python with only these variables of the package."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYROCKET_PURE", "PYTHONPATH")}
    return subprocess.run(
        [executable, "-P", *command],
        env=ours | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_import(folder: Path, **variables: str) -> tuple[str, str]:
    """Return the output of a new process about its compiled part, and its log."""
    response = python("-c", PRINT_STATE, cwd=folder, PYTHONPATH=str(folder), **variables)
    assert response.returncode == 0, response.stderr
    return response.stdout.strip(), response.stderr.strip()


@pytest.mark.live
@for_each("value, pure", [("1", True), ("yes", True), ("0", False), ("", False)])
def test_a_variable_switches_it_off(value, pure):
    both.copy(pure=False)  # skip if there is no compiled part to switch off
    printed, logged = run_import(ROOT, PYROCKET_PURE=value)
    assert printed.startswith(f"{not pure} ") and printed.endswith(" b'x'") and not logged
    assert ("PYROCKET_PURE is set" in printed) is pure


@pytest.mark.live
def test_the_command_line_shows_in_one_line_which_is_used(tmp_path):
    both.copy(pure=False)
    copied(tmp_path)
    for folder, value, expected in (
        (ROOT, "0", "with its compiled part\n"),
        (ROOT, "1", "in Python alone: PYROCKET_PURE is set\n"),
        (tmp_path, "0", "in Python alone: there is no build of it here"),
    ):
        command = ("-m", "pyrocket_consumer.cli", "--version")
        response = python(*command, cwd=folder, PYTHONPATH=str(folder), COLUMNS="40", PYROCKET_PURE=value)
        assert response.stdout.startswith(f"pyrocket-consumer {pyrocket_consumer.__version__}, {expected}"), (
            response.stderr
        )
        assert response.stdout.count("\n") == 1


LIBRARY = ".abi3.so" if not sysconfig.get_config_var("Py_GIL_DISABLED") else sysconfig.get_config_var("EXT_SUFFIX")


@pytest.mark.live
@pytest.mark.slow("starts an interpreter for each build")
@for_each(
    "suffix, content, reason",
    [
        ("", b"", "there is no build of it here"),
        (LIBRARY, b"", "its build cannot be used"),
        (LIBRARY, b"not a library at all", "its build cannot be used"),
        (LIBRARY, b"\x7fELF" + bytes(100), "its build cannot be used"),
        (".py", b"SOURCE = 'another'", "its build cannot be used: it is of another version's source"),
        (".py", b"raise SystemError('odd')", "its build cannot be used: odd"),
        (".py", b"raise ValueError('odd')", "its build cannot be used: odd"),
        (".py", b"import no_such_odd_module", "its build cannot be used: No module named 'no_such_odd_module'"),
    ],
)
def test_an_unusable_build_is_logged_once(tmp_path, suffix, content, reason):
    folder = tmp_path / suffix / str(len(content))
    wire = copied(folder)
    if suffix:
        (wire / f"_accelerator{suffix}").write_bytes(content)
    printed, logged = run_import(folder)
    assert printed.startswith(f"False {reason}") and printed.endswith(" b'x'")
    assert logged.count("\n") == 0
    if suffix:
        assert logged.startswith("WARNING Python code is used in place of the compiled part")
        assert "install the package again" in logged
    else:
        assert not logged


READ_MESSAGES = """
import os
os.environ["PYROCKET_PURE"] = "0"
from pyrocket_consumer.protocol import accelerator
from pyrocket_consumer.protocol.message import StoredMessage, decode_messages, encode_message
assert accelerator.ACCELERATED, accelerator.REASON
for _ in range(100):
    (message,) = decode_messages(encode_message(StoredMessage("T", b"body", {"A": "1"})))
    assert (message.body, message.properties, message.property("A")) == (b"body", {"A": "1"}, "1")
print("well")
"""

IN_ANOTHER_INTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
failed = interpreters.run_string(interpreters.create(), sys.argv[1])
assert not failed, failed
sys.stdout.flush()
"""


@pytest.mark.live
@for_each("version", pythons)
def test_another_interpreter_of_the_process_may_use_it(version):
    """One other: before 3.13.1 Python's own `datetime` breaks where more import it. From 3.12 on it has its own GIL."""
    both.copy(pure=False)
    command = ("-W", "ignore", "-c", IN_ANOTHER_INTERPRETER, READ_MESSAGES)
    response = python(*command, executable=pythons()[version], PYTHONPATH=str(ROOT))
    assert response.stdout == "well\n", response.stderr


def test_the_source_is_the_one_that_the_python_code_names():
    """A change of the C file needs its new digest in accelerator.py, so that older builds are not used."""
    digest = hashlib.sha256((ROOT / "pyrocket_consumer" / "protocol" / "_accelerator.c").read_bytes()).hexdigest()[:16]
    assert digest == accelerator.SOURCE


def test_tools_that_look_for_imports_find_it():
    """Programs that bundle modules skip imports that they do not see."""
    tree = ast.parse((ROOT / "pyrocket_consumer" / "protocol" / "accelerator.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "pyrocket_consumer.protocol._accelerator" in imported
