"""`pyrocket consume`: what it prints, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pyrocket_consumer.cli import main
from pyrocket_consumer.testing import EmbeddedCluster, answer
from pyrocket_consumer.wire.codes import RequestCode
from tests.consuming import consuming, until
from tests.packing import ZLIB, send

ROOT = Path(__file__).parents[2]
MEMBER = ["--group", "g", "--from", "first"]
MANY = 2000


@pytest.fixture
def orders():
    with EmbeddedCluster(delay_scale=0.01) as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", lambda number: b"m%d" % number, count=5, tags="paid")
        yield cluster


def command(cluster, *arguments):
    return [sys.executable, "-m", "pyrocket_consumer.cli", "consume", "orders", "-n", cluster.name_server, *arguments]


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def consume(cluster, *arguments, code=0):
    """Run it as from a shell; returns what it printed, and what it told beside."""
    done = subprocess.run(
        command(cluster, *arguments), capture_output=True, text=True, timeout=60, env=environment()
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines(), done.stderr


class Running:
    """The command while it runs; `read` waits for lines, `end` for its exit code."""

    def __init__(self, cluster, *arguments, through=()):
        self._process = subprocess.Popen(
            [*through, *command(cluster, *arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        self.send_signal = self._process.send_signal

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.kill()
        self._process.communicate()

    def read(self, count):
        return [self._process.stdout.readline().rstrip("\n") for _ in range(count)]

    def hears(self, text):
        """Wait for the line on standard error that has `text`."""
        while text not in (line := self._process.stderr.readline()):
            assert line, f"{text!r} was not told"

    def leave(self):
        """Read no more, as `head` does."""
        self._process.stdout.close()

    def end(self, within_s=15.0):
        began = time.monotonic()
        code = self._process.wait(60)
        assert time.monotonic() - began < within_s
        assert "Traceback" not in (beside := self._process.stderr.read()), beside
        return code


def assert_only_committed(cluster, count):
    """Nothing was sent back, nothing else was acknowledged, and nobody is a member any more."""
    assert sum(cluster.committed("g", "orders").values()) == count
    assert cluster.broker("broker-a").requests(RequestCode.CONSUMER_SEND_MSG_BACK) == []
    assert cluster.messages("%RETRY%g") == []
    assert cluster.members("g") == []


# --- as a member of a group


def test_a_member_ends_after_so_many_and_leaves_the_others_to_the_next(orders):
    printed, beside = consume(orders, *MEMBER, "--count", "2")
    assert printed == ["orders/broker-a/0@0  paid  m0", "orders/broker-a/0@1  paid  m1"]
    assert beside == "consuming orders as a member of g; Ctrl-C ends\n2 messages printed\n"
    assert_only_committed(orders, 2)
    printed, _ = consume(orders, *MEMBER, "--count", "3", "-o", "json")
    assert [json.loads(line)["body"] for line in printed] == ["m2", "m3", "m4"]
    assert_only_committed(orders, 5)


@pytest.mark.parametrize("arguments", [[], MEMBER], ids=["looking", "member"])
def test_the_sharding_key_is_shown(orders, arguments):
    assert main(["produce", "-n", orders.name_server, "orders", "step", "--tag", "t", "--sharding-key", "o-17"]) == 0
    printed, _ = consume(orders, *arguments, "--count", "6", "-o", "json")
    assert [json.loads(line)["sharding_key"] for line in printed] == [None] * 5 + ["o-17"]
    printed, _ = consume(orders, "--selector", "t")
    assert printed == ["orders/broker-a/0@5  t [o-17]  step"]


@pytest.fixture
def many():
    """A topic in which much more is ready than will be printed."""
    with EmbeddedCluster(delay_scale=0.01) as cluster:
        cluster.create_topic("orders", queues=4)
        cluster.send("orders", lambda number: b"m%d" % number, count=MANY)
        yield cluster


def test_a_member_changes_nothing_but_the_offsets_of_what_it_printed(many):
    printed, _ = consume(many, *MEMBER, "--count", "3")
    assert len(printed) == 3
    assert_only_committed(many, 3)
    by_queue = Counter(line.partition("@")[0] for line in printed)
    committed = many.committed("g", "orders")
    assert by_queue == Counter({f"orders/broker-a/{number}": end for number, end in committed.items() if end})
    again, _ = consume(many, *MEMBER, "--count", str(MANY - 3))
    assert len({*printed, *again}) == MANY, "nothing twice, nothing missing"
    assert_only_committed(many, MANY)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_signal_ends_a_member(many, number):
    with Running(many, *MEMBER) as running:
        printed = running.read(MANY)
        running.send_signal(number)
        assert running.end() == 0
    assert len(set(printed)) == MANY
    assert_only_committed(many, MANY)


def test_a_member_whose_output_is_stuck_ends_at_a_signal(many):
    many.send("orders", lambda number: b"x" * 4000, count=100)  # more than a pipe holds
    with Running(many, *MEMBER) as running:
        running.hears("Ctrl-C ends")
        until(lambda: len(many.broker("broker-a").requests(RequestCode.PULL_MESSAGE)) >= 4, "pulled")
        running.send_signal(signal.SIGTERM)
        assert running.end() == 0
    assert many.messages("%RETRY%g") == []


def test_a_member_whose_reader_leaves_ends(many):
    with Running(many, *MEMBER) as running:
        running.read(2)
        running.leave()
        assert running.end() == 0
    assert many.messages("%RETRY%g") == []
    assert many.broker("broker-a").requests(RequestCode.CONSUMER_SEND_MSG_BACK) == []
    assert many.members("g") == []


def test_a_member_that_waits_notices_that_its_reader_has_left(orders):
    with Running(orders, *MEMBER) as running:
        running.read(5)
        running.leave()
        assert running.end() == 0
    assert_only_committed(orders, 5)


def test_a_new_group_begins_with_what_comes(orders):
    with Running(orders, "--group", "g", "--count", "1") as running:
        running.hears("Ctrl-C ends")
        orders.send("orders", b"new")
        assert running.read(1) == ["orders/broker-a/0@5  -  new"]
        assert running.end() == 0
    assert orders.committed("g", "orders") == {0: 6}


def test_a_broadcasting_group_is_not_joined(orders, capsys, tmp_path):
    with consuming(orders, "orders", "g", message_model="broadcasting", offset_store_dir=tmp_path) as (_, seen):
        seen.wait_for(5)
        assert main(["consume", "orders", "-n", orders.name_server, *MEMBER]) == 2
    assert "g is a broadcasting group" in capsys.readouterr().err
    assert orders.committed("g", "orders") == {}


# --- as an onlooker


def groups_asked(cluster):
    """Return the groups that heartbeats and commits named."""
    broker = cluster.broker("broker-a")
    commits = {each.command.fields["consumerGroup"] for each in broker.requests(RequestCode.UPDATE_CONSUMER_OFFSET)}
    return commits | {f"heartbeat {number}" for number, _ in enumerate(broker.requests(RequestCode.HEART_BEAT))}


def test_who_looks_sees_what_there_is_in_order_of_time_and_changes_nothing(many):
    printed, beside = consume(many)
    assert [line.rpartition(" ")[2] for line in printed] == [f"m{number}" for number in range(MANY)]
    assert beside == ""
    assert groups_asked(many) == set()


def test_who_looks_may_begin_at_an_offset_of_one_queue(many):
    printed, _ = consume(many, "--queue", "broker-a/1", "--offset", "497")
    assert [line.partition("  ")[0] for line in printed] == [f"orders/broker-a/1@{n}" for n in (497, 498, 499)]
    assert consume(many, "--queue", "broker-a/1", "--offset", "500") == ([], "")


def test_who_looks_may_begin_at_a_time(orders):
    later = datetime.fromtimestamp(orders.messages("orders")[-1].stored_at_ms / 1000 + 0.001, UTC)
    until(lambda: datetime.now(UTC) > later, "a later time")
    orders.send("orders", b"later", tags="paid")
    printed, _ = consume(orders, "--from", later.isoformat())
    assert printed == ["orders/broker-a/0@5  paid  later"]
    assert len(consume(orders, "--from", "earliest")[0]) == 6


def test_who_looks_ends_after_so_many(orders):
    assert len(consume(orders, "--count", "2", "--follow")[0]) == 2


def test_who_looks_selects(orders):
    orders.send("orders", b"other", tags="open")
    assert consume(orders, "--selector", "open || lost")[0] == ["orders/broker-a/0@5  open  other"]
    assert consume(orders, "--selector", "lost") == ([], "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_who_follows_sees_what_comes_until_a_signal(orders, number):
    with Running(orders, "--from", "last") as running:
        running.hears("Ctrl-C ends")
        orders.send("orders", b"new")
        assert running.read(1) == ["orders/broker-a/0@5  -  new"]
        running.send_signal(number)
        assert running.end() == 0
    assert groups_asked(orders) == set()


def test_a_background_job_of_a_shell_ignores_ctrl_c(orders):
    with Running(orders, "--from", "last", through=("sh", "-c", "trap '' INT; exec \"$@\"", "sh")) as running:
        running.hears("Ctrl-C ends")
        running.send_signal(signal.SIGINT)
        orders.send("orders", b"new")
        assert running.read(1) == ["orders/broker-a/0@5  -  new"]
        running.send_signal(signal.SIGTERM)
        assert running.end() == 0


def test_who_follows_ends_when_its_reader_leaves(orders):
    with Running(orders, "--follow") as running:
        assert running.read(5)[4].endswith("m4")
        running.leave()
        assert running.end() == 0


def test_who_follows_tries_a_broker_that_is_away_again_and_says_so_once(orders):
    orders.broker("broker-a").on(RequestCode.PULL_MESSAGE, answer(1, "not well"), times=2)
    with Running(orders, "--from", "last") as running:
        running.hears("not well; trying again")
        orders.send("orders", b"new")
        assert running.read(1) == ["orders/broker-a/0@5  -  new"]


def test_messages_that_are_deleted_meanwhile_are_told(orders):
    broker = orders.broker("broker-a")
    broker.on(RequestCode.GET_MIN_OFFSET, answer(0, fields={"offset": "0"}))  # what it was a moment ago
    broker.delete_before("orders", 0, 3)
    printed, beside = consume(orders)
    assert [line.rpartition(" ")[2] for line in printed] == ["m3", "m4"]
    assert beside == "orders/broker-a/0 has nothing at 0; going on at 3\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--offset", "1"], "--offset N is for one queue"),
        (["--offset", "1", "--queue", "broker-a/0", "--queue", "broker-a/1"], "--offset N is for one queue"),
        (["--offset", "1", "--queue", "broker-a/0", "--from", "first"], "without --from"),
        (["--queue", "broker-a/0", "--group", "g"], "without --group"),
        (["--queue", "0"], "'0' is not like broker-a/3"),
        (["--selector", "a", "--sql", "b = 1"], "not both"),
        (["--offset", "-1"], "not a whole number"),
    ],
)
def test_wrong_usage(capsys, arguments, reason):
    with pytest.raises(SystemExit) as ended:
        main(["consume", "orders", "-n", "127.0.0.1:1", *arguments])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--queue", "broker-a/7"], "there is no queue orders/broker-a/7; there are orders/broker-a/0"),
        (["--queue", "broker-a/0", "--offset", "9"], "offset 9 is not in orders/broker-a/0, which holds 0 to 5"),
        (["--selector", "paid | open"], "tags are joined by '||': 'paid || open'"),
        (["--selector", "paid | open", "--group", "g"], "tags are joined by '||': 'paid || open'"),
        (["--sql", " "], "the SQL92 expression is empty"),
    ],
)
def test_what_is_not_there_is_told(orders, capsys, arguments, reason):
    assert main(["consume", "orders", "-n", orders.name_server, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_who_may_not_look_is_told_what_it_takes(orders, capsys):
    orders.broker("broker-a").on(RequestCode.PULL_MESSAGE, answer(16, "no permission"), times=None)
    assert main(["consume", "orders", "-n", orders.name_server]) == 1
    assert "the right to subscribe with group TOOLS_CONSUMER" in capsys.readouterr().err


@pytest.mark.parametrize("as_member", [[], [*MEMBER, "--count", "10"]], ids=["looking", "member"])
def test_bodies_that_cannot_be_read_are_told_in_their_place_and_end_nothing(orders, as_member):
    """One that holds more than is unpacked, an inner batch of a hundred thousand messages, and a damaged one."""
    send(orders, "orders", zlib.compress(bytes(65 << 20)), sys_flag=ZLIB)
    send(orders, "orders", struct.pack(">IIIiIH", 22, 0, 0, 0, 0, 0) * 100_000, sys_flag=0xC0)
    send(orders, "orders", b"no zlib", sys_flag=ZLIB)
    send(orders, "orders", b"last", b"and done")
    lines, _ = consume(orders, *as_member)
    assert len(lines) == 10
    assert "holds more than 67108864>" in lines[5]
    assert "more than 32767 messages>" in lines[6]
    assert "<the body cannot be read: zlib body of 7 bytes" in lines[7]
    assert [line.split("  ")[-1] for line in lines[8:]] == ["last", "and done"]
    lines, _ = consume(orders, "--offset", "7", "--queue", "broker-a/0", "-o", "json")
    shown = json.loads(lines[0])
    assert shown["body"] is None
    assert "zlib body of 7 bytes" in shown["body_error"]
