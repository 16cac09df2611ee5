"""The documentation names existing things, and all public ones."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pyrocket_consumer
from pyrocket_consumer import EventKind, ProducerConfig, admin, compat, consumer, errors, offsets, producer, testing
from pyrocket_consumer.compat.rocketmq import client
from pyrocket_consumer.config import ConsumerConfig
from tests.for_each import for_each

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = (ROOT / "docs" / "reference.md").read_text()

OPTIONS = sorted({field.name for kind in (ConsumerConfig, ProducerConfig) for field in fields(kind)})
ERRORS = sorted(name for name, value in vars(errors).items() if isinstance(value, type))


@for_each("name", [*OPTIONS, *ERRORS])
def test_the_reference_has(name):
    assert f"`{name}`" in REFERENCE


EVENT_ROWS = re.findall(r"^\| `([a-z-]+)` \| ([A-Z, –]+) \|", (DOCS / "events.md").read_text(), re.MULTILINE)


def test_each_event_has_one_row():
    assert sorted(kind for kind, _ in EVENT_ROWS) == sorted(EventKind)


PUBLIC = {
    getattr(module, name)
    for module in (pyrocket_consumer, admin, client, compat, consumer, offsets, producer, testing)
    for name in module.__all__
    if not name.startswith("_") and inspect.isroutine(getattr(module, name)) | inspect.isclass(getattr(module, name))
}


@for_each("public", sorted(PUBLIC, key=repr), ids=lambda public: public.__qualname__)
def test_public_names_have_a_docstring(public):
    methods = vars(public).items() if inspect.isclass(public) else ()
    docstrings = {"": public.__doc__} | {
        name: inspect.getdoc(getattr(public, name))
        for name, value in methods
        if not name.startswith("_")
        and (isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value))
    }
    assert [name for name, text in docstrings.items() if not text or text.startswith(f"{public.__name__}(")] == []


def test_the_design_notes_print_the_table_of_states():
    from pyrocket_consumer.consumer.assignment.held_queue import QueueState

    notes = (ROOT / "docs" / "design.md").read_text()
    assert all(state.name in notes for state in QueueState)


def test_the_security_policy_names_the_version_that_gets_fixes():
    release = ".".join(pyrocket_consumer.__version__.split(".")[:2])
    assert f"\n| {release} | yes |\n" in (ROOT / "SECURITY.md").read_text()


LINKED = re.compile(r"\]\(([^)\s]+)\)")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *DOCS.glob("*.md")])


@for_each("page", PAGES)
def test_links_between_pages_hold(page):
    text = (ROOT / page).read_text()
    wrong = []
    for link in LINKED.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    assert wrong == []


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings, as code hosts write them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_glossary_names_files_and_classes_that_exist():
    product = ROOT / "pyrocket_consumer"
    text = (DOCS / "glossary.md").read_text()
    section = text[text.index("## Where to find it") :]
    names = {path.name for path in product.rglob("*.py")}
    files = re.findall(r"`([a-z_/]+\.py)`", section)
    assert [file for file in files if not ((product / file).exists() if "/" in file else file in names)] == []
    source = "\n".join(path.read_text() for path in product.rglob("*.py"))
    words = {part for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", text) for part in name.split(".")}
    assert [word for word in sorted(words) if not re.search(rf"\b(?:class|def) {word}\b", source)] == []


def test_the_events_page_has_each_level_that_the_code_logs():
    documented = {kind: set(levels.replace("–", "").split(", ")) for kind, levels in EVENT_ROWS}
    undocumented = set()
    for path in (ROOT / "pyrocket_consumer" / "consumer").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            method = getattr(call.func, "attr", "") if isinstance(call, ast.Call) else ""
            kind = getattr(call.args[0], "attr", "") if method in ("emit", "emit_throttled") and call.args else ""
            if kind in EventKind.__members__:
                given = [getattr(each.value, "attr", None) for each in call.keywords if each.arg == "level"]
                level = given[0] if given else "WARNING" if method == "emit_throttled" else "INFO"
                if level and level not in documented[EventKind[kind]]:
                    undocumented.add((EventKind[kind].value, level))
    assert not undocumented
