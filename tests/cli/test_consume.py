"""`pyrocket consume`: its output, and its effects on the cluster."""

from __future__ import annotations

import json
import signal
import struct
import time
import zlib
from collections import Counter
from datetime import UTC, datetime

import pytest

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer
from tests.cli.shell import Running
from tests.compression import ZLIB, send
from tests.consuming import consuming, until
from tests.for_each import for_each

CLUSTER = {"delay_scale": 0.01}
MEMBER = ["--group", "g", "--from", "first"]
MANY = 2000


@pytest.fixture
def orders(cluster):
    cluster.send("orders", lambda number: b"m%d" % number, count=5, tags="paid")
    return cluster


@pytest.fixture
def many(cluster):
    """A topic with many more messages than are printed."""
    cluster.create_topic("orders", queues=4)
    cluster.send("orders", lambda number: b"m%d" % number, count=MANY)
    return cluster


@pytest.fixture
def consume(cluster, pyrocket):
    """Run it with these arguments; return the lines of its output, and its standard error."""

    def run(*arguments):
        code, printed, stderr = pyrocket("consume", "orders", "-n", cluster.name_server, *arguments)
        assert code == 0, stderr
        return printed.splitlines(), stderr

    return run


def running(cluster, *arguments, **options):
    return Running("consume", "orders", "-n", cluster.name_server, *arguments, **options)


def assert_only_committed(cluster, count):
    """Check that only `count` messages were acknowledged, none was sent back, and no member is left."""
    assert sum(cluster.committed("g", "orders").values()) == count
    assert_nothing_was_sent_back(cluster)


# --- as a member of a group


def test_a_member_ends_after_count_messages(orders, consume):
    printed, stderr = consume(*MEMBER, "--count", "2")
    assert printed == ["orders/broker-a/0@0  paid  m0", "orders/broker-a/0@1  paid  m1"]
    assert stderr == "consuming orders as a member of g; Ctrl-C ends\n2 messages printed\n"
    assert_only_committed(orders, 2)
    printed, _ = consume(*MEMBER, "--count", "3", "-o", "json")
    assert [json.loads(line)["body"] for line in printed] == ["m2", "m3", "m4"]
    assert_only_committed(orders, 5)


@pytest.mark.parametrize("arguments", [[], MEMBER], ids=["looking", "member"])
def test_the_sharding_key_is_shown(orders, pyrocket, consume, arguments):
    sent = pyrocket("produce", "-n", orders.name_server, "orders", "step", "--tag", "t", "--sharding-key", "o-17")
    assert sent[0] == 0
    printed, _ = consume(*arguments, "--count", "6", "-o", "json")
    assert [json.loads(line)["sharding_key"] for line in printed] == [None] * 5 + ["o-17"]
    printed, _ = consume("--selector", "t")
    assert printed == ["orders/broker-a/0@5  t [o-17]  step"]


def test_a_member_changes_only_offsets_of_what_it_printed(many, consume):
    printed, _ = consume(*MEMBER, "--count", "3")
    assert len(printed) == 3
    assert_only_committed(many, 3)
    by_queue = Counter(line.partition("@")[0] for line in printed)
    committed = many.committed("g", "orders")
    assert by_queue == Counter({f"orders/broker-a/{number}": end for number, end in committed.items() if end})
    again, _ = consume(*MEMBER, "--count", str(MANY - 3))
    assert len({*printed, *again}) == MANY, "nothing twice, nothing missing"
    assert_only_committed(many, MANY)


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_signal_ends_a_member(many, number):
    with running(many, *MEMBER) as command:
        printed = command.read(MANY)
        command.send_signal(number)
        assert command.end() == 0
    assert len(set(printed)) == MANY
    assert_only_committed(many, MANY)


@pytest.mark.live
def test_a_member_whose_output_is_stuck_ends_at_a_signal(many):
    many.send("orders", lambda number: b"x" * 4000, count=100)  # more than a pipe holds
    with running(many, *MEMBER) as command:
        command.wait_for_error_line("Ctrl-C ends")
        until(lambda: len(many.broker("broker-a").requests(RequestCode.PULL_MESSAGE)) >= 4, "pulled")
        command.send_signal(signal.SIGTERM)
        assert command.end() == 0
    assert many.messages("%RETRY%g") == []


def assert_nothing_was_sent_back(cluster):
    assert cluster.broker("broker-a").requests(RequestCode.CONSUMER_SEND_MSG_BACK) == []
    assert cluster.messages("%RETRY%g") == []
    assert cluster.members("g") == [], "it has left"


@pytest.mark.live
def test_a_member_whose_reader_leaves_ends(many):
    with running(many, *MEMBER) as command:
        command.read(2)
        command.leave()
        assert command.end() == 0
    assert_nothing_was_sent_back(many)


