"""Arguments that commands share."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from pyrocket_consumer.config import OffsetSpec, check_offset_spec, trusting
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.text import safe_repr

if TYPE_CHECKING:
    from pyrocket_consumer.cluster import Cluster

MAX_WAIT_S = 120
"""The longest time that a reset waits for members."""

_MAX_DIGITS = 19
"""The number of digits of the largest offset, 2⁶³-1. Python refuses to parse a number of more than 4300 digits."""

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


def add_name_server(command: argparse._ActionsContainer, default: str = "NAMESRV_ADDR") -> None:
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
    add_name_server(group)
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


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Cluster]:
    """Yield the cluster, connected, for work that Admin does not do."""
    from pyrocket_consumer.cluster import Cluster, make_client_id
    from pyrocket_consumer.config import ClientConfig

    config = ClientConfig(**connection(options))
    cluster = Cluster(config, make_client_id(config))
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.close()


def add_output(command: argparse.ArgumentParser) -> None:
    """Add `-o`."""
    command.add_argument("-o", "--output", choices=("table", "json"), default="table", help="format (default: table)")


def offset_spec(text: str) -> OffsetSpec:
    """Parse first, last, or a time with its zone."""
    try:
        return check_offset_spec("PLACE", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_number(text: str) -> int | None:
    """Return a whole number from zero, or None if the text has another form or too many digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def whole_number(text: str, least: int = 0) -> int:
    """Parse a whole number from zero."""
    number = parse_number(text)
    if number is None or number < least:
        range_text = "above zero" if least else "from 0"
        raise argparse.ArgumentTypeError(
            f"{safe_repr(text)} is not a whole number {range_text} of at most {_MAX_DIGITS} digits"
        )
    return number


def positive_number(text: str) -> int:
    """Parse a whole number above zero."""
    return whole_number(text, least=1)


def queue_name(text: str) -> tuple[str, int]:
    """Parse a queue without its topic: broker name and queue id."""
    broker, _, queue_id = text.rpartition("/")
    number = parse_number(queue_id)
    if not broker or number is None:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)} is not like broker-a/3")
    return broker, number


def check_once(option: str, names: Iterable[str], wrong_usage: Callable[[str], NoReturn]) -> None:
    """Report wrong usage if a name occurs twice. Otherwise only the last would count."""
    for name, times in Counter(names).items():
        if times > 1:
            wrong_usage(f"{option} {safe_repr(name)} is given {times} times; give it once")


def wait_seconds(text: str) -> float:
    """Parse the time that a reset waits for members."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MAX_WAIT_S:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)} is not a number of seconds from 0 to {MAX_WAIT_S}")
    return number
