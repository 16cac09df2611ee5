"""Checks the English of the repository: the length of sentences, and words that have a plainer one.

    python -m tests.english [PATH...]           # one line for each finding; exit code 1 if there is one
    python -m tests.english --count [PATH...]   # findings per folder
    python -m tests.english --words             # the table of words, for docs/style.md

It reads Markdown, docstrings, comments, texts of the product (errors, events, help), help of the Makefile, and names of
the product and of tests. `docs/style.md` explains the rules, and lists the words.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("pyrocket_consumer", "pyspark_rocketmq")
FOLDERS = (*PRODUCT, "tests", "benchmarks", "docs", ".github")
FILES = ("setup.py", "Makefile")
SKIPPED = {"golden", "__pycache__", "build"}

MAX_WORDS = 25
MIN_TEXT_WORDS = 4
"""Shorter strings of the product are keys, paths and codes more often than texts."""

INSTEAD: dict[str, str] = {
    # verbs of speaking
    "told": "logged, reported, informed; or name who reports it",
    "tell|tells|telling": "report, log, notify; `return whether` for `tell whether`; distinguish",
    "said": "reported, logged, answered",
    "says|saying": "reports, answers, contains, documents",
    "hear|hears|heard": "receive, learn of",
    "a word": "a request, a message, a log line",
    "without a word": "silently, without an event, without an answer",
    # prepositions and adverbs
    "beside": "next to, with, in addition to, compared with",
    "besides": "also",
    "apart": "separate; distinguish; except",
    "anew": "again, from the start; recreate",
    "afresh": "again, from the start",
    "for ever": "forever, without limit",
    "any more": "no longer, without `not`",
    "all the same": "anyway, still",
    "at hand": "available, ready",
    "in vain": "without success, for nothing",
    "of ours|of yours": "our, your",
    "till": "until",
    "upon": "on",
    "hence|thus|thereby|therefor|whence|thence|herewith|hitherto|henceforth": "so; or begin a new sentence",
    "lest": "so that ... does not",
    "ere": "before",
    "amid": "during, among",
    "amongst|whilst|unto": "among, while, to",
    "albeit": "although",
    "wholly": "completely",
    # pronouns
    "of which|whereof|thereof|wherein|therein": "a second sentence",
    "whoever|whosoever|whomever": "the caller, the user, another member: who it is",
    "somebody|everybody": "a user, another client, each member: who it is",
    "so many": "the number of, that many, `count`",
    "nothing of": "none of, no",
    "whom": "a second sentence, or `who`",
    "he|him": "the user, the caller, they",
    "save for|but for|all but": "except",
    "none but|nobody but|no one but|nothing but": "only",
    "is none|are none|was none|were none": "there is no ..., it is not a ...",
    # nouns and verbs with a usual word
    "come to|comes to|came to|coming to": "reach, arrive at, become; say what happens",
    "come again|comes again|came again|coming again": "be redelivered, return, reconnect",
    "come of|comes of|came of": "result in; the result of",
    "become of|becomes of|became of": "the result of, the outcome of",
    "go on|goes on|went on|gone on|going on": "continue",
    "go by|goes by|went by|going by": "use, follow",
    "look at|looks at|looked at|looking at": "check, read, inspect",
    "pass over|passes over|passed over|passing over": "skip",
    "leave out|leaves out|left out|leaving out": "skip, omit, exclude",
    "leave alone|leaves alone|left alone|leaving alone": "not retry, not change",
    "taken back|take back|takes back|took back": "withdraw, undo",
    "have done with|has done with|had done with|is done with|are done with|were done with": "has finished",
    "in hand": "being processed, delivered",
    "let go|lets go": "release",
    "bear|bears|bore|borne": "accept, withstand, contain",
    "mean harm|means harm|meant harm|come to harm": "is malicious; is damaged",
    "to be had": "available",
    "by chance": "randomly, at random",
    "no way on": "does not advance",
    "on its way|on their way": "in flight, in progress, sent",
    "under way": "in progress, running",
    "is away|are away|was away|were away": "is unreachable, is down",
    "out of bounds for": "is not allowed to",
    "stand|stands|stood": "is; represents for `stands for`; replaces for `stands in for`",
    "the begin": "the start, the first offset",
    "room": "space, free memory, capacity",
    "doubt|doubts": "uncertain, not confirmed",
    "patience": "timeout, number of retries, backoff",
    "a whit|aught|naught|nought|ought": "anything, nothing, should",
    "reckon|reckons|reckoned|deem|deems|deemed": "count, treat as",
    "mend|mends|mended|mending": "repair, fix",
    "quicker|quickest": "faster, fastest",
    "shall": "must, will, should",
    # `what` where a noun is meant
    "return what": "`Return the ...`: name it",
    "what there is|what it has|what they have|what has|what comes|what came": "a noun: the messages, the answer",
    "what is not|what is no|what is left|of what is|for what is|and what is": "a noun: the messages, the rest",
    "what ... is, is|what ... was, was|what ... has, has": "a noun, and one verb",
}
"""Words and phrases, and what to write instead. `|` separates forms; ` ... ` matches up to four words."""

ALLOWED: dict[tuple[str, str], str] = {}
"""Findings that stay: the path and the words found, and why. In a comment or in Markdown, `english: allow` in the line
does the same."""

ALLOW = "english: allow"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A place that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass(slots=True)
class Block:
    """A paragraph, a list item, a table cell, a comment, a text or a name, with the line that each part is from."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    kind: str = "text"  # or "title" (also of a table cell), or "name"

    def joined(self) -> tuple[str, list[int]]:
        """Return the text on one line, and where each of its lines begins in it."""
        starts, at = [], 0
        for _, text in self.lines:
            starts.append(at)
            at += len(text) + 1
        return " ".join(text for _, text in self.lines), starts


