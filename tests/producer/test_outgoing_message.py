"""Allowed messages, errors for the others, and the split of batches."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pyrocket_consumer import ConfigError, MessageQueue
from pyrocket_consumer.producer import RESERVED_PROPERTIES, OutgoingMessage, Producer
from pyrocket_consumer.producer.outgoing_message import MAX_BATCH_MESSAGES, BatchMessage, split_batch
from pyrocket_consumer.protocol.message import BatchItem, PropertyName, encode_batch
from tests.for_each import for_each


@for_each("body", [b"x", bytearray(b"x"), memoryview(b"x"), memoryview(b"xyx")[::2][:1]])
def test_bytes_like_objects_are_bodies(body):
    assert OutgoingMessage(body).body == b"x"


@for_each(
    "arguments, reason",
    [
        ({"body": "text"}, r"body\.encode\(\)"),
        ({"body": None}, "not NoneType"),
        ({"body": 17}, "not int"),
        ({"body": [1, 2]}, "not list"),
        ({"body": b""}, "at least one byte"),
        ({"tags": ""}, "tags is empty"),
        ({"tags": ["a"]}, "tags must be text, not list"),
        ({"tags": "a || b"}, "one tag"),
        ({"tags": " a"}, "one tag"),
        ({"tags": "a\x01"}, "separate properties"),
        ({"keys": ["a", ""]}, "a key is empty"),
        ({"keys": ["a b"]}, "white space"),
        ({"keys": [1]}, "must be text, not int"),
        ({"keys": b"k"}, "sequence of texts, not bytes"),
        ({"keys": 5}, "sequence of texts, not int"),
        ({"properties": [("a", "b")]}, "mapping of text to text, not list"),
        ({"properties": {1: "b"}}, "name must be text, not int"),
        ({"properties": {"a": 1}}, "property 'a' must be text, not int"),
        ({"properties": {"": "b"}}, "name is empty"),
        ({"properties": {"a": ""}}, "property 'a' is empty, and brokers would drop it"),
        ({"properties": {"a\x02": "b"}}, r"\\x01 or \\x02"),
        ({"properties": {"a": "b\x01c"}}, r"\\x01 or \\x02"),
        ({"properties": {"a": "\ud800"}}, "UTF-8"),
        ({"properties": {"TAGS": "b"}}, "use the argument tags="),
        ({"properties": {"KEYS": "b"}}, "use the argument keys="),
        ({"properties": {"DELAY": "3"}}, "use the argument delay_level="),
        ({"properties": {"TIMER_DELIVER_MS": "3"}}, "use the argument deliver_at="),
        ({"properties": {"__SHARDINGKEY": "3"}}, "use the argument sharding_key="),
        ({"properties": {"UNIQ_KEY": "x"}}, "reserved by RocketMQ; choose another name"),
        ({"properties": {"__RMQ.TRANSIENT.X": "x"}}, "reserved"),
        ({"flag": "1"}, "flag='1' is not allowed"),
        ({"flag": 2**31}, "flag=2147483648 is not allowed"),
        ({"topic": "a b"}, "character that is not allowed"),
    ],
)
def test_a_message_that_would_arrive_changed_is_refused(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        OutgoingMessage(**{"body": b"x", **arguments})


def test_tag_and_keys_are_sent_as_properties():
    message = OutgoingMessage(b"x", "paid", ["k1", "k2"], {"région": "é&="})
    assert message.travelling_properties() == {"région": "é&=", "KEYS": "k1 k2", "TAGS": "paid"}
    assert OutgoingMessage(b"x", keys="order-1").keys == ("order-1",), "one may be given as text"


def test_names_that_rocketmq_writes_are_reserved():
    assert {"UNIQ_KEY", "TAGS", "KEYS", "WAIT", "DELAY", "RETRY_TOPIC", "CLUSTER", "TRAN_MSG"} <= RESERVED_PROPERTIES
    assert PropertyName.CHECK_IMMUNITY_TIME_IN_SECONDS not in RESERVED_PROPERTIES


@pytest.fixture
def producer():
    return Producer(name_server="127.0.0.1:1", max_message_bytes=1000)  # no server listens there; no test sends


@for_each(
    "arguments, reason",
    [
        ({"topic": ""}, "topic is empty"),
        ({"topic": None}, "must be text, not NoneType"),
        ({"topic": ["a"]}, "must be text, not list"),
        ({"topic": "a.b"}, "not allowed"),
        ({"topic": "t" * 128}, "128 characters"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "belongs to the broker"),
        ({"body": b"x" * 1001}, "1001 bytes is more than max_message_bytes=1000"),
        ({"properties": {"a": "é" * 16_400}}, "at most 32767"),
        ({"delay_level": -1}, "delay_level=-1"),
        ({"delay_level": 19}, "delay_level=19"),
        ({"delay_level": True}, "delay_level=True"),
        ({"deliver_at": datetime(2030, 1, 1)}, "no time zone"),
        ({"deliver_at": 5}, "datetime with a time zone, not int"),
        ({"deliver_at": datetime(2030, 1, 1, tzinfo=UTC), "delay_level": 1}, "exclude each other"),
        ({"sharding_key": ""}, "sharding_key is empty"),
        ({"sharding_key": 7}, "sharding_key must be text"),
        ({"queue": 3}, "must be a MessageQueue, not int"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": "1"}, "timeout_s='1'"),
    ],
)
@for_each("how", ["send", "send_async", "send_oneway"])
def test_a_wrong_argument_of_a_send_is_reported_first(producer, how, arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        getattr(producer, how)(**{"topic": "orders", "body": b"x", **arguments})


def test_a_queue_belongs_to_the_topic_and_excludes_a_sharding_key(producer):
    queue = MessageQueue("other", "broker-a", 0)
    with pytest.raises(ConfigError, match="does not belong to topic 'orders'"):
        producer.send("orders", b"x", queue=queue)
    with pytest.raises(ConfigError, match="both choose the queue"):
        producer.send("other", b"x", queue=queue, sharding_key="k")


@for_each(
    "topic, messages, reason",
    [
        ("orders", b"abc", "list of messages, not bytes"),
        ("orders", OutgoingMessage(b"x"), "list of messages, not OutgoingMessage"),
        ("orders", [b"x", "text"], "body is text"),
        ("orders", [b"x", OutgoingMessage(b"x", topic="other")], "'orders', and a message in it is for 'other'"),
        ("orders", [b"x", b"x" * 999], "message 1 of the batch.*send it by itself"),
        ("orders", [b"x" * 1001], "more than max_message_bytes"),
        ("%RETRY%app", [b"x"], "one by one"),
    ],
)
def test_a_wrong_batch_is_reported_before_anything_is_sent(producer, topic, messages, reason):
    with pytest.raises(ConfigError, match=reason):
        producer.send_batch(topic, messages)


@for_each(
    "options, reason",
    [
        ({"send_timeot_s": 3}, "did you mean 'send_timeout_s'"),
        ({"group": "a b"}, "character that is not allowed"),
        ({"compression": "gzip"}, "choose one of"),
        ({"send_attempts": 0}, "send_attempts=0"),
        ({"max_in_flight_messages": 0}, "max_in_flight_messages=0"),
        ({"max_message_bytes": 16 * 1024 * 1024}, "max_message_bytes"),
    ],
)
def test_a_wrong_option_is_reported_at_once(options, reason):
    with pytest.raises(ConfigError, match=reason):
        Producer(**{"name_server": "127.0.0.1:1", **options})


def test_a_configuration_excludes_single_options():
    config = Producer(name_server="127.0.0.1:1", group="app").config
    assert Producer(config=config).group == "app"
    with pytest.raises(ConfigError, match="put 'send_attempts' into it"):
        Producer(config=config, send_attempts=1)


# --- the split of batches


def items(*body_bytes, properties=""):
    return [BatchMessage(BatchItem(b"x" * size, properties), str(number)) for number, size in enumerate(body_bytes)]


def encoded(part):
    return len(encode_batch(item for item, _ in part))


def test_one_byte_too_many_makes_two_parts():
    given = items(10, 20, 30)
    assert list(split_batch(given, encoded(given))) == [given]
    assert list(split_batch(given, encoded(given) - 1)) == [given[:2], given[2:]]
    given = items(10, 10, properties="a\x01éé\x02")
    assert [len(part) for part in split_batch(given, encoded(given) - 1)] == [1, 1]
    assert [len(part) for part in split_batch(given, encoded(given))] == [2]


def test_no_part_has_more_messages_than_brokers_can_count():
    given = items(*[1] * (2 * MAX_BATCH_MESSAGES + 1))
    assert [len(part) for part in split_batch(given, 1 << 30)] == [MAX_BATCH_MESSAGES, MAX_BATCH_MESSAGES, 1]


def test_every_part_fits_and_nothing_is_lost():
    given = items(*(7 * number % 90 + 1 for number in range(500)))
    parts = list(split_batch(given, 500))
    assert [each for part in parts for each in part] == given
    assert max(encoded(part) for part in parts) <= 500


def test_a_message_that_is_too_large_for_a_part_is_named():
    assert list(split_batch([], 100)) == []
    with pytest.raises(ConfigError, match="message 1 of the batch"):
        list(split_batch(items(10, 500), 500))
