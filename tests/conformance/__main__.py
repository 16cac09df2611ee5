"""Make docs/fidelity.md from the tests: `python -m tests.conformance --write`.

A test with the mark `differs("…")` shows a difference between real and embedded brokers.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

from tests.marks import TESTS, arguments, fixtures, marked_with, page_path
from tests.releases import VERSIONS

FOLDER = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "fidelity.md"

DIFFERENCES = {
    "side by side": (
        "execute the requests of one connection concurrently, so one may overtake another",
        "executes them one after the other; with `side_by_side_s` they overtake each other, controlled by `seed`",
    ),
    "registration": (
        "register within 30 s at a name server that was restarted, and new topics within moments",
        "registers at once; after `start(register=False)` it registers with `register()`",
    ),
    "ends": (
        "need seconds to stop and to start; a killed broker loses the commits of its last 5 s",
        "stops and starts at once; `kill()` loses commits only with `lose_commits=True`, and never messages",
    ),
    "roles": (
        "change roles automatically, if there is a controller",
        "changes roles when the test calls `switch_master`",
    ),
    "slaves": (
        "serve pulls on slaves (5.x) only if `slaveReadEnable` is set",
        'has it set; `settings={"slaveReadEnable": False}` unsets it',
    ),
    "disk": (
        "delete messages that are too old (`fileReservedTime`) or exceed the disk, and refuse sends when it is full",
        "keeps messages in memory; `delete_before` and `truncate` delete them, and a fault refuses sends",
    ),
    "busy": (
        "refuse requests that waited too long (SYSTEM_BUSY), and pulls beyond a quota (FLOW_CONTROL)",
        "is never busy; `answer(ResponseCode.SYSTEM_BUSY)` is a fault",
    ),
    "accounts": (
        "have accounts with permissions for topics and groups",
        "has one account with all permissions",
    ),
    "tls": (
        "accept plain and TLS connections on one port by default",
        "accepts only TLS connections with `tls`, and only plain ones without",
    ),
    "sql92": (
        "select by SQL92, if `enablePropertyFilter` is set",
        "always refuses SQL92",
    ),
    "inner batches": (
        "keep a batch as one record in a topic for batches (5.x, `queue.type=BatchCQ`)",
        "stores the messages of a batch separately",
    ),
    "requests": (
        "support POP, request-reply, the recall of timers, the administration of accounts, and static topics",
        "answers REQUEST_CODE_NOT_SUPPORTED (3)",
    ),
}
"""The behaviour of real brokers and of embedded ones, where a difference matters for tests."""

HEAD = """\
# Differences between the embedded cluster and real brokers

`EmbeddedCluster` behaves as brokers {releases} do. Tests compare its frames with recorded ones, and
the black-box tests of this project run unchanged on both. A test shows each intended difference:

*Generated from the tests by `python -m tests.conformance --write`.*

| real brokers | the embedded cluster | shown by |
|---|---|---|
"""

ALIKE = """
These tests run on both:

"""

ONLY_REAL = """
These tests run on real brokers only:

"""


@cache
def marked_tests() -> list[tuple[Path, ast.FunctionDef, list[str]]]:
    """Return the tests that show differences, with the keys of these, and all tests of this folder."""
    found = marked_with("differs", *FOLDER.glob("test_*.py"))
    return [(path, node, arguments(node, "differs")) for path, node in found]


def document() -> str:
    """Return the text of docs/fidelity.md."""
    parts = [HEAD.format(releases=", ".join(VERSIONS))]
    for key, (real, embedded) in DIFFERENCES.items():
        shown = ", ".join(
            f"`{node.name}` ({page_path(path)})" for path, node, differs in marked_tests() if key in differs
        )
        parts.append(f"| {real} | {embedded} | {shown} |\n")
    parts.append(ALIKE)
    here = [(path, node) for path, node, _ in marked_tests() if path.parent == FOLDER]
    for path in dict.fromkeys(path for path, node in here if "cluster" in fixtures(node)):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        parts.append(f"* {page_path(path)}: {text.splitlines()[0]}\n")
    parts.append(ONLY_REAL)
    parts += [f"* `{node.name}` ({page_path(path)})\n" for path, node in here if "real_cluster" in fixtures(node)]
    return "".join(parts)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(document())
    else:
        sys.stdout.write(document())
