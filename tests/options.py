"""What is made from the options in pyrocket_consumer/config/options.py: keyword types, docstrings and the reference.

`python -m tests.options --write` writes them; without the option it prints the files that differ.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from pyrocket_consumer.config import ClientConfig, ConsumerConfig, ProducerConfig
from pyrocket_consumer.config.options import option_of

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "pyrocket_consumer" / "config" / "options.py"
WIDTH = 120
INDENT = " " * 12

Options = list[Field[Any]]
PARAMETERS = {"name_server", "group"}
"""Every signature names these, so they are no keywords."""


def own(config: type[ClientConfig]) -> Options:
    """Return the fields that a config adds to those of every client."""
    inherited = {each.name for each in fields(ClientConfig)} if config is not ClientConfig else set()
    return [each for each in fields(config) if each.name not in inherited]


CLIENT, CONSUMER, PRODUCER = own(ClientConfig), own(ConsumerConfig), own(ProducerConfig)


def plain(markdown: str) -> str:
    """Return a text as docstrings have it: without markup, and with the paths of pages."""
    return re.sub(r"\[[^]]+\]\((\w+\.md)\)", r"docs/\1", markdown).replace("`", "")


def in_docstring(each: Field[Any]) -> str:
    """Return an option as `help()` shows it: name (default; allowed): purpose."""
    option = option_of(each)
    return plain(f"{each.name} ({'; '.join(filter(None, (option.default, option.allowed)))}): {option.purpose}")


def lines(options: Iterable[Field[Any]]) -> str:
    """Return the lines of options in a docstring."""
    return "".join(
        textwrap.fill(
            in_docstring(each),
            WIDTH,
            initial_indent=INDENT,
            subsequent_indent=INDENT + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
        for each in options
    )


def table(options: Iterable[Field[Any]]) -> str:
    """Return a table of the reference."""
    rows = [
        f"| `{each.name}` | {option.default} | {option.allowed} | {option.purpose} |"
        for each in options
        for option in [option_of(each)]
    ]
    rows = [re.sub(r"(?<=[^ |\\])\|(?=[^ |])", r"\\|", row) for row in rows]
    return "\n".join(["| option | default | allowed, unit | purpose |", "|---|---|---|---|", *rows]) + "\n"


def keywords(path: Path) -> str:
    """Return the source of the configs, with a `TypedDict` of the options after each of them."""
    text = path.read_text()
    for config in (ClientConfig, ConsumerConfig, ProducerConfig):
        name = config.__name__
        head = rf'(^class {name.replace("Config", "Options")}\(.*\n    """.*"""\n\n)(?:    .*\n)+'
        body = "".join(
            f"    {each.name}: {str(each.type).replace(chr(39), chr(34))}\n"
            for each in own(config)
            if each.name not in PARAMETERS
        )
        assert len(re.findall(head, text, re.MULTILINE)) == 1, f"{path.name} has no TypedDict of {name}"
        text = re.sub(head, lambda found, body=body: found[1] + body, text, flags=re.MULTILINE)
    return text


def between(text: str, begin: str, end: str, middle: str) -> str:
    """Return `text` with `middle` between the lines `begin` and `end`, which must be there once."""
    pattern = re.compile(rf"(^{re.escape(begin)}\n\n).*?(^{re.escape(end)}\n)", re.MULTILINE | re.DOTALL)
    assert len(pattern.findall(text)) == 1, f"{begin!r} … {end!r} must be there once"
    return pattern.sub(lambda found: f"{found[1]}{middle}\n{found[2]}", text)


def docstring(path: str, after: str, options: Options) -> tuple[Path, str]:
    """Return a source file with `options` behind the argument `after` of a docstring."""
    file = ROOT / path
    text = file.read_text()
    found = re.search(rf"^{INDENT}{after} \(.*?\n(?=\n)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{path} has no argument {after}"
    head = re.match(rf"{INDENT}.*?\n(?={INDENT}\S|\Z)", found[0], re.DOTALL)
    assert head
    return file, text[: found.start()] + head[0] + lines(options) + text[found.end() :]


def made() -> dict[Path, str]:
    """Return each file that has parts made from the options, as it must be."""
    reference = ROOT / "docs" / "reference.md"
    text = reference.read_text()
    name_server, client = CLIENT[:1], CLIENT[1:]
    group, consumer = CONSUMER[:1], CONSUMER[1:]
    producer_group, producer = PRODUCER[:1], PRODUCER[1:]
    for title, options in (
        ("consumer", group + name_server + consumer),
        ("client", client),
        ("producer", producer_group + producer),
    ):
        text = between(text, f"<!-- options of a {title} -->", "<!-- end of options -->", table(options))
    return {
        reference: text,
        CONFIGS: keywords(CONFIGS),
        **dict(
            [
                docstring("pyrocket_consumer/consumer/push_consumer.py", "config", name_server + consumer + client),
                docstring("pyrocket_consumer/producer/producer.py", "config", producer + name_server + client),
                docstring("pyrocket_consumer/admin/admin.py", "timeout_s", name_server + client),
            ]
        ),
    }


def main() -> int:
    """Print the files that differ from what the options make of them, or write them."""
    write = "--write" in sys.argv[1:]
    for file, text in made().items():
        if not file.exists() or file.read_text() != text:
            print(file.relative_to(ROOT), "written" if write else "differs")
            if write:
                file.write_text(text)
            else:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
