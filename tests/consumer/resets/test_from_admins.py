"""How a member handles the requests of admins, and the resets that they have recorded."""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
import uuid

import pytest

from pyrocket_consumer import ConfigError, ConsumerState, MessageQueue, PushConsumer, RocketError
from pyrocket_consumer.offsets import LocalFileOffsetStore, MemoryOffsetStore, QueueReset
from pyrocket_consumer.protocol.bodies import encode_offset_table
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.reset_format import (
    MAX_PLAN_BYTES,
    PlanBody,
    decode_report,
    encode_plan,
    record_areas,
    topic_digest,
)
from pyrocket_consumer.testing import answer
from tests.consuming import Events, consuming, until
from tests.hazards.members import request_matcher
from tests.offsets.local.disks import FailureHook, MemoryDisk, WatchedDisk
from tests.resets import (
    caught_up,
    fill,
    queue,
    record,
    reset,
    send_reset_to_members,
    wait_until_seen,
    wait_until_stored,
)
from tests.testing.raw_client import RawClient

RETRY = "%RETRY%G"


def reset_at_broker(broker, **fields: object) -> RemotingCommand:
    """Reset the group at the broker, as the dashboard does."""
    whole = {"topic": "T", "group": "G", "timestamp": 0, "isForce": True, **fields}
    with RawClient(broker.address) as client:
        return client.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, whole)


def relay(broker, consumer, body: bytes = b"", operation: str = "reset", **fields: object) -> RemotingCommand:
    """Relay a request to a member, as an admin does."""
    whole = {
        "consumerGroup": "G",
        "clientId": consumer.client_id,
        "jstackEnable": "false",
        "pyrocketV": "1",
        "pyrocketOp": operation,
        "pyrocketId": str(uuid.uuid4()),
        **fields,
    }
    given = {name: value for name, value in whole.items() if value is not None}
    with RawClient(broker.address) as client:
        return client.call(RequestCode.GET_CONSUMER_RUNNING_INFO, given, body, timeout_s=15)


def status(broker, consumer) -> RemotingCommand:
    return relay(broker, consumer, b'{"topic":"T"}', "status")


def state(reply: RemotingCommand) -> str:
    return reply.fields["pyrocketState"]


def send_plan(broker, consumer, targets, epoch: int = 5000, topic: str = "T", **fields: object) -> RemotingCommand:
    return relay(broker, consumer, encode_plan(PlanBody(topic, epoch, targets)), **fields)


def later_epoch() -> int:
    """An epoch above those of all earlier resets."""
    return time.time_ns() // 1_000_000 + 3_600_000


TARGETS = {queue("T", 0): 2, queue("T", 1): 7}


