"""Shows options in the API pages as lists: `name (default; allowed): meaning` is this package's way to write them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

OPTION = re.compile(r"(?P<names>\w+(?:, \w+)*) \((?P<allowed>.*?)\): (?P<meaning>.*)")
ARGS = re.compile(r"^Args:\n((?: +.*\n?)+)", re.MULTILINE)
ITEM = re.compile(r"^ {4}(?! )", re.MULTILINE)


class OptionsInDocstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            func.docstring.value = ARGS.sub(as_list, inspect.cleandoc(func.docstring.value))


def as_list(section: re.Match[str]) -> str:
    """Return options as a list, and a section of usual arguments as it is."""
    items = [" ".join(item.split()) for item in ITEM.split(section[1])[1:]]
    options = [OPTION.fullmatch(item) for item in items]
    if None in options:
        return section[0]
    lines = [f"- {names(each['names'])} ({code(each['allowed'])}): {code(each['meaning'])}" for each in options if each]
    return "\n".join(["**Options**, each with its default and what else is allowed:", "", *lines, ""])


def names(joined: str) -> str:
    return ", ".join(f"`{name}`" for name in joined.split(", "))


def code(text: str) -> str:
    """Escape what would be markup."""
    return re.sub(r"([*_\\`])", r"\\\1", text).replace("<", "&lt;")
