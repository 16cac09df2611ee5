"""`pyrocket offsets`: show the offsets and the lag of groups, and reset them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyrocket_consumer.cli.arguments import (
    MAX_WAIT_S,
    add_command,
    add_connection,
    add_output,
    check_once,
    connection,
    offset_spec,
    queue_name,
    wait_seconds,
    whole_number,
)
from pyrocket_consumer.cli.streams import Interrupts, print_json, print_line, print_table, print_to_stderr
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.text import safe_repr

if TYPE_CHECKING:
    from pyrocket_consumer.admin import Admin, GroupLag, QueueLag, ResetPlan, ResetProgress, ResetResult
    from pyrocket_consumer.admin.resets.plan import QueueMove, QueueTarget, RetryStart
    from pyrocket_consumer.offsets import DatabaseOffsets

_SUMMARY = "show the offsets of groups, and reset them"
_EXAMPLES = """\
  pyrocket offsets show orders-app orders -n 127.0.0.1:9876
  pyrocket offsets lag orders-app
  pyrocket offsets reset orders-app orders --to earliest              # shows what it would do
  pyrocket offsets reset orders-app orders --to earliest --execute
"""
_SHOW_EXAMPLES = """\
  pyrocket offsets show orders-app orders                             # every queue; per member in a broadcasting group
  pyrocket offsets show orders-app orders -o json
"""
_LAG_EXAMPLES = """\
  pyrocket offsets lag orders-app                                     # every topic of the group, and its retry topic
  pyrocket offsets lag orders-app --max 10000                         # exit code 3 if the lag of a topic is above it
"""
_RESET_EXAMPLES = """\
  pyrocket offsets reset orders-app orders --to earliest              # prints the plan, and changes nothing
  pyrocket offsets reset orders-app orders --to earliest --execute    # resets, and verifies each member
  pyrocket offsets reset orders-app orders --to 2026-11-21T08:00:00Z --execute
  pyrocket offsets reset orders-app orders --to latest --queue broker-a/3 --execute
  pyrocket offsets reset orders-app orders --queue broker-a/0=120 --queue broker-a/1=77 --execute

--store resets offsets in a database (DatabaseOffsets), whether members run or not:
  pyrocket offsets reset billing orders --to earliest --store env:DATABASE_URL --execute

Queues of the retry topic without a row in the database start at the brokers' offsets.

The plan and the result name the commands that undo the reset. Exit code 3: a member has not moved, or has not confirmed
it. Repeating a reset is safe.
"""
_INTERRUPTED = (
    "stopped during the reset; members that have moved stay moved, and the records that were written apply. "
    "Repeat the reset, which is safe, or undo it"
)
_DDL_EXAMPLES = """\
  pyrocket offsets ddl --dialect postgresql                           # for a user who may create tables
  pyrocket offsets ddl --dialect mysql --table billing_offsets --inbox
"""
_FORGET_EXAMPLES = """\
  pyrocket offsets forget-reset orders-app orders                     # members that are offline will not follow it
"""
_ADOPT_EXAMPLES = """\
  pyrocket offsets adopt ~/.rocketmq_offsets/10.0.0.5@DEFAULT/audit ~/.rocketmq_offsets/10.0.0.9@DEFAULT/audit

