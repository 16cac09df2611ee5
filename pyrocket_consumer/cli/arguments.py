"""Arguments that commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    examples: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add a command with its one-sentence help and examples."""
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="Examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def add_name_server(command: argparse.ArgumentParser, default: str = "NAMESRV_ADDR") -> None:
    """Add `-n`."""
    command.add_argument("-n", "--name-server", metavar="HOST:PORT[;…]", help=f"name servers (default: {default})")


def add_output(command: argparse.ArgumentParser) -> None:
    """Add `-o`."""
    command.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="for people or for machines"
    )


def seconds(text: str) -> float:
    """Parse a duration."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return number


def positive(text: str) -> int:
    """Parse a whole number above zero."""
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return number
