"""Resets and offsets of groups whose offsets are in a database: the same commands, with `--store`."""

import json
import re
import shlex
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, text

from pyrocket_consumer import ConsumeResult, Message
from pyrocket_consumer.admin import Admin
from pyrocket_consumer.cli import main
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, answer
from tests.consuming import WAIT_S, RecordingListener, consuming
from tests.exactly_once.booking import billing, consumed, consuming_own, send, until_all, until_at
from tests.exactly_once.ledgers import BODIES, GROUP, TOPIC, every_database, offsets_driven, once
from tests.pages import DOCS, blocks
from tests.resets import held, queue

pytestmark = pytest.mark.databases("sqlite")

RETRIES = f"%RETRY%{GROUP}"


@every_database
def test_a_running_idle_group_is_reset(embedded, ledger, events, reset):
    send(embedded)
    with billing(embedded, ledger, on_event=events) as (consumer, _):
        until_all(embedded, ledger)
        ledger.execute("DELETE FROM ledger")
        code, output = reset("--to", "earliest", "--execute")
        assert code == 0
        assert output["plan"]["way"] == "store"
        assert {each["state"] for each in output["result"]["outcomes"]} == {"moved"}
        assert all(consumer.client_id in each["text"] for each in output["result"]["outcomes"])
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert len(events.of("queue-fenced")) == 4


@every_database
def test_a_group_that_does_not_run_is_reset(embedded, ledger, reset):
    consumed(embedded, ledger)
    ledger.execute("DELETE FROM ledger")
    code, output = reset("--queue", "broker-a/0=10", "--queue", "broker-a/1=20", "--execute")
    assert code == 0
    assert [(each["current"], each["target"]) for each in output["plan"]["moves"]] == [(25, 10), (25, 20)]
    assert [each["text"] for each in output["result"]["outcomes"]] == ["in the database"] * 2
    assert "env:LEDGER_URL" in output["undo"][0] and "broker-a/0=25" in output["undo"][0]
    assert embedded.committed(GROUP, TOPIC)[0] == 10  # for tools that read it there
    with billing(embedded, ledger):
        embedded.wait_until(lambda: len(ledger.rows()) >= 20)
    assert len(ledger.rows()) == 20


def test_a_plan_changes_nothing(embedded, ledger, reset):
    consumed(embedded, ledger)
    before = ledger.query("SELECT * FROM pyrocket_offsets")
    code, output = reset("--to", "earliest")
    assert code == 0 and output["result"] is None
    assert ledger.query("SELECT * FROM pyrocket_offsets") == before


def test_show_and_lag_have_what_the_database_has(embedded, ledger, reset):
    consumed(embedded, ledger)
    ledger.execute("UPDATE pyrocket_offsets SET next_offset = 5")
    code, output = reset(what="show")
    assert code == 0
    assert [each["committed"] for each in output["queues"]] == [5] * 4 and output["lag"] == 80
    assert all(each["consumed_at"] for each in output["queues"])


def test_queues_that_were_never_consumed_are_reset(embedded, ledger, admin, reset):
    send(embedded)
    admin.create_group(GROUP)
    assert reset("--queue", "broker-a/0=10", "--execute")[0] == 0
    with billing(embedded, ledger, consume_from="last"):
        embedded.wait_until(lambda: len(ledger.rows()) >= 15)
    assert len(ledger.rows()) == 15


def test_a_reset_of_the_broker_reaches_members(embedded, ledger, admin):
    """As a Java tool resets: the broker notifies members, and the row moves."""
    send(embedded)
    with billing(embedded, ledger) as (consumer, _):
        until_all(embedded, ledger)
        ledger.execute("DELETE FROM ledger")
        assert admin.plan_reset(GROUP, TOPIC, "earliest").execute().verified
        until_all(embedded, ledger)
        assert {each.epoch for each in ledger.offsets.offsets(GROUP, TOPIC)} == {2}
        assert consumer.progress()[queue(TOPIC, 0)].origin == "reset"
    assert ledger.bodies() == once(BODIES)


