"""The compiled part under sanitizers, and with mistakes planted: whoever compares it with Python must find them."""

from __future__ import annotations

import pytest

from tests.wire.building import SANITIZED, SOURCE, build, compiler, run

TARGETS = ("compiled-as-python", "compiled-record-as-python", "compiled-properties-as-python")

MISTAKES = {
    "an empty value counts": ("name_end + 1 < stop", "name_end + 1 <= stop"),
    "an empty name counts": ("name_end > start &&", "name_end >= start &&"),
    "the last item needs an end": ("stop = end; /*", "return 0; /*"),
    "the first value of a name counts": ("            found = item;\n", "            found = item; break;\n"),
    "a record may be longer than what is there": ("total <= size - start &&", "total <= size &&"),
    "a body may be longer than its record": ("body_length <= total - SHORTEST_RECORD", "body_length <= total"),
    "offsets are of 32 bits": ("i64_at(head + QUEUE_OFFSET), sys_flag", "u32_at(head + QUEUE_OFFSET + 4), sys_flag"),
    "names are told apart by length alone": (
        "kept->length == length && memcmp(kept->bytes, bytes, (size_t)length) == 0", "kept->length == length",
    ),
    "both hosts are of IPv4": ("start += (flag & BORN_HOST_V6 ? 12 : 0)", "start += (flag & 0 ? 12 : 0)"),
}  # fmt: skip
"""What somebody might write: the text that stands there, and what is put in its place."""

BEYOND = (
    "if (start > record->end || start + (data[start - 2] << 8 | data[start - 1]) != record->end) {",
    "if (start + (data[start - 2] << 8 | data[start - 1]) != record->end) {",
)
"""A length that is believed: what it leads to may lie behind the answer."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, tmp_path):
    right, wrong = MISTAKES[mistake]
    source = SOURCE.read_text()
    assert source.count(right) == 1
    build(tmp_path, source.replace(right, wrong), "-O1")
    command = ("-m", "tests.fuzz", *TARGETS, "--engine", "mutation", "--executions", "60000", "--seed", "14")
    answer = run(tmp_path, *command)
    assert answer.returncode != 0 and "0 findings" not in answer.stdout, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    build(folder, SOURCE.read_text(), *SANITIZED)
    return folder


def test_sanitizers_find_nothing_in_what_is_read(sanitized):
    command = ("-m", "tests.fuzz", *TARGETS, "--engine", "mutation", "--seconds", "20", "--seed", "14")
    answer = run(sanitized, *command, sanitized=True)
    assert answer.returncode == 0 and " 0 findings" in answer.stdout, answer.stdout + answer.stderr


def test_sanitizers_find_nothing_in_the_tests(sanitized):
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(SOURCE.parents[2]), "--real=none")
    tests = SOURCE.parents[2] / "tests" / "wire"
    chosen = [str(tests / name) for name in ("test_accelerator.py", "test_message.py")]
    unsuited = "not memory and not variable and not build and not nothing_is_left"  # processes of their own; memory
    answer = run(sanitized, *command, *chosen, "-k", unsuited, sanitized=True)
    assert answer.returncode == 0 and " passed" in answer.stdout, answer.stdout + answer.stderr


def test_sanitizers_find_a_length_that_is_believed(tmp_path):
    source = SOURCE.read_text()
    assert source.count(BEYOND[0]) == 1
    build(tmp_path, source.replace(*BEYOND), *SANITIZED)
    command = ("-m", "tests.fuzz", *TARGETS, "--engine", "mutation", "--seconds", "20", "--seed", "14")
    answer = run(tmp_path, *command, sanitized=True)
    assert answer.returncode != 0 and "AddressSanitizer" in answer.stderr, answer.stdout + answer.stderr


def test_there_is_a_compiler():
    assert compiler()
