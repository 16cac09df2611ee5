"""Make docs/hazards.md from the tests: `python -m tests.hazards --write`.

A test marked `hazard("HNN")` is about hazard NN, in any folder of tests/. Its docstring describes the behaviour of our
consumer. A paragraph that begins with "Faulty:" describes the clients that fail, whose fault the test also runs.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.marks import TESTS, Test, arguments, fixtures, marked_with, page_path
from tests.releases import VERSIONS

DOCUMENT = TESTS.parent / "docs" / "hazards.md"

HAZARDS = {
    1: ("A late pull response moves a rewound offset forward again", "loss, duplicates"),
    2: ("A late acknowledgement overwrites a reset", "loss"),
    3: ("Resets are refused for broadcasting groups, and for groups with a queue that was never committed", "stuck"),
    4: ("A reset made at the broker reaches only the first broadcasting member that pulls", "wrong offset"),
    5: ("A queue that returns begins at the offset of the file or broker, not at that in memory", "duplicates"),
    6: ("All offsets are wrong, and the broker corrects them without end", "stuck"),
    7: ("The store's directory cannot be written", "stuck, duplicates"),
    8: ("The subscription's version changes all the time", "alarm, stuck, duplicates"),
    9: ('A "no new message" response commits past messages in flight', "loss"),
    10: ("The store's directory is on a disk that does not last", "loss or duplicates"),
    11: ("The client id changes between runs, and the directory with it", "loss or duplicates"),
    12: ("Two processes share one client id", "loss, duplicates"),
    13: ("A crash during the replacement of a file leaves it empty, torn or missing", "loss, duplicates, stuck"),
    14: ("Several threads or processes read, change and write the file at once", "duplicates"),
    15: ("Persisting drops the queues that the member does not hold at the moment", "loss"),
    16: ("A stored offset is larger than the queue", "loss, stuck"),
    17: ("An offset slightly beyond the end is corrected to 0", "duplicates of everything"),
    18: ("A broker that is still building its index corrects to 0", "duplicates of everything"),
    19: ("After a broker's failover offsets are lower, or beyond the end", "duplicates, loss"),
    20: ("Pulling from slaves, committing to slaves", "stuck, duplicates"),
    21: ('An error or a timeout is treated as "no offset"', "loss or duplicates"),
    22: ('"Last" skips messages, or does not begin at the end', "loss, duplicates"),
    23: ("The meaning of a start time", "loss, duplicates"),
    24: ("The start offset of a retry topic", "loss, duplicates"),
    25: ("Shutdown does not wait for running listeners", "duplicates that multiply, loss of order"),
    26: ("Corner cases of orderly batches and commits", "duplicates, loss, stuck"),
    27: ("Orderly broadcasting takes locks at the broker", "stuck"),
    28: ("An orderly queue that leaves and returns at once is stuck for two minutes", "stuck"),
    29: ("Side effects of resets that brokers keep, in clustering groups", "loss"),
    30: ("Side effects of resets that brokers send to members", "stuck, duplicates"),
    31: ("A running consumer overwrites an offset that an administrator has written", "wrong offset"),
    32: ("Commits are sent with pulls, and overtake each other", "duplicates"),
    33: ("A commit is lost, because it is one-way, or because the broker had not stored it", "duplicates"),
    34: ("The consumer commits past a message that it could not send back", "loss"),
    35: ("A message is sent back while its listener still runs", "duplicates"),
    36: ("A pull is lost unnoticed, or a pause makes a queue seem dead", "stuck, duplicates"),
    37: ("A message that never finishes blocks the offset", "stuck, duplicates"),
    38: ("Unsubscribing forgets the progress", "duplicates"),
    39: ("A queue has several owners at once, or none", "duplicates, loss"),
    40: ("One timer runs route updates, heartbeats and commits, one after the other", "duplicates"),
    41: ("Filtered messages, and members with different subscriptions", "duplicates, loss"),
    42: ("Each client reads the text of the file differently", "loss, duplicates, stuck"),
    43: ("A message that fails in a broadcasting group blocks or is skipped", "stuck or loss"),
    44: ("Diagnostics change offsets", "duplicates"),
    45: ("Offsets are deleted or replaced at the broker", "loss, duplicates"),
    46: ("Proxies keep their own offsets of broadcasting groups", "duplicates, loss"),
    47: ("Logical queues, tiered storage, batch queues", "wrong offset"),
    48: ("Pull consumers whose users store the offsets", "loss, duplicates, stuck"),
    49: ("POP consumers", "loss, duplicates"),
    50: ("Connectors and frameworks that keep their own offsets", "loss, duplicates"),
}
"""The hazards: the fault, and its effect for users."""

NAMES = [f"H{number:02}" for number in HAZARDS]

REMARKS = {
    46: "No test: the hazard concerns clients that reach brokers through a proxy. This consumer keeps its own file.",
    47: "The other parts of the hazard concern brokers and their storage.",
    48: "This package has no pull consumer. The tests apply the hazard to the push consumer.",
    49: "No test: this package has no POP consumer. The broker keeps its unacknowledged messages.",
    50: "No test: the hazard concerns programs on top of a client.",
}
"""The reason why a hazard, or a part of it, has no test."""

HEAD = """\
# Hazards of consumer offsets