Stop both consumers first. The old store is kept in the same directory under another name.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    group = add_command(commands, "offsets", _SUMMARY, _EXAMPLES, lambda options: _print_usage(group))
    under = group.add_subparsers(dest="what", metavar="COMMAND")
    show = add_command(under, "show", "show a group's offset in each queue of a topic", _SHOW_EXAMPLES, run_show)
    lag = add_command(under, "lag", "show a group's lag in each of its topics", _LAG_EXAMPLES, run_lag)
    reset = add_command(
        under, "reset", "plan a reset of a group, and with --execute do and verify it", _RESET_EXAMPLES, run_reset
    )
    forget = add_command(
        under, "forget-reset", "remove the recorded resets of a broadcasting group", _FORGET_EXAMPLES, run_forget
    )
    adopt = add_command(
        under, "adopt", "move local offsets to the directory of a changed client id", _ADOPT_EXAMPLES, run_adopt
    )
    adopt.add_argument("orphan", help="directory of the store left behind")
    adopt.add_argument("directory", help="directory of the store that is used now")
    adopt.add_argument("--replace", action="store_true", help="replace the offsets in DIRECTORY, if it has some")
    add_output(adopt)
    for command in (show, lag, reset, forget):
        add_connection(command)
        add_output(command)
        command.add_argument("group", help="consumer group")
    for command in (show, reset, forget):
        command.add_argument("topic", help="a topic of the group")
    lag.add_argument(
        "--max", type=whole_number, metavar="N", help="exit with code 3 if a topic's lag is above N, or unknown"
    )
    for command in (show, lag):
        command.add_argument(
            "--broker",
            action="append",
            default=[],
            metavar="NAME",
            help="exit with code 3 if no route has this broker, because name servers drop stopped ones; repeatable",
        )
    reset.add_argument(
        "--to",
        type=offset_spec,
        metavar="PLACE",
        help="the target: earliest, latest, or a time with its zone, like 2026-11-21T08:00:00Z",
    )
    reset.add_argument(
        "--queue",
        action="append",
        default=[],
        type=_queue,
        metavar="BROKER/ID[=OFFSET]",
        help="only this queue, or this queue to this offset; repeatable",
    )
    reset.add_argument("--member", metavar="CLIENT-ID", help="only this member of a broadcasting group")
    reset.add_argument(
        "--model", choices=("clustering", "broadcasting"), help="the group's model, if no member is online"
    )
    for command in (show, lag, reset):
        command.add_argument(
            "--store",
            metavar="URL",
            help="SQLAlchemy URL of the database with the group's offsets; env:NAME reads it from a variable",
        )
        _add_table(command)
    ddl = add_command(under, "ddl", "print the SQL that creates the tables of DatabaseOffsets", _DDL_EXAMPLES, run_ddl)
    ddl.add_argument(
        "--dialect", required=True, choices=("sqlite", "postgresql", "mysql", "mariadb"), help="the kind of database"
    )
    _add_table(ddl)
    ddl.add_argument("--inbox", action="store_true", help="include the table of consumed messages")
    reset.set_defaults(wrong_usage=reset.error)
    reset.add_argument("--execute", action="store_true", help="reset; without this, print the plan only")
    reset.add_argument("--partial", action="store_true", help="skip unreachable brokers")
    reset.add_argument(
        "--unsubscribed", action="store_true", help="reset even if no online member subscribes to the topic"
    )
    reset.add_argument(
        "--wait",
        type=wait_seconds,
        default=30.0,
        metavar="SECONDS",
        help=f"total time to wait for members, from 0 to {MAX_WAIT_S} (default: 30)",
    )


def _add_table(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--table",
        default="pyrocket_offsets",
        metavar="NAME",
        help="the offset table in the database (default: pyrocket_offsets)",
    )


def _print_usage(group: argparse.ArgumentParser) -> int:
    group.print_help(sys.stderr)
    return 2


def _queue(text: str) -> tuple[str, int, int | None]:
    name, _, offset = text.partition("=")
    try:
        return *queue_name(name), whole_number(offset) if "=" in text else None
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{safe_repr(text)} is not like broker-a/3 or broker-a/3=120") from None


def _admin(options: argparse.Namespace) -> Admin:
    from pyrocket_consumer.admin import Admin

    return Admin(**connection(options))


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[DatabaseOffsets | None]:
    """Yield the store that --store names, None without it.

    Raises:
        ConfigError: its address is wrong, or a driver is missing.
    """
    if options.store is None:
        yield None
        return
    from pyrocket_consumer.errors import ConfigError
    from pyrocket_consumer.offsets import DatabaseOffsets

    variable = options.store.removeprefix("env:") if options.store.startswith("env:") else None
    if not options.store or variable == "":
        raise ConfigError(f"--store {options.store!r} names no database; it must be env:NAME, or an address")
    url = options.store if variable is None else os.environ.get(variable)
    if url is None:
        raise ConfigError(f"--store {options.store}: there is no variable {variable} in the environment; set it")
    if not url:
        raise ConfigError(
            f"--store {options.store}: the variable {variable} is empty; set it to the database's address"
        )
    try:
        url.encode()
    except UnicodeEncodeError:
        name = "the address" if variable is None else f"the address in {variable}"  # it may have a password
        raise ConfigError(f"--store: {name} is not UTF-8; write it as text") from None
    store = DatabaseOffsets.at(url, options.table)
    try:
        yield store
    finally:
        store.close()


# --- show, lag


