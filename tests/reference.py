"""The tables of options in docs/reference.md, read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REFERENCE = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()


class Row(NamedTuple):
    """A row of a table of options in the reference: one option, or several that are told together."""

    names: tuple[str, ...]
    default: str
    allowed: str
    what: str

    def in_a_docstring(self) -> str:
        """Return the row as `help()` has it: names (default; what is allowed): what it does."""
        what = f": {self.what}" if self.what else ""
        return f"{', '.join(self.names)} ({'; '.join(filter(None, (self.default, self.allowed)))}){what}"


def table(title: str) -> list[Row]:
    """Return the rows of the table of options in a section of the reference, without their markup."""
    section = REFERENCE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [
        [re.sub(r"\[(\w+)\]\((\w+\.md)\)", r"docs/\2", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    ]
    return [
        Row(tuple(re.findall(r"\w+", names)), *(re.sub(r"[`\\]", "", cell) for cell in cells)) for names, *cells in rows
    ]


CONSUMER = table("What a consumer takes")
PRODUCER = table("What a producer takes")
