"""What a task reads of its ranges, without Spark."""

from __future__ import annotations

import logging
import pickle
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pyarrow as pa
import pytest

from pyrocket_consumer.config import ConfigError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.spark import read
from pyrocket_consumer.spark.data_loss import DataLoss
from pyrocket_consumer.spark.options import ClientOptions, DamagedBodies, ReadOptions
from pyrocket_consumer.spark.ranges import QueueRange
from pyrocket_consumer.spark.read import ReadFailed, read_ranges
from pyrocket_consumer.spark.schema import READ_SCHEMA, arrow_schema
from pyrocket_consumer.testing import (
    EmbeddedCluster,
    Gate,
    answer,
    close_connection,
    cut_after,
    delay,
    drop,
    drop_answer,
    rewrite,
)
from pyrocket_consumer.wire.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.wire.message import BatchItem, StoredMessage, compress, encode_batch, encode_message
from pyrocket_consumer.wire.subscription import parse_subscription

pytestmark = pytest.mark.live

PULL = RequestCode.PULL_MESSAGE
ALL = arrow_schema(READ_SCHEMA)
WAIT_S = 30.0


@pytest.fixture(scope="module")
def module_cluster():
    with EmbeddedCluster() as cluster:
        yield cluster


@pytest.fixture
def embedded(module_cluster):
    yield module_cluster
    for node in (*module_cluster.nodes, *module_cluster.name_server_nodes):
        node.clear_faults()
        if not node.running:  # a test has failed
            node.start()


@pytest.fixture
def broker(embedded):
    broker = embedded.broker("broker-a")
    broker.forget_requests()
    return broker


@pytest.fixture
def topic(embedded, names):
    topic = names.topic()
    embedded.create_topic(topic, queues=4)
    return topic


def wanted(topic, begin, end, queue_id=0, broker_name="broker-a"):
    return QueueRange(MessageQueue(topic, broker_name, queue_id), begin, end)


def options(cluster, *, retries=1, request_timeout_s=10.0, namespace=None, tags="*", account=(None, None), **others):
    client = ClientOptions(
        name_server=cluster.name_server,
        retries=retries,
        request_timeout_s=request_timeout_s,
        namespace=namespace,
        access_key=account[0],
        secret_key=account[1],
    )
    return ReadOptions(client=client, **{"selector": parse_subscription("", tags), **others})


def batches(cluster, *ranges, columns=("queueId", "queueOffset"), **others):
    """Return an iterator over the record batches of `ranges`, as a task would get them."""
    return read_ranges(ranges, pa.schema([ALL.field(name) for name in columns]), options(cluster, **others))


def rows(cluster, *ranges, **others):
    return [row for batch in batches(cluster, *ranges, **others) for row in batch.to_pylist()]


def offsets(cluster, *ranges, **others):
    return [row["queueOffset"] for row in rows(cluster, *ranges, **others)]


def pulls(broker):
    """Return queue id, offset and count of each pull the broker has got."""
    fields = [recorded.command.fields for recorded in broker.requests(PULL)]
    return [(int(each["queueId"]), int(each["queueOffset"]), int(each["maxMsgNums"])) for each in fields]


# ---- what is read


def test_every_column_is_what_the_message_says(embedded, broker, topic):
    embedded.send(topic, lambda n: b"body-%d" % n, count=40, tags="A", keys=["k1", "k2"], properties={"p": "ä"})
    found = rows(embedded, *(wanted(topic, 0, 10, queue_id) for queue_id in range(4)), columns=READ_SCHEMA.names)
    by_place = {(row["queueId"], row["queueOffset"]): row for row in found}
    assert len(found) == len(by_place) == 40
    for message in embedded.messages(topic):
        row = by_place[message.queue.queue_id, message.queue_offset]
        assert {**row, "properties": dict(row["properties"])} == {
            "topic": topic, "brokerName": "broker-a", "queueId": message.queue.queue_id,
            "queueOffset": message.queue_offset, "msgId": message.message_id, "tags": "A", "keys": "k1 k2",
            "body": message.body, "properties": message.properties, "flag": 0, "sysFlag": message.sys_flag,
            "reconsumeTimes": 0, "bornTimestamp": message.born_at, "storeTimestamp": message.stored_at,
            "bornHost": message.born_host, "storeHost": message.store_host,
        }  # fmt: skip


def test_a_range_is_read_from_its_begin_to_before_its_end(embedded, broker, topic):
    embedded.send(topic, count=200, queue_id=0)
    assert offsets(embedded, wanted(topic, 37, 150)) == list(range(37, 150))