This page lists every known way in which RocketMQ consumers of any language have lost messages, consumed them twice, or
stopped, because of offsets. For each hazard it describes the behaviour of this consumer, and names the tests that prove
it. Most tests also run a faulty member that behaves like the affected clients, and require that the same check fails.

*Made from the tests by `python -m tests.hazards --write`. "real" means the releases {releases}.*
"""


@dataclass(frozen=True, slots=True)
class HazardTest:
    """One test: its file, its hazards, the text of its docstring, and the brokers that it runs on."""

    name: str
    path: str
    numbers: tuple[int, ...]
    text: str
    faulty: str
    brokers: str


@cache
def hazard_tests() -> tuple[HazardTest, ...]:
    """Return the tests of hazards, sorted by file."""
    return tuple(_read_tests())


def _read_tests() -> Iterator[HazardTest]:
    for path, node in marked_with("hazard"):
        names = arguments(node, "hazard")
        if unknown := [name for name in names if name not in NAMES]:
            sys.exit(f"{page_path(path)}: {node.name}: hazard({unknown[0]!r}) is not one of {NAMES[0]} to {NAMES[-1]}")
        numbers = tuple(NAMES.index(name) + 1 for name in names)
        if numbers and "the_naive_member_is_right" not in node.name:
            yield HazardTest(node.name, page_path(path), numbers, *_docstring(node), _brokers(node))


def _docstring(node: Test) -> tuple[str, str]:
    """Return the parts of a test's docstring about our consumer, and about others."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")]
    ours = [part for part in paragraphs if part and not part.startswith("Faulty:")]
    others = [part.removeprefix("Faulty:").strip() for part in paragraphs if part.startswith("Faulty:")]
    return " ".join(ours), " ".join(_sentence(part) for part in others)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _brokers(node: Test) -> str:
    """Return the brokers that a test runs on, by its fixtures."""
    taken, versions = fixtures(node), ", ".join(arguments(node, "versions") or ["real"])
    if taken & {"real_cluster", "real_version"}:
        return versions
    if "cluster" in taken:
        return f"embedded, {versions}"
    return "embedded" if taken & {"embedded", "broker", "names"} else "none needed"


def document() -> str:
    """Return the text of docs/hazards.md."""
    tests = hazard_tests()
    parts = [HEAD.format(releases=", ".join(VERSIONS))]
    for number, (title, effects) in HAZARDS.items():
        about = [test for test in tests if number in test.numbers]
        parts.append(f"## H{number:02} {title}\n\n*{_sentence(effects)}.*\n")
        claims = dict.fromkeys((test.text, test.faulty) for test in about if test.text)
        if claims:
            points = [f"- {text}" + (f" *Other clients:* {faulty}" if faulty else "") for text, faulty in claims]
            parts.append("\n".join(points) + "\n")
        if number in REMARKS:
            parts.append(f"{REMARKS[number]}\n")
        if about:
            rows = [f"| `{test.name}` | {test.path} | {test.brokers} |" for test in about]
            parts.append("\n".join(["| test | file | brokers |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(document())
    else:
        sys.stdout.write(document())
