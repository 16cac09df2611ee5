"""The writers of the sink, called as Spark calls them, without Spark."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from pyrocket_consumer.errors import ConfigError, ConnectError, RocketError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.spark.data_source import READ_SCHEMA
from pyrocket_consumer.spark.sink import (
    BatchWriter,
    DataSourceStreamArrowWriter,
    StreamArrowWriter,
    StreamRowWriter,
    StreamWriter,
    check_overwrite,
)
from pyrocket_consumer.spark.sink_rows import check_schema
from pyrocket_consumer.testing import EmbeddedCluster, Gate, answer, close_connection, delay, handle_and_close, rewrite
from tests.for_each import for_each
from tests.spark.spark_calls import set_fault_on_all_brokers
from tests.spark.writing import batches, columns

SEND = RequestCode.SEND_MESSAGE_V2
MARKS = {"spark_query_id", "spark_batch_id", "spark_partition", "spark_row"}

CLUSTER = {"brokers": 2, "delay_scale": 0.01, "auto_create_topics": False}
ORDERS = {"queues": 2, "count": 0}

PINNED = "body string, brokerName string, queueId int"
EVERYTHING = (
    "topic string, body binary, tags string, keys string, delayLevel int, deliverAt timestamp, "
    "properties map<string,string>, flag int"
)


def own(message: Any) -> dict[str, str]:
    """Return the properties that come from the row."""
    kept = {"UNIQ_KEY", "TAGS", "KEYS", "MSG_REGION", "TRACE_ON", "CLUSTER", "WAIT", "__SHARDINGKEY"} | MARKS
    return {name: value for name, value in message.properties.items() if name not in kept}


def keys(message: Any) -> list[str]:
    return list(message.keys)


KINDS = [BatchWriter, StreamRowWriter, *([StreamArrowWriter] if DataSourceStreamArrowWriter else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_becomes_a_message_with_all_its_columns(embedded, sink, kind):
    row = ("orders", b"\x00body", "paid", "o-1  o-2", 0, None, {"region": "eu", "empty": "", "WAIT": "x"}, 7)
    assert sink(topic=None).write(EVERYTHING, row, kind=kind) == 1
    (message,) = embedded.messages("orders")
    assert (message.body, message.tags, message.flag) == (b"\x00body", "paid", 7)
    assert list(message.keys) == ["o-1", "o-2"]
    assert own(message) == {"region": "eu"}


def queue(message: Any) -> tuple[str, int]:
    return message.queue.broker_name, message.queue.queue_id


GIVEN = {"a": None, "b": "", "c": "1", "__RMQ.TRANSIENT.x": "y", "UNIQ_KEY": "old", "DELAY": "18", "x.y": "z"}
QUEUES = [(f"broker-{'ab'[n % 2]}", n // 2 % 2) for n in range(8)]


@for_each("kind", KINDS)
@for_each(
    "more, rows, read_field, seen",
    [
        ("", [("grün",)], lambda message: message.body, ["grün".encode()]),
        ("keys array<string>", [("x", ["a", "b"]), ("y", None), ("z", [])], keys, [["a", "b"], [], []]),
        ("properties map<string,string>", [("x", GIVEN), ("y", None)], own, [{"c": "1", "x.y": "z"}, {}]),
        ("brokerName string, queueId int", [(f"{n}", *QUEUES[n]) for n in range(8)], queue, QUEUES),
        ("brokerName string, queueId long", [(f"{n}", *QUEUES[n]) for n in range(8)], queue, QUEUES),
        ("brokerName string, queueId int, shardingKey string", [("x", "broker-a", 1, "")], queue, [("broker-a", 1)]),
    ],
)
@for_each("binary", [False, True])
def test_the_effect_of_each_column(embedded, names, sink, kind, more, rows, read_field, seen, binary):
    topic, schema = names.topic(), f"body {'binary' if binary else 'string'}{', ' * bool(more)}{more}"
    embedded.create_topic(topic, queues=2)
    given = [(row[0].encode() if binary else row[0], *row[1:]) for row in rows]
    assert sink(topic=topic).write(schema, *given, kind=kind) == len(rows)
    found = {message.body: read_field(message) for message in embedded.messages(topic)}
    assert found == {row[0].encode(): each for row, each in zip(rows, seen, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_row_goes_to_its_queue_and_others_anywhere(embedded, sink, kind):
    rows = [("x", "broker-b", 1)] * 3 + [("y", None, None)]
    sink().write(PINNED, *rows, kind=kind)
    assert [m.body for m in embedded.broker("broker-b").messages("orders", 1)].count(b"x") == 3


def test_a_topic_is_an_option_or_a_column(embedded, sink):
    sink().write("body string, topic string", ("x", "elsewhere"), ("y", None))
    assert len(embedded.messages("orders")) == 2
    topics = ["first", "second"]
    for name in topics:
        embedded.create_topic(name)
    sink(topic=None).write("body string, topic string", *[(f"{n}", topics[n % 2]) for n in range(10)])
    assert [len(embedded.messages(name)) for name in topics] == [5, 5]
    with pytest.raises(ConfigError, match="row 1 of partition 0: topic is null"):
        sink(topic=None).write("body string, topic string", ("x", "orders"), ("x", None))


def test_rows_with_one_sharding_key_are_in_one_queue_in_order(embedded, sink):
    rows = [(f"{key}-{number}", key) for number in range(50) for key in "abc"]
    sink(maxInFlight=16).write("body string, shardingKey string", *rows)
    for key in "abc":
        found = [m for m in embedded.messages("orders") if m.body.startswith(key.encode())]
        assert [m.body for m in found] == [f"{key}-{number}".encode() for number in range(50)]
        assert len({m.queue for m in found}) == 1


def test_a_row_may_be_delayed(embedded, sink):
    at = datetime.fromtimestamp(time.time() + 0.3, UTC)
    sink().write("body string, delayLevel int, deliverAt timestamp", ("a", 1, None), ("b", None, at))
    assert embedded.wait_until(lambda: len(embedded.messages("orders")) == 2, 30)
    (timed,) = [m for m in embedded.messages("orders") if m.body == b"b"]
    assert abs(timed.stored_at_ms - at.timestamp() * 1000) < 10_000


def test_a_time_without_a_zone_is_local(embedded, sink):
    """PySpark makes rows with local times without a zone."""
    at = datetime.fromtimestamp(time.time() + 0.3)
    sink().write("body string, deliverAt timestamp", ("b", at), kind=StreamRowWriter)
    assert embedded.wait_until(lambda: len(embedded.messages("orders")) == 1, 30)


def test_a_frame_that_was_read_can_be_written(embedded, sink):
    embedded.send("orders", b"x", tags="t", keys=["k1", "k2"], properties={"a": "b"}, queue_id=1)
    (read,) = embedded.messages("orders")
    embedded.create_topic("copies", queues=2)
    now = datetime.fromtimestamp(time.time(), UTC)
    row = (
        "orders",
        read.queue.broker_name,
        read.queue.queue_id,
        read.queue_offset,
        read.message_id,
        read.tags,
        " ".join(read.keys),
        read.body,
        dict(read.properties),
        0,
        0,
        0,
        now,
        now,
        "h",
        "h",
    )
    sink(topic="copies").write(READ_SCHEMA, row)
    (written,) = embedded.messages("copies")
    assert (written.body, written.tags, list(written.keys), own(written)) == (b"x", "t", ["k1", "k2"], {"a": "b"})
    assert queue(written) == (read.queue.broker_name, 1)
    assert written.message_id != read.message_id


def test_skipped_properties_are_logged_once(embedded, sink, caplog):
    given = {"__RMQ.TRANSIENT.a": "1", "__RMQ.TRANSIENT.b": "1", "POP_CK": "2", "TTL": "1", "own": "3"}
    made = sink()
    for _ in range(3):
        made.write("body string, properties map<string,string>", *[("x", given)] * 50)
    logged = [record.getMessage() for record in caplog.records if "are not written" in record.getMessage()]
    assert [("TTL" in text, "own" in text.split()) for text in logged if "POP_CK" in text] == [(True, False)]
    assert "\n".join(logged).count("__RMQ.TRANSIENT.") <= 1, "an earlier task of this process may have logged it"


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_sharding_key_counts_as_missing(embedded, sink, kind):
    sink().write("body string, shardingKey string", *[("x", "")] * 8, ("y", None), kind=kind)
    found = embedded.messages("orders")
    assert len({message.queue for message in found if message.body == b"x"}) == 4
    assert not [message for message in found if "__SHARDINGKEY" in message.properties]


# --- marks of duplicates


def test_every_message_names_its_row(embedded, sink):
    sink().write("body string", *[(f"{n}",) for n in range(3000)])
    found = embedded.messages("orders")
    assert {m.properties["spark_row"]: m.body.decode() for m in found} == {str(n): str(n) for n in range(3000)}
    assert {(m.properties["spark_batch_id"], m.properties["spark_partition"]) for m in found} == {("0", "0")}
    assert len({m.properties["spark_query_id"] for m in found}) == 1


def test_a_task_that_runs_again_gives_the_same_marks_if_any(embedded, sink):
    schema, made = columns("body string"), sink()
    writer = BatchWriter(schema, made.options)
    for task in (writer, pickle.loads(pickle.dumps(writer)), BatchWriter(schema, made.options)):
        task.write(iter(batches(schema, [("x",)])))
    marks = [m.properties["spark_query_id"] for m in embedded.messages("orders")]
    assert len(marks) == 3 and len(set(marks)) == 2
    sink(dedupProperties=False).write("body string", ("without",))
    (message,) = [m for m in embedded.messages("orders") if m.body == b"without"]
    assert not MARKS & set(message.properties)


# --- acknowledgement


@pytest.fixture
def gates(embedded: EmbeddedCluster) -> Iterator[list[Gate]]:
    """Hold the sends to each broker, so that concurrent ones wait together."""
    gates = [Gate(answers=True), Gate(answers=True)]
    for broker, gate in zip(embedded.brokers, gates, strict=True):
        broker.on(SEND, gate, times=None)
    yield gates
    for gate in gates:
        gate.open()


def test_a_task_ends_only_when_every_send_was_acknowledged(embedded, sink, gates):
    made = sink()
    with ThreadPoolExecutor() as pool:
        task = pool.submit(made.write, "body string", *[("x",)] * 8)
        for gate in gates:
            gate.wait_held(4, 30)
        assert len(embedded.messages("orders")) == 8
        gates[0].open()
        time.sleep(0.2)
        assert not task.done()
        gates[1].open()
        assert task.result(30) == 8


def test_no_more_than_max_in_flight_are_unacknowledged(embedded, sink, gates):
    made = sink(maxInFlight=4)
    with ThreadPoolExecutor() as pool:
        task = pool.submit(made.write, "body string", *[("x",)] * 20)
        for gate in gates:
            gate.wait_held(2, 30)
        time.sleep(0.2)  # time for a fifth send, if there was one
        assert sum(len(gate.wait_held(2)) for gate in gates) == 4
        for gate in gates:
            gate.open()
        assert task.result(30) == 20
    assert len(embedded.messages("orders")) == 20


def test_no_row_in_order_passes_one_that_failed(embedded, sink):
    set_fault_on_all_brokers(embedded, SEND, answer(13, "no such message"), when=lambda command: command.body == b"3")
    with pytest.raises(RocketError, match=r"row 3 of partition 0.*no such message"):
        sink().write("body string, shardingKey string", *[(str(n), "k") for n in range(10)])
    assert [m.body for m in embedded.messages("orders")] == [b"0", b"1", b"2"]


def test_each_row_in_order_has_the_whole_timeout(embedded, sink):
    """All rows together take longer than the timeout of one."""
    set_fault_on_all_brokers(embedded, SEND, delay(0.25), times=None)
    rows = [(str(n), "k") for n in range(10)]
    assert sink(sendTimeoutMs=2000).write("body string, shardingKey string", *rows) == 10


# --- failures


def test_another_broker_takes_what_one_refuses(embedded, sink):
    embedded.broker("broker-a").on(SEND, answer(14, "not now"), times=None)
    assert sink().write("body string", *[("x",)] * 10) == 10
    assert len(embedded.broker("broker-b").messages("orders")) == 10


def test_after_all_retries_the_task_fails_naming_the_row(embedded, sink):
    """Each attempt may have stored the row, so the number of attempts is limited, too."""
    set_fault_on_all_brokers(embedded, SEND, close_connection, times=None)
    with pytest.raises(RocketError, match="row 0 of partition 0.*orders.*lost"):
        sink(sendRetries=1).write("body string", ("x",))
    assert sum(len(broker.requests(SEND)) for broker in embedded.brokers) == 2


IN_ORDER = pytest.mark.parametrize(
    ("schema", "rest"), [("brokerName string, queueId int", ("broker-a", 0)), ("shardingKey string", ("k",))]
)


@IN_ORDER
def test_rows_in_order_are_tried_again_on_their_queue(embedded, sink, schema, rest):
    rows = [(str(number), *rest) for number in range(10)]
    sink().write(f"body string, {schema}", *rows)
    (queue,) = {message.queue for message in embedded.messages("orders")}
    broker = embedded.broker(queue.broker_name)
    broker.on(SEND, answer(2, "busy"), times=5)
    sink().write(f"body string, {schema}", *rows)
    assert [message.body for message in embedded.messages("orders")] == [row[0].encode() for row in rows * 2]
    assert {message.queue for message in embedded.messages("orders")} == {queue}


@IN_ORDER
def test_a_send_without_a_response_is_retried_as_configured(embedded, sink, schema, rest):
    set_fault_on_all_brokers(embedded, SEND, answer(1, "odd"), times=None)
    with pytest.raises(RocketError, match=r"row 0 of partition 0.*odd \(3 times\)"):
        sink(sendRetries=2).write(f"body string, {schema}", ("x", *rest))
    assert sorted(len(broker.requests(SEND)) for broker in embedded.brokers) == [0, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_possible_duplicates_are_logged(embedded, sink, caplog, kind):
    set_fault_on_all_brokers(
        embedded, SEND, handle_and_close, when=lambda command: command.body in (b"3", b"8"), times=1
    )
    rows = [(str(number), "k") for number in range(10)]
    assert sink().write("body string, shardingKey string", *rows, kind=kind) == 10
    bodies = [message.body for message in embedded.messages("orders")]
    assert [body for body in dict.fromkeys(bodies) if bodies.count(body) == 2] == [b"3"]
    marks = [message.properties["spark_row"] for message in embedded.messages("orders") if message.body == b"3"]
    assert marks == ["3", "3"]
    (logged,) = [record.getMessage() for record in caplog.records if "may have copies" in record.getMessage()]
    assert "rows=1 " in logged


def degraded(command):
    command.code = 12
    return command


def test_degraded_responses_count_only_with_accept_degraded(embedded, sink):
    set_fault_on_all_brokers(embedded, SEND, rewrite(degraded), times=None)
    with pytest.raises(RocketError, match=r"row 0 of partition 0.*FLUSH_SLAVE_TIMEOUT"):
        sink(sendRetries=1).write("body string", ("x",))
    assert len(embedded.messages("orders")) == 2
    assert sink(acceptDegraded=True).write("body string", ("x",)) == 1
    assert len(embedded.messages("orders")) == 3


def test_after_a_failed_task_the_next_one_connects_again(embedded, sink):
    made = sink(sendRetries=1)
    set_fault_on_all_brokers(embedded, SEND, close_connection, times=None)
    with pytest.raises(RocketError):
        made.write("body string", ("x",))
    for broker in embedded.brokers:
        broker.clear_faults()
    assert made.write("body string", ("y",)) == 1


def test_a_task_keeps_its_connections_for_the_next(embedded, sink):
    made = sink()
    made.write("body string", *[("x",)] * 4)
    before = {each for broker in embedded.brokers for each in broker.connections}
    made.write("body string", *[("x",)] * 4)
    assert {each for broker in embedded.brokers for each in broker.connections} <= before


NOWHERE = {"nameServer": "127.0.0.1:1", "retries": 1}


def test_only_rows_need_a_name_server(sink):
    for kind in (BatchWriter, StreamWriter):
        assert sink(**NOWHERE).write("body string", kind=kind) == 0
    with pytest.raises(ConnectError, match="127.0.0.1:1"):
        sink(**NOWHERE).write("body string", ("x",))


@pytest.mark.parametrize("kind", KINDS)
def test_a_topic_is_created_on_demand_with_the_option(sink, kind):
    with EmbeddedCluster(auto_create_topics=True) as cluster:
        made = sink(nameServer=cluster.name_server, topic=None, autoCreateTopic=True)
        schema = "body string, topic string, shardingKey string"
        assert made.write(schema, ("x", "new", "k"), ("y", "new", "k"), kind=kind) == 2
        assert [message.body for message in cluster.messages("new")] == [b"x", b"y"]


def test_a_body_may_be_larger_with_the_option(embedded, sink):
    with pytest.raises(ConfigError, match="row 0 of partition 0: body of 5000000 bytes is more than maxMessageBytes"):
        sink().write("body binary", (bytes(5_000_000),))
    assert sink(maxMessageBytes=6_000_000).write("body binary", (bytes(5_000_000),)) == 1


@for_each(
    "schema, row, reason",
    [
        ("body string", (None,), "body is null"),
        ("body binary", (None,), "body is null"),
        ("body string", ("",), "body is empty"),
        (PINNED, ("x", "broker-a", None), "give both"),
        (PINNED, ("x", None, 1), "give both"),
        (f"{PINNED}, shardingKey string", ("x", "broker-a", 1, "k"), "brokerName with queueId, and shardingKey='k'"),
        (PINNED, ("x", "broker-z", 1), "cannot be written: "),
        ("body string, shardingKey string", ("x", "a\x01b"), "shardingKey holds"),
        ("body string, delayLevel int", ("x", 19), "delayLevel=19"),
        ("body string, delayLevel int, deliverAt timestamp", ("x", 1, datetime.now(UTC)), "delayLevel and deliverAt"),
        ("body string, tags string", ("x", "a || b"), "one tag"),
        ("body string, keys array<string>", ("x", ["a b"]), "white space"),
        ("body string, properties map<string,string>", ("x", {"a": "\x02"}), "property 'a' holds"),
        ("body string, properties map<string,string>", ("x", {"deliver_at": "\x02"}), "property 'deliver_at' holds"),
    ],
)
@for_each("kind", [BatchWriter, StreamRowWriter])
def test_a_row_that_cannot_be_a_message_is_named(embedded, sink, kind, schema, row, reason):
    good = ("good", *[None] * (len(row) - 1))
    with pytest.raises(RocketError, match=rf"row 2 of partition 0: .*{reason}"):
        sink(sendTimeoutMs=3000).write(schema, good, good, row, kind=kind)


NOT_TEXT = b"\xff-"  # Spark's text may be any bytes: CAST(X'ff2d' AS STRING)


def text(*values: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


PROPERTIES = pa.MapArray.from_arrays([0, 0, 1], text(b"name"), text(NOT_TEXT))


@for_each(
    "schema, column, reason",
    [
        ("tags string", text(b"-", NOT_TEXT), r"column 'tags' is not text in UTF-8: b'\xff-'"),
        ("shardingKey string", text(b"-", NOT_TEXT), "column 'shardingKey' is not text"),
        ("keys string", text(b"-", NOT_TEXT), "column 'keys' is not text"),
        ("keys array<string>", pa.ListArray.from_arrays([0, 0, 1], text(NOT_TEXT)), "column 'keys' is not text"),
        ("properties map<string,string>", PROPERTIES, "column 'properties' is not text"),
        ("deliverAt timestamp", pa.array([0, 2**58], pa.timestamp("us", "UTC")), "column 'deliverAt' is not a time"),
        ("deliverAt timestamp", pa.array([0, -(2**58)], pa.timestamp("us", "UTC")), "column 'deliverAt' is not a time"),
    ],
)
def test_a_value_that_python_cannot_represent_is_named(sink, schema, column, reason):
    writer = BatchWriter(columns(f"body string, {schema}"), sink().options)
    names = ["body", schema.split()[0]]
    parts = column.slice(0, 1), column
    handed = [pa.RecordBatch.from_arrays([pa.array(["x"] * len(part)), part], names=names) for part in parts]
    with pytest.raises(ConfigError, match=f"row 2 of partition 0: {re.escape(reason)}"):
        writer.write(iter(handed))


def test_an_unused_topic_column_may_hold_any_value(embedded, sink):
    batch = pa.RecordBatch.from_arrays([text(NOT_TEXT), text(NOT_TEXT)], names=["body", "topic"])
    assert BatchWriter(columns("body string, topic string"), sink().options).write(iter([batch])).rows == 1
    assert [message.body for message in embedded.messages("orders")] == [NOT_TEXT]


def test_secrets_are_in_no_text(sink):
    made = sink(**NOWHERE, accessKey="user", secretKey="hidden")
    assert "hidden" not in repr(made.options)
    with pytest.raises(ConnectError) as raised:
        made.write("body string", ("x",))
    assert "hidden" not in repr(raised.value)


def test_commit_and_abort_never_raise(sink):
    writer = BatchWriter(columns("body string"), sink().options)
    stream = StreamWriter(columns("body string"), sink().options)
    for messages in ([], [None], None):
        writer.commit(messages)
        writer.abort(messages)
        stream.commit(messages, batchId=1)
        stream.abort(messages, batchId=1)


# --- schemas


@for_each(
    "schema, topic, reason",
    [
        ("value string", "orders", "no column 'value'"),
        ("body string, shardingkey string", "orders", "did you mean 'shardingKey'"),
        ("tags string", "orders", "needs a column 'body'"),
        ("body int", "orders", "column 'body' is int; .* string or binary"),
        ("body string, body string", "orders", "has 2 columns 'body'"),
        ("body string, keys map<string,string>", "orders", "array<string>"),
        ("body string, deliverAt timestamp_ntz", "orders", "takes timestamp"),
        ("body string, properties map<string,int>", "orders", "map<string,string>"),
        ("body string, queueId int", "orders", "needs 'brokerName'"),
        ("body string, brokerName string", "orders", "needs 'queueId'"),
        ("body string", None, "option topic"),
    ],
)
def test_a_wrong_schema_is_refused(sink, schema, topic, reason):
    for check in (check_schema, BatchWriter, StreamWriter):
        with pytest.raises(ConfigError, match=reason):
            check(columns(schema), sink(topic=topic).options)


def test_overwriting_is_refused():
    check_overwrite(False)
    with pytest.raises(ConfigError, match="append"):
        check_overwrite(True)
