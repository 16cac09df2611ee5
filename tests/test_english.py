"""Texts and names keep to `docs/style.md`, in short sentences and usual words."""

from __future__ import annotations

import pytest

from tests.english import (
    INSTEAD,
    MAX_WORDS,
    ROOT,
    Block,
    c_blocks,
    check,
    check_file,
    check_source,
    files,
    main,
    makefile_blocks,
    markdown_blocks,
    python_blocks,
    word_table,
)
from tests.for_each import for_each

SHARES = 8  # the files are checked in eight tests, because a unit test may take at most 2 s


def found(blocks) -> list[tuple[int, str, str]]:
    return [(finding.line, finding.rule, finding.text) for block in blocks for finding in check(block, "a path")]


@pytest.mark.parametrize("share", range(SHARES))
def test_the_english_of_each_file_is_plain(share):
    assert "\n".join(str(finding) for path in files()[share::SHARES] for finding in check_file(path)) == ""


LONG = " ".join(["word"] * (MAX_WORDS + 1))
SHORT = " ".join(["word"] * MAX_WORDS)


@for_each(
    "text, lines",
    [
        (f"{LONG}.", [1]),
        (f"{SHORT}.", []),
        (f"{SHORT}. Another sentence.", []),
        (f"One. {LONG}", [1]),
        (f"One.\nTwo. {LONG}", [2]),
        (f"{SHORT}; and more", [1]),
        (f"{SHORT}:\n* an item\n* another item", []),
        (f"{SHORT}:\n```\n{LONG}\n```\n", []),
        (f"{SHORT[:-5]} `code of many words that count as one`", []),
        (f"{SHORT[:-5]} [link](https://example.com/a b c)", []),
        (f"| {SHORT} | {SHORT} |", []),
        (f"| a | {LONG} |", [1]),
        (f"# {SHORT}\n{SHORT}", []),
        (f"* {SHORT}\n  {SHORT}", [1]),
        (f"{SHORT} e.g. `code`", [1]),
    ],
)
def test_long_sentences_are_found(text, lines):
    assert [line for line, rule, _ in found(markdown_blocks(text)) if rule == "length"] == lines


@for_each(
    "text, words",
    [
        ("A member is told of it.", ["told"]),
        ("`told` is code, and so is\n\n```\ntold\n```\n", []),
        ("The event `offset-apart`, offset-apart, and x.told in a sentence", []),
        ("It goes on,\nand it looks at the file. Told twice", ["goes on", "looks at", "Told"]),
        ("It goes\non", ["goes on"]),
        ("x is None, and there is none", ["is none"]),
        ("a [link that is told](told.md)", ["told"]),
    ],
)
def test_banned_words_are_found(text, words):
    assert [text.split("'")[1] for _, rule, text in found(markdown_blocks(text)) if rule == "word"] == words


@for_each(
    "sentence, is_found",
    [
        ("What is left of a queue goes to the next owner.", True),
        ("What lets a message be missed is not the consumer's fault.", True),
        ("What does a test cost, and is it slow?", False),
        ("What a test costs", False),
        ("The rest of a queue goes to the next owner.", False),
    ],
)
def test_clauses_in_place_of_nouns_are_found(sentence, is_found):
    assert any(rule == "subject" for _, rule, _ in found(markdown_blocks(sentence))) == is_found


MODULE = '''\
"""Told in a docstring."""

# A comment: told
x = "told # in a string, which is a text of the product"  # anew, in a comment
y = f"the broker {x} told nothing to us"
z = "told"


def test_that_it_is_told():
    """Return a value.

    Raises:
        ValueError: told
    """


class Beside:
    """A class.

        told = "in code"
    """
'''


def test_python_is_read():
    assert [(line, rule) for line, rule, _ in sorted(found(python_blocks(MODULE, product=True)))] == [
        (1, "word"), (3, "word"), (4, "word"), (4, "word"), (5, "word"), (9, "name"), (13, "word"), (17, "name"),
    ]  # fmt: skip


def test_texts_and_classes_outside_the_product_are_not_read():
    lines = [line for line, _, _ in sorted(found(python_blocks(MODULE, product=False)))]
    assert lines == [1, 3, 4, 9, 13]


def test_a_line_can_be_allowed():
    assert [finding.line for finding in check_source("page.md", "told <!-- english: allow -->\ntold\n")] == [2]
    assert [finding.line for finding in check_source("x.py", "# told\nx = 1\n# told  # english: allow\n")] == [1]


def test_c_is_read():
    source = '/* told\n * anew */\nraise("the %s is told to nobody");\nx = "told"; // told\n'
    assert [line for line, _, _ in sorted(found(c_blocks(source)))] == [1, 2, 3, 4]


def test_makefiles_are_read():
    source = "# told\nhelp: x  ## told\n\techo told\n"
    assert [line for line, _, _ in found(makefile_blocks(source))] == [1, 2]


def test_the_command_prints_findings_and_counts(capsys):
    assert main([str(ROOT / "tests" / "test_english.py")]) == 0
    assert main(["--count", str(ROOT / "tests" / "test_english.py")]) == 0
    assert "length" in capsys.readouterr().out


@for_each("forms", INSTEAD)
def test_each_word_is_found(forms):
    for form in forms.split("|"):
        assert found([Block([(1, form.replace("...", "it"))])]), form


def test_the_style_page_has_the_words_of_the_checker():
    assert word_table() in (ROOT / "docs" / "style.md").read_text(), "python -m tests.english --words prints the table"
