"""`pyrocket offsets`: its output, its plans, its effects, and its exit codes."""

from __future__ import annotations

import json
import shlex
import signal
import sys

import pytest

from pyrocket_consumer.cli import main
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.reset_format import record_areas
from pyrocket_consumer.testing import EmbeddedCluster, answer, drop
from tests.admin.foreign import ForeignMember
from tests.cli.shell import Running
from tests.consuming import Events, consuming, until
from tests.for_each import for_each
from tests.producer.programs import within
from tests.resets import fill, record, wait_until_seen, wait_until_stored

CLUSTER = {"relay_timeout_s": 0.3, "status_timeout_s": 0.3}
TOPIC, QUEUES = "T", 2


@pytest.fixture
def embedded(cluster):
    fill(cluster, "T", 20)
    return cluster


@pytest.fixture
def stores(tmp_path):
    return {"message_model": "broadcasting", "offset_store_dir": tmp_path}


@pytest.fixture
def consumed_before(embedded):
    """The group G has consumed all messages, and its member has left."""
    with consuming(embedded, "T", "G") as (_, seen):
        wait_until_seen(seen, 1, 20)
    until(lambda: embedded.members("G") == [], "it has left")


@pytest.fixture
def offsets(embedded, pyrocket):
    """Run `pyrocket offsets …`; return the exit code, its output, and its standard error."""
    return lambda *arguments: pyrocket("offsets", *arguments, "-n", embedded.name_server)


def test_show_a_clustering_group(embedded, offsets):
    with consuming(embedded, "T", "G") as (_, seen):
        wait_until_seen(seen, 1, 20)
        until(lambda: embedded.committed("G", "T") == {0: 10, 1: 10}, "committed")
        code, text, _ = offsets("show", "G", "T")
        assert (code, text.count("broker-a/")) == (0, 2)
        assert "Group G in topic T (clustering, 1 online)" in text
        code, text, _ = offsets("show", "G", "T", "-o", "json")
        shown = json.loads(text)
        assert (code, shown["lag"], shown["model"]) == (0, 0, "clustering")
        assert [(each["queue"], each["committed"]) for each in shown["queues"]] == [(0, 10), (1, 10)]


def test_lag_of_a_group_and_its_threshold(embedded, consumed_before, offsets):
    fill(embedded, "T", 6, start=20)
    code, text, _ = offsets("lag", "G")
    assert (code, [line.split() for line in text.splitlines() if line.split()[:1] == ["T"]]) == (0, [["T", "2", "6"]])
    assert (offsets("lag", "G", "--max", "6")[0], offsets("lag", "G", "--max", "6")[2]) == (0, "")
    code, text, stderr = offsets("lag", "G", "--max", "5")
    assert (code, stderr) == (3, "T: lag 6 is above --max 5\n")
    assert "--max" not in text
    code, text, stderr = offsets("lag", "G", "--max", "5", "-o", "json")
    assert (code, json.loads(text)["lag"], stderr) == (3, 6, "T: lag 6 is above --max 5\n")


@for_each("command", [["show", "G", "T"], ["lag", "G"]], ids=" ".join)
def test_a_broker_of_an_unknown_name_is_missing(consumed_before, offsets, command):
    code, _, stderr = offsets(*command, "--broker", "broker-a", "--broker", "broker-z")
    known = "no broker of that name is known; check the name, and that it runs (known: broker-a)"
    assert (code, stderr) == (3, f"  broker-z is missing: {known}\n")


def test_a_broadcasting_member_that_reports_no_offsets_is_named(embedded, offsets, stores):
    with (
        consuming(embedded, "T", "G", **stores) as (consumer, seen),
        ForeignMember(embedded, "G", "T", {}, silent=True) as silent,
    ):
        wait_until_seen(seen, 1, 20)
        code, text, stderr = offsets("lag", "G")
        assert (code, consumer.client_id in text) == (0, True)
        assert f"{silent.client_id} did not report its offsets" in stderr
        code, _, stderr = offsets("lag", "G", "--max", "1000", "-o", "json")
        assert code == 3, "what is not known may be above"
        assert stderr == "a part of the lag is unknown, and counts as above --max 1000\n"
        consumer.pause()
        fill(embedded, "T", 6, start=20)
        _, _, stderr = offsets("lag", "G", "--max", "1")
        assert f"T: lag 6 of {consumer.client_id} is above --max 1\n" in stderr


def test_a_plan_changes_nothing_and_execute_does_it(embedded, offsets, stores):
    with consuming(embedded, "T", "G", **stores) as (consumer, seen):
        wait_until_seen(seen, 1, 20)
        wait_until_stored(consumer, "T", 20)
        code, text, _ = offsets("reset", "G", "T", "--to", "earliest")
        assert (code, len(seen.messages)) == (0, 20)
        assert "Nothing was changed. Add --execute" in text and consumer.client_id in text
        code, text, stderr = offsets("reset", "G", "T", "--to", "earliest", "--execute")
        assert (code, ": verified" in text) == (0, True)
        assert f"member {consumer.client_id}: moved" in stderr
        wait_until_seen(seen, 2, 20)


