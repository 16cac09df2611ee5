"""Prints docs/hazards.md, made from the tests: `python -m tests.hazards > docs/hazards.md`.

A test marked `hazard("HNN")` is about hazard NN, wherever in tests/ it is. Where such a test runs a faulty member as
well, its docstring says what our consumer does, and a paragraph that begins with "Faulty:" who does otherwise.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.marks import TESTS, Test, arguments, fixtures, marked_with, place
from tests.releases import VERSIONS

DOCUMENT = TESTS.parent / "docs" / "hazards.md"

HAZARDS = {
    1: ("A late answer to a pull moves a rewound offset forward again", "loss, duplicates"),
    2: ("A late acknowledgement overwrites a reset", "loss"),
    3: ("Resets are refused for broadcasting groups, and for groups with a queue that was never committed", "stuck"),
    4: ("A reset made at the broker reaches only the first broadcasting member that pulls", "wrong place"),
    5: ("A queue that comes back begins where the file (or broker) says, not memory", "duplicates"),
    6: ("All offsets are wrong: corrections without end", "stuck"),
    7: ("The store's directory cannot be written", "stuck, duplicates"),
    8: ("The subscription's version changes all the time", "alarm, stuck, duplicates"),
    9: ('"No new message" commits past messages that are in flight', "loss"),
    10: ("The store's directory is on a disk that does not last", "loss or duplicates"),
    11: ("The client id, and with it the directory, changes between runs", "loss or duplicates"),
    12: ("Two processes share one client id", "loss, duplicates"),
    13: ("A file is replaced, and a crash leaves it empty, torn or away", "loss, duplicates, stuck"),
    14: ("The file is read, changed and written by several at once", "duplicates"),
    15: ("Persisting drops the queues that are not held at the moment", "loss"),
    16: ("A stored offset is larger than the queue", "loss, stuck"),
    17: ("An offset slightly beyond the end is corrected to 0", "duplicates of everything"),
    18: ("A broker whose index is still being built corrects to 0", "duplicates of everything"),
    19: ("After a broker's failover offsets go back, or beyond the end", "duplicates, loss"),
    20: ("Pulling from slaves, committing to slaves", "stuck, duplicates"),
    21: ('An error or a time-out is taken for "no offset"', "loss or duplicates"),
    22: ('"Last" skips messages, or does not begin at the last', "loss, duplicates"),
    23: ("What a time means", "loss, duplicates"),
    24: ("Where a retry topic begins", "loss, duplicates"),
    25: ("Shutdown loses the race with listeners that run", "duplicates that multiply, loss of order"),
    26: ("Corner cases of orderly batches and commits", "duplicates, loss, stuck"),
    27: ("Orderly broadcasting takes locks at the broker", "stuck"),
    28: ("An orderly queue that goes and comes back at once stands still for two minutes", "stuck"),
    29: ("Side effects of resets that brokers keep, in clustering groups", "loss"),
    30: ("Side effects of resets that are sent to members", "stuck, duplicates"),
    31: ("An offset written by an administrator is overwritten by a consumer that is online", "wrong place"),
    32: ("Commits that travel with pulls, and overtake each other", "duplicates"),
    33: ("A commit is lost: one-way, or the broker had not written it", "duplicates"),
    34: ("A message that could not be sent back is committed past", "loss"),
    35: ("A message is sent back while its listener still runs", "duplicates"),
    36: ("A pull is lost, and nobody notices; a pause makes a queue seem dead", "stuck, duplicates"),
    37: ("A message that is never finished pins the offset", "stuck, duplicates"),
    38: ("Unsubscribing forgets the progress", "duplicates"),
    39: ("A queue has several owners at once, or none", "duplicates, loss"),
    40: ("One timer does routes, heartbeats and commits, one after the other", "duplicates"),
    41: ("Filtered messages, and members that subscribe differently", "duplicates, loss"),
    42: ("The file's text is read differently by each client", "loss, duplicates, stuck"),
    43: ("A message that fails in a broadcasting group blocks or is skipped", "stuck or loss"),
    44: ("Diagnostics change offsets", "duplicates"),
    45: ("Offsets are deleted or replaced at the broker", "loss, duplicates"),
    46: ("Proxies keep offsets of broadcasting groups of their own", "duplicates, loss"),
    47: ("Logical queues, tiered storage, batch queues", "wrong place"),
    48: ("Pull consumers whose user stores offsets", "loss, duplicates, stuck"),
    49: ("POP consumers", "loss, duplicates"),
    50: ("Connectors and frameworks that keep offsets of their own", "loss, duplicates"),
}
"""Every hazard: what goes wrong, and what users see of it."""

NAMES = [f"H{number:02}" for number in HAZARDS]

REMARKS = {
    46: "No test: this is about clients that reach brokers through a proxy. Ours keeps its own file.",
    47: "The rest is about brokers and their storage.",
    48: "There is no pull consumer here; this is what the hazard teaches a push consumer.",
    49: "No test: there is no such consumer here. The broker keeps what a POP consumer has not acknowledged.",
    50: "No test: this is about programs on top of a client.",
}
"""Why a hazard has no test, or not for all of it."""

HEAD = """\
# Hazards of consumer offsets

