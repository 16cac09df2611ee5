"""`pyrocket produce`: send messages from arguments or standard input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyrocket_consumer.cli.arguments import add_command, add_connection, add_output, connection
from pyrocket_consumer.cli.streams import (
    Interrupts,
    discard_output,
    print_json,
    print_line,
    print_to_stderr,
    wait_writable,
)
from pyrocket_consumer.errors import RocketError

_EXAMPLES = """\
  pyrocket produce -n 127.0.0.1:9876 orders 'first' 'second' --tag paid
  pyrocket produce -n 127.0.0.1:9876 orders 'placed' 'paid' --sharding-key customer-7   # one queue, in order
  seq 1000 | pyrocket produce -n 127.0.0.1:9876 orders -          # one message per line

A body is a line without its end (LF or CRLF); empty lines are skipped. An error, Ctrl-C or SIGTERM stops the command
between two messages. It then prints the number of sent messages on standard error. With -o json the last line of the
output always has this number.
"""

_CHECK_INTERVAL_S = 0.2


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = add_command(commands, "produce", "send messages to a topic", _EXAMPLES, run)
    add_connection(command)
    add_output(command)
    command.add_argument("topic", help="the topic to send to")
    command.add_argument(
        "bodies", nargs="+", metavar="BODY", help="one message each; - reads one message per line of stdin"
    )
    command.add_argument("--tag", help="the messages' tag")
    command.add_argument("--key", action="append", default=[], help="an index key; repeatable")
    command.add_argument("--sharding-key", metavar="KEY", help="messages with the same key go to one queue, in order")


@dataclass
class _Sent:
    """The number of stored messages, and the source of the last one."""

    count: int = 0
    last: str = ""


def run(options: argparse.Namespace) -> int:
    sent = _Sent()
    try:
        with Interrupts() as interrupts:
            _send(options, interrupts, sent)
        # It flushes here, so that _print_stopped reports the number if stdout cannot be written.
        if options.output == "json":
            print_json(_as_json(options, sent, None))
        else:
            print_line(_text(options, sent))
    except BaseException as error:
        _print_stopped(options, sent, error)
        raise
    return 0


def _send(options: argparse.Namespace, interrupts: Interrupts, sent: _Sent) -> None:
    from pyrocket_consumer.producer import Producer

    with Producer(**connection(options)) as producer:
        bodies = _Bodies(options.bodies, producer.config.max_message_bytes)
        for body in bodies:
            with interrupts.deferred():  # so that the send in flight is awaited and counted
                result = producer.send(
                    options.topic, body, tags=options.tag, keys=options.key, sharding_key=options.sharding_key
                )
                sent.count, sent.last = sent.count + 1, bodies.where
                if options.output == "json":
                    while not wait_writable(_CHECK_INTERVAL_S) and not interrupts.is_pending:
                        pass
                    if wait_writable(0):
                        stored = {"queue": str(result.queue), "offset": result.queue_offset, "id": result.message_id}
                        print_json(stored)


def _text(options: argparse.Namespace, sent: _Sent) -> str:
    return f"{sent.count} {'message' if sent.count == 1 else 'messages'} sent to {options.topic}"


def _as_json(options: argparse.Namespace, sent: _Sent, stopped_by: str | None) -> dict[str, object]:
    return {"topic": options.topic, "sent": sent.count, "last": sent.last or None, "stopped_by": stopped_by}


def _print_stopped(options: argparse.Namespace, sent: _Sent, error: BaseException) -> None:
    """Print the number of messages sent before an error. The error alone suffices if the first message failed."""
    if sent.count or not isinstance(error, RocketError):
        last = f"; the last was {sent.last}" if sent.last else ""
        print_to_stderr(f"pyrocket: stopped, {_text(options, sent)}{last}")
    if options.output == "json" and sys.stdout is not None and wait_writable(0):
        try:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
            print_json(_as_json(options, sent, reason))
        except OSError:
            discard_output()


class _Bodies:
    """The bodies from arguments and from lines of standard input. `where` is the source of the current one."""

    def __init__(self, arguments: Iterable[str], max_bytes: int) -> None:
        self.where = ""
        self._arguments = arguments
        self._max_bytes = max_bytes

    def __iter__(self) -> Iterator[bytes]:
        for number, argument in enumerate(self._arguments, 1):
            if argument == "-":
                yield from self._lines()
            else:
                self.where = f"argument {number}"
                yield os.fsencode(argument)

    def _lines(self) -> Iterator[bytes]:
        if sys.stdin is None:
            raise RocketError("- reads standard input, which is closed; connect it, as in: seq 10 | pyrocket …")
        if sys.stdin.isatty():
            print_to_stderr("one message per line, until Ctrl-D")
        number = 0
        while line := sys.stdin.buffer.readline(self._max_bytes + len(b"\r\n")):
            number += 1
            body = line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line
            if len(body) > self._max_bytes:  # the rest is not read, because it may be endless
                raise RocketError(
                    f"line {number} of standard input has more than {self._max_bytes} bytes, the limit of a message; "
                    "split it"
                )
            if body:
                self.where = f"line {number} of standard input"
                yield body