def undoing(text: str) -> list[list[str]]:
    """Return the commands that undo a reset, without `pyrocket`."""
    stderr = text.rpartition("To undo it:\n")[2]
    return [shlex.split(line)[1:] for line in stderr.splitlines() if line.startswith("  pyrocket ")]


def test_a_clustering_reset_is_undone_by_what_is_printed(embedded, consumed_before, offsets):
    _, plan, _ = offsets("reset", "G", "T", "--to", "earliest")
    _, result, _ = offsets("reset", "G", "T", "--to", "earliest", "--execute")
    assert embedded.committed("G", "T") == {0: 0, 1: 0}
    assert undoing(plan) == undoing(result)
    (command,) = undoing(result)
    assert main(command) == 0
    assert embedded.committed("G", "T") == {0: 10, 1: 10}


def test_a_broadcasting_reset_is_undone_member_by_member(embedded, offsets, stores):
    """The members have different offsets, so one reset for all cannot undo it."""

    def member_offsets(consumer) -> list[int | None]:
        return [progress.committed for _, progress in sorted(consumer.progress().items())]

    with (
        consuming(embedded, "T", "G", instance_name="one", **stores) as (one, seen_by_one),
        consuming(embedded, "T", "G", instance_name="other", **stores) as (other, seen_by_other),
    ):
        wait_until_seen(seen_by_other, 1, 20)
        other.pause()
        fill(embedded, "T", 10, start=20)
        wait_until_seen(seen_by_one, 1, 30)
        one.pause()
        until(lambda: member_offsets(one) == [15, 15] and len(seen_by_other.messages) >= 20, "consumed")
        before = member_offsets(other)
        _, plan, _ = offsets("reset", "G", "T", "--to", "earliest")
        code, result, _ = offsets("reset", "G", "T", "--to", "earliest", "--execute")
        assert (code, member_offsets(one), member_offsets(other)) == (0, [0, 0], [0, 0])
        assert undoing(plan) == undoing(result)
        for command in undoing(result):
            assert main(command) == 0
        assert (member_offsets(one), member_offsets(other)) == ([15, 15], before)
    recorded = embedded.committed("G", "%RETRY%G")
    assert sorted(recorded.values())[:-1] == [0] * (len(recorded) - 1), "members that are away stay where they are"


def test_wait_bounds_the_whole_reset(pyrocket):
    arguments = ["reset", "G", "T", "--to", "earliest", "--execute", "--wait", "3", "--model", "broadcasting"]
    with EmbeddedCluster() as cluster:  # its brokers wait 10 s for a member
        cluster.create_topic("T", queues=2)
        with ForeignMember(cluster, "G", "T", {}, silent=True) as frozen, within(8):
            code, printed, _ = pyrocket("offsets", *arguments, "-n", cluster.name_server)
    assert (code, f"{frozen.client_id}: some of its offsets are unknown" in printed) == (3, True)


def test_exit_code_3_if_a_member_has_not_moved(embedded, offsets, stores):
    with consuming(embedded, "T", "G", **stores) as (_, seen), ForeignMember(embedded, "G", "T", {}) as java:
        wait_until_seen(seen, 1, 20)
        code, text, _ = offsets("reset", "G", "T", "--to", "earliest", "--execute")
        assert (code, "NOT verified" in text) == (3, True)
        code, text, stderr = offsets("reset", "G", "T", "--to", "earliest", "--execute", "-o", "json")
        done = json.loads(text)
        assert (code, done["result"]["verified"], stderr) == (3, False, "")
        assert {each["who"]: each["state"] for each in done["result"]["outcomes"]}[java.client_id] == "unreached"
        assert java.client_id in done["plan"]["problems"][0]


def test_exit_code_3_and_every_queue_if_a_broker_refuses_half_of_a_reset(embedded, consumed_before, offsets):
    embedded.broker("broker-a").on(
        RequestCode.UPDATE_CONSUMER_OFFSET,
        answer(1, "disk full"),
        times=None,
        when=lambda command: command.fields["queueId"] == "1",
    )
    code, text, _ = offsets("reset", "G", "T", "--to", "earliest", "--execute", "-o", "json")
    result = json.loads(text)["result"]
    assert (code, result["verified"]) == (3, False)
    assert [(each["who"], each["state"]) for each in result["outcomes"]] == [
        ("broker-a/0", "moved"),
        ("broker-a/1", "unreached"),
    ]
    assert "disk full" in result["outcomes"][1]["text"]
    assert embedded.committed("G", "T") == {0: 0, 1: 10}


def test_exact_offsets_and_single_queues(embedded, consumed_before, offsets):
    for to, committed in (
        (["--queue", "broker-a/0=4", "--queue", "broker-a/1=99"], {0: 4, 1: 10}),
        (["--to", "earliest", "--queue", "broker-a/1"], {0: 4, 1: 0}),
        (["--to", "first"], {0: 0, 1: 0}),
    ):
        assert offsets("reset", "G", "T", *to, "--execute")[0] == 0
        assert embedded.committed("G", "T") == committed
    code, text, _ = offsets("reset", "G", "T", "--to", "2100-01-01T00:00:00Z", "-o", "json")
    assert [each["target"] for each in json.loads(text)["plan"]["targets"]] == [10, 10]