# -- Rules -----------------------------------------------------------------------------------------------------------


def _pattern(phrase: str) -> str:
    words = r"(?:\s+[^\s.;:]+){0,4}?\s+"
    return words.join(r"\s+".join(map(re.escape, part.split())) for part in phrase.split(" ... "))


@cache
def _banned() -> tuple[re.Pattern[str], list[tuple[re.Pattern[str], str]]]:
    """Return the pattern that finds any form, and one for each form with what to write instead."""
    instead = {form: text for forms, text in INSTEAD.items() for form in forms.split("|")}
    longest_first = sorted(instead, key=len, reverse=True)
    anything = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(_pattern, longest_first))})(?![\w-])")
    return anything, [(re.compile(_pattern(form)), instead[form]) for form in longest_first]


def instead_of(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield for each banned word where it begins, the words themselves, and what to write instead."""
    anything, forms = _banned()
    for match in anything.finditer(text.lower()):
        words = text[match.start() : match.end()]
        if not words.endswith("None"):  # the value, not the word
            yield match.start(), words, next(instead for form, instead in forms if form.fullmatch(match[0]))


_VERB = re.compile(
    "(?:is|are|was|were|has|have|does|do|can|cannot|may|must|goes|stays|comes|gets|keeps|needs|follows|begins|starts|"
    "ends|counts|takes|waits|gives|holds|means|runs|fails|remains|decides|becomes|costs)"
)
_PRONOUN = re.compile("it|they|you|we|i|this|that|which|who|the|an?|each|every")


def has_clause_as_subject(sentence: str) -> bool:
    """Return whether a sentence begins with a clause in place of a noun, as in "What failed is tried again"."""
    words = re.findall(r"[\w'’-]+|\x00", sentence.lower())
    if len(words) < MIN_TEXT_WORDS + 1 or words[0] not in {"what", "whatever", "who"} or "?" in sentence[-4:]:
        return False
    verbs = [
        at for at, word in enumerate(words[:-1]) if _VERB.fullmatch(word) and not _PRONOUN.fullmatch(words[at - 1])
    ]
    return len(verbs) > 1 or bool(verbs and verbs[0] > 2)


_SENTENCE_END = re.compile(r"[.!?…][)\"'”’*_]*\s+(?=[\"'“‘(*_\[]*[A-Z0-9`\x00])")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|approx|No|\b[A-Z])\.)\s*$")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield where each sentence begins, and the sentence. A semicolon and a colon end none."""
    begin = 0
    for end in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[begin : end.start() + 1]):
            yield begin, text[begin : end.end()]
            begin = end.end()
    yield begin, text[begin:]


def words_in(sentence: str) -> int:
    """Return how many words a sentence has; inline code is one."""
    return sum(any(letter.isalnum() or letter == CODE for letter in word) for word in sentence.split())


