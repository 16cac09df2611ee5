"""`pyrocket consume`: print messages, without a group or as a member of one."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from pyrocket_consumer.cli.arguments import (
    add_command,
    add_connection,
    add_output,
    check_once,
    connected,
    connection,
    offset_spec,
    positive_number,
    queue_name,
    whole_number,
)
from pyrocket_consumer.cli.streams import (
    Interrupts,
    discard_output,
    is_output_closed,
    print_json,
    print_line,
    print_to_stderr,
    wait_writable,
)
from pyrocket_consumer.config import check_topic
from pyrocket_consumer.errors import ConfigError, PermissionDenied, ProtocolError
from pyrocket_consumer.protocol.properties import PropertyName
from pyrocket_consumer.text import escape_controls

if TYPE_CHECKING:
    from pyrocket_consumer.cli.topic_tail import TopicTailer
    from pyrocket_consumer.cluster import Cluster
    from pyrocket_consumer.consumer import ConsumeResult, PushConsumer, Suspend
    from pyrocket_consumer.model import MessageModel, MessageQueue, Subscription
    from pyrocket_consumer.protocol.message import Message

_EXAMPLES = """\
  pyrocket consume -n 127.0.0.1:9876 orders                        # the stored messages, oldest first
  pyrocket consume -n 127.0.0.1:9876 orders --from last            # new messages, until Ctrl-C
  pyrocket consume -n 127.0.0.1:9876 orders --from 2026-11-21T08:00:00Z --follow -o json
  pyrocket consume -n 127.0.0.1:9876 orders --queue broker-a/3 --offset 120 --count 1
  pyrocket consume -n 127.0.0.1:9876 orders --selector 'paid || refunded'
  pyrocket consume -n 127.0.0.1:9876 orders --group audit --count 10