def run_show(options: argparse.Namespace) -> int:
    with _admin(options) as admin, _store(options) as store:
        found = admin.offsets(options.group, options.topic, brokers=options.broker, store=store)
    if options.output == "json":
        print_json(_lag_as_json(found), indent=2)
        return 3 if found.missing else 0
    if not found.rows:
        print_line(f"{options.group} has no offset in {options.topic}{_online(found)}")
        return _print_unreached(found)
    heads = ["member", "queue", "min", "committed", "max", "lag", "consumed up to"]
    rows: list[list[object]] = [
        [
            row.member,
            _queue_name(row.queue),
            row.min,
            "-" if row.committed is None else row.committed,
            row.max,
            row.lag,
            _format_time(row.consumed_at),
        ]
        for row in found.rows
    ]
    _print_lag(found, f"Group {found.group} in topic {options.topic}", heads, rows)
    return _print_unreached(found)


def run_lag(options: argparse.Namespace) -> int:
    with _admin(options) as admin, _store(options) as store:
        found = admin.lag(options.group, brokers=options.broker, store=store)
    totals = _by_topic(found)
    too_far = [] if options.max is None else _describe_excess(found, totals, options.max)
    code = 3 if too_far or found.missing else 0
    if options.output == "json":
        print_json(_lag_as_json(found), indent=2)
        for line in too_far:
            print_to_stderr(line)
        return code
    _print_lag(found, f"Group {found.group}", ["member", "topic", "queues", "lag"], totals)
    _print_unreached(found)
    for line in too_far:
        print_to_stderr(line)
    return code


