"""The `pyrocket` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pyrocket_consumer import __version__
from pyrocket_consumer.cli import broker, consume, demo, offsets, produce
from pyrocket_consumer.cli.streams import discard_output, escape_unencodable, print_to_stderr
from pyrocket_consumer.errors import ConfigError, RequestTimeout, RocketError
from pyrocket_consumer.protocol.accelerator import ACCELERATED, REASON

_TIMEOUT_HINT = "; it is busy or broken, or another program listens there"
OK, ERROR, USAGE, FAILED_CHECK = 0, 1, 2, 3


class _Version(argparse.Action):
    """Prints the version in one line, also on a narrow terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        parts = "with its compiled part" if ACCELERATED else f"in Python alone: {REASON}"
        print(f"pyrocket-consumer {__version__}, {parts}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="pyrocket",
        description="Apache RocketMQ from the shell: a demo, consuming and producing, offsets, a broker for tests.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 a check failed. Checks that can fail: a message was "
        "lost, a lag is above --max or unknown, a broker is missing, or a reset is not verified.",
    )
    top.add_argument("--version", action=_Version, help="show the version, whether its compiled part is used, and exit")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (demo, consume, produce, offsets, broker):
        module.add_to(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    escape_unencodable()
    options = parser().parse_args(arguments)
    if sys.stdout is None:
        print_to_stderr("pyrocket: standard output is closed; send it somewhere, to /dev/null for example")
        return ERROR
    try:
        code = int(options.run(options))
        sys.stdout.flush()  # here, so that a closed pipe is handled below
        return code
    except RocketError as error:
        remedy = _TIMEOUT_HINT if isinstance(error, RequestTimeout) else ""
        print_to_stderr(f"pyrocket: {error}{remedy}")
        for note in getattr(error, "__notes__", ()):
            print_to_stderr(f"  {note}")
        return USAGE if isinstance(error, ConfigError) else ERROR
    except KeyboardInterrupt:
        return ERROR
    except BrokenPipeError:  # the reader of stdout has closed it
        discard_output()
        return ERROR
    except OSError as error:
        discard_output()
        name = error.filename or "standard output or input"
        print_to_stderr(f"pyrocket: {name}: {error.strerror or error}")
        return ERROR