Every way we know of in which a RocketMQ consumer, in whatever language, has lost messages, consumed them again or stood
still because of offsets; what this one does about it; and the test that shows it. Each test has its fault in it: a
variant that behaves as the clients where the hazard was met, which the same check must catch.

*Made from the tests by `python -m tests.hazards > docs/hazards.md`. "Real" are the releases {releases}.*
"""


@dataclass(frozen=True, slots=True)
class HazardTest:
    """One test: where it is, which hazards it is about, what it says and what it runs on."""

    name: str
    path: str
    numbers: tuple[int, ...]
    text: str
    faulty: str
    brokers: str


@cache
def hazard_tests() -> tuple[HazardTest, ...]:
    """Return the tests of hazards, in the order of their files."""
    return tuple(_read_tests())


def _read_tests() -> Iterator[HazardTest]:
    for path, node in marked_with("hazard"):
        names = arguments(node, "hazard")
        if unknown := [name for name in names if name not in NAMES]:
            sys.exit(f"{place(path)}: {node.name}: hazard({unknown[0]!r}) is none of {NAMES[0]} to {NAMES[-1]}")
        numbers = tuple(NAMES.index(name) + 1 for name in names)
        if numbers and "the_naive_member_is_right" not in node.name:
            yield HazardTest(node.name, place(path), numbers, *_docstring(node), _brokers(node))


def _docstring(node: Test) -> tuple[str, str]:
    """Return what a test's docstring says of us, and what of others."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")]
    ours = [part for part in paragraphs if part and not part.startswith("Faulty:")]
    others = [part.removeprefix("Faulty:").strip() for part in paragraphs if part.startswith("Faulty:")]
    return " ".join(ours), " ".join(_sentence(part) for part in others)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _brokers(node: Test) -> str:
    """Return which brokers a test runs on, by its fixtures."""
    taken, versions = fixtures(node), ", ".join(arguments(node, "versions") or ["real"])
    if taken & {"real_cluster", "real_version"}:
        return versions
    if "cluster" in taken:
        return f"embedded, {versions}"
    return "embedded" if taken & {"embedded", "broker", "names"} else "none needed"


def document() -> str:
    """Return docs/hazards.md as it should be."""
    tests = hazard_tests()
    parts = [HEAD.format(releases=", ".join(VERSIONS))]
    for number, (title, effects) in HAZARDS.items():
        about = [test for test in tests if number in test.numbers]
        parts.append(f"## H{number:02} {title}\n\n*{_sentence(effects)}.*\n")
        claims = dict.fromkeys((test.text, test.faulty) for test in about if test.text)
        if claims:
            points = [f"- {text}" + (f" *Elsewhere:* {faulty}" if faulty else "") for text, faulty in claims]
            parts.append("\n".join(points) + "\n")
        if number in REMARKS:
            parts.append(f"{REMARKS[number]}\n")
        if about:
            rows = [f"| `{test.name}` | {test.path} | {test.brokers} |" for test in about]
            parts.append("\n".join(["| test | file | brokers |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