def test_no_more_is_asked_for_than_the_range_has(embedded, broker, topic):
    embedded.send(topic, count=200, queue_id=0)
    assert offsets(embedded, wanted(topic, 10, 50)) == list(range(10, 50))
    assert pulls(broker) == [(0, 10, 32), (0, 42, 8)]


def test_nothing_is_asked_for_empty_ranges(embedded, broker, topic):
    assert rows(embedded, wanted(topic, 5, 5), wanted(topic, 9, 3, 1)) == []
    assert rows(embedded) == []
    assert broker.requests() == []


def test_rows_of_a_queue_come_in_order_and_batches_have_2048(embedded, broker, topic):
    embedded.send(topic, count=5000, queue_id=0)
    found = list(batches(embedded, wanted(topic, 0, 5000)))
    assert [batch.num_rows for batch in found] == [2048, 2048, 904]
    assert [offset for batch in found for offset in batch["queueOffset"].to_pylist()] == list(range(5000))


def test_batches_of_large_messages_are_smaller(embedded, broker, topic):
    embedded.send(topic, b"x" * 900_000, count=12, queue_id=0)
    found = list(batches(embedded, wanted(topic, 0, 12), columns=("body",)))
    assert [batch.num_rows for batch in found] == [4, 4, 4]
    assert all(body == b"x" * 900_000 for batch in found for body in batch["body"].to_pylist())


def test_bodies_of_4_mib_are_read(embedded, broker, topic):
    body = b"y" * (4 * 1024 * 1024)
    embedded.send(topic, body, count=3, queue_id=0)
    found = list(batches(embedded, wanted(topic, 0, 3), columns=("body",)))
    assert [batch["body"].to_pylist() == [body] for batch in found] == [True] * 3


def test_small_ranges_share_a_batch(embedded, broker, topic):
    embedded.send(topic, count=40)
    found = list(batches(embedded, *(wanted(topic, 0, 10, queue_id) for queue_id in range(4))))
    assert [batch.num_rows for batch in found] == [40]


def test_more_ranges_are_read_than_are_pulled_at_once(embedded, broker, names):
    topic, queues = names.topic(), 3 * read.QUEUES_AT_ONCE
    embedded.create_topic(topic, queues=queues)
    embedded.send(topic, count=2 * queues)
    found = rows(embedded, *(wanted(topic, 0, 2, queue_id) for queue_id in range(queues)))
    assert sorted((row["queueId"], row["queueOffset"]) for row in found) == [
        (queue_id, offset) for queue_id in range(queues) for offset in range(2)
    ]


def test_a_queue_may_be_read_in_several_ranges(embedded, broker, topic):
    embedded.send(topic, count=100, queue_id=0)
    assert sorted(offsets(embedded, wanted(topic, 0, 50), wanted(topic, 50, 100))) == list(range(100))


def test_messages_of_an_inner_batch_count_only_within_the_range(embedded, broker, topic):
    items = encode_batch([BatchItem(b"%d" % number) for number in range(10)])
    record = encode_message(StoredMessage(topic, items, queue_offset=0, sys_flag=0xC0))
    fields = {"nextBeginOffset": "10", "minOffset": "0", "maxOffset": "10", "suggestWhichBrokerId": "0"}
    broker.on(PULL, answer(ResponseCode.SUCCESS, "FOUND", fields, record), times=None)
    assert offsets(embedded, wanted(topic, 3, 8)) == [3, 4, 5, 6, 7]


# ---- pulls ahead


def test_several_pulls_of_each_queue_are_under_way(embedded, broker, topic):
    embedded.send(topic, count=1600)
    gate = Gate()
    broker.on(PULL, gate, times=None)
    found = batches(embedded, *(wanted(topic, 0, 400, queue_id) for queue_id in range(4)), pulls_in_flight=3)
    got = list[pa.RecordBatch]()
    task = threading.Thread(target=lambda: got.extend(found))
    task.start()
    waiting = gate.wait_held(12, WAIT_S)
    places = sorted((int(each.fields["queueId"]), int(each.fields["queueOffset"])) for each in waiting)
    assert places == [(queue_id, offset) for queue_id in range(4) for offset in (0, 32, 64)]
    gate.open()
    task.join(WAIT_S)
    assert sum(batch.num_rows for batch in got) == 1600