@pytest.mark.live
def test_a_member_that_waits_notices_that_its_reader_has_left(orders):
    with running(orders, *MEMBER) as command:
        command.read(5)
        command.leave()
        assert command.end() == 0
    assert_only_committed(orders, 5)


@pytest.mark.live
def test_a_new_group_starts_with_new_messages(orders):
    with running(orders, "--group", "g", "--count", "1") as command:
        command.wait_for_error_line("Ctrl-C ends")
        orders.send("orders", b"new")
        assert command.read(1) == ["orders/broker-a/0@5  -  new"]
        assert command.end() == 0
    assert orders.committed("g", "orders") == {0: 6}


def test_a_broadcasting_group_is_not_joined(orders, pyrocket, tmp_path):
    with consuming(orders, "orders", "g", message_model="broadcasting", offset_store_dir=tmp_path) as (_, seen):
        seen.wait_for(5)
        code, _, stderr = pyrocket("consume", "orders", "-n", orders.name_server, *MEMBER)
    assert (code, "g is a broadcasting group" in stderr) == (2, True), stderr
    assert orders.committed("g", "orders") == {}


def test_an_offline_group_with_a_recorded_reset_is_not_joined(orders, pyrocket, tmp_path):
    """`offsets show` calls such a group broadcasting, too, until it has committed something."""

    def run(*arguments):
        return pyrocket(*arguments, "-n", orders.name_server)

    options = {"message_model": "broadcasting", "offset_store_dir": tmp_path, "consume_from": "first"}
    with consuming(orders, "orders", "g", **options) as (_, seen):
        seen.wait_for(5)
        assert run("offsets", "reset", "g", "orders", "--to", "earliest", "--execute")[0] == 0
        seen.wait(lambda seen: len(seen.messages) == 10)
    until(lambda: orders.members("g") == [], "it has left")
    assert "(broadcasting, 0 online" in run("offsets", "show", "g", "orders")[1]
    code, printed, stderr = run("consume", "orders", *MEMBER, "--count", "2")
    assert (code, printed, "g is a broadcasting group" in stderr) == (2, "", True), stderr
    assert orders.committed("g", "orders") == {}
    remedy = stderr.partition("first remove its recorded resets: pyrocket ")[2].split()
    assert run(*remedy)[0] == 0
    code, printed, stderr = run("consume", "orders", *MEMBER, "--count", "2")
    assert (code, len(printed.splitlines())) == (0, 2), stderr


@pytest.mark.parametrize("code", [RequestCode.GET_BROKER_CLUSTER_INFO, RequestCode.GET_CONSUME_STATS], ids=str)
def test_an_account_that_may_only_consume_can_join(orders, consume, code):
    for node in (*orders.nodes, *orders.name_server_nodes):
        node.on(code, answer(16, "no permission"), times=None)
    printed, _ = consume(*MEMBER, "--count", "2")
    assert len(printed) == 2
    printed, _ = consume(*MEMBER, "--count", "3")
    assert len(printed) == 3


# --- without a group


def groups_in_requests(cluster):
    """Return the groups in heartbeats and commits."""
    broker = cluster.broker("broker-a")
    commits = {each.command.fields["consumerGroup"] for each in broker.requests(RequestCode.UPDATE_CONSUMER_OFFSET)}
    return commits | {f"heartbeat {number}" for number, _ in enumerate(broker.requests(RequestCode.HEART_BEAT))}


def test_without_a_group_all_messages_are_printed_and_nothing_changes(many, consume):
    printed, stderr = consume()
    assert [line.rpartition(" ")[2] for line in printed] == [f"m{number}" for number in range(MANY)]
    assert stderr == ""
    assert groups_in_requests(many) == set()


def test_without_a_group_it_may_start_at_an_offset_of_one_queue(many, consume):
    printed, _ = consume("--queue", "broker-a/1", "--offset", "497")
    assert [line.partition("  ")[0] for line in printed] == [f"orders/broker-a/1@{n}" for n in (497, 498, 499)]
    assert consume("--queue", "broker-a/1", "--offset", "500") == ([], "")


def test_without_a_group_it_may_start_at_a_time(orders, consume):
    later = datetime.fromtimestamp(orders.messages("orders")[-1].stored_at_ms / 1000 + 0.001, UTC)
    time.sleep(0.01)
    orders.send("orders", b"later", tags="paid")
    printed, _ = consume("--from", later.isoformat())
    assert printed == ["orders/broker-a/0@5  paid  later"]
    assert len(consume("--from", "earliest")[0]) == 6


def test_without_a_group_it_ends_after_count_messages(orders, consume):
    assert len(consume("--count", "2", "--follow")[0]) == 2