def test_a_reset_of_the_broker_reaches_the_owner_of_the_queue(embedded, ledger, admin):
    """Each of two members gets the reset of all queues, and moves its own."""
    send(embedded)
    with billing(embedded, ledger, instance_name="one"), billing(embedded, ledger, instance_name="two") as (two, _):
        until_all(embedded, ledger)
        embedded.wait_until(lambda: len(held(two, TOPIC)) == 2)
        ledger.execute("DELETE FROM ledger")
        assert admin.plan_reset(GROUP, TOPIC, "earliest").execute().verified
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


def test_a_reset_of_a_queue_another_has_claimed_does_nothing(embedded, ledger, events):
    """The reset arrives while the member is checking its claims."""
    idle, checking, may_continue = threading.Event(), threading.Event(), threading.Event()

    def intercept(statement):
        if statement.startswith("SELECT") and idle.is_set() and not checking.is_set():
            checking.set()
            assert may_continue.wait(WAIT_S)

    send(embedded, queues=1)
    with (
        offsets_driven(ledger, intercept) as offsets,
        ThreadPoolExecutor() as pool,
        billing(embedded, ledger, offsets=offsets, on_event=events) as (consumer, _),
    ):
        until_at(embedded, ledger, 100)
        idle.set()
        assert checking.wait(WAIT_S)
        ledger.execute("UPDATE pyrocket_offsets SET epoch = epoch + 1, next_offset = 90 WHERE topic = :t", t=TOPIC)
        resetting = pool.submit(consumer.reset_offsets, TOPIC, {queue(TOPIC, 0): 10})
        time.sleep(0.1)
        may_continue.set()
        assert resetting.result(WAIT_S) == {}
        embedded.wait_until(lambda: len(ledger.rows()) >= 110)
    assert [each.queue.topic for each in events.of("queue-fenced")] == [TOPIC]
    assert {body for body, times in ledger.bodies().items() if times == 2} == set(BODIES[90:])


def test_a_reset_is_kept_while_the_offsets_of_other_queues_are_stored(embedded, ledger):
    """The listener leaves the offsets to the commit timer, which stores one queue after the other."""
    send(embedded)
    stores, may_continue, is_reset, got = threading.Event(), threading.Event(), threading.Event(), []

    def intercept(statement: str) -> None:
        if statement.startswith("UPDATE pyrocket_offsets") and len(got) >= 100 and not stores.is_set():
            stores.set()
            may_continue.wait(WAIT_S)

    def listen(messages: list[Message]) -> None:
        if is_reset.is_set():
            raise RuntimeError("not again yet")
        got.extend(messages)

    with (
        offsets_driven(ledger, intercept) as offsets,
        ThreadPoolExecutor() as pool,
        consuming_own(embedded, ledger, listen, offsets, commit_interval_s=0.3) as (consumer, _),
    ):
        while not stores.wait(1):
            for each in range(4):
                embedded.send(TOPIC, b"more", queue_id=each)
        is_reset.set()
        resetting = pool.submit(consumer.reset_offsets, TOPIC, "earliest")
        time.sleep(0.3)
        may_continue.set()
        assert set(resetting.result(WAIT_S).values()) == {0}
        time.sleep(0.5)
        assert [ledger.offset(queue_id=each) for each in range(4)] == [0] * 4


def test_a_recorded_reset_is_followed_once(embedded, ledger, admin):
    consumed(embedded, ledger)
    ledger.execute("DELETE FROM ledger")
    admin.plan_reset(GROUP, TOPIC, {queue(TOPIC, 1): 5}, model="broadcasting").execute()
    for _ in range(2):
        with billing(embedded, ledger):
            embedded.wait_until(lambda: len(ledger.rows()) >= 20)
    assert [(number, offset) for _, number, offset in ledger.rows()] == [(1, offset) for offset in range(5, 25)]