def test_one_pull_at_a_time_if_the_user_wants_that(embedded, broker, topic):
    embedded.send(topic, count=200, queue_id=0)
    assert offsets(embedded, wanted(topic, 0, 200), pulls_in_flight=1, pull_batch_size=50) == list(range(200))
    asked = [offset for _, offset, _ in pulls(broker)]
    assert asked == sorted(asked)


def test_answers_shorter_than_expected_leave_no_holes(embedded, broker, topic):
    embedded.send(topic, count=500, queue_id=0)
    broker.count_as_on_disk()
    try:
        assert offsets(embedded, wanted(topic, 3, 490)) == list(range(3, 490))
    finally:
        broker.count_as_on_disk(False)


def test_answers_of_changing_length_leave_no_holes(embedded, broker, topic):
    embedded.send(topic, lambda n: b"z" * (60_000 if n % 50 < 20 else 10), count=400, queue_id=0)
    assert offsets(embedded, wanted(topic, 0, 400)) == list(range(400))


def test_late_answers_are_put_in_order(embedded, broker, topic):
    embedded.send(topic, count=320, queue_id=0)
    broker.on(PULL, delay(0.2), times=1)
    broker.on(PULL, delay(0.1), times=1)
    assert offsets(embedded, wanted(topic, 0, 320)) == list(range(320))


# ---- filters


def test_only_wanted_tags_are_read(embedded, broker, topic):
    for number in range(300):
        embedded.send(topic, tags="A" if 100 <= number < 140 else "B", queue_id=0)
    assert offsets(embedded, wanted(topic, 0, 300), tags="A") == list(range(100, 140))
    assert offsets(embedded, wanted(topic, 120, 130), tags="A || C") == list(range(120, 130))
    assert offsets(embedded, wanted(topic, 0, 90), tags="A") == []


def test_tags_are_compared_by_their_text_too(embedded, broker, topic):
    for tag in ("AaAa", "BBBB", "AaBB"):
        embedded.send(topic, tags=tag, queue_id=0)
    assert offsets(embedded, wanted(topic, 0, 3), tags="BBBB") == [1]


@pytest.mark.versions("5.5.0", "4.9.7")
def test_tags_and_ranges_on_every_broker(cluster, names):
    topic = names.topic()
    cluster.create_topic(topic, queues=2)
    for number in range(100):
        cluster.send(topic, b"%d" % number, tags="A" if number % 3 else "B", queue_id=number % 2)
    cluster.wait_until(lambda: cluster.broker("broker-a").max_offset(topic, 1) == 50)
    found = rows(cluster, wanted(topic, 0, 50), wanted(topic, 10, 40, 1), columns=("queueId", "queueOffset", "body"))
    assert sorted((row["queueId"], row["queueOffset"]) for row in found) == [
        *((0, offset) for offset in range(50)), *((1, offset) for offset in range(10, 40)),
    ]  # fmt: skip
    assert all(int(row["body"]) == 2 * row["queueOffset"] + row["queueId"] for row in found)
    tagged = offsets(cluster, wanted(topic, 0, 50), tags="B")
    assert tagged == [offset for offset in range(50) if 2 * offset % 3 == 0]


@pytest.mark.versions("5.5.0", "4.9.7")
def test_sql_is_the_brokers_business(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=1)
    for number in range(20):
        real_cluster.send(topic, properties={"price": str(number)}, queue_id=0)
    selector = Subscription("", "price > 16 OR price = 3", frozenset(), "SQL92")
    real_cluster.wait_until(lambda: real_cluster.broker("broker-a").max_offset(topic, 0) == 20)
    assert offsets(real_cluster, wanted(topic, 0, 20), selector=selector) == [3, 17, 18, 19]


# ---- data that is lost


def test_expired_messages_are_an_error_that_says_what_is_there(embedded, broker, topic):
    embedded.send(topic, count=100, queue_id=0)
    broker.delete_before(topic, 0, 30)
    with pytest.raises(DataLoss) as raised:
        offsets(embedded, wanted(topic, 10, 80))
    assert str(raised.value) == (
        f"data loss in queue {topic}/broker-a/0: wanted offsets from 10 up to 80, available 30 up to 100; "
        "offsets 10 up to 30 are gone. With the option failOnDataLoss=false a query goes on with what there is"
    )
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.slow("the pauses between gaps are 3 s together")
def test_a_broker_that_leads_from_gap_to_gap_is_followed_slower(embedded, broker, topic, caplog):
    """Each gap is a line of the log, and a pull."""
    embedded.create_topic(topic, queues=1)
    embedded.send(topic, b"x", count=10)

    def one_further(exchange):
        further = str(int(exchange.request.fields["queueOffset"]) + 1)
        fields = {"nextBeginOffset": further, "minOffset": further, "maxOffset": "10", "suggestWhichBrokerId": "0"}
        answer(ResponseCode.PULL_OFFSET_MOVED, fields=fields)(exchange)

    broker.on(PULL, one_further, times=5)
    began = time.monotonic()
    found = offsets(embedded, wanted(topic, 0, 10), fail_on_data_loss=False, pulls_in_flight=1)
    assert found == list(range(5, 10))
    assert time.monotonic() - began > 0.75 * (0.2 + 0.4 + 0.8 + 1.6)
    assert caplog.text.count("are gone") == 5


