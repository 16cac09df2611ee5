"""Update the defaults in the Java tables of docs/from-java-and-kafka.md: `python -m tests.migration`.

Java's defaults are those that `tests.migration.java` has recorded, and ours are those of the reference. The mapping of
names, the remarks, and the rest of the page are written by hand.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import NamedTuple

from pyrocket_consumer import ConsumerConfig, ProducerConfig
from pyrocket_consumer.config.options import option_of
from tests.migration import java
from tests.pages import DOCS

DOCUMENT = DOCS / "from-java-and-kafka.md"

OPTIONS = {field.name: option_of(field) for config in (ProducerConfig, ConsumerConfig) for field in fields(config)}
_QUOTED = re.compile(r"`([^`]+)`")
_TABLE = re.compile(r"(<!-- (\w+): python -m tests\.migration -->\n)(.*?)(<!-- end -->)", re.DOTALL)

ONLY_HERE = "only_here"
CLASSES = {
    "client": ["ClientConfig"],
    "consumer": ["DefaultMQPushConsumer", "ConsumeFromWhere", "MessageModel"],
    "listener": [
        "ConsumeConcurrentlyStatus",
        "ConsumeOrderlyStatus",
        "ConsumeConcurrentlyContext",
        "ConsumeOrderlyContext",
    ],
    "producer": ["DefaultMQProducer", "TransactionMQProducer", "SendStatus", "LocalTransactionState"],
    "exceptions": ["exceptions"],
}
"""Table -> the Java classes whose every name has a row in it."""


class Row(NamedTuple):
    """One row: names of Java, or options that Java lacks; our counterpart; and the difference."""

    names: list[str]
    here: str
    remark: str


def rows(table: str) -> list[Row]:
    """Return the rows of a table."""
    head, _, *body = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
    return [Row(_QUOTED.findall(cells[0]), cells[head.index("here")], cells[-1]) for cells in body]


def tables(page: str) -> dict[str, list[Row]]:
    """Return the rows of all tables of the page."""
    return {name: rows(table) for _, name, table, _ in _TABLE.findall(page)}


def options_in(text: str) -> list[str]:
    """Return the options that a cell names."""
    return [name for name in _QUOTED.findall(text) if name in OPTIONS]


def build_table(name: str, old: str) -> str:
    """Return a table as it should be."""
    if name == ONLY_HERE:
        options = [option for row in rows(old) for option in row.names]
        cells = [[f"`{option}`", default_of(option), OPTIONS[option].purpose] for option in options]
        return _lines(["here", "default", "purpose"], *cells)
    known = {each: default for kind in CLASSES[name] for each, default in java.recorded()[kind].items()}
    if not any(known.values()):
        return _lines(["Java", "here", "remark"], *([_quoted(row.names), row.here, row.remark] for row in rows(old)))
    lines = []
    for row in rows(old):
        theirs = filter(None, dict.fromkeys(_java_default(each, known.get(each)) for each in row.names))
        ours = filter(None, dict.fromkeys(map(default_of, options_in(row.here))))
        lines.append([_quoted(row.names), ", ".join(theirs), row.here, ", ".join(ours), row.remark])
    return _lines(["Java", "default", "here", "default", "remark"], *lines)


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{each}`" for each in names)


def _lines(*cells: list[str]) -> str:
    head, *body = (re.sub(r"(?<=\|) +(?=\|)", " ", f"| {' | '.join(row)} |") for row in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *body, ""])


def _java_default(name: str, default: str | None) -> str:
    if default in (None, "null"):
        return ""
    return default if default == java.VARYING.get(name) else f"`{default}`"


def default_of(option: str) -> str:
    """Return the default of an option as the reference shows it."""
    default = OPTIONS[option].default
    return "" if default == "–" else default


def document(page: str) -> str:
    """Return the page as it should be."""
    return _TABLE.sub(lambda found: f"{found[1]}{build_table(found[2], found[3])}{found[4]}", page)


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
