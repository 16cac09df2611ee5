"""Prints docs/fidelity.md, made from the tests: `python -m tests.conformance > docs/fidelity.md`.

A test with the mark `differs("…")` shows what one kind of broker does where the other does something else.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.real_brokers import VERSIONS

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
DOCUMENT = TESTS.parent / "docs" / "fidelity.md"

DIFFERENCES = {
    "side by side": (
        "execute the requests of one connection side by side: one may overtake another",
        "executes one after the other, in order; with `side_by_side_s` they overtake each other, as `seed` says",
    ),
    "registration": (
        "register at a name server that was restarted within 30 s, new topics within moments",
        "at once; `start(register=False)` leaves it to `register()`",
    ),
    "ends": (
        "need seconds to stop and to start; one that is killed has lost the commits of its last 5 s",
        "at once; `kill()` loses commits only with `lose_commits=True`, and messages never",
    ),
    "roles": (
        "change roles by themselves, where there is a controller",
        "when the test calls `switch_master`",
    ),
    "slaves": (
        "answer no pulls as slaves (5.x) unless `slaveReadEnable` is set",
        "it is set; `settings={\"slaveReadEnable\": False}` unsets it",
    ),
    "disk": (
        "delete what is too old (`fileReservedTime`) or too much for the disk, and refuse sends when it is full",
        "keeps all in memory; `delete_before` and `truncate` delete, and a fault refuses",
    ),
    "busy": (
        "refuse what has waited in them for too long (SYSTEM_BUSY), and pulls beyond a quota (FLOW_CONTROL)",
        "is never busy; `answer(ResponseCode.SYSTEM_BUSY)` is a fault",
    ),
    "accounts": (
        "know accounts with rights to topics and groups",
        "knows one account, which may do everything",
    ),
    "tls": (
        "take plain connections and those with TLS on one port, unless set otherwise",
        "takes those with TLS only if `tls` is given, else plain ones only",
    ),
    "sql92": (
        "select by SQL92, if `enablePropertyFilter` is set",
        "refuses SQL92 in any case",
    ),
    "inner batches": (
        "keep a batch in one piece where the topic is one of batches (5.x, `queue.type=BatchCQ`)",
        "takes every batch apart",
    ),
    "requests": (
        "know POP, request and reply, the recall of timers, the administration of accounts, static topics",
        "answers REQUEST_CODE_NOT_SUPPORTED (3)",
    ),
}  # fmt: skip
"""What real brokers do and what the embedded ones do instead, where it matters to those who write tests."""

HEAD = """\
# What the embedded cluster does not do as real brokers do

`EmbeddedCluster` answers as brokers {releases} do: frames recorded from them are compared with its own, and
the tests of this project that look from outside run unchanged on both. Where it differs on purpose, a test shows it:

*Made from the tests by `python -m tests.conformance > docs/fidelity.md`.*

| real brokers | the embedded cluster | shown by |
|---|---|---|
"""

ALIKE = """
Both are held to the same by

"""

ONLY_REAL = """
and real ones alone by

"""


@dataclass(frozen=True, slots=True)
class MarkedTest:
    """A test that shows a difference, or one of this folder."""

    name: str
    path: Path
    differs: tuple[str, ...]
    fixtures: frozenset[str]


@cache
def marked_tests() -> list[MarkedTest]:
    """Return the tests that show differences, and all of this folder."""
    sources = {path: path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
    return [
        MarkedTest(node.name, path, tuple(_differs(node)), frozenset(argument.arg for argument in node.args.args))
        for path, source in sources.items()
        if "mark.differs" in source or path.parent == FOLDER
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def _differs(node: ast.FunctionDef) -> Iterator[str]:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.differs":
            yield from (str(ast.literal_eval(each)) for each in mark.args)


def document() -> str:
    """Return docs/fidelity.md as it should be."""
    tests = marked_tests()
    parts = [HEAD.format(releases=", ".join(VERSIONS))]
    for key, (real, embedded) in DIFFERENCES.items():
        shown = ", ".join(f"`{test.name}` ({_place(test.path)})" for test in tests if key in test.differs)
        parts.append(f"| {real} | {embedded} | {shown} |\n")
    parts.append(ALIKE)
    for path in dict.fromkeys(test.path for test in tests if "cluster" in test.fixtures and _is_here(test)):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        parts.append(f"* {_place(path)}: {text.splitlines()[0]}\n")
    parts.append(ONLY_REAL)
    only_real = [test for test in tests if "real_cluster" in test.fixtures and _is_here(test)]
    parts += [f"* `{test.name}` ({_place(test.path)})\n" for test in only_real]
    return "".join(parts)


def _is_here(test: MarkedTest) -> bool:
    return test.path.parent == FOLDER


def _place(path: Path) -> str:
    return path.relative_to(TESTS.parent).as_posix()


if __name__ == "__main__":
    sys.stdout.write(document())