def test_expired_messages_are_skipped_if_the_user_wants_that(embedded, broker, topic, caplog):
    embedded.send(topic, count=100, queue_id=0)
    embedded.send(topic, count=5, queue_id=1)
    broker.delete_before(topic, 0, 30)
    broker.delete_before(topic, 1, 5)
    ranges = wanted(topic, 10, 80), wanted(topic, 0, 5, 1)
    with caplog.at_level(logging.WARNING, "pyrocket_consumer.spark"):
        assert offsets(embedded, *ranges, fail_on_data_loss=False) == list(range(30, 80))
    assert sum("data loss in queue" in record.getMessage() for record in caplog.records) == 2


def test_messages_that_expire_while_the_range_is_read_are_lost(embedded, broker, topic):
    embedded.send(topic, count=100, queue_id=0)
    expired = answer(21, "OFFSET_TOO_SMALL", place(90, 90, 100))
    broker.on(PULL, expired, when=lambda command: command.fields["queueOffset"] == "64")
    with pytest.raises(DataLoss, match="from 0 up to 100, available 90 up to 100; offsets 64 up to 90 are gone"):
        offsets(embedded, wanted(topic, 0, 100), pulls_in_flight=1)


def place(next_offset, low, high, suggested=0):
    return {
        "nextBeginOffset": str(next_offset), "minOffset": str(low), "maxOffset": str(high),
        "suggestWhichBrokerId": str(suggested),
    }  # fmt: skip


def test_messages_behind_the_end_are_lost_after_asking_again(embedded, broker, topic):
    embedded.send(topic, count=50, queue_id=0)
    soon = {"request_timeout_s": 0.3, "retries": 20}
    with pytest.raises(DataLoss, match="from 10 up to 80, available 0 up to 50; offsets 50 up to 80 are gone"):
        offsets(embedded, wanted(topic, 10, 80), request_timeout_s=1.0, retries=20)  # time for several questions
    assert [offset for _, offset, _ in pulls(broker)].count(50) >= 3
    assert offsets(embedded, wanted(topic, 10, 80), fail_on_data_loss=False, **soon) == list(range(10, 50))
    with pytest.raises(DataLoss, match="offsets 70 up to 80 are gone"):
        offsets(embedded, wanted(topic, 70, 80), **soon)


def test_a_broker_that_knows_its_queues_late_loses_nothing(embedded, broker, topic):
    embedded.send(topic, count=50, queue_id=0)
    broker.on(PULL, answer(21, "NO_MESSAGE_IN_QUEUE", place(0, 0, 0)), times=2)
    assert offsets(embedded, wanted(topic, 10, 40), retries=3) == list(range(10, 40))


def test_messages_that_are_just_being_deleted_are_lost(embedded, broker, topic):
    embedded.send(topic, count=50, queue_id=0)
    broker.on(PULL, answer(20, "MESSAGE_WAS_REMOVING", place(20, 0, 50)), times=None)
    with pytest.raises(DataLoss, match="offsets 0 up to 20 are gone"):
        offsets(embedded, wanted(topic, 0, 50))


def test_a_deleted_topic_is_lost(embedded, broker, topic, caplog):
    embedded.send(topic, count=10, queue_id=0)
    embedded.delete_topic(topic)
    soon = {"request_timeout_s": 0.3, "retries": 20}
    with pytest.raises(DataLoss, match="the queue is gone"):
        offsets(embedded, wanted(topic, 0, 10), **soon)
    assert offsets(embedded, wanted(topic, 0, 10), fail_on_data_loss=False, **soon) == []