def test_without_a_group_selectors_apply(orders, consume):
    orders.send("orders", b"other", tags="open")
    assert consume("--selector", "open || lost")[0] == ["orders/broker-a/0@5  open  other"]
    assert consume("--selector", "lost") == ([], "")


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_follow_prints_new_messages_until_a_signal(orders, number):
    with running(orders, "--from", "last") as command:
        command.wait_for_error_line("Ctrl-C ends")
        orders.send("orders", b"new")
        assert command.read(1) == ["orders/broker-a/0@5  -  new"]
        command.send_signal(number)
        assert command.end() == 0
    assert groups_in_requests(orders) == set()


@pytest.mark.live
def test_a_background_job_of_a_shell_ignores_ctrl_c(orders):
    with running(orders, "--from", "last", through=("sh", "-c", "trap '' INT; exec \"$@\"", "sh")) as command:
        command.wait_for_error_line("Ctrl-C ends")
        command.send_signal(signal.SIGINT)
        orders.send("orders", b"new")
        assert command.read(1) == ["orders/broker-a/0@5  -  new"]
        command.send_signal(signal.SIGTERM)
        assert command.end() == 0


@pytest.mark.live
def test_follow_ends_when_its_reader_leaves(orders):
    with running(orders, "--follow") as command:
        assert command.read(5)[4].endswith("m4")
        command.leave()
        assert command.end() == 0


@pytest.mark.slow("waits for a broker in trouble")
@pytest.mark.live
def test_follow_retries_a_failing_broker(orders):
    orders.broker("broker-a").on(RequestCode.PULL_MESSAGE, answer(1, "not well"), times=2)
    with running(orders, "--from", "last") as command:
        command.wait_for_error_line("not well; trying again")
        orders.send("orders", b"new")
        assert command.read(1) == ["orders/broker-a/0@5  -  new"]


def test_messages_deleted_meanwhile_are_reported(orders, consume):
    broker = orders.broker("broker-a")
    broker.on(RequestCode.GET_MIN_OFFSET, answer(0, fields={"offset": "0"}))  # the offset before the deletion
    broker.delete_before("orders", 0, 3)
    printed, stderr = consume()
    assert [line.rpartition(" ")[2] for line in printed] == ["m3", "m4"]
    assert stderr == "orders/broker-a/0 has nothing at 0; continuing at 3\n"


@for_each(
    "arguments, reason",
    [
        (["--queue", "broker-a/7"], "there is no queue orders/broker-a/7; choose one of orders/broker-a/0"),
        (["--queue", "broker-a/0", "--offset", "9"], "offset 9 is not in orders/broker-a/0, which holds 0 to 5"),
        (["--selector", "paid | open"], "tags are joined by '||': 'paid || open'"),
        (["--selector", "paid | open", "--group", "g"], "tags are joined by '||': 'paid || open'"),
        (["--sql", " "], "the SQL92 expression is empty"),
    ],
)
def test_missing_topics_and_queues_are_named(orders, pyrocket, arguments, reason):
    code, _, stderr = pyrocket("consume", "orders", "-n", orders.name_server, *arguments)
    assert (code, reason in stderr) == (2, True), stderr


def test_a_denied_read_names_the_required_right(orders, pyrocket):
    orders.broker("broker-a").on(RequestCode.PULL_MESSAGE, answer(16, "no permission"), times=None)
    code, _, stderr = pyrocket("consume", "orders", "-n", orders.name_server)
    assert (code, "the right to subscribe with group TOOLS_CONSUMER" in stderr) == (1, True), stderr


@pytest.mark.parametrize("as_member", [[], [*MEMBER, "--count", "10"]], ids=["looking", "member"])
def test_damaged_bodies_are_reported_in_their_place(orders, consume, as_member):
    """One body unpacks to too many bytes, one is an inner batch of a hundred thousand messages, and one is damaged."""
    send(orders, "orders", zlib.compress(bytes(65 << 20)), sys_flag=ZLIB)
    send(orders, "orders", struct.pack(">IIIiIH", 22, 0, 0, 0, 0, 0) * 100_000, sys_flag=0xC0)
    send(orders, "orders", b"no zlib", sys_flag=ZLIB)
    send(orders, "orders", b"last", b"and done")
    lines, _ = consume(*as_member)
    assert len(lines) == 10
    assert "holds more than 67108864>" in lines[5]
    assert "more than 32767 messages>" in lines[6]
    assert "<the body cannot be read: zlib body of 7 bytes" in lines[7]
    assert [line.split("  ")[-1] for line in lines[8:]] == ["last", "and done"]
    lines, _ = consume("--offset", "7", "--queue", "broker-a/0", "-o", "json")
    shown = json.loads(lines[0])
    assert (shown["body"], "zlib body of 7 bytes" in shown["body_error"]) == (None, True)
