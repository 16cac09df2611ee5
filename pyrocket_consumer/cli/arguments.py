"""Arguments that commands share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

from pyrocket_consumer.config import OffsetSpec, check_offset_spec, trusting
from pyrocket_consumer.errors import ConfigError

_ACCOUNT = ("access_key", "secret_key", "security_token")


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
    command.add_argument("-n", "--name-server", metavar="HOST:PORT[;...]", help=f"name servers (default: {default})")


def add_connection(command: argparse.ArgumentParser) -> None:
    """Add the options for the cluster's address and the account; `connection` reads them."""
    group = command.add_argument_group(
        "cluster",
        "The variables PYROCKET_ACCESS_KEY and PYROCKET_SECRET_KEY set the account,\n"
        "and PYROCKET_SECURITY_TOKEN its token, if it has one. They are not options,\n"
        "because every user of the machine can see the arguments of a command.",
    )
    group.add_argument("-n", "--name-server", metavar="HOST:PORT[;...]", help="name servers (default: NAMESRV_ADDR)")
    group.add_argument("--tls", action="store_true", help="encrypt, and trust the system's authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="encrypt, and trust the authorities in this PEM file")
    group.add_argument(
        "--allowed-addresses",
        metavar="LIST",
        help="the only addresses of brokers to connect to, joined by commas: hosts, host:port, networks like "
        "10.0.0.0/8 (default: all)",
    )


def connection(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a client from the options that `add_connection` added.

    Raises:
        ConfigError: a part of the account is missing, or the file of authorities cannot be read.
    """
    account = {name: os.environ.get(f"PYROCKET_{name.upper()}") or None for name in _ACCOUNT}
    for one, other in (("access_key", "secret_key"), ("secret_key", "access_key")):
        if account[one] is not None and account[other] is None:
            raise ConfigError(f"PYROCKET_{one.upper()} is set, and PYROCKET_{other.upper()} is missing; set both")
    tls = trusting(options.tls_ca, "--tls-ca ") if options.tls_ca is not None else options.tls
    allowed = options.allowed_addresses
    return {
        "name_server": options.name_server,
        "tls": tls,
        "allowed_addresses": allowed if allowed is None else allowed.split(","),
        **account,
    }


def add_output(command: argparse.ArgumentParser) -> None:
    """Add `-o`."""
    command.add_argument("-o", "--output", choices=("table", "json"), default="table", help="format (default: table)")


def offset_spec(text: str) -> OffsetSpec:
    """Parse first, last, or a time with its zone."""
    try:
        return check_offset_spec("PLACE", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(text: str) -> int:
    """Parse a whole number from zero."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def queue_name(text: str) -> tuple[str, int]:
    """Parse a queue without its topic: broker name and queue id."""
    broker, _, queue_id = text.rpartition("/")
    if not broker or not (queue_id.isascii() and queue_id.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like broker-a/3")
    return broker, int(queue_id)


def seconds(text: str) -> float:
    """Parse a duration."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return number


def positive_number(text: str) -> int:
    """Parse a whole number above zero."""
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return number