@pytest.mark.versions("5.5.0", "4.9.7")
def test_a_queue_that_there_is_not_is_lost_on_every_broker(cluster, names):
    topic = names.topic()
    cluster.create_topic(topic, queues=1)
    with pytest.raises(DataLoss, match="the queue is gone"):
        offsets(cluster, wanted(topic, 0, 10, queue_id=7), retries=1)


def test_a_reset_of_the_group_moves_no_query(embedded, broker, topic, caplog):
    embedded.send(topic, count=100, queue_id=0)
    broker.on(PULL, answer(21, "OFFSET_RESET", place(90, 0, 100)), times=1)
    with caplog.at_level(logging.WARNING, "pyrocket_consumer.spark"):
        assert offsets(embedded, wanted(topic, 5, 100)) == list(range(5, 100))
    assert any("was reset" in record.getMessage() for record in caplog.records)


# ---- trouble


@pytest.mark.parametrize(
    "fault",
    [close_connection, cut_after(40), answer(ResponseCode.SYSTEM_BUSY, "busy"), answer(1, "store error")],
    ids=["closed", "cut", "busy", "error"],
)
def test_what_fails_once_is_read_all_the_same(embedded, broker, topic, fault):
    embedded.send(topic, count=400, queue_id=0)
    broker.on(PULL, fault, times=1, when=lambda command: command.fields["queueOffset"] == "64")
    assert offsets(embedded, wanted(topic, 0, 400)) == list(range(400))


@pytest.mark.parametrize("fault", [drop, drop_answer])
def test_an_answer_that_does_not_come_is_asked_for_again(embedded, broker, topic, fault):
    embedded.send(topic, count=400, queue_id=0)
    broker.on(PULL, fault, times=1, when=lambda command: command.fields["queueOffset"] == "96")
    assert offsets(embedded, wanted(topic, 0, 400), request_timeout_s=0.3, retries=5) == list(range(400))


@pytest.mark.slow("the pauses between tries grow")
def test_a_task_outlives_the_restart_of_a_broker(embedded, broker, topic):
    embedded.send(topic, count=6000, queue_id=0)
    found = batches(embedded, wanted(topic, 0, 6000), retries=None, pulls_in_flight=1)
    first = next(found).num_rows
    broker.stop()
    name_server = embedded.name_server_nodes[0]
    name_server.forget_requests()
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(lambda: sum(batch.num_rows for batch in found))
        asked = RequestCode.GET_ROUTEINFO_BY_TOPIC
        embedded.wait_until(lambda: len(name_server.requests(asked)) >= 7 or rest.done(), WAIT_S)
        broker.start()
        assert first + rest.result(WAIT_S) == 6000


@pytest.mark.timeout(60)
def test_trouble_beyond_the_patience_of_a_task_fails_it(embedded, broker, topic):
    embedded.send(topic, count=40, queue_id=0)
    broker.on(PULL, answer(ResponseCode.SYSTEM_BUSY, "busy"), times=None)
    with pytest.raises(ReadFailed, match=r"failed after \d tries: .*busy"):
        offsets(embedded, wanted(topic, 0, 40), retries=None, read_timeout_s=1.0)
    assert len(pulls(broker)) >= 3


def test_a_broker_that_never_answers_fails_the_task(embedded, broker, topic):
    embedded.send(topic, count=40, queue_id=0)
    broker.on(PULL, drop, times=None)
    with pytest.raises(ReadFailed) as raised:
        offsets(embedded, wanted(topic, 0, 40), request_timeout_s=0.1, retries=2)
    assert str(raised.value) == (
        f"reading {topic}/broker-a/0[0, 40) failed after 3 tries: "
        f"PULL_MESSAGE was not answered by {broker.address} within 0.1 s"
    )
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_broker_that_is_away_fails_the_task(embedded, broker, topic):
    embedded.send(topic, count=40, queue_id=0)
    broker.stop(keep_route=True)
    try:
        with pytest.raises(ReadFailed, match="cannot connect to"):
            offsets(embedded, wanted(topic, 0, 40), fail_on_data_loss=False)
        embedded.unregister(broker)
        with pytest.raises(ReadFailed, match="no route for topic"):
            offsets(embedded, wanted(topic, 0, 40), fail_on_data_loss=False, request_timeout_s=9)  # another worker
    finally:
        broker.start()
    assert offsets(embedded, wanted(topic, 0, 40)) == list(range(40))


def test_a_refusal_that_will_not_change_fails_the_task_at_once(embedded, broker, topic):
    broker.on(PULL, answer(ResponseCode.NO_PERMISSION, "the group may not"), times=None)
    with pytest.raises(ReadFailed, match=r"after 1 try: .* NO_PERMISSION \(16\): the group may not"):
        offsets(embedded, wanted(topic, 0, 40), retries=9)


