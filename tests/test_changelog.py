"""News fragments have names and texts that `make changelog` can use; the changelog has the current version."""

from __future__ import annotations

import re
import tomllib

import pyrocket_consumer
from tests.for_each import for_each
from tests.pages import DOCS, ROOT

FOLDER = DOCS / "changelog.d"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in SETTINGS["type"]]
NAME = re.compile(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md")
FRAGMENTS = sorted(path.name for path in FOLDER.iterdir() if path.name not in ("README.md", "template.jinja"))
SENTENCE = re.compile(r"[A-Z`\[].*?\.(?: |$)")


@for_each("name", [*FRAGMENTS, "tls-names.fixed.md"])
def test_a_fragment_has_a_subject_and_a_kind(name):
    assert NAME.fullmatch(name), f"docs/changelog.d/{name}: name it <name>.<kind>.md, with a kind of {KINDS}"


@for_each("name", ["fixed.md", "tls.bug.md", "TLS.fixed.md", "tls.fixed.txt", "tls names.fixed.md", "tls.fixed.1.md"])
def test_other_names_are_refused(name):
    assert not NAME.fullmatch(name)


def problem_of(text: str) -> str | None:
    """Return the defect of a fragment's text, or None."""
    if len(text.splitlines()) != 1 or not text.endswith("\n"):
        return "it must be one line"
    if text.startswith(("#", "*", "-")):
        return "it must be sentences, without a heading or a list"
    sentences = SENTENCE.findall(text.strip())
    if "".join(sentences).strip() != text.strip():
        return "it must be whole sentences: a capital letter or a name first, a full stop last"
    return "it may have at most three sentences" if len(sentences) > 3 else None


@for_each("name", FRAGMENTS)
def test_a_fragment_is_up_to_three_sentences(name):
    assert problem_of((FOLDER / name).read_text()) is None


@for_each(
    "text, problem",
    [
        ("`close()` returns in time. No thread stays.\n", None),
        ("`close()` returns\nin time.\n", "one line"),
        ("`close()` returns in time.", "one line"),
        ("* `close()` returns in time.\n", "without a heading"),
        ("fix close\n", "whole sentences"),
        ("One. Two. Three. Four.\n", "at most three"),
    ],
)
def test_problems_of_a_text_are_named(text, problem):
    found = problem_of(text)
    assert found is None if problem is None else problem in str(found)


def test_the_page_about_fragments_lists_the_kinds():
    assert re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE) == KINDS


def test_the_changelog_has_the_current_version():
    assert f"\n## {pyrocket_consumer.__version__}" in (ROOT / "CHANGELOG.md").read_text()
