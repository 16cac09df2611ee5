"""`pyrocket broker`: the embedded cluster, for experiments and tests."""

from __future__ import annotations

import argparse
import threading
from contextlib import closing

from pyrocket_consumer.cli.arguments import add_command, check_once, parse_number, positive_number
from pyrocket_consumer.cli.streams import Interrupts, print_line
from pyrocket_consumer.config import check_topic
from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.text import safe_repr

_EXAMPLES = """\
  pyrocket broker --topic orders:4                      # prints the name server's address; Ctrl-C ends it
  pyrocket broker --port 9876 --topic orders
  pyrocket broker --brokers 2 --topic orders --topic payments:8
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = add_command(
        commands, "broker", "run a name server and brokers in memory on this host, for tests only", _EXAMPLES, run
    )
    command.add_argument("--brokers", type=positive_number, default=1, help="how many brokers (default: 1)")
    command.add_argument("--port", type=_port, default=0, help="the name server's port (default: one that is free)")
    command.add_argument(
        "--topic",
        action="append",
        default=[],
        type=_topic,
        metavar="NAME[:QUEUES]",
        help="create a topic (4 queues); repeatable",
    )
    command.set_defaults(wrong_usage=command.error)


def _port(text: str) -> int:
    port = parse_number(text)
    if not port or port > 65535:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)} is not a port from 1 to 65535")
    return port


def _topic(text: str) -> tuple[str, int]:
    from pyrocket_consumer.admin.topics import MAX_QUEUES

    name, _, queues = text.partition(":")
    try:
        check_topic(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    count = 4 if text == name else parse_number(queues)
    if not count or count > MAX_QUEUES:
        raise argparse.ArgumentTypeError(
            f"{safe_repr(text)} is not like orders or orders:4, with 1 to {MAX_QUEUES} queues"
        )
    return name, count


def run(options: argparse.Namespace) -> int:
    from pyrocket_consumer.testing import EmbeddedCluster

    check_once("--topic", (name for name, _ in options.topic), options.wrong_usage)
    cluster = EmbeddedCluster(brokers=options.brokers, port=options.port)
    try:
        cluster.start()
    except OSError as error:
        raise RocketError(
            f"port {options.port} cannot be used: {error.strerror or error}; choose another with --port"
        ) from error
    with closing(cluster):
        for name, queues in options.topic:
            cluster.create_topic(name, queues)
        try:
            with Interrupts():
                print_line(f"name server: {cluster.name_server}   (messages are kept in memory; Ctrl-C ends)")
                threading.Event().wait()
        except KeyboardInterrupt:
            pass
    return 0