def test_recorded_resets_can_be_removed(embedded, offsets, stores):
    with consuming(embedded, "T", "G", **stores) as (_, seen):
        wait_until_seen(seen, 1, 20)
        assert offsets("reset", "G", "T", "--to", "earliest", "--execute")[0] == 0
    code, text, _ = offsets("forget-reset", "G", "T")
    assert (code, text) == (0, "the recorded resets of G in T were removed\n")
    recorded = embedded.committed("G", "%RETRY%G")
    assert sorted(recorded.values())[:-1] == [0] * (len(recorded) - 1), "only the name of the place is left"
    code, text, _ = offsets("forget-reset", "G", "T")
    assert (code, text) == (0, "no reset of G in T was recorded; nothing was removed\n")


def test_forget_reset_as_json_has_whether_one_was_recorded(embedded, consumed_before, offsets):
    broker = embedded.broker("broker-a")
    for is_recorded in (False, True, False):
        if is_recorded:
            record(broker, 1000, {0: 5})
        code, text, stderr = offsets("forget-reset", "G", "T", "-o", "json")
        assert stderr == ""
        assert (code, json.loads(text)) == (0, {"group": "G", "topic": "T", "forgotten": is_recorded})
    record(broker, 1000, {0: 5})
    area = next(record_areas("T"))
    broker.commit("G", "%RETRY%G", {area.head: 0})  # a reset that stopped half-way has no head
    assert json.loads(offsets("forget-reset", "G", "T", "-o", "json")[1])["forgotten"] is True


def test_errors_are_one_sentence_and_an_exit_code(offsets):
    code, text, stderr = offsets("show", "G", "nowhere")
    assert (code, text) == (1, "")
    assert stderr.startswith("pyrocket: no route for topic 'nowhere'")
    code, _, stderr = offsets("lag", "nobody")
    assert (code, "no broker knows group 'nobody'" in stderr) == (2, True)


@for_each("command", [[], ["show"], ["lag"], ["reset"], ["forget-reset"], ["adopt"]])
def test_every_command_has_help_with_examples(pyrocket, command):
    code, printed, _ = pyrocket("offsets", *command, "--help")
    assert (code, "Examples:\n  pyrocket offsets " in printed) == (0, True), printed


def test_without_a_command_it_lists_the_commands(pyrocket):
    assert pyrocket("offsets", "-n", "127.0.0.1:1")[0] == 2
    assert pyrocket("offsets")[0] == 2


def test_the_command_an_orphaned_store_s_event_names_adopts_it(embedded, tmp_path, pyrocket):
    """Run the command exactly as the event has it."""

    def events_while_consuming(**options):
        events = Events()
        where = {"message_model": "broadcasting", "offset_store_dir": tmp_path, "on_event": events}
        with consuming(embedded, "T", "G", **where, **options) as (consumer, seen):
            until(lambda: sum(each.committed or 0 for each in consumer.progress().values()) == 20, "consumed")
        return seen, events.of("store-orphaned")

    first, stderr = events_while_consuming(client_ip="10.0.0.5")
    assert (len(first.messages), stderr) == (20, [])
    _, (orphaned,) = events_while_consuming(client_ip="10.0.0.9")
    command = orphaned.text.partition("adopt it: ")[2].split()
    assert command[:3] == ["pyrocket", "offsets", "adopt"]
    code, _, stderr = pyrocket(*command[1:])
    assert (code, "holds offsets of 2 queues already" in stderr) == (1, True), stderr
    code, printed, _ = pyrocket(*command[1:], "--replace")
    assert (code, f"the offsets of {command[3]} are in {command[4]} now" in printed) == (0, True), printed
    after, stderr = events_while_consuming(client_ip="10.0.0.9")
    assert (after.messages, stderr) == ([], [])


@pytest.mark.live
@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("output", ["table", "json"])
def test_an_interrupted_reset_prints_its_state(embedded, number, output):
    broker = embedded.broker("broker-a")
    broker.create_group("G")
    broker.commit("G", "T", {0: 5})
    broker.on(RequestCode.UPDATE_CONSUMER_OFFSET, drop, times=None)
    where = ["G", "T", "--to", "earliest", "--queue", "broker-a/0", "--model", "clustering"]
    with Running("offsets", "reset", *where, "--execute", "-o", output, "-n", embedded.name_server) as running:
        broker.wait_for(RequestCode.UPDATE_CONSUMER_OFFSET)
        running.send_signal(number)
        printed = running.process.stdout.read().decode()
        assert running.end(60) == 1
    assert "stopped during the reset; members that have moved stay moved" in running.stderr
    undo = "--queue broker-a/0=5 --execute"
    if output == "json":
        shown = json.loads(printed)
        assert (shown["result"], shown["stopped_by"], undo in shown["undo"][0]) == (None, "interrupted", True)
    else:
        assert undo in printed
