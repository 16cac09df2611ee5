"""Makes the tables of docs/from-java-and-kafka.md about Java anew, in place: `python -m tests.migration`.

Names and defaults are those of both sides: Java's as `tests.migration.java` has recorded them, ours as the reference
has them. What stands for what is in `tests.migration.rows`. The rest of the page is written by hand.
"""

from __future__ import annotations

import re
from dataclasses import fields

from pyrocket_consumer import ConsumerConfig, ProducerConfig
from tests.migration import java, rows
from tests.pages import DOCS
from tests.reference import CONSUMER as CONSUMER_OPTIONS
from tests.reference import PRODUCER as PRODUCER_OPTIONS
from tests.reference import Row as Told

DOCUMENT = DOCS / "from-java-and-kafka.md"

OPTIONS = {field.name for config in (ConsumerConfig, ProducerConfig) for field in fields(config)}
_QUOTED = re.compile(r"`([^`]+)`")
_TABLE = re.compile(r"(<!-- (\w+): python -m tests\.migration -->\n).*?(<!-- end -->)", re.DOTALL)


def options_in(text: str) -> list[str]:
    """Return the options that a cell names."""
    return [name for name in _QUOTED.findall(text) if name in OPTIONS]


def table(name: str) -> str:
    """Return one of the page's tables."""
    if name == "only_here":
        return _lines(
            ["here", "default", "what it does"],
            *([f"`{option}`", default_of(option), _linked(_told(option).what)] for option in rows.ONLY_HERE),
        )
    chosen = rows.TABLES[name]
    known = {java_name: default for each in chosen.classes for java_name, default in java.recorded()[each].items()}
    lines = []
    for row in chosen.rows:
        names = row.java.split()
        theirs = dict.fromkeys(_java_default(each, known.get(each)) for each in names)
        ours = dict.fromkeys(map(default_of, options_in(row.here)))
        names_of_java = ", ".join(f"`{each}`" for each in names)
        lines.append(
            [names_of_java, ", ".join(filter(None, theirs)), row.here or "–", ", ".join(filter(None, ours)), row.remark]
        )
    if any(known.values()):
        return _lines(["Java", "default", "here", "default", "remark"], *lines)
    return _lines(["Java", "here", "remark"], *([each[0], each[2], each[4]] for each in lines))


def _lines(*cells: list[str]) -> str:
    head, *body = (re.sub(r"(?<=\|) +(?=\|)", " ", f"| {' | '.join(row)} |") for row in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *body, ""])


def _java_default(name: str, default: str | None) -> str:
    if default in (None, "null"):
        return ""
    return default if default == java.VARYING.get(name) else f"`{default}`"


def default_of(option: str) -> str:
    """Return the default of an option as the reference tells it."""
    told = _told(option)
    each = told.default.split(", ")
    default = each[told.names.index(option)] if len(each) == len(told.names) > 1 else told.default
    if default == "–":
        return ""
    return f"`{default}`" if re.fullmatch(r"[\d.]+|True|False|\".*\"|[A-Z]+_[A-Z]+", default) else default


def _linked(text: str) -> str:
    return re.sub(r"docs/((\w+)\.md)", r"[\2](\1)", text.replace("<", "&lt;"))


def _told(option: str) -> Told:
    return next(row for row in (*CONSUMER_OPTIONS, *PRODUCER_OPTIONS) if option in row.names)


def document(page: str) -> str:
    """Return the page as it should be."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", page)


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