def test_a_reset_recorded_before_a_group_began_is_not_followed(embedded, ledger, admin):
    consumed(embedded, ledger)
    ledger.execute("DELETE FROM pyrocket_offsets")
    admin.plan_reset(GROUP, TOPIC, "earliest", model="broadcasting").execute()
    ledger.execute("DELETE FROM ledger")
    for _ in range(2):
        with billing(embedded, ledger, consume_from="last") as (consumer, _):
            embedded.wait_until(lambda one=consumer: len(one.progress()) == 5)
            time.sleep(2)  # messages that are consumed again would be booked
    assert ledger.rows() == []


@every_database
def test_a_reset_in_the_database_moves_a_running_group(embedded, ledger, events):
    send(embedded)
    with billing(embedded, ledger, on_event=events):
        until_all(embedded, ledger)
        ledger.execute("DELETE FROM ledger")
        ledger.offsets.reset(GROUP, {queue(TOPIC, number): 20 for number in range(4)}, reset_epoch=7)
        for number in range(4):  # an idle member learns of it when it has a message
            embedded.send(TOPIC, f"new {number}".encode(), queue_id=number)
        embedded.wait_until(lambda: len(ledger.rows()) >= 24)
        events.wait_for("queue-fenced", 4)
    assert {offset for _, _, offset in ledger.rows()} == set(range(20, 26))
    assert set(ledger.bodies().values()) == {1}
    assert {each.reset_epoch for each in ledger.offsets.offsets(GROUP, TOPIC)} == {7}


@every_database
def test_a_reset_of_a_member_moves_the_row_and_fences_running_calls(embedded, ledger):
    send(embedded, queues=1)
    running, go_on = threading.Event(), threading.Event()

    def book(messages, connection):
        ledger.book(messages, connection)
        if messages[-1].queue_offset == 99 and not running.is_set():
            running.set()
            assert go_on.wait(WAIT_S)

    with billing(embedded, ledger, book) as (consumer, _):
        assert running.wait(WAIT_S)
        epoch = ledger.offsets.offsets(GROUP, TOPIC)[0].epoch if ledger.database.kind != "sqlite" else 1
        mover = threading.Thread(target=lambda: consumer.reset_offsets(TOPIC, to={queue(TOPIC, 0): 90}))
        mover.start()
        if ledger.database.kind != "sqlite":  # there the running call locks the whole database
            embedded.wait_until(lambda: ledger.offsets.offsets(GROUP, TOPIC)[0].epoch == epoch + 1)
        go_on.set()
        mover.join(WAIT_S)
        embedded.wait_until(lambda: ledger.offset(GROUP, 0, TOPIC) == 100 and len(ledger.bodies()) == 100)
    counts = ledger.bodies()
    assert all(counts[body] == 1 for body in BODIES[:90])
    assert all(counts[body] in (1, 2) for body in BODIES[90:])


# --- moving a group into a database


@pytest.fixture
def moving():
    """A group before the move: its offsets are at the brokers, and failed messages came from its retry topic."""
    judged = set()

    def judge(message):
        if int(message.body) % 5 == 0 and message.body not in judged:
            judged.add(message.body)
            return ConsumeResult.RETRY

    with EmbeddedCluster(delay_scale=0.01) as cluster:
        cluster.create_topic(TOPIC, queues=2)
        for queue_id, bodies in enumerate((range(12), range(12, 21))):
            for body in bodies:
                cluster.send(TOPIC, b"%d" % body, queue_id=queue_id)
        with consuming(cluster, TOPIC, GROUP, RecordingListener(judge)) as (_, seen):
            seen.wait(lambda seen: len(seen.messages) == 21 + 5)
            cluster.wait_until(lambda: sum(cluster.committed(GROUP, RETRIES).values()) == 5)
            cluster.wait_until(lambda: cluster.committed(GROUP, TOPIC) == {0: 12, 1: 9})
        yield cluster