def test_name_servers_that_are_away_fail_the_task(embedded, names):
    with EmbeddedCluster() as other:
        other.stop_name_server()
        with pytest.raises(ReadFailed, match=r"reading from 127.0.0.1:\d+ failed after 2 tries: cannot connect"):
            offsets(other, wanted("t", 0, 1))


def test_a_master_that_is_away_is_replaced_by_its_replica(names):
    topic = names.topic()
    with EmbeddedCluster(slaves=1) as cluster:
        cluster.create_topic(topic, queues=1)
        cluster.send(topic, count=400, queue_id=0)
        master, slave = cluster.nodes
        found = batches(cluster, wanted(topic, 0, 400), pulls_in_flight=1)
        master.on(PULL, close_connection, times=None, when=lambda command: int(command.fields["queueOffset"]) >= 96)
        assert [row["queueOffset"] for batch in found for row in batch.to_pylist()] == list(range(400))
        assert slave.requests(PULL)
        master.stop()
        assert offsets(cluster, wanted(topic, 0, 400), retries=3) == list(range(400))


def test_a_suggested_replica_is_pulled_from(names):
    topic = names.topic()
    with EmbeddedCluster(slaves=1) as cluster:
        cluster.create_topic(topic, queues=1)
        cluster.send(topic, count=200, queue_id=0)
        master, slave = cluster.nodes
        slave.pause_replication()
        cluster.send(topic, count=100, queue_id=0)
        master.suggest_broker(1)
        slave.suggest_broker(1)
        assert offsets(cluster, wanted(topic, 0, 300), retries=3, pulls_in_flight=2) == list(range(300))
        assert slave.requests(PULL)


def test_a_damaged_record_fails_the_task_and_names_the_place(embedded, broker, topic):
    embedded.send(topic, count=40, queue_id=0)

    def damage(found):
        found.body = found.body[:-1]
        return found

    broker.on(PULL, rewrite(damage), times=None)
    with pytest.raises(ReadFailed, match=rf"{topic}/broker-a/0\[0, 32\).* a record is damaged: "):
        offsets(embedded, wanted(topic, 0, 40))


def damaged(broker, topic, count, *places):
    """Have pulls answered with messages of which some have bodies that cannot be unpacked."""
    bodies = [(b"no zlib", SysFlag.COMPRESSED) if number in places else (b"fine", 0) for number in range(count)]
    records = b"".join(
        encode_message(StoredMessage(topic, body, queue_offset=number, sys_flag=flag))
        for number, (body, flag) in enumerate(bodies)
    )
    fields = place(count, 0, count)
    broker.on(PULL, answer(ResponseCode.SUCCESS, "FOUND", fields, records), times=None)


@pytest.mark.parametrize("count", [8, 100])  # row by row, and column by column
def test_a_damaged_body_fails_the_task_and_names_its_offset(embedded, broker, topic, count):
    damaged(broker, topic, count, 5, 7)
    text = rf"reading {topic}/broker-a/0 at offset 5 failed .*its body cannot be unpacked: .*damagedBodies=skip"
    with pytest.raises(ReadFailed, match=text):
        rows(embedded, wanted(topic, 0, count), columns=("queueOffset", "body"))
    assert offsets(embedded, wanted(topic, 0, count)) == list(range(count))  # no body is unpacked that nobody wants


@pytest.mark.parametrize("count", [8, 100])
def test_damaged_bodies_are_left_out_if_wanted(embedded, broker, topic, count, caplog):
    damaged(broker, topic, count, 5, 7)
    with caplog.at_level(logging.WARNING, "pyrocket_consumer.spark"):
        skip = {"columns": ("queueOffset", "body"), "damaged_bodies": DamagedBodies.SKIP}
        found = rows(embedded, wanted(topic, 0, count), **skip)
    assert [row["queueOffset"] for row in found] == [each for each in range(count) if each not in (5, 7)]
    assert {row["body"] for row in found} == {b"fine"}
    (record,) = caplog.records
    assert f"2 damaged bodies were left out: {topic}/broker-a/0 at offset 5 (" in record.getMessage()