CODE = "\x00"
_INLINE_CODE = re.compile(r"(``.+?``|`[^`]+`)")


def check(block: Block, path: str) -> Iterator[Finding]:
    """Yield the findings in one block."""
    raw, starts = block.joined()
    text, spans = _with_origin(raw)

    def line_at(position: int) -> int:
        at = bisect_right(spans, (position, sys.maxsize)) - 1
        origin = spans[at][1] + position - spans[at][0]
        return block.lines[max(bisect_right(starts, origin) - 1, 0)][0]

    for begin, words, instead in instead_of(text):
        if (path, " ".join(words.lower().split())) not in ALLOWED:
            rule = "name" if block.kind == "name" else "word"
            yield Finding(path, line_at(begin), rule, f"{' '.join(words.split())!r}: write {instead}")
    if block.kind != "name":
        for begin, sentence in sentences(text):
            if (count := words_in(sentence)) > MAX_WORDS:
                short = " ".join(sentence.replace(CODE, "`…`").split())
                yield Finding(path, line_at(begin), "length", f"{count} words, at most {MAX_WORDS}: {short[:70]}…")
            if block.kind == "text" and has_clause_as_subject(sentence):
                short = " ".join(sentence.replace(CODE, "`…`").split())
                yield Finding(path, line_at(begin), "subject", f"begins with a clause, write a noun: {short[:50]}…")


