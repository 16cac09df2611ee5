"""docs/from-java-and-kafka.md: its code runs, its tables are complete, and all names in it exist."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

import pyrocket_consumer
from pyrocket_consumer import ConsumerConfig, ProducerConfig, PushConsumer, admin, consumer, producer, testing
from pyrocket_consumer.cli import main
from tests.for_each import for_each
from tests.migration import java
from tests.migration.__main__ import CLASSES, DOCUMENT, ONLY_HERE, OPTIONS, document, options_in, tables
from tests.pages import blocks, orders_arriving, run_pyrocket, run_python, title

PAGE = DOCUMENT.read_text()
TABLES = tables(PAGE)


@pytest.fixture
def orders():
    with orders_arriving() as cluster:
        yield cluster


@pytest.mark.live
@pytest.mark.slow("a block is a whole program")
@pytest.mark.parametrize("block", blocks(DOCUMENT, "python"), ids=title)
def test_a_python_block_runs(block, orders, tmp_path):
    assert run_python(block, orders, tmp_path, logged="event=offset-reset")


@pytest.mark.live
@pytest.mark.slow("runs each command of the page")
def test_the_pyrocket_commands_run(orders, tmp_path):
    with PushConsumer("billing", name_server=orders.name_server) as member:
        member.subscribe("orders", lambda message: None)
        for block in blocks(DOCUMENT, "sh"):
            for printed in run_pyrocket(block, orders, tmp_path):
                assert "orders" in printed


def test_the_tables_are_up_to_date():
    assert document(PAGE) == PAGE, "make them again: python -m tests.migration"


@for_each("name", [*CLASSES, ONLY_HERE])
def test_the_page_has_each_table_once(name):
    assert PAGE.count(f"<!-- {name}: python -m tests.migration -->\n|") == 1


@for_each("name", CLASSES)
def test_each_name_of_java_has_exactly_one_row(name):
    named = [each for row in TABLES[name] for each in row.names]
    assert sorted(named) == sorted({each for kind in CLASSES[name] for each in java.recorded()[kind]})


def test_each_class_of_java_is_in_a_table():
    assert sorted(kind for kinds in CLASSES.values() for kind in kinds) == sorted(java.recorded())


def test_each_option_is_in_a_row_or_is_only_here():
    only_here = [option for row in TABLES[ONLY_HERE] for option in row.names]
    named = {option for name in CLASSES for row in TABLES[name] for option in options_in(row.here)}
    assert sorted({*named, *only_here}) == sorted(OPTIONS)
    assert named.isdisjoint(only_here)


def cells_named_here() -> list[str]:
    """Return the quoted names in the column "here" of the page's tables."""
    found, column = [], None
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if not line.startswith("|"):
            column = None
        elif "here" in cells:
            column = cells.index("here")
        elif column is not None:
            found += re.findall(r"`([^`]+)`", cells[column])
    return list(dict.fromkeys(found))


@for_each("text", cells_named_here)
def test_the_names_here_exist(text):
    if text.startswith("pyrocket "):
        with pytest.raises(SystemExit, match="0"):
            main([*text.split()[1:], "--help"])
        return
    name, arguments, value = re.fullmatch(r"([\w.\"-]+)(?:\((.*)\))?(?:=(.+))?", text).groups()
    if name in OPTIONS:
        assert arguments is None
        assert value is None or made_with(name, ast.literal_eval(value))
    elif not is_literal(name):
        thing = resolved(name)
        assert arguments is None or callable(thing)
        for argument in re.findall(r"(\w+)=", arguments or ""):
            assert argument in inspect.signature(thing).parameters


@for_each("text", sorted(set(re.findall(r"`([a-z]+-[a-z-]+)`", PAGE)) - {"kafka-topics"}))
def test_the_events_that_are_named_exist(text):
    kafka = {"kafka-consumer-groups", "kafka-console-consumer", "kafka-console-producer"}
    assert text in kafka or text in {kind.value for kind in pyrocket_consumer.EventKind}


def is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except ValueError:
        return False
    return True


def resolved(name: str) -> Any:
    """Return the object of a public name in the package, or in a module that the docs import from."""
    first, *rest = name.split(".")
    (thing, *_) = [
        getattr(module, first)
        for module in (pyrocket_consumer, producer, consumer, admin, testing)
        if first in module.__all__
    ]
    for each in rest:
        options = {field.name for field in fields(thing)} if hasattr(thing, "__dataclass_fields__") else set()
        thing = thing if each in options and not rest[1:] else getattr(thing, each)
    return thing


def made_with(option: str, value: object) -> bool:
    """Return a config with an option. Invalid values raise."""
    config = ConsumerConfig if option in {field.name for field in fields(ConsumerConfig)} else ProducerConfig
    options = {"group": "g", "name_server": "127.0.0.1:9876", option: value}
    return getattr(config.from_options(options), option) == value