@pytest.mark.parametrize("count", [8, 100])
def test_damaged_bodies_are_given_as_stored_if_wanted(embedded, broker, topic, count, caplog):
    damaged(broker, topic, count, 5)
    with caplog.at_level(logging.WARNING, "pyrocket_consumer.spark"):
        raw = {"columns": ("queueOffset", "sysFlag", "body"), "damaged_bodies": DamagedBodies.RAW}
        found = rows(embedded, wanted(topic, 0, count), **raw)
    assert [row["queueOffset"] for row in found] == list(range(count))
    assert (found[5]["body"], found[5]["sysFlag"]) == (b"no zlib", SysFlag.COMPRESSED)
    assert f"1 damaged bodies were given as stored: {topic}/broker-a/0 at offset 5 (" in caplog.text


@pytest.mark.parametrize("what", DamagedBodies)
def test_a_damaged_inner_batch_counts_as_one_message(embedded, broker, topic, what):
    flag = 0xC0 | SysFlag.COMPRESSED
    record = encode_message(StoredMessage(topic, b"no zlib", queue_offset=0, sys_flag=flag))
    fine = encode_message(StoredMessage(topic, b"fine", queue_offset=10))
    broker.on(PULL, answer(ResponseCode.SUCCESS, "FOUND", place(11, 0, 11), record + fine), times=None)
    options = {"columns": ("queueOffset", "body"), "damaged_bodies": what}
    if what is DamagedBodies.FAIL:
        with pytest.raises(ReadFailed, match="at offset 0 failed"):
            rows(embedded, wanted(topic, 0, 11), **options)
    else:
        found = [(row["queueOffset"], row["body"]) for row in rows(embedded, wanted(topic, 0, 11), **options)]
        assert found == [*([(0, b"no zlib")] if what is DamagedBodies.RAW else []), (10, b"fine")]


MIB = 1 << 20


def found_once(broker, topic, *stored):
    """Have pulls answered with these messages."""
    end = stored[-1].queue_offset + 1
    records = b"".join(map(encode_message, stored))
    broker.on(PULL, answer(ResponseCode.SUCCESS, "FOUND", place(end, 0, end), records), times=None)
    return end


@pytest.mark.parametrize("count", [8, 100])
def test_a_body_larger_than_allowed_is_damaged(embedded, broker, topic, count):
    body, flag = compress(bytes(MIB + 1))
    stored = [StoredMessage(topic, body, queue_offset=each, sys_flag=flag) for each in range(count)]
    end = found_once(broker, topic, *stored)
    with pytest.raises(ReadFailed, match=r"offset 0 failed.*holds more than 1048576; maxBodyBytes allows more, or"):
        rows(embedded, wanted(topic, 0, end), columns=("body",), max_body_bytes=MIB)
    found = rows(embedded, wanted(topic, 0, end), columns=("body",), max_body_bytes=MIB + 1)
    assert [len(row["body"]) for row in found] == [MIB + 1] * count


@pytest.mark.slow("unpacks many megabytes")
def test_packed_bodies_of_few_messages_are_not_held_together(embedded, broker, topic):
    """Thirty messages are read row by row; each row's body is gone with its batch."""
    body, flag = compress(bytes(8 * MIB))
    stored = [StoredMessage(topic, body, queue_offset=each, sys_flag=flag) for each in range(30)]
    end = found_once(broker, topic, *stored)
    sizes = []
    tracemalloc.start()
    try:
        for batch in batches(embedded, wanted(topic, 0, end), columns=("body",)):
            sizes += [len(each.as_buffer()) for each in batch.column("body")]
            del batch
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes == [8 * MIB] * 30
    assert peak < 75 * MIB


def test_an_inner_batch_that_no_broker_could_count_is_damaged(embedded, broker, topic):
    body, flag = compress(encode_batch([BatchItem(b"")]) * 600_000)
    stored = StoredMessage(topic, body, queue_offset=0, sys_flag=flag | 0xC0)
    end = found_once(broker, topic, stored, StoredMessage(topic, b"next", queue_offset=600_000))
    with pytest.raises(ReadFailed, match="offset 0 failed.*inner batch holds more than 32767 messages"):
        rows(embedded, wanted(topic, 0, end))
    found = rows(embedded, wanted(topic, 0, end), columns=("queueOffset",), damaged_bodies=DamagedBodies.SKIP)
    assert [row["queueOffset"] for row in found] == [600_000]