def _with_origin(raw: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the plain text, and for each piece of it (where it begins, where that is in the raw text)."""
    spans, parts, at = [(0, 0)], [], 0
    length = 0
    for match in _REPLACED.finditer(raw):
        kept = raw[at : match.start()]
        parts.append(kept)
        length += len(kept)
        if match["label"] is not None:
            new, origin = _INLINE_CODE.sub(CODE, match["label"]), match.start("label")
        else:
            new, origin = ("" if match["tag"] else CODE), match.start()
        spans.append((length, origin))
        parts.append(new)
        length += len(new)
        at = match.end()
        spans.append((length, at))
    parts.append(raw[at:])
    return "".join(parts), spans


_REPLACED = re.compile(
    r"``.+?``|`[^`]+`|!?\[(?P<label>[^\]]*)\](?:\([^)]*\)|\[[^\]]*\])"
    r"|(?P<tag><!--.*?-->|</?[a-zA-Z][^>]*>|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w))|\bhttps?://\S+[\w/]"
)


# -- Readers: each yields the blocks of one file -----------------------------------------------------------------------

_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_FENCE = re.compile(r"\s*(?:```|~~~)")


def markdown_blocks(text: str) -> Iterator[Block]:
    """Yield the paragraphs, headings, list items and table cells of a page, without code."""
    yield from _prose_blocks(list(enumerate(text.split("\n"), 1)))


def _prose_blocks(lines: Iterable[tuple[int, str]], *, indented_code: bool = False) -> Iterator[Block]:
    block, fenced, entries, indent_of_code, blank = Block(), False, -1, -1, True
    base = 0
    for number, line in lines:
        if _FENCE.match(line):
            fenced = not fenced
            if block.lines:
                yield block
                block = Block()
            continue
        if fenced:
            continue
        stripped = line.strip()
        if not stripped:
            if block.lines:
                yield block
                block = Block()
            blank = True
            continue
        indent = len(line) - len(line.lstrip())
        if indented_code and (stripped.startswith(">>>") or (blank and indent >= base + 4 and entries < 0)):
            indent_of_code = indent
        if indent_of_code >= 0:
            if indent >= indent_of_code:
                continue
            indent_of_code = -1
        is_section = indented_code and re.fullmatch(r"[A-Z]\w+:", stripped)
        if is_section:
            if block.lines:
                yield block
            block, entries, blank = Block(), indent + 4, False
            continue
        if entries >= 0 and indent < entries:
            entries = -1
        item = _ITEM.match(line)
        starts_anew = item or stripped.startswith(("#", ">", "|")) or indent == entries
        if starts_anew and block.lines:
            yield block
            block = Block()
        if stripped.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", _INLINE_CODE.sub(lambda code: code[0].replace("|", " "), stripped)):
                if any(letter.isalnum() for letter in cell):
                    yield Block([(number, cell.strip())], kind="title")
            continue
        if entries >= 0 and indent == entries:
            stripped = re.sub(r"^[\w*., `\[\]]+: ", "", stripped)
        block.lines.append((number, _ITEM.sub("", stripped, count=1) if item else stripped.lstrip("#> ")))
        if stripped.startswith("#"):
            block.kind = "title"
            yield block
            block = Block()
        blank = False
    if block.lines:
        yield block


_DIRECTIVE = re.compile(
    r"#\s*(?:noqa|type:|fmt:|pragma|pyright|ruff|mypy:|-\*-|!)|\b(?:noqa|type: ignore|fmt: skip)\b.*"
)
_WORD = re.compile(r"(?<![\w./-])[A-Za-z][a-z']+(?![\w./=-])")
_NOT_TEXT = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER|WITH|SET|BEGIN|REPLACE|LOCK|PRAGMA|ON|WHERE|FROM|AND)\s"
    r"|.*(?:\(\?|\\[wsdbAZ]|\[\^)",
    re.DOTALL,
)


def python_blocks(source: str, *, product: bool) -> Iterator[Block]:
    """Yield the docstrings and comments of a module, and names and texts as far as they are checked there."""
    tree = ast.parse(source)
    lines = source.split("\n")
    docstrings: set[int] = set()
    inside: set[int] = set()
    strings: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(id(node.value))
            strings.append(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if product or node.name.startswith("test_"):
                yield Block([(node.lineno, _words_of(node.name))], kind="name")
        elif isinstance(node, ast.JoinedStr):
            strings.append(node)
            inside.update(id(value) for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            strings.append(node)
    for node in strings:
        if id(node) in docstrings:
            yield from _docstring_blocks(node)
        elif product and id(node) not in inside:
            yield from _text_blocks(node)
    yield from _comment_blocks(lines, strings)


def _words_of(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("_", " ").strip().lower()


def _docstring_blocks(node: ast.expr) -> Iterator[Block]:
    assert isinstance(node, ast.Constant)
    lines = node.value.split("\n")
    rest = [line for line in lines[1:] if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in rest), default=0)
    margin = min(margin, node.col_offset)
    dedented = [lines[0].strip(), *(line[margin:] for line in lines[1:])]
    yield from _prose_blocks(list(enumerate(dedented, node.lineno)), indented_code=True)


def _text_blocks(node: ast.expr) -> Iterator[Block]:
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(value.value) if isinstance(value, ast.Constant) else CODE for value in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%\(?\w*\)?[sdr]|\{\w*\}", CODE, node.value)
    else:
        return
    if len(_WORD.findall(text)) >= MIN_TEXT_WORDS and not _NOT_TEXT.match(text):
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*|] |\s)", text):
            yield Block([(node.lineno, " ".join(paragraph.split()))])


def _comment_blocks(lines: list[str], strings: list[ast.expr]) -> Iterator[Block]:
    """Yield the comments: what follows a `#` that is in no string. Whole lines one below the other are one block."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for node in strings:
        last = node.end_lineno or node.lineno
        for number in range(node.lineno, last + 1):
            begin = node.col_offset if number == node.lineno else 0
            end = (node.end_col_offset or 0) if number == last else sys.maxsize
            spans.setdefault(number, []).append((begin, end))
    block: list[tuple[int, str]] = []
    column = -1
    for number, line in enumerate(lines, 1):
        at = line.find("#")
        inside = spans.get(number, ())
        while at >= 0 and inside:
            position = at if line.isascii() else len(line[:at].encode())
            if not any(begin <= position < end for begin, end in inside):
                break
            at = line.find("#", at + 1)
        whole = at >= 0 and not line[:at].strip()
        if block and (not whole or at != column):
            yield from _prose_blocks(block)
            block = []
        if at < 0:
            continue
        text = _DIRECTIVE.sub("", line[at:]).lstrip("#: ").rstrip("- ")
        if whole:
            column = at
            block.append((number, text))
        else:
            yield from _prose_blocks([(number, text)])
    yield from _prose_blocks(block)


_C_TOKEN = re.compile(r'(?P<string>(?:"(?:\\.|[^"\\\n])*"\s*)+)|/\*(?P<comment>.*?)\*/|//(?P<line>[^\n]*)', re.DOTALL)


def c_blocks(source: str) -> Iterator[Block]:
    """Yield the comments and texts of a C file."""
    for match in _C_TOKEN.finditer(source):
        number = source.count("\n", 0, match.start()) + 1
        if match["string"]:
            text = "".join(re.findall(r'"((?:\\.|[^"\\\n])*)"', match["string"]))
            if len(re.findall(r"[A-Za-z][a-z']+", text)) >= MIN_TEXT_WORDS:
                yield Block([(number, re.sub(r"%[-.\d]*[a-zA-Z]+", CODE, text))])
        else:
            body = (match["comment"] or match["line"] or "").split("\n")
            yield from _prose_blocks([(n, line.strip().lstrip("*")) for n, line in enumerate(body, number)])


def makefile_blocks(source: str) -> Iterator[Block]:
    """Yield the help of each target and the comments of a Makefile."""
    for number, line in enumerate(source.split("\n"), 1):
        if match := re.match(r"#+ (.*)|[\w-]+:.*?##? (.*)", line):
            yield from _prose_blocks([(number, match[1] or match[2])])


# -- All of it ---------------------------------------------------------------------------------------------------------


def files(paths: Iterable[Path] = ()) -> list[Path]:
    """Return the files that are checked: all of the repository, or those that `paths` name or hold."""
    chosen = list(paths) or [ROOT / name for name in (*FOLDERS, *FILES)] + sorted(ROOT.glob("*.md"))
    found: set[Path] = set()
    for path in chosen:
        for file in [path] if path.is_file() else path.rglob("*"):
            is_read = file.suffix in {".md", ".py", ".c", ".h"} or file.name == "Makefile"
            if is_read and not SKIPPED.intersection(file.relative_to(ROOT).parts) and file.is_file():
                found.add(file)
    return sorted(found)


def check_file(path: Path) -> list[Finding]:
    """Return the findings in one file, in order."""
    return check_source(path.relative_to(ROOT).as_posix(), path.read_text())


def check_source(path: str, source: str) -> list[Finding]:
    """Return the findings in the source of a file, in order. The path decides how the source is read."""
    suffix = Path(path).suffix
    if suffix == ".md":
        blocks = markdown_blocks(source)
    elif suffix == ".py":
        blocks = python_blocks(source, product=path.startswith(tuple(f"{folder}/" for folder in PRODUCT)))
    elif suffix in {".c", ".h"}:
        blocks = c_blocks(source)
    else:
        blocks = makefile_blocks(source)
    lines = source.split("\n")
    found = {finding for block in blocks for finding in check(block, path)}
    return sorted(finding for finding in found if ALLOW not in lines[finding.line - 1])


def word_table() -> str:
    """Return the table of words for `docs/style.md`, two to a row."""
    cells = [f"`{forms.replace('|', '`, `')}` | {instead}" for forms, instead in INSTEAD.items()]
    pairs = zip(cells[::2], [*cells[1::2], *[" | "] * (len(cells) % 2)], strict=True)
    rows = [f"| {left} | {right} |" for left, right in pairs]
    return "\n".join(["| do not write | write | do not write | write |", "|---|---|---|---|", *rows])


def folder_of(path: str) -> str:
    """Return the name that a file is counted under: its folder, two deep, or itself if it is a page or at the top."""
    parts = path.split("/")
    return path if path.endswith(".md") or len(parts) == 1 else "/".join(parts[: min(2, len(parts) - 1)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.english", description="Checks the English of the repository."
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; all of the repository without")
    parser.add_argument("--count", action="store_true", help="a table of findings per folder")
    parser.add_argument("--words", action="store_true", help="the table of words, for docs/style.md")
    chosen = parser.parse_args(arguments)
    if chosen.words:
        print(word_table())
        return 0
    found: list[Finding] = []
    counts: dict[str, Counter[str]] = {}
    for path in files(path.absolute() for path in chosen.paths):
        for finding in check_file(path):
            found.append(finding)
            counts.setdefault(folder_of(finding.path), Counter())[finding.rule] += 1
    if chosen.count:
        rules = ("length", "word", "subject", "name")
        print(f"{'':40}", *(f"{rule:>8}" for rule in rules), f"{'all':>8}")
        counts["all"] = Counter(finding.rule for finding in found)
        for folder, by_rule in sorted(counts.items(), key=lambda item: item[0] == "all"):
            print(f"{folder:40}", *(f"{by_rule[rule]:8}" for rule in rules), f"{by_rule.total():8}")
    else:
        for finding in found:
            print(finding)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
