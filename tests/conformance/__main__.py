"""Prints docs/fidelity.md, made from the tests: `python -m tests.conformance > docs/fidelity.md`.

A test with the mark `differs("…")` shows what one kind of broker does where the other does something else.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

from tests.marks import TESTS, arguments, fixtures, marked_with, place
from tests.releases import VERSIONS

FOLDER = Path(__file__).parent
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
        'it is set; `settings={"slaveReadEnable": False}` unsets it',
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
}
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


@cache
def marked_tests() -> list[tuple[Path, ast.FunctionDef, list[str]]]:
    """Return the tests that show differences, with what these are, and all of this folder."""
    found = marked_with("differs", *FOLDER.glob("test_*.py"))
    return [(path, node, arguments(node, "differs")) for path, node in found]


def document() -> str:
    """Return docs/fidelity.md as it should be."""
    parts = [HEAD.format(releases=", ".join(VERSIONS))]
    for key, (real, embedded) in DIFFERENCES.items():
        shown = ", ".join(f"`{node.name}` ({place(path)})" for path, node, differs in marked_tests() if key in differs)
        parts.append(f"| {real} | {embedded} | {shown} |\n")
    parts.append(ALIKE)
    here = [(path, node) for path, node, _ in marked_tests() if path.parent == FOLDER]
    for path in dict.fromkeys(path for path, node in here if "cluster" in fixtures(node)):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        parts.append(f"* {place(path)}: {text.splitlines()[0]}\n")
    parts.append(ONLY_REAL)
    parts += [f"* `{node.name}` ({place(path)})\n" for path, node in here if "real_cluster" in fixtures(node)]
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