def test_large_inner_batches_come_in_several_batches_of_rows(embedded, broker, topic):
    body, flag = compress(encode_batch([BatchItem(b"x")]) * 30_000)
    stored = [StoredMessage(topic, body, queue_offset=first, sys_flag=flag | 0xC0) for first in (0, 30_000)]
    broker.on(
        PULL,
        answer(ResponseCode.SUCCESS, "FOUND", place(60_000, 0, 60_000), b"".join(map(encode_message, stored))),
        times=None,
    )
    found = [batch.num_rows for batch in batches(embedded, wanted(topic, 0, 60_000))]
    assert sum(found) == 60_000
    assert max(found) <= 8192


def test_an_answer_with_too_many_records_fails_the_task(embedded, broker, topic):
    record = encode_message(StoredMessage(topic, b""))
    broker.on(PULL, answer(ResponseCode.SUCCESS, "FOUND", place(32, 0, 32), record * 50_000), times=None)
    with pytest.raises(ReadFailed, match="more than 1024 records"):
        rows(embedded, wanted(topic, 0, 32))


# ---- how it is read


def test_no_more_is_asked_for_than_the_system_can_hold(embedded, broker, topic):
    embedded.send(topic, b"x" * 1_000_000, count=100, queue_id=0)
    found = batches(embedded, wanted(topic, 0, 100), columns=("queueOffset", "body"), pulls_in_flight=200)
    taken = [offset for batch in islice(found, 5) for offset in batch["queueOffset"].to_pylist()]
    most = len(taken) + (read.MOST_AHEAD_BYTES + read.BATCH_BYTES) // 1_000_000 + 4
    broker.wait_for(PULL, len(taken) + 20, WAIT_S)
    time.sleep(0.3)  # nothing is to happen, so there is nothing to wait for
    assert len(taken) + 20 <= len(pulls(broker)) <= most
    taken += [offset for batch in found for offset in batch["queueOffset"].to_pylist()]
    assert taken == list(range(100))


def test_a_reader_that_is_closed_early_pulls_no_more(embedded, broker, topic):
    embedded.send(topic, b"x" * 100_000, count=2000)
    others = set(broker.connections)
    found = batches(embedded, *(wanted(topic, 0, 500, queue_id) for queue_id in range(4)))
    next(found)
    used = set(broker.connections) - others
    found.close()
    embedded.wait_until(lambda: not used & set(broker.connections))  # answers were on their way, so it is closed
    broker.forget_requests()
    assert offsets(embedded, wanted(topic, 20, 30, 3)) == list(range(20, 30))
    assert {queue_id for queue_id, offset, _ in pulls(broker) if offset != 20} <= {3}
    assert {offset for _, offset, _ in pulls(broker)} <= set(range(20, 30))


def test_tasks_of_a_worker_share_their_connection(embedded, broker, topic):
    embedded.send(topic, count=40)
    before = set(broker.connections)
    for queue_id in range(4):
        assert len(offsets(embedded, wanted(topic, 0, 10, queue_id))) == 10
    assert len(set(broker.connections) - before) == 1


def test_a_connection_that_was_lost_between_tasks_is_made_anew(embedded, broker, topic):
    embedded.send(topic, count=40, queue_id=0)
    assert len(offsets(embedded, wanted(topic, 0, 10))) == 10
    broker.close_connections()
    assert len(offsets(embedded, wanted(topic, 0, 10))) == 10


def test_the_namespace_is_put_before_names_on_the_wire_only(embedded, broker, names):
    topic = names.topic()
    embedded.create_topic(f"space%{topic}", queues=1)
    embedded.send(f"space%{topic}", count=3, queue_id=0)
    found = rows(embedded, wanted(topic, 0, 3), namespace="space", group="app", columns=("topic", "queueOffset"))
    assert found == [{"topic": topic, "queueOffset": offset} for offset in range(3)]
    fields = broker.requests(PULL)[0].command.fields
    assert (fields["topic"], fields["consumerGroup"]) == (f"space%{topic}", "space%app")


def test_requests_are_signed(names):
    topic, account = names.topic(), ("key", "secret-key")
    with EmbeddedCluster(account=account) as cluster:
        cluster.create_topic(topic, queues=1)
        cluster.send(topic, count=100, queue_id=0)
        assert offsets(cluster, wanted(topic, 0, 100), account=account) == list(range(100))
        with pytest.raises(ReadFailed, match="after 1 try"):
            offsets(cluster, wanted(topic, 0, 100), account=("key", "another"))


def test_wrong_settings_are_told_at_once(embedded):
    wrong = ReadOptions(client=ClientOptions(name_server="nowhere", retries=9))
    with pytest.raises(ConfigError, match="'nowhere' is not host:port"):
        list(read_ranges([wanted("t", 0, 1)], ALL, wrong))
