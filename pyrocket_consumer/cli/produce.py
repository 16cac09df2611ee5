"""`pyrocket produce`: send messages from arguments or standard input."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable

from pyrocket_consumer.cli.arguments import add_command, add_connection, add_output, connection
from pyrocket_consumer.errors import RocketError

_EXAMPLES = """\
  pyrocket produce -n 127.0.0.1:9876 orders 'first' 'second' --tag paid
  seq 1000 | pyrocket produce -n 127.0.0.1:9876 orders -          # a message a line
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = add_command(commands, "produce", "send messages to a topic", _EXAMPLES, run)
    add_connection(command)
    add_output(command)
    command.add_argument("topic")
    command.add_argument("bodies", nargs="+", metavar="BODY", help="a message each; - reads standard input by lines")
    command.add_argument("--tag", help="the messages' tag")
    command.add_argument("--key", action="append", default=[], help="an index key; repeatable")


def run(options: argparse.Namespace) -> int:
    from pyrocket_consumer.producer import Producer

    sent = 0
    with Producer(**connection(options)) as producer:
        for body in _bodies(options.bodies):
            result = producer.send(options.topic, body, tags=options.tag, keys=options.key)
            sent += 1
            if options.output == "json":
                print(json.dumps({"queue": str(result.queue), "offset": result.queue_offset, "id": result.message_id}))
    if options.output == "table":
        print(f"{sent} messages sent to {options.topic}")
    return 0


def _bodies(arguments: Iterable[str]) -> Iterable[bytes]:
    for argument in arguments:
        if argument == "-" and sys.stdin is None:
            raise RocketError("- reads standard input, which is closed; give it something to read, as in: seq 10 | …")
        if argument == "-":
            yield from (line.rstrip(b"\n") for line in sys.stdin.buffer if line != b"\n")
        else:
            yield os.fsencode(argument)