Without --group it joins no group and commits nothing. It ends at the last message that was stored when it started.
With --group it is a member of the group while it runs. It shares the queues with the other members, and waits for
messages. It commits only the messages that it has printed. --count, Ctrl-C, SIGTERM or a closed pipe (| head) end it.
"""

_CHECK_INTERVAL_S = 0.2
_CLOSE_WITHIN_S = 5.0


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = add_command(commands, "consume", "print the messages of a topic", _EXAMPLES, run)
    add_connection(command)
    add_output(command)
    command.add_argument("topic", help="the topic to read")
    command.add_argument("--group", help="consume as a member of this group, and commit what was printed")
    command.add_argument(
        "--from",
        dest="start",
        type=offset_spec,
        metavar="PLACE",
        help="the start: first (default), last (and follow), or a time with its zone, like 2026-11-21T08:00:00Z. "
        "With --group only for queues without an offset, and stored at once (default: last)",
    )
    command.add_argument(
        "--queue", action="append", type=queue_name, metavar="BROKER/ID", help="only this queue; repeatable"
    )
    command.add_argument("--offset", type=whole_number, metavar="N", help="start at this offset of the one --queue")
    command.add_argument("--follow", action="store_true", help="wait for new messages at the end, as with --group")
    command.add_argument("--selector", default="*", help="tags, for example 'paid || refunded' (default: *)")
    command.add_argument("--sql", help="properties, for example \"region = 'eu' AND price > 5\"")
    command.add_argument("--count", type=positive_number, help="stop after this many messages")
    command.add_argument(
        "--raw",
        action="store_true",
        help="print bodies unchanged, although a terminal executes the escapes in them; without it, escapes are shown",
    )
    command.set_defaults(wrong_usage=command.error)


class Printer:
    """Prints messages up to `limit`, until the reader closes the output. For the main thread.

    Print a message and report its result within one `interrupts.deferred()`, so that no signal separates the two.
    """

    def __init__(self, interrupts: Interrupts, as_json: bool, raw: bool, limit: int | None) -> None:
        self.ended = False
        self.interrupts = interrupts
        self.printed = 0
        self._as_json = as_json
        self._raw = raw
        self._remaining = limit

    def print_message(self, message: Message) -> bool:
        """Print a message, and return True. Return False if the limit was reached or the output is closed."""
        from pyrocket_consumer.protocol.message import drop_body

        while not self.ended and not wait_writable(_CHECK_INTERVAL_S):
            self.ended = self.interrupts.is_pending
        if self.ended:
            return False
        try:
            self._print(message)
        except BrokenPipeError:
            self._stop_printing()
            return False
        finally:
            drop_body(message)  # other messages wait, and memory is limited
        self.printed += 1
        if self._remaining is not None:
            self._remaining -= 1
            self.ended = self._remaining == 0
        return True

    def _print(self, message: Message) -> None:
        if self._as_json:
            print_json(_as_json(message))
        elif self._raw:
            print(escape_controls(_heading(message)) + _body_text(message), flush=True)
        else:
            print_line(_heading(message) + _body_text(message))

    def check_reader(self) -> None:
        """Stop if the reader has closed the output."""
        if is_output_closed():
            self._stop_printing()

    def print_count(self) -> None:
        """Print the number of printed messages on standard error."""
        print_to_stderr(f"{self.printed} {'message' if self.printed == 1 else 'messages'} printed")

    def _stop_printing(self) -> None:
        self.ended = True
        discard_output()


def _heading(message: Message) -> str:
    sharding_key = message.property(PropertyName.SHARDING_KEY)
    about = (message.tags or "-") + (f" [{sharding_key}]" if sharding_key else "")
    return f"{message.queue}@{message.queue_offset}  {about}  "


def _as_json(message: Message) -> dict[str, object]:
    body, body_error = _read_body(message)
    text = body.decode(errors="backslashreplace")
    fields: dict[str, object] = {
        "topic": message.topic,
        "queue": str(message.queue),
        "offset": message.queue_offset,
        "id": message.message_id,
        "tag": message.tags,
        "keys": message.keys,
        "sharding_key": message.property(PropertyName.SHARDING_KEY),
        "born_at_ms": message.born_at_ms,
        "body": None if body_error else text,
    }
    if body_error:
        fields["body_error"] = body_error
    elif text.encode() != body:  # it is not UTF-8
        fields["body_base64"] = base64.b64encode(body).decode()
    return fields


def _read_body(message: Message) -> tuple[bytes, str | None]:
    """Return the body, or the reason why it cannot be read. The messages after it are printed anyway."""
    try:
        return message.body, None
    except ProtocolError as error:
        return b"", str(error)


def _body_text(message: Message) -> str:
    body, body_error = _read_body(message)
    return f"<the body cannot be read: {body_error}>" if body_error else body.decode(errors="backslashreplace")


def run(options: argparse.Namespace) -> int:
    named = options.queue or []
    check_once("--queue", (f"{broker}/{queue_id}" for broker, queue_id in named), options.wrong_usage)
    if options.sql is not None and options.selector != "*":
        options.wrong_usage("--selector and --sql exclude each other; give one of them")
    if options.raw and options.output == "json":
        options.wrong_usage("--raw is for text, because JSON has its own escapes and body_base64; remove one of them")
    if options.offset is not None and (options.start is not None or len(named) != 1):
        options.wrong_usage("--offset N needs exactly one queue, without --from: --queue BROKER/ID --offset N")
    if options.group is not None and named:
        options.wrong_usage("use --queue and --offset without --group, because the members share all queues")
    with Interrupts() as interrupts:
        raw = options.raw or not sys.stdout.isatty()  # a program gets bodies unchanged
        printer = Printer(interrupts, options.output == "json", raw, options.count)
        try:
            if options.group is None:
                _tail(options, printer)
                return 0
            _consume(options, printer)
        except KeyboardInterrupt:
            pass
        except BaseException:
            if printer.printed:
                printer.print_count()
            raise
        printer.print_count()
    return 0


# --- as a member of a group


class _PrintQueue:
    """Passes messages from the consumer's one worker to the thread that prints, and the result of each back."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._printed: SimpleQueue[bool] = SimpleQueue()

    def listen(self, message: Message) -> ConsumeResult | Suspend:
        """Consume a message once it is printed. In order of offset, so no unprinted message is skipped."""
        from pyrocket_consumer.consumer import ConsumeResult, Suspend

        self._messages.put(message)
        if self._printed.get():
            return ConsumeResult.SUCCESS
        self._printed.put(False)  # printing has ended, also for all later messages
        return Suspend(30)

    def print_until_ended(self, consumer: PushConsumer, printer: Printer) -> None:
        while not printer.ended and consumer.state.value == "running":
            try:
                message = self._messages.get(timeout=_CHECK_INTERVAL_S)
            except Empty:
                printer.check_reader()
            else:
                with printer.interrupts.deferred():
                    self._printed.put(printer.print_message(message))

    def end(self) -> None:
        """Release the worker, if it waits."""
        self._printed.put(False)


def _consume(options: argparse.Namespace, printer: Printer) -> None:
    from pyrocket_consumer.consumer import PushConsumer, sql

    print_queue = _PrintQueue()
    consumer = PushConsumer(
        options.group,
        **connection(options),
        consume_from=options.start or "last",
        consume_threads=1,
        orderly=True,  # so that unprinted messages stay in their queue, and are not sent back
        shutdown_timeout_s=_CLOSE_WITHIN_S,
    )
    consumer.subscribe(options.topic, print_queue.listen, options.selector if options.sql is None else sql(options.sql))
    with connected(options) as cluster:
        cluster.run(_check_model(cluster, options), None)
    try:
        with consumer:
            try:
                print_to_stderr(f"consuming {options.topic} as a member of {options.group}; Ctrl-C ends")
                print_queue.print_until_ended(consumer, printer)
            except KeyboardInterrupt:
                pass  # now the consumer closes, and its errors count
            finally:
                print_queue.end()
    finally:
        print_queue.end()


