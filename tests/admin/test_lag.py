"""The lag of a group counts all messages left to consume, and reports unknown positions."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from pyrocket_consumer.admin import Admin
from pyrocket_consumer.cli import main
from pyrocket_consumer.errors import BrokerError, ConnectError
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import EmbeddedCluster, answer, close_connection, delay, drop, rewrite
from tests.admin.conftest import admin_of, administered
from tests.admin.foreign import ForeignMember
from tests.consuming import consuming, until
from tests.for_each import for_each
from tests.producer.programs import within
from tests.resets import fill, queue, reset, wait_until_seen

VERSIONS = ["4.9.7", "5.5.0"]


@pytest.fixture(params=VERSIONS)
def embedded(request):
    with EmbeddedCluster(version=request.param) as cluster:
        fill(cluster, "T", 10, queues=2)
        yield cluster


@pytest.fixture
def committed(embedded):
    """The group G with these committed offsets."""

    def commit(*offsets):
        embedded.broker("broker-a").create_group("G")
        embedded.broker("broker-a").commit("G", "T", dict(enumerate(offsets)))

    return commit


@pytest.fixture
def exit_code(embedded, capsys):
    """Return the exit code of `offsets lag G --max …`, and its standard error."""

    def run(most: int) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["offsets", "lag", "G", "--max", str(most), "-n", embedded.name_server])
        return code, capsys.readouterr().err

    return run


def by_topic(found) -> dict[str, int]:
    return {topic: sum(row.lag for row in found.rows if row.queue.topic == topic) for topic in topics(found)}


def topics(found) -> set[str]:
    return {row.queue.topic for row in found.rows}


def test_a_report_on_queues_of_another_broker_is_ignored():
    """A broker that reports offsets of queues of another broker could hide lag there."""
    with administered(brokers=2) as (cluster, admin):
        fill(cluster, "T", 4, queues=1)
        for name in ("broker-a", "broker-b"):
            cluster.broker(name).create_group("G")
            cluster.broker(name).commit("G", "T", {0: 1})
        honest, ranges = admin.lag("G"), admin.topic_offsets("T")
        for name, other in (("broker-a", "broker-b"), ("broker-b", "broker-a")):
            queue = f'{{"brokerName":"{other}","queueId":0,"topic":"T"}}'

            def and_of_the_other(given, body, queue=queue):
                more = body.format('{"offsetTable":{' + queue) + given.body.partition(b'"offsetTable":{')[2].decode()
                return replace(given, body=more.encode())

            for code, text in (
                (RequestCode.GET_CONSUME_STATS, '{}:{{"brokerOffset":2,"consumerOffset":2,"lastTimestamp":5}},'),
                (RequestCode.GET_TOPIC_STATS_INFO, '{}:{{"minOffset":2,"maxOffset":2,"lastUpdateTimestamp":5}},'),
            ):
                cluster.broker(name).on(code, rewrite(partial(and_of_the_other, body=text)), times=None)
        assert admin.lag("G").rows == honest.rows
        assert admin.topic_offsets("T") == ranges


def test_messages_that_wait_for_a_retry_count(embedded, admin, committed, exit_code):
    committed(5, 5)
    assert exit_code(0) == (0, "")
    embedded.create_topic("%RETRY%G", queues=1)
    assert (topics(admin.lag("G")), exit_code(0)) == ({"T"}, (0, "")), "an empty one says nothing"
    embedded.send("%RETRY%G", count=3)
    assert by_topic(admin.lag("G")) == {"T": 0, "%RETRY%G": 3}
    assert (exit_code(2)[0], exit_code(3)[0]) == (3, 0)
    embedded.broker("broker-a").commit("G", "%RETRY%G", {0: 2})
    assert by_topic(admin.lag("G")) == {"T": 0, "%RETRY%G": 1}


def test_a_broker_without_commits_counts():
    with administered(brokers=2) as (cluster, admin):
        fill(cluster, "T", 10, queues=1)
        cluster.broker("broker-a").create_group("G")
        cluster.broker("broker-b").create_group("G")
        cluster.broker("broker-a").commit("G", "T", {0: 5})
        rows = {row.queue: (row.committed, row.lag) for row in admin.lag("G").rows}
        assert rows == {queue("T", 0): (5, 0), queue("T", 0, "broker-b"): (None, 5)}


def test_a_topic_of_members_counts_before_they_commit(embedded, admin):
    with ForeignMember(embedded, "G", "T", {}, model="CLUSTERING"):
        assert by_topic(admin.lag("G")) == {"T": 10}


def test_a_group_that_has_consumed_everything_is_not_behind(embedded, exit_code):
    with consuming(embedded, "T", "G") as (_, seen):
        wait_until_seen(seen, 1, 10)
    until(lambda: embedded.members("G") == [], "it has left")
    assert exit_code(0) == (0, "")


def test_broadcasting_members_that_are_all_offline_are_not_known(embedded, admin, exit_code, tmp_path):
    with consuming(embedded, "T", "G", message_model="broadcasting", offset_store_dir=tmp_path) as (_, seen):
        wait_until_seen(seen, 1, 10)
    until(lambda: embedded.members("G") == [], "it has left")
    found = admin.lag("G")
    assert (found.is_complete, found.rows) == (False, ())
    code, text = exit_code(1_000_000)
    assert (code, "not known: no member of G is online, and it has committed nothing" in text) == (3, True)


def test_the_last_reset_of_offline_broadcasting_members_is_known(embedded, admin, exit_code, tmp_path):
    with consuming(embedded, "T", "G", message_model="broadcasting", offset_store_dir=tmp_path) as (_, seen):
        wait_until_seen(seen, 1, 10)
        assert reset(admin, "G", "T", {queue("T", 0): 3}).verified
        seen.wait(lambda seen: len(seen.messages) == 12)
        assert admin.lag("G").is_complete
    until(lambda: embedded.members("G") == [], "it has left")
    found = admin.lag("G")
    (row,) = found.rows
    assert (row.queue, row.member, row.committed, row.lag) == (queue("T", 0), "(offline)", 3, 2)
    code, text = exit_code(1_000_000)
    assert (code, "no reset of T/broker-a/1 is recorded" in text) == (3, True)
    assert reset(admin, "G", "T", "latest").verified
    assert (exit_code(0), admin.lag("G").total) == ((0, ""), 0)
    fill(embedded, "T", 2, start=10)
    assert exit_code(0)[0] == 3


def test_a_commit_above_the_end_is_reported_as_unknown_lag(admin, committed, exit_code):
    committed(999, 5)
    found = admin.offsets("G", "T")
    assert [(row.committed, row.max, row.is_above_end) for row in found.rows] == [(999, 5, True), (5, 5, False)]
    assert not found.is_complete
    code, text = exit_code(1_000_000)
    assert (code, "T/broker-a/0 is committed at 999, above its end 5" in text) == (3, True)
    assert reset(admin, "G", "T", "latest").verified
    assert exit_code(0) == (0, "")


def test_json_has_no_number_for_an_unknown_lag(embedded, capsys):
    embedded.broker("broker-a").create_group("G")
    assert main(["offsets", "lag", "G", "-o", "json", "-n", embedded.name_server]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["lag"], "no member of G is online" in shown["not_known"]) == (None, True)


# --- brokers that are down


@pytest.fixture
def pair():
    """Two brokers with five messages in each queue of T. G has consumed those on broker-a."""
    with EmbeddedCluster(brokers=2) as cluster:
        fill(cluster, "T", 10, queues=1)
        for name, committed in (("broker-a", 5), ("broker-b", 2)):
            cluster.broker(name).create_group("G")
            cluster.broker(name).commit("G", "T", {0: committed})
        yield cluster


@pytest.fixture
def pair_admin(pair):
    with admin_of(pair) as admin:
        yield admin


by_both_requests = pytest.mark.parametrize(
    "ask", [Admin.lag, lambda admin, group: admin.offsets(group, "T")], ids=["lag", "offsets"]
)


@pytest.mark.parametrize("keep_route", [True, False], ids=["registered", "forgotten"])
@by_both_requests
def test_the_queues_of_a_stopped_broker_are_reported(pair, pair_admin, ask, keep_route):
    assert (ask(pair_admin, "G").total, ask(pair_admin, "G").is_complete) == (3, True)
    pair.broker("broker-b").stop(keep_route=keep_route)
    for found in (ask(pair_admin, "G"), ask(pair_admin, "G")):
        assert [(row.queue, row.lag) for row in found.rows] == [(queue("T", 0), 0)]
        assert (list(found.missing), found.is_complete) == (["broker-b"], False)
        assert ("no longer knows it" in found.missing["broker-b"]) is not keep_route
        assert found.missing["broker-b"].endswith("; queues not shown: 1 of T")
    pair.broker("broker-b").start()
    assert (ask(pair_admin, "G").total, ask(pair_admin, "G").is_complete) == (3, True)


def test_an_expected_broker_that_is_missing_is_reported(pair, pair_admin):
    pair.broker("broker-b").stop()
    assert pair_admin.lag("G", brokers=["broker-a"]).is_complete
    found = pair_admin.lag("G", brokers=["broker-a", "broker-b"])
    assert found.missing == {
        "broker-b": "no broker of that name is known; check the name, and that it runs (known: broker-a)"
    }


def test_a_broker_without_a_master_is_reported_without_an_address(pair, pair_admin):
    pair.broker("broker-b").stop(keep_route=True)
    body = {"brokerAddrTable": {}, "clusterAddrTable": {}}
    for name, node in (("broker-a", pair.broker("broker-a")), ("broker-b", None)):
        addresses = {} if node is None else {"0": node.address}
        body["brokerAddrTable"][name] = {"brokerName": name, "cluster": "c", "brokerAddrs": addresses}
    pair.name_server_node.on(RequestCode.GET_BROKER_CLUSTER_INFO, answer(0, body=json.dumps(body).encode()), times=None)
    reason = pair_admin.lag("G").missing["broker-b"]
    assert reason.startswith("the name server knows no master of it now; check that it runs")
    with pytest.raises(ConnectError, match="^broker broker-b: the name server knows no master of it now; check that"):
        pair_admin.create_group("G2")


def test_without_a_response_of_any_broker_lag_is_an_error(pair, pair_admin):
    for name in ("broker-a", "broker-b"):
        pair.broker(name).stop(keep_route=True)
    with pytest.raises(ConnectError):
        pair_admin.lag("G")


WAYS = {"connection": close_connection, "silence": drop, "refusal": answer(ResponseCode.SYSTEM_ERROR, "no")}


@pytest.mark.parametrize("way", WAYS)
@by_both_requests
@pytest.mark.parametrize(
    "code",
    [
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_MAX_OFFSET,
    ],
    ids=lambda code: code.name,
)
def test_a_broker_that_responds_in_part_is_missing(pair, code, ask, way):
    pair.broker("broker-b").commit("G", "T", {0: 0})  # then the committed offset is uncertain, and is fetched
    pair.broker("broker-b").on(code, WAYS[way], times=None)
    with Admin(name_server=pair.name_server, call_timeout_s=0.5) as admin:
        found = ask(admin, "G")
        assert [(row.queue, row.lag) for row in found.rows] == [(queue("T", 0), 0)]
        assert (list(found.missing), found.is_complete) == (["broker-b"], False)
        pair.broker("broker-b").clear_faults()
        found = ask(admin, "G")
        assert (found.total, found.is_complete) == (5, True)


@for_each("at_ms", [2**63 - 1, 253_402_300_800_000, -1])
def test_a_time_beyond_datetime_is_unknown(embedded, admin, committed, exit_code, at_ms):
    broker = embedded.broker("broker-a")
    committed(3, 3)

    def far(answer):
        body = re.sub(rb'"(last\w*Timestamp)":-?\d+', rb'"\1":%d' % at_ms, answer.body)
        assert body != answer.body
        return replace(answer, body=body)

    broker.clear_faults()
    for code in (RequestCode.GET_CONSUME_STATS, RequestCode.GET_TOPIC_STATS_INFO):
        broker.on(code, rewrite(far), times=None)
    assert [(row.lag, row.consumed_at) for row in admin.lag("G").rows] == [(2, None), (2, None)]
    assert [(each.max, each.stored_at) for each in admin.topic_offsets("T").values()] == [(5, None), (5, None)]
    assert exit_code(10) == (0, "")


@pytest.mark.parametrize("code", [RequestCode.GET_CONSUME_STATS, RequestCode.GET_MAX_OFFSET])
def test_lag_is_an_error_if_all_brokers_fail_later(pair, pair_admin, code):
    for broker in pair.brokers:
        broker.on(code, answer(ResponseCode.SYSTEM_ERROR, "out of order"), times=None)
    with pytest.raises(BrokerError, match="out of order"):
        pair_admin.lag("G")


def test_broadcasting_members_have_no_queues_without_a_range(pair, pair_admin, tmp_path):
    with consuming(pair, "T", "B", message_model="broadcasting", offset_store_dir=tmp_path) as (_, seen):
        wait_until_seen(seen, 1, 10)
        until(lambda: len(pair_admin.lag("B").rows) == 2, "both groups are listed")
        pair.broker("broker-b").on(RequestCode.GET_MIN_OFFSET, close_connection, times=None)
        found = pair_admin.lag("B")
        assert [row.queue for row in found.rows] == [queue("T", 0)]
        assert (list(found.missing), found.unreached) == (["broker-b"], {})
        pair.broker("broker-b").clear_faults()
        pair.broker("broker-b").stop(keep_route=True)
        found = pair_admin.lag("B")
        assert [row.queue for row in found.rows] == [queue("T", 0)]
        assert (list(found.missing), found.is_complete) == (["broker-b"], False)
        pair.broker("broker-b").start()
    until(lambda: pair.members("B") == pair.members("B", "broker-b") == [], "it has left")
    pair.broker("broker-b").clear_faults()
    pair_admin.plan_reset("B", "T", "earliest", model="broadcasting").execute()
    assert [row.queue for row in pair_admin.lag("B").rows] == [queue("T", 0), queue("T", 0, "broker-b")]
    for code in (RequestCode.GET_MIN_OFFSET, RequestCode.QUERY_CONSUMER_OFFSET):
        pair.broker("broker-b").on(code, close_connection, times=None)
        found = pair_admin.lag("B")
        assert [row.queue for row in found.rows] == [queue("T", 0)]
        assert list(found.missing) == ["broker-b"]


@pytest.mark.parametrize("what", [["lag", "G"], ["show", "G", "T"]], ids=" ".join)
def test_the_shell_reports_missing_brokers_and_exits_with_3(pair, capsys, what):
    command = ["offsets", *what, "-n", pair.name_server]
    assert main([*command, "--broker", "broker-a", "--broker", "broker-b"]) == 0
    pair.broker("broker-b").stop(keep_route=True)
    capsys.readouterr()
    assert main(command) == 3
    assert "broker-b is missing: cannot connect to " in capsys.readouterr().err
    assert main([*command, "-o", "json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert (shown["lag"], list(shown["missing"])) == (None, ["broker-b"])
    pair.broker("broker-b").start()
    pair.broker("broker-b").stop()
    assert main([*command, "--broker", "broker-b"]) == 3
    assert "broker-b is missing: " in capsys.readouterr().err


@pytest.mark.virtual
def test_a_thousand_queues_of_slow_brokers_are_read_concurrently():
    with administered() as (cluster, admin):
        cluster.create_topic("T", queues=1000)
        cluster.send("T", b"one")
        cluster.broker("broker-a").create_group("G")
        cluster.broker("broker-a").commit("G", "T", dict.fromkeys(range(10), 0))
        cluster.broker("broker-a").on(None, delay(0.1), times=None)
        with within(5):  # one after the other takes 100 s, sixteen at a time 6 s
            found = admin.lag("G")
        assert (found.total, found.is_complete) == (1, True)
