"""The compiled part under sanitizers, and with mistakes planted: whoever compares it with Python must find them."""

from __future__ import annotations

import subprocess

import pytest

from tests.interpreters import pythons
from tests.wire.building import SANITIZED, SOURCE, build, compiler, run

TARGETS = ("compiled-as-python", "compiled-record-as-python", "compiled-properties-as-python")
COLUMNS = "compiled-columns-as-python"

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

MISTAKES_OF_COLUMNS = {
    "a host of IPv6 is as long as one of IPv4": (
        "uint32_t shift = born_v6(&row) + store_v6(&row);", "uint32_t shift = 0;",
    ),
    "a batch's own record is a row": ("(row.sys_flag & UNPACK) == UNPACK ||", ""),
    "any magic will do": ("(magic != MAGIC_V1 && magic != MAGIC_V2)", "0"),
    "the end of the range belongs to it": ("first <= offset && offset < end", "first <= offset && offset <= end"),
    "bytes too few for a record are passed over": ("return left ? IRREGULAR : REGULAR;", "return REGULAR;"),
    "what is no UTF-8 is text": ("if (!is_utf8((const", "if (0 && !is_utf8((const"),
    "the first value is as long as the last": (
        "        place->value_length = (uint16_t)item.value_length;\n    }\n",
        "        if (!place->value_length) {place->value_length = (uint16_t)item.value_length;}\n    }\n",
    ),
    "a time that is no date is one": ("number < FIRST_MS || number > LAST_MS", "number < FIRST_MS"),
    "texts overlap": ("            place += texts[each].length;\n", "            place += texts[each].length - 1;\n"),
    "rows with any tag are kept": ("if (is_chosen(tags_of(self, &self->rows[each], NULL), tags, count))", "if (1)"),
    "an id is of the producer's host": (
        "Text host = store_host_of(self, row, NULL);", "Text host = born_host_of(self, row, NULL);",
    ),
}  # fmt: skip

BEYOND = (
    "if (start > record->end || start + (data[start - 2] << 8 | data[start - 1]) != record->end) {",
    "if (start + (data[start - 2] << 8 | data[start - 1]) != record->end) {",
)
"""A length that is believed: what it leads to may lie behind the answer."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, tmp_path):
    assert_found(tmp_path, *MISTAKES[mistake], *TARGETS, executions=60_000)


@pytest.mark.parametrize("mistake", MISTAKES_OF_COLUMNS)
def test_a_mistake_in_columns_is_found(mistake, tmp_path):
    assert_found(tmp_path, *MISTAKES_OF_COLUMNS[mistake], COLUMNS, executions=20_000)


def fuzz(*targets):
    return ("-m", "tests.fuzz", *targets, "--engine", "mutation", "--seed", "14")


def assert_found(folder, right, wrong, *targets, executions):
    source = SOURCE.read_text()
    assert source.count(right) == 1
    build(folder, source.replace(right, wrong), "-O1", "-Wno-unused-function", "-Wno-unused-variable")
    answer = run(folder, *fuzz(*targets), "--executions", str(executions), "--seconds", "240")
    assert answer.returncode != 0 and "0 findings" not in answer.stdout, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    build(folder, SOURCE.read_text(), *SANITIZED)
    return folder


def test_sanitizers_find_nothing_in_what_is_read(sanitized):
    answer = run(sanitized, *fuzz(*TARGETS, COLUMNS), "--seconds", "20", sanitized=True)
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
    answer = run(tmp_path, *fuzz(*TARGETS), "--executions", "60000", "--seconds", "240", sanitized=True)
    assert answer.returncode != 0 and "AddressSanitizer" in answer.stderr, answer.stdout + answer.stderr


def test_what_a_free_threaded_python_compiles_is_right():
    """With the headers of an ordinary one, told that it is free-threaded: 3.13 is the first that can be."""
    if "3.13" not in pythons():
        pytest.skip("there is no Python 3.13")
    ask = "import sysconfig; print(sysconfig.get_path('include'))"
    headers = subprocess.run([pythons()["3.13"], "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    flags = ("-fsyntax-only", "-Wall", "-Werror", "-DPy_GIL_DISABLED=1", '-DSOURCE=""', "-I", headers)
    command = [compiler(), *flags, str(SOURCE)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr


def test_there_is_a_compiler():
    assert compiler()
