"""`pyrocket consume`: print what arrives on a topic."""

from __future__ import annotations

import argparse
import json
import sys
import threading

from pyrocket_consumer.cli.arguments import add_command, add_connection, add_output, connection, positive

_EXAMPLES = """\
  pyrocket consume -n 127.0.0.1:9876 orders                        # new messages, until Ctrl-C
  pyrocket consume -n 127.0.0.1:9876 orders --from first --count 10 -o json
  pyrocket consume -n 127.0.0.1:9876 orders --group audit --selector 'paid || refunded'
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = add_command(commands, "consume", "print the messages of a topic as they arrive", _EXAMPLES, run)
    add_connection(command)
    add_output(command)
    command.add_argument("topic")
    command.add_argument("--group", default="pyrocket-cli", help="consumer group (default: pyrocket-cli)")
    command.add_argument(
        "--from", dest="start", choices=("first", "last"), default="last", help="where a new group starts"
    )
    command.add_argument("--selector", default="*", help="tags, for example 'paid || refunded' (default: *)")
    command.add_argument("--count", type=positive, help="stop after this many messages")


def run(options: argparse.Namespace) -> int:
    from pyrocket_consumer.consumer import ConsumeResult, PushConsumer
    from pyrocket_consumer.wire.message import Message

    lock, enough, printed = threading.Lock(), threading.Event(), 0

    def show(message: Message) -> ConsumeResult:
        nonlocal printed
        with lock:
            if enough.is_set():
                return ConsumeResult.RETRY  # not ours to consume: it stays for the next
            text = message.body.decode(errors="backslashreplace")
            if options.output == "json":
                facts = {
                    "topic": message.topic,
                    "queue": str(message.queue),
                    "offset": message.queue_offset,
                    "id": message.message_id,
                    "tag": message.tags,
                    "keys": message.keys,
                    "born_at_ms": message.born_at_ms,
                    "body": text,
                }
                print(json.dumps(facts, ensure_ascii=False), flush=True)
            else:
                print(f"{message.queue}@{message.queue_offset}  {message.tags or '-'}  {text}", flush=True)
            printed += 1
            if options.count and printed >= options.count:
                enough.set()
            return ConsumeResult.SUCCESS

    with PushConsumer(
        options.group, **connection(options), consume_from=options.start, consume_threads=1
    ) as consumer:
        consumer.subscribe(options.topic, show, options.selector)
        print(f"consuming {options.topic} as {options.group}; Ctrl-C ends", file=sys.stderr)
        try:
            while not enough.is_set():
                consumer.join(0.2)
                if consumer.state.value != "running":
                    break
        except KeyboardInterrupt:
            pass
    return 0
