"""Frames recorded between real brokers, name servers and clients, with the output of an independent decoder.

`INDEX.md` and `INDEX-reset.md` describe the frames; each zip holds those of one version as they crossed the wire.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import ZipFile

FOLDER = Path(__file__).parent
VERSIONS = ("4.9.7", "5.1.4", "5.3.3", "5.5.0")

_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|\|)")
_CUT = re.compile(r"…\((\d+)\)$")
_LINE = re.compile(
    r"\| `(?P<name>[^`]+\.bin)` \| (?:(?P<what>.*) — )?(?P<kind>request|response) code (?P<code>-?\d+)"
    r" opaque (?P<opaque>-?\d+) flag (?P<flag>\d+) lang (?P<language>\w+) version (?P<version>\d+)"
    r"(?: remark `(?P<remark>.*?)`)? · (?:no ext|ext (?P<fields>.*?))"
    r"(?: · body (?P<body_bytes>\d+) B(?:: (?P<body_hex>hex )?`(?P<body>.*)`)?)? \|$"
)
_FIELD = re.compile(r"`([^=`]+)=(.*?)`(?= `[^=` ]+=|$)")


@dataclass(frozen=True)
class Text:
    """A text of the index, which may have its first characters only."""

    begin: str
    characters: int | None  # the whole length of a truncated text, in which a | counts as two

    @classmethod
    def shown(cls, text: str) -> Text:
        cut = _CUT.search(text)
        begin = text[: cut.start()] if cut else text
        for picture, character in {"␀": "\x00", "␁": "\x01", "␂": "\x02", "⏎": "\n"}.items():
            begin = begin.replace(picture, character)
        begin = _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "|", begin)
        return cls(begin, int(cut[1]) if cut else None)

    def describes(self, text: str) -> bool:
        if self.characters is None:
            return text == self.begin
        return text.startswith(self.begin) and len(text.replace("|", "\\|")) == self.characters


@dataclass(frozen=True)
class Entry:
    """One line of the index: the contents of a frame."""

    version: str
    name: str
    what: str
    is_response: bool
    code: int
    opaque: int
    flag: int
    language: str
    header_version: int
    remark: Text | None
    fields: dict[str, Text]
    body_bytes: int
    body: Text | None  # None if the index does not have it
    body_hex: str  # if the index has bytes
    records: tuple[str, ...]  # descriptions of the messages in the body

    def frame(self) -> bytes:
        return frame(self.version, self.name)

    def __str__(self) -> str:
        return f"{self.version}/{self.name.removesuffix('.bin')}"


@cache
def frames(version: str) -> dict[str, bytes]:
    """Return all frames of a version (or "reset") by file name."""
    with ZipFile(FOLDER / f"{version}.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def frame(version: str, name: str) -> bytes:
    """Return one whole frame, its length field included."""
    return frames(version)[name]


@cache
def index() -> tuple[Entry, ...]:
    """Return the lines of the index, in order."""
    entries: list[Entry] = []
    version = ""
    for line in (FOLDER / "INDEX.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            version = line[3:].strip()
        elif line.startswith("|  |  · record: "):
            last = entries[-1]
            entries[-1] = Entry(**{**vars(last), "records": (*last.records, line[16:].removesuffix(" |"))})
        elif line.startswith("| `") and ".bin` |" in line:
            entries.append(_entry(version, line))
    return tuple(entries)


def _entry(version: str, line: str) -> Entry:
    found = _LINE.fullmatch(line)
    assert found, f"a line of the index is not understood: {line}"
    body = found["body"]
    return Entry(
        version,
        found["name"],
        found["what"] or "",
        found["kind"] == "response",
        int(found["code"]),
        int(found["opaque"]),
        int(found["flag"]),
        {"0": "JAVA", "3": "PYTHON"}.get(found["language"], found["language"]),  # numbers in binary headers
        int(found["version"]),
        None if found["remark"] is None else Text.shown(found["remark"]),
        {name: Text.shown(value) for name, value in _FIELD.findall(found["fields"] or "")},
        int(found["body_bytes"] or 0),
        None if body is None or found["body_hex"] else Text.shown(body),
        body.removesuffix("…") if found["body_hex"] else "",
        (),
    )


@dataclass(frozen=True)
class ResetEntry:
    """One line of the index of resets."""

    name: str
    code: int
    flag: int | None  # None if the index has only code, fields and body
    header_version: int | None
    remark: str | None
    fields: dict[str, str]
    body: str
    body_bytes: int | None  # if the index has only the start of the body

    def frame(self) -> bytes:
        return frame("reset", self.name)

    def __str__(self) -> str:
        return self.name.removesuffix(".bin")


@cache
def reset_index() -> tuple[ResetEntry, ...]:
    """Return the lines of the index of resets."""
    entries = []
    for line in (FOLDER / "INDEX-reset.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
        if not cells[0].endswith(".bin") or len(cells) not in (4, 8):
            continue
        name, code, *middle, fields, body = cells
        flag, _language, version, remark = middle or (None, None, None, "None")
        cut = re.search(r"… \((\d+) bytes\)$", body)
        entries.append(
            ResetEntry(
                name,
                int(code),
                flag and int(flag),
                version and int(version),
                None if remark == "None" else remark,
                json.loads(fields) if fields else {},
                body[: cut.start()] if cut else body.rstrip("`| "),
                int(cut[1]) if cut else None,
            )
        )
    return tuple(entries)