def send_late(cluster):
    """Make one message arrive from the retry topic and one from the topic. Both had no effect yet."""
    cluster.send(RETRIES, b"failed", properties={"RETRY_TOPIC": TOPIC})
    cluster.send(TOPIC, b"new")


def test_the_page_s_move_loses_nothing_and_repeats_nothing(moving, ledger, monkeypatch, capsys):
    monkeypatch.setenv("NAMESRV_ADDR", moving.name_server)
    monkeypatch.setenv("DATABASE_URL", ledger.database.url)
    (block,) = [each for each in blocks(DOCS / "exactly-once.md", "sh") if "--queue" in each]
    for line in block.splitlines():
        assert main(shlex.split(line, comments=True)[1:]) == 0, capsys.readouterr().err
    send_late(moving)
    with billing(moving, ledger):
        moving.wait_until(lambda: len(ledger.rows()) >= 2)
    assert ledger.bodies() == once(["failed", "new"])


def test_the_retry_topic_is_reset_with_its_topic_and_reported(moving, ledger, capsys):
    offsets = ["-n", moving.name_server, "--store", ledger.database.url]
    here = ["offsets", "reset", GROUP, TOPIC, "--to", "latest", *offsets]
    assert main(here) == 0
    assert f"{RETRIES}/broker-a/0 will be set to 5, the offset at the brokers" in capsys.readouterr().out
    assert main([*here, "--execute", "-o", "json"]) == 0
    output = json.loads(capsys.readouterr().out)
    retry_queue = {"topic": RETRIES, "broker": "broker-a", "queue": 0}
    assert output["plan"]["retries"] == [{**retry_queue, "committed": 5, "target": 5}]
    outcome = {"who": f"{RETRIES}/broker-a/0", "state": "moved", "text": "in the database, the offset at the brokers"}
    assert output["result"]["outcomes"][-1] == outcome
    assert ledger.offset(GROUP, 0, RETRIES) == 5
    ledger.execute("UPDATE pyrocket_offsets SET next_offset = 3 WHERE topic = :topic", topic=RETRIES)
    assert main([*here, "--execute", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["retries"] == []
    assert ledger.offset(GROUP, 0, RETRIES) == 3, "it has its own row now"


def test_retries_without_an_offset_begin_at_the_first(embedded, ledger, admin):
    send(embedded, ["1"], queues=1)
    embedded.create_topic(RETRIES, queues=1)
    embedded.broker("broker-a").create_group(GROUP)
    plan = admin.plan_reset(GROUP, TOPIC, "latest", store=ledger.offsets)
    assert f"{RETRIES}/broker-a/0 will be set to 0, its first message" in str(plan)
    assert plan.execute().verified
    send_late(embedded)
    with billing(embedded, ledger):
        embedded.wait_until(lambda: len(ledger.rows()) >= 2)
    assert ledger.bodies() == once(["failed", "new"])


def test_a_retry_topic_that_members_consume_is_not_reset(moving, ledger):
    with Admin(name_server=moving.name_server) as admin:
        plan = admin.plan_reset(GROUP, TOPIC, "latest", store=ledger.offsets)
        ledger.offsets.reset(GROUP, {queue(RETRIES, 0): 4}, 1)
        assert plan.execute().verified
    assert ledger.offset(GROUP, 0, RETRIES) == 4


def test_the_retry_topic_of_a_namespace_is_reset_too(embedded, ledger):
    wire_retries = f"%RETRY%team%{GROUP}"
    for topic in (f"team%{TOPIC}", wire_retries):
        embedded.create_topic(topic, queues=1)
        embedded.send(topic, count=3)
    embedded.broker("broker-a").create_group(f"team%{GROUP}")
    embedded.broker("broker-a").commit(f"team%{GROUP}", wire_retries, {0: 2})
    with Admin(name_server=embedded.name_server, namespace="team") as admin:
        plan = admin.plan_reset(GROUP, TOPIC, "latest", store=ledger.offsets)
        assert [str(each.queue) for each in plan.retries] == [f"{RETRIES}/broker-a/0"]
        assert plan.execute().verified
    assert ledger.offset(f"team%{GROUP}", 0, wire_retries) == 2


# --- facts that only the database has


@pytest.mark.parametrize("what", ["show", "lag"])
def test_a_group_that_the_database_has_rows_of_is_known(embedded, ledger, capsys, what):
    """New brokers do not know the group. That is when an operator checks it."""
    embedded.create_topic(TOPIC, queues=2)
    embedded.send(TOPIC, count=6)
    ledger.offsets.reset(GROUP, {queue(TOPIC, number): number for number in (2, 3)}, 1)
    ledger.offsets.reset(GROUP, {queue(TOPIC, number): number for number in (0, 1)}, 1)

    def run(group):
        words = [what, group, *([TOPIC] if what == "show" else []), "-n", embedded.name_server, "-o", "json"]
        return main(["offsets", *words, "--store", ledger.database.url]), *capsys.readouterr()

    code, printed, _ = run(GROUP)
    assert code == 0
    output = json.loads(printed)
    assert [(each["queue"], each["committed"], each["lag"]) for each in output["queues"]] == [(0, 0, 3), (1, 1, 2)]
    code, _, stderr = run("nobody")
    assert (code, "no broker knows group 'nobody'" in stderr) == (2, True)


def test_a_queue_that_is_consumed_to_its_end_is_shown(embedded, ledger, reset):
    embedded.create_topic(TOPIC, queues=1)
    ledger.offsets.reset(GROUP, {queue(TOPIC, 0): 0}, 1)
    code, output = reset(what="show")
    assert (code, [(each["committed"], each["lag"]) for each in output["queues"]]) == (0, [(0, 0)])


@pytest.fixture
def wrong(tmp_path):
    """The address of another database that has the tables."""
    url = f"sqlite:///{tmp_path}/wrong.db"
    engine = create_engine(url)
    DatabaseOffsets(engine).create_tables()
    engine.dispose()
    return url


def test_a_reset_in_another_database_is_unconfirmed(embedded, ledger, wrong, capsys):
    send(embedded)
    with billing(embedded, ledger) as (consumer, _):
        until_all(embedded, ledger)
        embedded.wait_until(lambda: embedded.committed(GROUP, TOPIC) == dict.fromkeys(range(4), 25))
        words = ["--to", "earliest", "--execute", "--wait", "3", "-o", "json"]
        code = main(["offsets", "reset", GROUP, TOPIC, "-n", embedded.name_server, "--store", wrong, *words])
        output = json.loads(capsys.readouterr().out)
        assert code == 3
        outcomes = output["result"]["outcomes"]
        assert {each["state"] for each in outcomes} == {"unconfirmed", "moved"}
        unclaimed = "is set, but no online member has claimed it; check that they use this database and table"
        assert {each["text"] for each in outcomes if each["who"].startswith("broker-a")} == {unclaimed}
        (problem,) = output["plan"]["problems"]
        assert problem.startswith(f"{consumer.client_id}: consumes the topic, but the database has no row of it")
        assert embedded.committed(GROUP, TOPIC) == dict.fromkeys(range(4), 25), (
            "brokers have the offsets that members publish"
        )
    assert ledger.bodies() == once(BODIES)


def test_a_former_owner_that_does_not_claim_again_is_named(embedded, ledger, admin, wrong):
    """As a member that checks a changed log once a minute. Here the reset uses a copy of its database."""
    send(embedded, queues=1)
    engine = create_engine(wrong)
    copy = DatabaseOffsets(engine)
    with billing(embedded, ledger) as (consumer, _):
        until_all(embedded, ledger)
        copy.reset(GROUP, {queue(TOPIC, 0): 100}, 1)
        with engine.begin() as connection:
            connection.execute(text("UPDATE pyrocket_offsets SET owner = :owner"), {"owner": consumer.client_id})
        result = admin.plan_reset(GROUP, TOPIC, "earliest", store=copy).execute(wait_s=1)
        assert result.outcomes[0].state == "unconfirmed"
        assert f"its owner {consumer.client_id} has not claimed it again yet" in result.outcomes[0].text
    engine.dispose()


def test_a_queue_whose_log_has_changed_is_reset(embedded, ledger, events, reset):
    consumed(embedded, ledger, queues=1)
    embedded.delete_topic(TOPIC)
    send(embedded, [f"new {number}" for number in range(120)], queues=1)
    with billing(embedded, ledger, on_event=events, start_wait_s=0.1):
        events.wait_for("log-diverged")
        assert reset("--to", "earliest", "--execute")[0] == 0
        until_all(embedded, ledger, [*BODIES, *(f"new {number}" for number in range(120))])


def test_a_topic_nobody_subscribes_to_is_set_for_later(embedded, ledger, admin):
    send(embedded)
    embedded.create_topic("other", queues=1)
    embedded.send("other", count=3)
    with billing(embedded, ledger):
        until_all(embedded, ledger)
        began = time.monotonic()
        plan = admin.plan_reset(GROUP, "other", "latest", store=ledger.offsets)
        assert plan.execute(unsubscribed=True).verified
        assert time.monotonic() - began < 20, "the reset waits for no member"
    assert ledger.offset(GROUP, 0, "other") == 3


# --- odd rows, and odd addresses


@pytest.mark.parametrize("what", ["show", "lag", "reset"])
@pytest.mark.parametrize(
    "wrong",
    [
        "next_offset = 'abc'",
        "next_offset = -3",
        "reset_epoch = 'abc'",
        "reset_epoch = 9223372036854775807",
        "queue_id = 'abc'",
        "topic = x'ff'",
    ],
)
def test_an_invalid_row_is_named_in_one_line(embedded, ledger, capsys, what, wrong):
    embedded.create_topic(TOPIC, queues=2)
    embedded.broker("broker-a").create_group(GROUP)
    ledger.offsets.reset(GROUP, {queue(TOPIC, number): 0 for number in range(2)}, 1)
    ledger.execute(f"UPDATE pyrocket_offsets SET {wrong} WHERE queue_id = 1")
    words = [GROUP, *([TOPIC] if what != "lag" else []), *(["--to", "latest", "--execute"] if what == "reset" else [])]
    code = main(["offsets", what, *words, "-n", embedded.name_server, "--store", ledger.database.url])
    (output,) = capsys.readouterr().err.splitlines()
    assert code == 1
    assert re.search(r"the row of topic .*, broker 'broker-a', queue .* has ", output) and "Correct the row" in output


def test_an_epoch_from_the_future_spoils_no_reset(embedded, ledger, reset):
    consumed(embedded, ledger)
    ledger.execute("UPDATE pyrocket_offsets SET reset_epoch = 32503680000000 WHERE queue_id = 0")  # in the year 3000
    code, output = reset("--to", "earliest", "--execute")
    assert code == 0
    assert output["result"]["epoch"] <= time.time() * 1000
    ledger.execute("DELETE FROM ledger")
    with billing(embedded, ledger):
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)


@pytest.mark.cluster(brokers=2)
def test_a_reset_is_verified_despite_a_broker_that_does_not_list_members(embedded, ledger):
    """Members of another broker show who is online."""
    consumed(embedded, ledger)
    with billing(embedded, ledger), Admin(name_server=embedded.name_server) as admin:
        embedded.wait_until(lambda: len(embedded.members(GROUP)) == 1)
        plan = admin.plan_reset(GROUP, TOPIC, "earliest", store=ledger.offsets)
        refused = answer(1, "not well")
        embedded.broker("broker-b").on(RequestCode.GET_CONSUMER_CONNECTION_LIST, refused, times=None)
        result = plan.execute()
    assert result.verified, str(result)
    assert all("claimed again by" in each.text for each in result.outcomes), str(result)