async def _check_model(cluster: Cluster, options: argparse.Namespace) -> None:
    """Raise ConfigError if the group is broadcasting, where each member stores its own offsets.

    Its online members show that, or else a recorded reset, as for `offsets show`.
    """
    from pyrocket_consumer.cluster.admin_relay import fetch_group_members
    from pyrocket_consumer.model import MessageModel

    names = {data.broker_name for data in (await cluster.routes.get(options.topic, refresh=True)).queues}
    addresses = {
        name: address for name in names if (address := cluster.routes.address(name, only_this=True)) is not None
    }
    found = await fetch_group_members(cluster, options.group, addresses)
    model, remedy = found.model, ""
    if not found.members:
        model = await _recorded_model(cluster, options)
        remedy = (
            f". If it is a clustering group now, first remove its recorded resets: pyrocket offsets forget-reset "
            f"{options.group} {options.topic}"
        )
    if model is MessageModel.BROADCASTING:
        raise ConfigError(
            f"{options.group} is a broadcasting group: each member gets every message, and stores its own offsets; "
            f"read the topic without --group{remedy}"
        )


async def _recorded_model(cluster: Cluster, options: argparse.Namespace) -> MessageModel | None:
    """Return the model that `offsets show` reports for a group without members, None if it is not known."""
    from pyrocket_consumer.admin.lag import group_lag

    try:
        return (await group_lag(cluster, options.group, options.topic, (), {})).model
    except (ConfigError, PermissionDenied):  # a new group, or an account that may only consume
        return None


# --- without a group


def _tail(options: argparse.Namespace, printer: Printer) -> None:
    subscription = _subscription(options)
    with connected(options) as cluster:
        tailer = cluster.run(_open_tailer(cluster, options, subscription), None)
        while not printer.ended and (messages := cluster.run(tailer.next_messages(), None)):
            _print(messages, printer)
        if options.follow or options.start == "last":
            cluster.run(_follow(tailer, options), None)
            print_to_stderr(f"following {options.topic}; Ctrl-C ends")
            while not printer.ended:
                _print(cluster.run(tailer.new_messages(_CHECK_INTERVAL_S), None), printer)
                printer.check_reader()


async def _follow(tailer: TopicTailer, options: argparse.Namespace) -> None:
    tailer.follow(new_queues=not options.queue)


def _print(messages: Iterable[Message], printer: Printer) -> None:
    for message in messages:
        with printer.interrupts.deferred():
            printer.print_message(message)


def _subscription(options: argparse.Namespace) -> Subscription:
    from pyrocket_consumer.model import Subscription
    from pyrocket_consumer.protocol.subscription import SQL92, check_expression, parse_subscription

    check_topic(options.topic)
    if options.sql is None:
        return parse_subscription(options.topic, options.selector)
    if not options.sql.strip():
        raise ConfigError("the SQL92 expression is empty; give one, or remove --sql")
    check_expression(options.sql)
    return Subscription(options.topic, options.sql, expression_type=SQL92)


async def _open_tailer(cluster: Cluster, options: argparse.Namespace, subscription: Subscription) -> TopicTailer:
    """Find the queues, and their start and end offsets."""
    from pyrocket_consumer.cli.topic_tail import TopicTailer
    from pyrocket_consumer.cluster.offset_lookup import TOOLS_GROUP, fetch_first_and_last, fetch_offsets_at

    queues = await _queues(cluster, options)
    ends = await fetch_offsets_at(cluster, "last", queues, groups=(TOOLS_GROUP,))
    if options.offset is None:
        begins = await fetch_offsets_at(cluster, options.start or "first", queues, groups=(TOOLS_GROUP,))
    else:
        begins = dict.fromkeys(queues, options.offset)
        for queue, (low, high) in (await fetch_first_and_last(cluster, queues)).items():
            if not low <= options.offset <= high:
                raise ConfigError(f"offset {options.offset} is not in {queue}, which holds {low} to {high}")
    return TopicTailer(cluster, subscription, begins, ends, print_to_stderr)


async def _queues(cluster: Cluster, options: argparse.Namespace) -> list[MessageQueue]:
    from pyrocket_consumer.model import MessageQueue

    existing = (await cluster.routes.get(options.topic, refresh=True)).consume_queues()
    if not options.queue:
        return existing
    named = {MessageQueue(options.topic, broker, queue_id) for broker, queue_id in options.queue}
    if unknown := sorted(named - set(existing)):
        raise ConfigError(f"there is no queue {unknown[0]}; choose one of {', '.join(map(str, existing))}")
    return sorted(named)