def _print_lag(found: GroupLag, title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, whose first column, the member, is for a broadcasting group only."""
    first = 0 if any(row.member for row in found.rows) else 1
    print_table(f"{title}{_online(found)}", heads[first:], [row[first:] for row in rows])


def _describe_excess(found: GroupLag, totals: Sequence[tuple[str | None, str, int, int]], limit: int) -> list[str]:
    """Return a line for each topic whose lag is above the limit, and one if a part of the lag is unknown."""
    lines = [
        f"{topic}: lag {lag} {f'of {member} ' if member else ''}is above --max {limit}"
        for member, topic, _, lag in totals
        if lag > limit
    ]
    return lines if found.is_complete else [*lines, f"a part of the lag is unknown, and counts as above --max {limit}"]


def _by_topic(found: GroupLag) -> list[tuple[str | None, str, int, int]]:
    """Return member, topic, number of queues and lag, the largest lag first."""
    rows: dict[tuple[str | None, str], list[QueueLag]] = {}
    for row in found.rows:
        rows.setdefault((row.member, row.queue.topic), []).append(row)
    totals = [(member, topic, len(each), sum(row.lag for row in each)) for (member, topic), each in rows.items()]
    return sorted(totals, key=lambda total: (-total[-1], total[1], total[0] or ""))


def _online(found: GroupLag) -> str:
    kind = f"{found.model}, " if found.model else ""
    is_recorded = found.model == "broadcasting" and not found.members
    source = "; these are the targets of the last reset" if is_recorded else ""
    return f" ({kind}{len(found.members)} online{source})"


def _print_unreached(found: GroupLag) -> int:
    for broker, reason in found.missing.items():
        print_to_stderr(f"  {broker} is missing: {reason}")
    for client_id, reason in found.unreached.items():
        print_to_stderr(f"  {client_id} did not report its offsets: {reason}")
    if found.not_known:
        print_to_stderr(f"  not known: {found.not_known}")
    for row in found.rows:
        if row.is_above_end:
            print_to_stderr(
                f"  {row.queue} is committed at {row.committed}, above its end {row.max}. No message is delivered "
                "until a member that stays online, or a reset, corrects the offset"
            )
    return 3 if found.missing else 0


def _format_time(at: datetime | None) -> str:
    return at.astimezone().isoformat(sep=" ", timespec="seconds") if at is not None else "-"


def _queue_name(queue: MessageQueue) -> str:
    return f"{queue.broker_name}/{queue.queue_id}"


def _lag_as_json(found: GroupLag) -> dict[str, Any]:
    return {
        "group": found.group,
        "model": found.model,
        "members": list(found.members),
        "lag": found.total if found.is_known and not found.missing else None,
        "missing": dict(found.missing),
        "unreached": dict(found.unreached),
        "not_known": found.not_known or None,
        "queues": [
            {
                "topic": row.queue.topic,
                **_as_json(row, "member min committed max"),
                "lag": None if row.is_above_end else row.lag,
                "consumed_at": row.consumed_at.isoformat() if row.consumed_at else None,
            }
            for row in found.rows
        ],
    }


# --- tables


def run_ddl(options: argparse.Namespace) -> int:
    from pyrocket_consumer.offsets.database.store import ddl

    for statement in ddl(options.dialect, options.table, with_inbox=options.inbox):
        for line in f"{statement};".replace("\t", "    ").splitlines():
            print_line(line.rstrip())
    return 0


# --- reset


def run_reset(options: argparse.Namespace) -> int:
    to, queues = _reset_targets(options)
    began = time.monotonic()
    with Interrupts(), _admin(options) as admin, _store(options) as store:
        plan = admin.plan_reset(
            options.group,
            options.topic,
            to,
            queues,
            model=options.model,
            member=options.member,
            store=store,
            wait_s=options.wait / 2,
        )
        as_json = options.output == "json"
        undo = _undo_commands(plan, options)
        if not as_json:
            _print_plan(plan)
            _print_undo(plan, undo)
        if not options.execute:
            if as_json:
                print_json({"plan": _plan_as_json(plan), "undo": undo, "result": None}, indent=2)
            else:
                print_line()
                print_line("Nothing was changed. Add --execute to do it.")
            return 0
        left_s = max(0.0, options.wait - (time.monotonic() - began))
        try:
            result = plan.execute(
                None if as_json else _print_step,
                partial=options.partial,
                unsubscribed=options.unsubscribed,
                wait_s=left_s,
            )
        except KeyboardInterrupt:
            print_to_stderr(f"pyrocket: {_INTERRUPTED}")
            if as_json:
                print_json(
                    {"plan": _plan_as_json(plan), "undo": undo, "result": None, "stopped_by": "interrupted"}, indent=2
                )
            raise
    if as_json:
        print_json({"plan": _plan_as_json(plan), "undo": undo, "result": _result_as_json(result)}, indent=2)
    else:
        _print_result(result)
        _print_undo(plan, undo)
    return 0 if result.verified else 3


def _undo_commands(plan: ResetPlan, options: argparse.Namespace) -> list[str]:
    """Return the commands that move every member back to its offsets before the reset."""
    where = [*(["-n", options.name_server] if options.name_server else []), *(["--tls"] if options.tls else [])]
    where += ["--tls-ca", options.tls_ca] if options.tls_ca else []
    if plan.store is not None:  # without a password
        where += ["--store", options.store if options.store.startswith("env:") else plan.store.address]
        where += ["--table", options.table] if options.table != "pyrocket_offsets" else []
    where += ["--allowed-addresses", options.allowed_addresses] if options.allowed_addresses else []
    command = ["pyrocket", "offsets"]
    commands = [
        [
            *command,
            "reset",
            plan.group,
            plan.topic,
            *(["--member", member] if member is not None else []),
            *(
                word
                for queue, offset in sorted(offsets.items())
                for word in ("--queue", f"{_queue_name(queue)}={offset}")
            ),
            "--execute",
            *where,
        ]
        for member, offsets in plan.undo.items()
    ]
    if plan.broadcasting and plan.member is None:
        commands.append([*command, "forget-reset", plan.group, plan.topic, *where])
    return [shlex.join(words) for words in commands]


def _print_undo(plan: ResetPlan, commands: Sequence[str]) -> None:
    if commands:
        print_line()
        print_line("To undo it:")
        for command in commands:
            print_line(f"  {command}")
    for member in sorted({move.member for move in plan.moves if move.member and move.current is None}):
        print_line(f"  {member}: some of its offsets are unknown, so no command can undo their reset")
    nowhere = sorted(_queue_name(move.queue) for move in plan.moves if move.current is None)
    if nowhere and not plan.broadcasting:
        print_line(
            f"  no offset is committed yet in {', '.join(nowhere)}, and no command can remove the one of a reset"
        )


def _reset_targets(options: argparse.Namespace) -> tuple[Any, list[MessageQueue] | None]:
    """Return the target of the reset, and the queues."""
    check_once("--queue", (f"{broker}/{queue_id}" for broker, queue_id, _ in options.queue), options.wrong_usage)
    named = {MessageQueue(options.topic, broker, queue_id): offset for broker, queue_id, offset in options.queue}
    exact = {queue: offset for queue, offset in named.items() if offset is not None}
    if exact and (len(exact) < len(named) or options.to is not None):
        options.wrong_usage("give either --to, or an offset with each --queue")
    if exact:
        return exact, None
    if options.to is None:
        options.wrong_usage("the target is missing; give --to earliest, latest or a time, or --queue BROKER/ID=OFFSET")
    return options.to, list(named) or None


def _print_plan(plan: ResetPlan) -> None:
    from pyrocket_consumer.admin.resets.plan import plan_table

    heads, rows = plan_table(plan)
    print_table(f"Reset of {plan.subject} in topic {plan.topic}: {plan.way_text}", heads, rows)
    print_line()
    if plan.unsubscribed:
        print_line(f"  {plan.unsubscribed}")
    for retry in plan.retries:
        print_line(f"  {retry}")
    for broker in plan.brokers:
        print_line(f"  {broker}")
    for each in plan.members:
        print_line(f"  {each.client_id} ({each.client}): {each.how}")
    if not plan.members:
        print_line("  no member of the group is online")
    if plan.broadcasting and plan.member is None:
        print_line("  offline members will follow at their next start")


def _print_step(step: ResetProgress) -> None:
    print_to_stderr(f"... {step}")


def _print_result(result: ResetResult) -> None:
    rows = [[outcome.subject, outcome.state, outcome.text] for outcome in result.outcomes]
    print_line()
    if rows:
        print_table(result.heading, ["who", "state", ""], rows)
    else:
        print_line(result.heading)
    for name, text in sorted(result.brokers.items()):
        print_line(f"  {name}: {text}")
    if result.raced:
        names = ", ".join(map(_queue_name, result.raced))
        print_line(f"  another reset of {names} ran at the same time; it was later, so it counts")


def _plan_as_json(plan: ResetPlan) -> dict[str, Any]:
    return {
        "group": plan.group,
        "topic": plan.topic,
        "model": plan.model,
        "way": plan.way,
        "problems": plan.problems,
        "unsubscribed": plan.unsubscribed or None,
        "targets": [_as_json(each, "wanted target min max") for each in plan.targets],
        "moves": [_as_json(each, "member current target replayed skipped") for each in plan.moves],
        "retries": [{"topic": each.queue.topic, **_as_json(each, "committed target")} for each in plan.retries],
        "members": [
            {"client_id": each.client_id, "client": each.client, "reachable": each.reachable, "how": each.how}
            for each in plan.members
        ],
    }


def _queue_as_json(queue: MessageQueue) -> dict[str, Any]:
    return {"broker": queue.broker_name, "queue": queue.queue_id}


def _as_json(value: QueueLag | QueueMove | QueueTarget | RetryStart, names: str) -> dict[str, Any]:
    """Return the queue of a value, and its attributes with these names."""
    return {**_queue_as_json(value.queue), **{name: getattr(value, name) for name in names.split()}}


def _result_as_json(result: ResetResult) -> Mapping[str, Any]:
    return {
        "id": result.id,
        "epoch": result.epoch,
        "verified": result.verified,
        "outcomes": [{"who": each.subject, "state": each.state, "text": each.text} for each in result.outcomes],
        "brokers": dict(result.brokers),
        "raced": [_queue_as_json(queue) for queue in result.raced],
    }


# --- forget-reset


def run_forget(options: argparse.Namespace) -> int:
    with _admin(options) as admin:
        forgotten = admin.forget_reset(options.group, options.topic)
    if options.output == "json":
        print_json({"group": options.group, "topic": options.topic, "forgotten": forgotten}, indent=2)
    elif forgotten:
        print_line(f"the recorded resets of {options.group} in {options.topic} were removed")
    else:
        print_line(f"no reset of {options.group} in {options.topic} was recorded; nothing was removed")
    return 0


# --- adopt


def run_adopt(options: argparse.Namespace) -> int:
    from pyrocket_consumer.offsets.local.store import adopt_store

    renamed = adopt_store(options.orphan, options.directory, replace=options.replace)
    if options.output == "json":
        print_json({"directory": options.directory, "kept": str(renamed)}, indent=2)
    else:
        print_line(f"the offsets of {options.orphan} are in {options.directory} now; its files are kept in {renamed}")
    return 0