def test_an_ordinary_request_for_running_info_is_answered(embedded, broker, stores):
    with consuming(embedded, "T", "G", **stores) as (consumer, _), RawClient(broker.address) as client:
        fields = {"consumerGroup": "G", "clientId": consumer.client_id, "jstackEnable": "false"}
        reply = client.call(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
        assert (reply.code, reply.fields) == (0, {})
        assert b"mqTable" in reply.body


def test_the_same_plan_twice_is_followed_once(embedded, broker, stores):
    with caught_up(embedded, "T", "G", 20, **stores) as (consumer, seen):
        first = send_plan(broker, consumer, {queue("T", 0): 4}, pyrocketId="one")
        assert (state(first), first.fields["pyrocketAck"]) == ("applied", "one")
        assert decode_report(first.body).epochs == {queue("T", 0): 5000}
        seen.wait(lambda seen: len(seen.messages) == 26)
        assert state(send_plan(broker, consumer, {queue("T", 0): 4})) == "already"
        assert state(send_plan(broker, consumer, {queue("T", 0): 0}, epoch=4999)) == "already"
        known = status(broker, consumer)
        assert (state(known), decode_report(known.body).epochs) == ("ok", {queue("T", 0): 5000})
    with consuming(embedded, "T", "G", **stores) as (consumer, _):
        assert state(send_plan(broker, consumer, {queue("T", 0): 4})) == "already"
        assert state(status(broker, consumer)) == "ok"


GOOD = encode_plan(PlanBody("T", 5000, {queue("T", 0): 0}))
BAD_REQUESTS = {
    "damaged": (b"{", {}, "reset"),
    "not a plan": (b"[1]", {}, "reset"),
    "no body": (b"", {}, "reset"),
    "huge": (b" " * (MAX_PLAN_BYTES + 1), {}, "reset"),
    "negative": (b'{"topic":"T","epoch":5,"targets":{"broker-a":{"0":-1}}}', {}, "reset"),
    "epoch 0": (b'{"topic":"T","epoch":0,"targets":{"broker-a":{"0":1}}}', {}, "reset"),
    "newer version": (GOOD, {"pyrocketV": "2"}, "reset"),
    "no version": (GOOD, {"pyrocketV": None}, "reset"),
    "no id": (GOOD, {"pyrocketId": None}, "reset"),
    "unknown operation": (GOOD, {}, "explode"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_an_invalid_request_is_refused_and_moves_nothing(embedded, broker, stores, case):
    body, fields, operation = BAD_REQUESTS[case]
    with caught_up(embedded, "T", "G", 10, **stores) as (consumer, seen):
        refused = relay(broker, consumer, body, operation, **fields)
        assert (refused.code, state(refused)) == (0, "refused")
        assert refused.fields["pyrocketReason"]
        assert all(refused.fields.values()), "the binary header has no empty texts"
        fill(embedded, "T", 2, start=10)
        wait_until_seen(seen, 1, 12)


def test_a_target_for_a_new_queue_is_kept_for_it(embedded, broker, stores):
    fill(embedded, "T", 2)
    options = {"rebalance_interval_s": 3600, "route_refresh_interval_s": 3600, **stores}
    with consuming(embedded, "T", "G", **options) as (consumer, seen):
        wait_until_seen(seen, 1, 2)
        embedded.create_topic("T", queues=3)
        assert state(send_plan(broker, consumer, {queue("T", 2): 3})) == "applied"
        for number in range(5):
            embedded.send("T", b"new%d" % number, queue_id=2)
        with consuming(embedded, "T", "G", instance_name="another", **stores):  # the new member causes a rebalance
            seen.wait(lambda seen: {b"new3", b"new4"} <= set(seen.bodies))
        assert consumer.progress()[queue("T", 2)].start_offset == 3
        assert b"new0" not in seen.bodies


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (PlanBody("U", 5000, {queue("U", 0): 3}), "does not subscribe to U"),
        (PlanBody("T", 5000, {queue("T", 0): 3, queue("T", 2): 3}), "no queue T/broker-a/2"),
        (PlanBody("T", 5000, {queue("T", 0, "broker-x"): 3}), "no queue T/broker-x/0"),
        (PlanBody("T", 2**63 - 1, {queue("T", 0): 3}), "more than a day ahead"),
        (PlanBody("T", (time.time_ns() // 1_000_000) + 25 * 3_600_000, {queue("T", 0): 3}), "more than a day ahead"),
    ],
)
def test_a_plan_that_cannot_be_for_this_member_is_refused(embedded, broker, admin, stores, plan, reason):
    events = Events()
    with caught_up(embedded, "T", "G", 20, on_event=events, **stores) as (consumer, seen):
        refused = relay(broker, consumer, encode_plan(plan))
        assert state(refused) == "refused"
        assert reason in refused.fields["pyrocketReason"] and reason in events.wait_for("offset-reset").text
        assert reset(admin, "G", "T", "earliest").verified  # later resets still work
        wait_until_seen(seen, 2, 20)
    files = b"".join(path.read_bytes() for path in stores["offset_store_dir"].rglob("offsets.*") if path.is_file())
    assert not any(text in files for text in (b'"U"', b"broker-x", b'"2":'))


def test_a_plan_for_unknown_queues_is_refused_without_a_route(embedded, broker, stores):
    with caught_up(embedded, "T", "G", 2, **stores) as (consumer, seen):
        refusal = answer(ResponseCode.SYSTEM_ERROR, "not now")
        embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, refusal, times=None)
        refused = send_plan(broker, consumer, {queue("T", 9): 3})
        assert state(refused) == "refused"
        assert "no queue T/broker-a/9" in refused.fields["pyrocketReason"]


def test_a_client_that_is_always_newer_blocks_no_admin_forever(embedded, broker, admin, stores):
    area, newer = next(record_areas("T")), itertools.count(later_epoch(), 1000)
    with caught_up(embedded, "T", "G", 20, **stores):

        def write_a_newer_head(exchange):
            exchange.handle(exchange.answer)
            broker.core.offsets.commit(RETRY, "G", area.head, next(newer))

        plan = admin.plan_reset("G", "T", "earliest")
        embedded.broker("broker-a").on(RequestCode.UPDATE_CONSUMER_OFFSET, write_a_newer_head, times=None)
        with pytest.raises(RocketError, match="recorded at the same time"):
            plan.execute()


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("absurd", [2**63 - 1, 2**62, 2**50, 1 << 42])
def test_an_invalid_record_is_reported_and_overwritten(embedded, broker, admin, stores, absurd, online):
    """Any client that may commit offsets of the group can write such a record, with four commits."""
    events = Events()
    options = {**stores, "on_event": events, "reset_record_interval_s": 0.2}
    with caught_up(embedded, "T", "G", 20, **options) as (consumer, seen):
        wait_until_stored(consumer, "T", 20)
        if online:
            record(broker, absurd, {0: 3, 1: absurd - 1})
            assert "is ignored" in events.wait_for("record-ignored").text
            assert reset(admin, "G", "T", "earliest").verified
            wait_until_seen(seen, 2, 20)
    if not online:
        record(broker, absurd, {0: 3, 1: absurd - 1})
        with consuming(embedded, "T", "G", **options) as (_, again):
            assert "is ignored" in events.wait_for("record-ignored").text
            fill(embedded, "T", 1, start=20)
            again.wait_for(1)
            assert again.bodies == [b"m20"]
        reset(admin, "G", "T", "earliest", model="broadcasting")
        with consuming(embedded, "T", "G", **options) as (_, due_at):
            due_at.wait_for(21)


def test_any_number_in_a_record_stops_no_reset(embedded, broker, admin, stores):
    fill(embedded, "T", 20)
    chance = random.Random(7)
    area = next(record_areas("T"))
    keys = [area.head, *(key_of(each) for each in (0, 1) for key_of in (area.target, area.epoch))]
    now = time.time_ns() // 1_000_000
    numbers = (0, 1, -1, -(2**63), 2**63 - 1, 2**62, now, now + 3_600_000, now + 90_000_000)
    with consuming(embedded, "T", "G", reset_record_interval_s=0.05, **stores) as (consumer, seen):
        wait_until_seen(seen, 1, 20)
        for _ in range(20):
            broker.commit("G", RETRY, {area.name: topic_digest("T")})
            broker.commit("G", RETRY, {key_of: chance.choice(numbers) for key_of in keys})
            assert reset(admin, "G", "T", "latest").verified
        assert consumer.state is ConsumerState.RUNNING
        fill(embedded, "T", 1, start=20)
        seen.wait(lambda seen: b"m20" in seen.bodies)


def test_record_slots_that_another_client_has_filled_are_taken(embedded, broker, admin, stores):
    with caught_up(embedded, "T", "G", 20, **stores) as (consumer, seen):
        wait_until_stored(consumer, "T", 20)
    broker.commit("G", RETRY, {area.name: 4711 for area in record_areas("T")})
    response = []
    admin.plan_reset("G", "T", "earliest", model="broadcasting").execute(response.append)
    assert any("are taken" in each.text for each in response)
    with consuming(embedded, "T", "G", **stores) as (_, again):
        again.wait_for(20)


def test_an_invalid_stored_epoch_blocks_no_reset(embedded, admin, stores):
    events = Events()
    options = {**stores, "on_event": events}
    with caught_up(embedded, "T", "G", 20, **options) as (consumer, seen):
        wait_until_stored(consumer, "T", 20)
    folder = next(stores["offset_store_dir"].rglob("offsets.json")).parent
    with LocalFileOffsetStore(folder) as poisoned:
        poisoned.persist_resets({queue("T", number): QueueReset(None, 2**63 - 1) for number in (0, 1)})
    with consuming(embedded, "T", "G", **options) as (_, again):
        assert reset(admin, "G", "T", "earliest").verified
        again.wait_for(20)
        assert "so it is ignored" in events.wait_for("record-ignored").text


def test_a_broker_s_repetition_of_a_reset_is_ignored(embedded, broker, stores):
    with caught_up(embedded, "T", "G", 20, **stores) as (consumer, seen):
        send_plan(broker, consumer, TARGETS)
        seen.wait(lambda seen: len(seen.messages) == 31)
        send_reset_to_members(broker, "G", "T", encode_offset_table(TARGETS))
        send_reset_to_members(broker, "G", "T", encode_offset_table({queue("T", 0): 9}))  # this one is another reset
        seen.wait(lambda seen: len(seen.messages) >= 32)
        wait_until_stored(consumer, "T", 20)
        assert len(seen.messages) == 32


def test_a_queue_moves_once_per_plan_in_clustering(embedded, broker):
    with caught_up(embedded, "T", "G", 20) as (consumer, seen):
        targets = {**TARGETS, MessageQueue("T", "broker-z", 0): 5}
        for _ in range(2):
            response = send_plan(broker, consumer, targets, epoch=1, pyrocketId="one")
            assert decode_report(response.body).moved == TARGETS
        seen.wait(lambda seen: len(seen.messages) == 31)
        assert embedded.wait_until(lambda: embedded.committed("G", "T") == {0: 10, 1: 10})
        assert len(seen.messages) == 31


class PlainStore(MemoryOffsetStore):
    """A store of the user that outlives consumers, and stores no epochs."""

    def close(self) -> None:
        for each in list(self.clone_offset_table()):
            self.remove_offset(each)


def test_a_store_without_epochs_works_and_reports_its_limits(embedded, broker, admin):
    events = Events()
    options = {"message_model": "broadcasting", "offset_store": PlainStore(), "on_event": events}
    with caught_up(embedded, "T", "G", 20, **options) as (consumer, seen):
        assert reset(admin, "G", "T", "earliest").verified
        wait_until_seen(seen, 2, 20)
        assert "keeps no reset epochs" in events.wait_for("store-fallback").text
        wait_until_stored(consumer, "T", 20)
        assert state(send_plan(broker, consumer, {queue("T", 0): 0}, epoch=1)) == "already"
    with consuming(embedded, "T", "G", reset_record_interval_s=0.1, **options) as (consumer, again):
        fill(embedded, "T", 2, start=20)
        again.wait_for(2)
        assert len(again.messages) == 2, "a reset from before the restart is not followed again"
        record(broker, later_epoch(), {0: 8})
        again.wait(lambda seen: len(seen.messages) >= 5)


def test_a_full_disk_moves_queues_in_memory_and_confirms_later(embedded, broker):
    disk, failing, events = MemoryDisk(), FailureHook(), Events()
    store = LocalFileOffsetStore("/s", disk=WatchedDisk(disk, failing))
    options = {"message_model": "broadcasting", "offset_store": store, "on_event": events}
    with caught_up(embedded, "T", "G", 20, **options) as (consumer, seen):
        wait_until_stored(consumer, "T", 20)
        failing.error = errno.ENOSPC
        response = send_plan(broker, consumer, TARGETS)
        assert state(response) == "pending"
        assert "memory only" in response.fields["pyrocketReason"]
        assert decode_report(response.body).epochs == {}
        seen.wait(lambda seen: len(seen.messages) == 31)
        failing.error = None
        everywhere = dict.fromkeys(TARGETS, 5000)
        until(lambda: decode_report(status(broker, consumer).body).epochs == everywhere, "it is stored")
    disk.free_locks()
    with LocalFileOffsetStore("/s", disk=disk) as found:
        assert [found.reset_epoch(each) for each in TARGETS] == [5000, 5000]


class SlowStore(LocalFileOffsetStore):
    """Stores resets only when the test lets it."""

    let = threading.Event()

    def persist_resets(self, resets):
        self.let.wait(30)
        super().persist_resets(resets)


def test_a_slow_store_leads_to_a_pending_reply_and_finishes_later(embedded, broker, tmp_path):
    store = SlowStore(tmp_path)
    with caught_up(embedded, "T", "G", 20, message_model="broadcasting", offset_store=store) as (consumer, seen):
        assert state(send_plan(broker, consumer, TARGETS)) == "pending"
        assert len(seen.messages) == 20, "no message is pulled before the target is durable"
        store.let.set()
        seen.wait(lambda seen: len(seen.messages) == 31)


def test_a_record_without_permission_is_reported(embedded, broker, stores):
    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, answer(16, "no permission"), times=None, when=request_matcher(RETRY))
    events = Events()
    with caught_up(embedded, "T", "G", 10, on_event=events, **stores):
        assert "no permission to read" in events.wait_for("broker-unreachable").text


def test_a_record_not_read_at_the_start_is_followed_soon(embedded, broker, stores):
    with caught_up(embedded, "T", "G", 10, **stores):
        pass
    record(broker, 1000, {0: 0, 1: 0})
    broker.on(RequestCode.QUERY_CONSUMER_OFFSET, answer(2, "busy"))
    with consuming(embedded, "T", "G", reset_record_interval_s=0.3, **stores) as (_, seen):
        wait_until_seen(seen, 1, 10)


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_a_member_that_refuses_keeps_its_offsets(embedded, broker, tmp_path, model):
    """It does not read the plan or the table, so they may be invalid."""
    events = Events()
    options = {"message_model": model, "offset_store_dir": tmp_path, "on_event": events, "remote_reset": "refuse"}
    with caught_up(embedded, "T", "G", 20, pull_hold_s=0.2, **options) as (consumer, seen):
        wait_until_stored(consumer, "T", 20)
        for number, table in enumerate((encode_offset_table(TARGETS), b"this is no table"), 1):
            send_reset_to_members(broker, "G", "T", table)
            events.wait_for("offset-reset", number)
        for plan in (encode_plan(PlanBody("T", 5000, TARGETS)), b"neither is this a plan"):
            response = relay(broker, consumer, plan)
            assert state(response) == "refused"
            assert response.fields["pyrocketReason"] == "this consumer has remote_reset='refuse'"
        assert reset_at_broker(broker).code == 0
        events.wait_for("offset-reset", 5)
        assert all("refused" in event.text for event in events.of("offset-reset"))
        fill(embedded, "T", 2, start=20)
        wait_until_seen(seen, 1, 22)
        assert state(relay(broker, consumer, b"", "status")) == "refused"


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"remote_reset": "maybe"}, "remote_reset='maybe' is not allowed; choose one of 'accept', 'refuse'"),
        ({"reset_record_interval_s": 0}, "reset_record_interval_s=0 is not allowed"),
    ],
)
def test_wrong_options_are_errors(option, reason):
    with pytest.raises(ConfigError, match=reason):
        PushConsumer("G", name_server="127.0.0.1:1", **option)
