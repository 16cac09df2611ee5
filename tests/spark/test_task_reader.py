"""The messages that a task reads, without Spark."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pyarrow as pa
import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, SysFlag
from pyrocket_consumer.protocol.message import BatchItem, StoredMessage, compress, encode_batch, encode_message
from pyrocket_consumer.protocol.subscription import parse_subscription
from pyrocket_consumer.spark import range_puller, task_reader
from pyrocket_consumer.spark.data_source import READ_SCHEMA
from pyrocket_consumer.spark.failures import DataLoss, ReadFailed
from pyrocket_consumer.spark.offsets import QueueRange
from pyrocket_consumer.spark.options import ClientOptions, DamagedBodies, ReadOptions
from pyrocket_consumer.spark.task_reader import arrow_schema, read_ranges
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
from tests.for_each import for_each

pytestmark = pytest.mark.live

PULL = RequestCode.PULL_MESSAGE
ALL = arrow_schema(READ_SCHEMA)
WAIT_S = 30.0
MIB = 1 << 20

ORDERS = {"queues": 4, "count": 0}


@pytest.fixture
def broker(embedded):
    return embedded.broker("broker-a")


def wanted(begin, end, queue_id=0, topic="orders"):
    return QueueRange(MessageQueue(topic, "broker-a", queue_id), begin, end)


def options(cluster, *, tags="*", account=(None, None), retries=1, request_timeout_s=10.0, namespace=None, **others):
    access_key, secret_key = account
    client = ClientOptions(
        name_server=cluster.name_server,
        retries=retries,
        request_timeout_s=request_timeout_s,
        namespace=namespace,
        access_key=access_key,
        secret_key=secret_key,
    )
    return ReadOptions(client=client, **{"selector": parse_subscription("", tags), **others})


def batches(cluster, *ranges, columns=("queueId", "queueOffset"), **others):
    """Return an iterator over the record batches of `ranges`, as in a task."""
    return read_ranges(ranges, pa.schema([ALL.field(name) for name in columns]), options(cluster, **others))


def rows(cluster, *ranges, **others):
    return [row for batch in batches(cluster, *ranges, **others) for row in batch.to_pylist()]


def offsets(cluster, *ranges, **others):
    return [row["queueOffset"] for row in rows(cluster, *ranges, **others)]


def pulls(broker):
    """Return queue id, offset and count of each pull that the broker received."""
    fields = [recorded.command.fields for recorded in broker.requests(PULL)]
    return [(int(each["queueId"]), int(each["queueOffset"]), int(each["maxMsgNums"])) for each in fields]


def place(next_offset, low, high):
    numbers = {"nextBeginOffset": next_offset, "minOffset": low, "maxOffset": high, "suggestWhichBrokerId": 0}
    return {name: str(number) for name, number in numbers.items()}


def stub_pulls(broker, *stored, end=None):
    """Make pulls return these messages; return the offset after the last one."""
    end = stored[-1].queue_offset + 1 if end is None else end
    records = b"".join(map(encode_message, stored))
    broker.on(PULL, answer(ResponseCode.SUCCESS, "FOUND", place(end, 0, end), records), times=None)
    return end


# ---- reads


def test_every_column_has_its_part_of_the_message(embedded, broker):
    embedded.send("orders", lambda n: b"body-%d" % n, count=40, tags="A", keys=["k1", "k2"], properties={"p": "ä"})
    found = rows(embedded, *(wanted(0, 10, queue_id) for queue_id in range(4)), columns=READ_SCHEMA.names)
    by_offset = {(row["queueId"], row["queueOffset"]): row for row in found}
    assert len(found) == len(by_offset) == 40
    for message in embedded.messages("orders"):
        row = by_offset[message.queue.queue_id, message.queue_offset]
        assert {**row, "properties": dict(row["properties"])} == {
            "topic": "orders",
            "brokerName": "broker-a",
            "queueId": message.queue.queue_id,
            "queueOffset": message.queue_offset,
            "msgId": message.message_id,
            "tags": "A",
            "keys": "k1 k2",
            "body": message.body,
            "properties": message.properties,
            "flag": 0,
            "sysFlag": message.sys_flag,
            "reconsumeTimes": 0,
            "bornTimestamp": message.born_at,
            "storeTimestamp": message.stored_at,
            "bornHost": message.born_host,
            "storeHost": message.store_host,
        }


def test_a_range_is_read_without_its_end(embedded, broker):
    embedded.send("orders", count=200, queue_id=0)
    assert offsets(embedded, wanted(37, 150)) == list(range(37, 150))
    broker.forget_requests()
    assert offsets(embedded, wanted(10, 50)) == list(range(10, 50))
    assert pulls(broker) == [(0, 10, 32), (0, 42, 8)], "no more is asked for than the range has"


def test_empty_ranges_send_no_request(embedded, broker):
    assert rows(embedded, wanted(5, 5), wanted(9, 3, 1)) == []
    assert rows(embedded) == []
    assert broker.requests() == []


@for_each(
    "body, count, queues, rows_of_batches",
    [
        (b"x", 5000, 1, [2048, 2048, 904]),
        (b"x" * 900_000, 12, 1, [4, 4, 4]),
        (b"y" * (4 * MIB), 3, 1, [1, 1, 1]),
        (b"x", 40, 4, [40]),
    ],
    ids=["2048 rows are a batch", "of large messages fewer", "of the largest one", "small ranges share a batch"],
)
def test_rows_come_in_order_and_in_batches(embedded, names, body, count, queues, rows_of_batches):
    topic, each = names.topic(), count // queues
    embedded.create_topic(topic, queues=queues)
    embedded.send(topic, body, count=count)
    ranges = [wanted(0, each, queue_id, topic) for queue_id in range(queues)]
    found = list(batches(embedded, *ranges, columns=("queueId", "queueOffset", "body")))
    assert [batch.num_rows for batch in found] == rows_of_batches
    assert all(read == body for batch in found for read in batch["body"].to_pylist())
    for queue_id in range(queues):
        of_queue = [row for batch in found for row in batch.to_pylist() if row["queueId"] == queue_id]
        assert [row["queueOffset"] for row in of_queue] == list(range(each))


def test_more_ranges_are_read_than_are_pulled_at_once(embedded):
    queues = 3 * task_reader.MAX_CONCURRENT_QUEUES
    embedded.create_topic("many", queues=queues)
    embedded.send("many", count=2 * queues)
    found = rows(embedded, *(wanted(0, 2, queue_id, "many") for queue_id in range(queues)))
    assert sorted((row["queueId"], row["queueOffset"]) for row in found) == [divmod(n, 2) for n in range(2 * queues)]


def test_a_queue_may_be_read_in_several_ranges(embedded, broker):
    embedded.send("orders", count=100, queue_id=0)
    assert sorted(offsets(embedded, wanted(0, 50), wanted(50, 100))) == list(range(100))


def test_messages_of_an_inner_batch_count_only_within_the_range(embedded, broker):
    items = encode_batch([BatchItem(b"%d" % number) for number in range(10)])
    stub_pulls(broker, StoredMessage("orders", items, queue_offset=0, sys_flag=0xC0), end=10)
    assert offsets(embedded, wanted(3, 8)) == [3, 4, 5, 6, 7]


# ---- pulls ahead


def test_several_pulls_of_each_queue_are_in_flight(embedded, broker):
    embedded.send("orders", count=1600)
    gate = Gate()
    broker.on(PULL, gate, times=None)
    found = batches(embedded, *(wanted(0, 400, queue_id) for queue_id in range(4)), pulls_in_flight=3)
    with ThreadPoolExecutor() as pool:
        task = pool.submit(lambda: sum(batch.num_rows for batch in found))
        waiting = gate.wait_held(12, WAIT_S)
        places = sorted((int(each.fields["queueId"]), int(each.fields["queueOffset"])) for each in waiting)
        assert places == [(queue_id, offset) for queue_id in range(4) for offset in (0, 32, 64)]
        gate.open()
        assert task.result(WAIT_S) == 1600


def test_pulls_in_flight_limits_the_pulls(embedded, broker):
    embedded.send("orders", count=200, queue_id=0)
    assert offsets(embedded, wanted(0, 200), pulls_in_flight=1, pull_batch_size=50) == list(range(200))
    pulled_offsets = [offset for _, offset, _ in pulls(broker)]
    assert pulled_offsets == sorted(pulled_offsets)


def test_responses_of_any_length_leave_no_gaps(embedded, broker):
    embedded.send("orders", lambda n: b"z" * (60_000 if n % 50 < 20 else 10), count=400, queue_id=0)
    assert offsets(embedded, wanted(0, 400)) == list(range(400))
    embedded.send("orders", count=500, queue_id=1)
    broker.count_as_on_disk()
    assert offsets(embedded, wanted(3, 490, 1)) == list(range(3, 490)), "they are shorter than expected"


def test_late_responses_are_put_in_order(embedded, broker):
    embedded.send("orders", count=320, queue_id=0)
    broker.on(PULL, delay(0.2), times=1)
    broker.on(PULL, delay(0.1), times=1)
    assert offsets(embedded, wanted(0, 320)) == list(range(320))


# ---- filters


def test_only_wanted_tags_are_read(embedded, broker):
    for number in range(300):
        embedded.send("orders", tags="A" if 100 <= number < 140 else "B", queue_id=0)
    assert offsets(embedded, wanted(0, 300), tags="A") == list(range(100, 140))
    assert offsets(embedded, wanted(120, 130), tags="A || C") == list(range(120, 130))
    assert offsets(embedded, wanted(0, 90), tags="A") == []


def test_tags_are_compared_by_their_text_too(embedded, broker):
    for tag in ("AaAa", "BBBB", "AaBB"):
        embedded.send("orders", tags=tag, queue_id=0)
    assert offsets(embedded, wanted(0, 3), tags="BBBB") == [1]


@pytest.mark.versions("5.5.0", "4.9.7")
def test_tags_and_ranges_on_every_broker(cluster, names):
    topic = names.topic()
    cluster.create_topic(topic, queues=2)
    for number in range(100):
        cluster.send(topic, b"%d" % number, tags="A" if number % 3 else "B", queue_id=number % 2)
    cluster.wait_until(lambda: cluster.broker("broker-a").max_offset(topic, 1) == 50)
    ranges = wanted(0, 50, topic=topic), wanted(10, 40, 1, topic)
    found = rows(cluster, *ranges, columns=("queueId", "queueOffset", "body"))
    places = [(0, offset) for offset in range(50)] + [(1, offset) for offset in range(10, 40)]
    assert sorted((row["queueId"], row["queueOffset"]) for row in found) == places
    assert all(int(row["body"]) == 2 * row["queueOffset"] + row["queueId"] for row in found)
    tagged = offsets(cluster, wanted(0, 50, topic=topic), tags="B")
    assert tagged == [offset for offset in range(50) if 2 * offset % 3 == 0]


@pytest.mark.versions("5.5.0", "4.9.7")
def test_the_broker_applies_an_sql_filter(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=1)
    for number in range(20):
        real_cluster.send(topic, properties={"price": str(number)}, queue_id=0)
    selector = Subscription("", "price > 16 OR price = 3", frozenset(), "SQL92")
    real_cluster.wait_until(lambda: real_cluster.broker("broker-a").max_offset(topic, 0) == 20)
    assert offsets(real_cluster, wanted(0, 20, topic=topic), selector=selector) == [3, 17, 18, 19]


# ---- data loss


def test_expired_messages_are_an_error_or_skipped(embedded, broker, caplog):
    for queue_id, count, expired in ((0, 100, 30), (1, 5, 5)):
        embedded.send("orders", count=count, queue_id=queue_id)
        broker.delete_before("orders", queue_id, expired)
    with pytest.raises(DataLoss) as raised:
        offsets(embedded, wanted(10, 80))
    assert str(raised.value) == (
        "data loss in queue orders/broker-a/0: wanted offsets from 10 up to 80, available 30 up to 100; "
        "offsets 10 up to 30 are gone. "
        "With the option failOnDataLoss=false a query continues with the remaining messages"
    )
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert offsets(embedded, wanted(10, 80), wanted(0, 5, 1), fail_on_data_loss=False) == list(range(30, 80))
    assert sum("data loss in queue" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.slow("the pauses between gaps are 3 s together")
def test_pulls_from_gap_to_gap_become_slower(embedded, broker, caplog):
    """Each gap causes a log line, and a pull."""
    embedded.send("orders", b"x", count=10, queue_id=0)

    def one_further(exchange):
        further = int(exchange.request.fields["queueOffset"]) + 1
        answer(ResponseCode.PULL_OFFSET_MOVED, fields=place(further, further, 10))(exchange)

    broker.on(PULL, one_further, times=5)
    began = time.monotonic()
    assert offsets(embedded, wanted(0, 10), fail_on_data_loss=False, pulls_in_flight=1) == list(range(5, 10))
    assert time.monotonic() - began > 0.75 * (0.2 + 0.4 + 0.8 + 1.6)
    assert caplog.text.count("are gone") == 5


@pytest.mark.parametrize(
    ("fault", "place", "expected"),
    [
        (answer(21, "OFFSET_TOO_SMALL", place(90, 90, 100)), 64, "available 90 up to 100; offsets 64 up to 90"),
        (answer(20, "MESSAGE_WAS_REMOVING", place(20, 0, 100)), 0, "offsets 0 up to 20"),
    ],
    ids=["they have expired", "they are just being deleted"],
)
def test_messages_deleted_during_a_read_are_lost(embedded, broker, fault, place, expected):
    embedded.send("orders", count=100, queue_id=0)
    broker.on(PULL, fault, times=None, when=lambda command: command.fields["queueOffset"] == str(place))
    with pytest.raises(DataLoss, match=f"from 0 up to 100, .*{expected} are gone"):
        offsets(embedded, wanted(0, 100), pulls_in_flight=1)


SOON = {"request_timeout_s": 0.3, "retries": 20}


def test_messages_after_the_end_are_lost_after_retries(embedded, broker):
    embedded.send("orders", count=50, queue_id=0)
    with pytest.raises(DataLoss, match="from 10 up to 80, available 0 up to 50; offsets 50 up to 80 are gone"):
        offsets(embedded, wanted(10, 80), request_timeout_s=1.0, retries=20)  # time for several requests
    assert [offset for _, offset, _ in pulls(broker)].count(50) >= 3
    assert offsets(embedded, wanted(10, 80), fail_on_data_loss=False, **SOON) == list(range(10, 50))
    with pytest.raises(DataLoss, match="offsets 70 up to 80 are gone"):
        offsets(embedded, wanted(70, 80), **SOON)


def test_a_broker_that_loads_its_queues_late_loses_nothing(embedded, broker):
    embedded.send("orders", count=50, queue_id=0)
    broker.on(PULL, answer(21, "NO_MESSAGE_IN_QUEUE", place(0, 0, 0)), times=2)
    assert offsets(embedded, wanted(10, 40), retries=3) == list(range(10, 40))


def test_a_deleted_topic_is_lost(embedded, broker, caplog):
    embedded.send("orders", count=10, queue_id=0)
    embedded.delete_topic("orders")
    with pytest.raises(DataLoss, match="the queue is gone"):
        offsets(embedded, wanted(0, 10), **SOON)
    assert offsets(embedded, wanted(0, 10), fail_on_data_loss=False, **SOON) == []


@pytest.mark.versions("5.5.0", "4.9.7")
def test_a_missing_queue_is_lost_on_every_broker(cluster, names):
    topic = names.topic()
    cluster.create_topic(topic, queues=1)
    with pytest.raises(DataLoss, match="the queue is gone"):
        offsets(cluster, wanted(0, 10, queue_id=7, topic=topic), retries=1)


def test_a_reset_of_the_group_moves_no_query(embedded, broker, caplog):
    embedded.send("orders", count=100, queue_id=0)
    broker.on(PULL, answer(21, "OFFSET_RESET", place(90, 0, 100)), times=1)
    assert offsets(embedded, wanted(5, 100)) == list(range(5, 100))
    assert any("was reset" in record.getMessage() for record in caplog.records)


# ---- failures


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (close_connection, {}),
        (cut_after(40), {}),
        (answer(ResponseCode.SYSTEM_BUSY, "busy"), {}),
        (answer(1, "store error"), {}),
        (drop, {"request_timeout_s": 0.3, "retries": 5}),
        (drop_answer, {"request_timeout_s": 0.3, "retries": 5}),
    ],
    ids=["closed", "cut", "busy", "error", "not got", "not answered"],
)
def test_a_pull_that_fails_once_is_retried(embedded, broker, fault, options):
    embedded.send("orders", count=400, queue_id=0)
    broker.on(PULL, fault, times=1, when=lambda command: command.fields["queueOffset"] == "64")
    assert offsets(embedded, wanted(0, 400), **options) == list(range(400))


@pytest.mark.slow("the pauses between tries grow")
def test_a_task_survives_the_restart_of_a_broker(embedded, broker):
    embedded.send("orders", count=6000, queue_id=0)
    found = batches(embedded, wanted(0, 6000), retries=None, pulls_in_flight=1)
    first = next(found).num_rows
    broker.stop()
    name_server = embedded.name_server_nodes[0]
    name_server.forget_requests()
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(lambda: sum(batch.num_rows for batch in found))
        pulled_offsets = RequestCode.GET_ROUTEINFO_BY_TOPIC
        embedded.wait_until(lambda: len(name_server.requests(pulled_offsets)) >= 7 or rest.done(), WAIT_S)
        broker.start()
        assert first + rest.result(WAIT_S) == 6000


def damage(answer):
    answer.body = answer.body[:-1]
    return answer


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("fault", "options", "expected", "least"),
    [
        (answer(2, "busy"), {"retries": None, "read_timeout_s": 1.0}, r"failed after \d tries: .*busy", 3),
        (answer(16, "you may not"), {"retries": 9}, r"after 1 try: .* NO_PERMISSION \(16\): you may not", 1),
        (rewrite(damage), {}, r"orders/broker-a/0\[0, 32\).* a record is damaged: ", 1),
    ],
    ids=["beyond all patience", "a refusal that will not change", "a damaged record"],
)
def test_lasting_failures_fail_the_task(embedded, broker, fault, options, expected, least):
    embedded.send("orders", count=40, queue_id=0)
    broker.on(PULL, fault, times=None)
    with pytest.raises(ReadFailed, match=expected):
        offsets(embedded, wanted(0, 40), **options)
    assert len(pulls(broker)) >= least


def test_a_broker_that_never_responds_fails_the_task(embedded, broker):
    embedded.send("orders", count=40, queue_id=0)
    broker.on(PULL, drop, times=None)
    with pytest.raises(ReadFailed) as raised:
        offsets(embedded, wanted(0, 40), request_timeout_s=0.1, retries=2)
    assert str(raised.value) == (
        "reading orders/broker-a/0[0, 40) failed after 3 tries: "
        f"PULL_MESSAGE got no response from {broker.address} within 0.1 s"
    )
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_an_unreachable_broker_fails_the_task(embedded, broker):
    embedded.send("orders", count=40, queue_id=0)
    broker.stop(keep_route=True)
    with pytest.raises(ReadFailed, match="cannot connect to"):
        offsets(embedded, wanted(0, 40), fail_on_data_loss=False)
    embedded.unregister(broker)
    with pytest.raises(ReadFailed, match="no route for topic"):
        offsets(embedded, wanted(0, 40), fail_on_data_loss=False, request_timeout_s=9)  # another worker
    broker.start()
    assert offsets(embedded, wanted(0, 40)) == list(range(40))


def test_unreachable_name_servers_fail_the_task():
    with EmbeddedCluster() as other:
        other.stop_name_server()
        with pytest.raises(ReadFailed, match=r"reading from 127.0.0.1:\d+ failed after 2 tries: cannot connect"):
            offsets(other, wanted(0, 1))


@pytest.fixture
def replicated():
    with EmbeddedCluster(slaves=1) as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", count=200)
        yield cluster


def test_a_replica_replaces_an_unreachable_master(replicated):
    master, slave = replicated.nodes
    found = batches(replicated, wanted(0, 200), pulls_in_flight=1)
    master.on(PULL, close_connection, times=None, when=lambda command: int(command.fields["queueOffset"]) >= 96)
    assert [row["queueOffset"] for batch in found for row in batch.to_pylist()] == list(range(200))
    assert slave.requests(PULL)
    master.stop()
    assert offsets(replicated, wanted(0, 200), retries=3) == list(range(200))


def test_a_suggested_replica_is_pulled_from(replicated):
    master, slave = replicated.nodes
    slave.pause_replication()
    replicated.send("orders", count=100)
    master.suggest_broker(1)
    slave.suggest_broker(1)
    assert offsets(replicated, wanted(0, 300), retries=3, pulls_in_flight=2) == list(range(300))
    assert slave.requests(PULL)


def damaged(broker, count, *places):
    """Make pulls return messages, some with bodies that cannot be unpacked."""
    bad, fine = {"body": b"no zlib", "sys_flag": SysFlag.COMPRESSED}, {"body": b"fine"}
    stub_pulls(
        broker, *(StoredMessage("orders", queue_offset=n, **(bad if n in places else fine)) for n in range(count))
    )


@pytest.mark.parametrize("count", [8, 100])  # row by row, and column by column
def test_a_damaged_body_fails_is_skipped_or_returned_as_stored(embedded, broker, count, caplog):
    damaged(broker, count, 5, 7)
    text = r"reading orders/broker-a/0 at offset 5 failed .*its body cannot be decompressed: .*damagedBodies=skip"
    with pytest.raises(ReadFailed, match=text):
        rows(embedded, wanted(0, count), columns=("queueOffset", "body"))
    assert offsets(embedded, wanted(0, count)) == list(range(count))  # a body is unpacked only if its column is read

    def read_with(what):
        caplog.clear()
        columns = ("queueOffset", "sysFlag", "body")
        return rows(embedded, wanted(0, count), columns=columns, damaged_bodies=what)

    found = read_with(DamagedBodies.SKIP)
    assert [row["queueOffset"] for row in found] == [each for each in range(count) if each not in (5, 7)]
    assert {row["body"] for row in found} == {b"fine"}
    (record,) = caplog.records
    assert "2 damaged bodies were skipped: orders/broker-a/0 at offset 5 (" in record.getMessage()
    found = read_with(DamagedBodies.RAW)
    assert [row["queueOffset"] for row in found] == list(range(count))
    assert (found[5]["body"], found[5]["sysFlag"]) == (b"no zlib", SysFlag.COMPRESSED)
    assert "2 damaged bodies were returned as stored: orders/broker-a/0 at offset 5 (" in caplog.text


@pytest.mark.parametrize("what", DamagedBodies)
def test_a_damaged_inner_batch_counts_as_one_message(embedded, broker, what):
    flag = 0xC0 | SysFlag.COMPRESSED
    inner = StoredMessage("orders", b"no zlib", queue_offset=0, sys_flag=flag)
    stub_pulls(broker, inner, StoredMessage("orders", b"fine", queue_offset=10))
    options = {"columns": ("queueOffset", "body"), "damaged_bodies": what}
    if what is DamagedBodies.FAIL:
        with pytest.raises(ReadFailed, match="at offset 0 failed"):
            rows(embedded, wanted(0, 11), **options)
    else:
        found = [(row["queueOffset"], row["body"]) for row in rows(embedded, wanted(0, 11), **options)]
        assert found == [*([(0, b"no zlib")] if what is DamagedBodies.RAW else []), (10, b"fine")]


@pytest.mark.parametrize("count", [8, 100])
def test_a_body_larger_than_allowed_is_damaged(embedded, broker, count):
    body, flag = compress(bytes(MIB + 1))
    stored = [StoredMessage("orders", body, queue_offset=each, sys_flag=flag) for each in range(count)]
    end = stub_pulls(broker, *stored)
    with pytest.raises(ReadFailed, match=r"offset 0 failed.*holds more than 1048576; maxBodyBytes allows more, or"):
        rows(embedded, wanted(0, end), columns=("body",), max_body_bytes=MIB)
    found = rows(embedded, wanted(0, end), columns=("body",), max_body_bytes=MIB + 1)
    assert [len(row["body"]) for row in found] == [MIB + 1] * count


@pytest.mark.slow("unpacks many megabytes")
def test_packed_bodies_of_few_messages_are_not_held_together(embedded, broker):
    """Thirty messages are read row by row, and each batch frees the bodies of its rows."""
    body, flag = compress(bytes(8 * MIB))
    stored = [StoredMessage("orders", body, queue_offset=each, sys_flag=flag) for each in range(30)]
    end = stub_pulls(broker, *stored)
    sizes = []
    tracemalloc.start()
    try:
        for batch in batches(embedded, wanted(0, end), columns=("body",)):
            sizes += [len(each.as_buffer()) for each in batch.column("body")]
            del batch
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes == [8 * MIB] * 30
    assert peak < 75 * MIB


def test_an_inner_batch_that_no_broker_could_count_is_damaged(embedded, broker):
    body, flag = compress(encode_batch([BatchItem(b"")]) * 600_000)
    stored = StoredMessage("orders", body, queue_offset=0, sys_flag=flag | 0xC0)
    end = stub_pulls(broker, stored, StoredMessage("orders", b"next", queue_offset=600_000))
    with pytest.raises(ReadFailed, match="offset 0 failed.*inner batch holds more than 32767 messages"):
        rows(embedded, wanted(0, end))
    found = rows(embedded, wanted(0, end), columns=("queueOffset",), damaged_bodies=DamagedBodies.SKIP)
    assert [row["queueOffset"] for row in found] == [600_000]


def test_large_inner_batches_come_in_several_batches_of_rows(embedded, broker):
    body, flag = compress(encode_batch([BatchItem(b"x")]) * 30_000)
    stored = [StoredMessage("orders", body, queue_offset=first, sys_flag=flag | 0xC0) for first in (0, 30_000)]
    stub_pulls(broker, *stored, end=60_000)
    found = [batch.num_rows for batch in batches(embedded, wanted(0, 60_000))]
    assert sum(found) == 60_000
    assert max(found) <= 8192


def test_a_response_with_too_many_records_fails_the_task(embedded, broker):
    stub_pulls(broker, *[StoredMessage("orders", b"")] * 50_000, end=32)
    with pytest.raises(ReadFailed, match="more than 1024 records"):
        rows(embedded, wanted(0, 32))


# ---- connections and limits


def test_pulls_ahead_are_limited_by_bytes(embedded, broker):
    embedded.send("orders", b"x" * 1_000_000, count=100, queue_id=0)
    found = batches(embedded, wanted(0, 100), columns=("queueOffset", "body"), pulls_in_flight=200)
    taken = [offset for batch in islice(found, 5) for offset in batch["queueOffset"].to_pylist()]
    most = len(taken) + (range_puller.MAX_AHEAD_BYTES + task_reader.BATCH_BYTES) // 1_000_000 + 4
    broker.wait_for(PULL, len(taken) + 20, WAIT_S)
    time.sleep(0.3)  # there is no event to wait for, because nothing may happen
    assert len(taken) + 20 <= len(pulls(broker)) <= most
    taken += [offset for batch in found for offset in batch["queueOffset"].to_pylist()]
    assert taken == list(range(100))


def test_a_reader_that_is_closed_early_pulls_no_more(embedded, broker):
    embedded.send("orders", b"x" * 100_000, count=2000)
    others = set(broker.connections)
    found = batches(embedded, *(wanted(0, 500, queue_id) for queue_id in range(4)))
    next(found)
    used = set(broker.connections) - others
    found.close()
    embedded.wait_until(
        lambda: not used & set(broker.connections)
    )  # responses were in flight, so the connection is closed
    broker.forget_requests()
    assert offsets(embedded, wanted(20, 30, 3)) == list(range(20, 30))
    assert {queue_id for queue_id, offset, _ in pulls(broker) if offset != 20} <= {3}
    assert {offset for _, offset, _ in pulls(broker)} <= set(range(20, 30))


def test_tasks_of_a_worker_share_their_connection(embedded, broker):
    embedded.send("orders", count=40)
    before = set(broker.connections)
    for queue_id in range(4):
        assert len(offsets(embedded, wanted(0, 10, queue_id))) == 10
    assert len(set(broker.connections) - before) == 1
    broker.close_connections()
    assert len(offsets(embedded, wanted(0, 10))) == 10, "it is made anew"


def test_the_namespace_prefixes_names_on_the_wire_only(embedded, broker):
    embedded.create_topic("space%mine", queues=1)
    embedded.send("space%mine", count=3, queue_id=0)
    found = rows(embedded, wanted(0, 3, topic="mine"), namespace="space", group="app", columns=("topic", "queueOffset"))
    assert found == [{"topic": "mine", "queueOffset": offset} for offset in range(3)]
    fields = broker.requests(PULL)[0].command.fields
    assert (fields["topic"], fields["consumerGroup"]) == ("space%mine", "space%app")


def test_requests_are_signed():
    account = ("key", "secret-key")
    with EmbeddedCluster(account=account) as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", count=100)
        assert offsets(cluster, wanted(0, 100), account=account) == list(range(100))
        with pytest.raises(ReadFailed, match="after 1 try"):
            offsets(cluster, wanted(0, 100), account=("key", "another"))


def test_wrong_settings_are_raised_at_once(embedded):
    wrong = ReadOptions(client=ClientOptions(name_server="nowhere", retries=9))
    with pytest.raises(ConfigError, match="'nowhere' is not host:port"):
        list(read_ranges([wanted(0, 1)], ALL, wrong))
