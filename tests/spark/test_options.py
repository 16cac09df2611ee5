"""The options of the data source: what each means, and what is said when one is wrong. No Spark, no broker."""

from __future__ import annotations

import json
import pickle

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.options import (
    DEFAULT_GROUP,
    EARLIEST,
    LATEST,
    NAMES,
    GivenOffsets,
    Named,
    StoredAt,
    StoredAtByTopic,
    check_options,
    parse_sink,
    parse_source,
)
from tests.for_each import for_each

SERVER = {"nameserver": "127.0.0.1:9876"}
ORDERS = {**SERVER, "subscribe": "orders"}


def given(base: dict[str, str] = ORDERS, **options: str) -> dict[str, str]:
    """Return options as Spark hands them over: their names in lower case."""
    return {**base, **{name.lower(): value for name, value in options.items()}}


def test_defaults_of_a_read():
    options = parse_source(ORDERS, streaming=True)
    assert options.topics == ("orders",)
    assert (options.pattern, options.assigned, options.start, options.end) == (None, (), None, Named.LATEST)
    assert options.read.group == DEFAULT_GROUP
    assert options.read.selector.expression == "*"
    assert (options.read.pull_batch_size, options.read.pulls_in_flight) == (32, 16)
    assert options.read.fail_on_data_loss
    assert (options.commit_offsets, options.max_offsets, options.min_offsets) == (False, None, None)
    assert (options.max_delay_s, options.planning_interval_s) == (900, 0.1)
    assert (options.tasks.min_partitions, options.tasks.max_partitions) == (None, None)
    assert (options.tasks.min_records, options.tasks.max_records) == (1000, None)
    assert (options.client.request_timeout_s, options.client.retries, options.read.read_timeout_s) == (10, None, 120)


def test_defaults_of_a_write():
    options = parse_sink(SERVER)
    assert (options.topic, options.send_timeout_s, options.send_retries, options.max_in_flight) == (None, 120, 5, 256)
    assert (options.accept_degraded, options.dedup_properties) == (False, True)


def test_names_are_taken_in_any_case():
    options = parse_source({"NAMESERVER": "h:1", "Subscribe": "orders", "minPartitions": "3"}, None)
    assert options.tasks.min_partitions == 3


@for_each("text", ["a:1;b:2", "a:1,b:2", " a:1 ; b:2 "])
def test_several_name_servers(text):
    assert parse_source(given(nameServer=text), None).client.config().name_servers == ("a:1", "b:2")


@for_each("name", ["subscribe", "topic"])
def test_topics_are_joined_by_commas(name):
    assert parse_source(given(SERVER, **{name: "b, a,b"}), None).topics == ("b", "a")


def test_assigned_queues():
    options = parse_source(given(SERVER, assign='{"orders": {"broker-b": [1, 0], "broker-a": [2]}}'), None)
    assert [str(queue) for queue in options.assigned] == ["orders/broker-a/2", "orders/broker-b/0", "orders/broker-b/1"]


@for_each("name", ["tags", "subExpression"])
def test_tags(name):
    assert parse_source(given(**{name: "a || b"}), None).read.selector.tags == {"a", "b"}


def test_a_filter_in_sql():
    selector = parse_source(given(sqlFilter="a > 1"), None).read.selector
    assert (selector.expression, selector.expression_type) == ("a > 1", "SQL92")


@for_each(
    "text, bound",
    [
        ("earliest", Named.EARLIEST), ("first", Named.EARLIEST), ("Earliest", Named.EARLIEST), ("LATEST", Named.LATEST),
        ("last", Named.LATEST), ("group", Named.GROUP),
    ],
)  # fmt: skip
def test_starting_places_have_the_same_names_as_everywhere(text, bound):
    assert parse_source(given(startingOffsets=text, consumerGroup="app"), True).start is bound


def test_starting_offsets_for_queues_brokers_and_topics():
    text = '{"a": {"x": {"0": 23, "1": -2}, "y": -1}, "b": -2}'
    start = parse_source(given(SERVER, subscribe="a,b", startingOffsets=text), True).start
    assert isinstance(start, GivenOffsets)
    queues = [MessageQueue(*each) for each in [("a", "x", 0), ("a", "x", 1), ("a", "y", 7), ("b", "z", 0)]]
    assert [start.offset(queue) for queue in queues] == [23, EARLIEST, LATEST, EARLIEST]
    start.check(queues)
    with pytest.raises(ConfigError, match="startingOffsets covers all queues .* lacks a/x/2"):
        start.check([*queues, MessageQueue("a", "x", 2)])
    with pytest.raises(ConfigError, match="startingOffsets names a/y, of which there is nothing"):
        start.check([*queues[:2], queues[3]])


@for_each(
    "text, at_ms",
    [
        ("0", 0),
        ("1714557600000", 1714557600000),
        ("2024-05-01T12:00:00+02:00", 1714557600000),
        ("2024-05-01T10:00:00Z", 1714557600000),
        ("2024-05-01T10:00:00.000001Z", 1714557600001),
    ],
)
def test_starting_times(text, at_ms):
    options = parse_source(given(startingTimestamp=text, startingOffsets="earliest"), True)
    assert options.start == StoredAt(at_ms)


def test_times_by_topic():
    text = '{"orders": "2024-05-01T12:00:00+02:00", "payments": 1714557600001}'
    options = parse_source(given(subscribe="orders,payments", startingTimestamp=text, namespace="ns"), True)
    assert isinstance(options.start, StoredAtByTopic)
    assert options.start.timestamps_ms == {"ns%orders": 1714557600000, "ns%payments": 1714557600001}
    options = parse_source(given(SERVER, subscribePattern="pay.*", endingTimestamp='{"payments": "5"}'), False)
    assert options.end == StoredAtByTopic("endingTimestamp", {"payments": 5})


@for_each(
    "options, said",
    [
        ({"subscribe": "orders,payments", "startingTimestamp": '{"orders": 5}'}, "lacks payments"),
        ({"subscribe": "orders", "startingTimestamp": '{"orders": 5, "other": 5}'}, "names other"),
        ({"subscribePattern": "pay.*", "startingTimestamp": '{"orders": 5}'}, "names orders, which no option chooses"),
    ],
)
def test_times_by_topic_are_of_the_topics_to_read(options, said):
    with pytest.raises(ConfigError, match=f"startingTimestamp .*{said}"):
        parse_source(given(SERVER, **options), None)


def test_endings_of_a_batch():
    assert parse_source(given(endingOffsets="latest"), False).end is Named.LATEST
    assert parse_source(given(endingTimestamp="5"), False).end == StoredAt(5)
    end = parse_source(given(endingOffsets='{"orders": {"b": {"0": 7, "1": -1}}}'), False).end
    assert isinstance(end, GivenOffsets)
    assert end.offset(MessageQueue("orders", "b", 1)) == LATEST


@for_each("text, seconds", [("500ms", 0.5), ("90", 0.09), ("30s", 30), ("15m", 900), ("2 hours", 7200), ("1d", 86400)])
def test_durations(text, seconds):
    assert parse_source(given(maxTriggerDelay=text), True).max_delay_s == pytest.approx(seconds)


def test_a_group_is_committed_for_unless_told_otherwise():
    assert parse_source(given(consumerGroup="app"), True).commit_offsets
    assert parse_source(given(consumerGroup="app"), True).read.group == "app"
    assert not parse_source(given(consumerGroup="app", commitOffsets="FALSE"), True).commit_offsets


def test_names_are_put_into_the_namespace():
    options = parse_source(given(namespace="ns", consumerGroup="app", startingOffsets='{"orders": -2}'), True)
    assert (options.topics, options.read.group, options.client.namespace) == (("ns%orders",), "ns%app", "ns")
    assert isinstance(options.start, GivenOffsets)
    assert options.start.offset(MessageQueue("ns%orders", "b", 0)) == EARLIEST
    assert parse_sink(given(SERVER, namespace="ns", topic="orders")).topic == "orders"  # the producer does it


WRONG = [
    # name, value, what the text must say besides the name, other options
    ("nameServer", "nowhere", "host:port", {}),
    ("nameServer", "", "empty", {}),
    ("subscribe", " , ", "names no topic", {}),
    ("subscribe", "", "empty", {}),
    ("subscribe", "or ders", "or ders", {}),
    ("topic", "other", "exclude each other", {}),
    ("subscribePattern", ".*", "exclude each other", {}),
    ("assign", '{"orders": {"b": [0]}}', "exclude each other", {}),
    ("tags", "||", "no tag", {}),
    ("tags", "paid | open", "joined by '||': 'paid || open'", {}),
    ("subExpression", "price > 5", "sqlFilter", {}),
    ("tags", "a", "sqlFilter exclude each other", {"sqlFilter": "b = 1"}),
    ("subExpression", "a", "sqlFilter exclude each other", {"sqlFilter": "b = 1"}),
    ("subExpression", "a", "are the same", {"tags": "a"}),
    ("sqlFilter", "  ", "empty", {}),
    ("startingOffsets", "yesterday", "'earliest', 'latest', 'group'", {}),
    ("startingOffsets", "{", "no JSON", {}),
    ("startingOffsets", '{"orders": 5}', "5 for orders", {}),
    ("startingOffsets", '{"orders": {"b": 5}}', "5 for orders/b", {}),
    ("startingOffsets", '{"orders": {"b": {"0": -3}}}', "-3 for orders/b/0", {}),
    ("startingOffsets", '{"orders": {"b": {"0": "5"}}}', "'5' for orders/b/0", {}),
    ("startingOffsets", '{"orders": {"b": {"0": true}}}', "True for orders/b/0", {}),
    ("startingOffsets", '{"orders": {"b": {"x": 1}}}', "'x' of orders/b", {}),
    ("startingOffsets", '{"orders": {"b": {"0": 1, "0": 2}}}', "twice", {}),
    ("startingOffsets", '{"orders": {"b": {"0": 1, "00": 2}}}', "'00' of orders/b is no queue id", {}),
    ("startingOffsets", f'{{"orders": {{"b": {{"{"9" * 5000}": 1}}}}}}', "is no queue id", {}),
    ("startingOffsets", f'{{"orders": {{"b": {{"0": {"9" * 5000}}}}}}}', "no JSON", {}),
    ("startingOffsets", "group", "consumerGroup", {}),
    ("startingTimestamp", "2024-05-01T12:00:00", "no time zone", {}),
    ("startingTimestamp", "-5", "out of range", {}),
    ("startingTimestamp", "1969-12-31T00:00:00Z", "out of range", {}),
    ("startingTimestamp", "noon", "no time", {}),
    ("startingTimestamp", "9" * 5000, "no time", {}),
    ("startingTimestamp", '{"orders": "noon"}', "'noon' for orders is no time", {}),
    ("startingTimestamp", '{"orders": "2024-05-01T12:00:00"}', "for orders has no time zone", {}),
    ("startingTimestamp", '{"orders": -5}', "for orders is out of range", {}),
    ("startingTimestamp", '{"orders": 1.5}', "1.5 for orders is not allowed; give one time, or JSON like", {}),
    ("startingTimestamp", '{"orders": {"b": 5}}', "for orders is not allowed", {}),
    ("startingTimestamp", '{"orders": true}', "True for orders is not allowed", {}),
    ("startingTimestamp", '{"orders": 5, "orders": 6}', "one of them twice", {}),
    ("startingTimestamp", '{"a b": 5}', "a b", {}),
    ("startingTimestamp", "{}", "names no topic", {}),
    ("startingTimestamp", '{"orders"', "no JSON", {}),
    ("startingTimestamp", f'{{"orders": {"9" * 5000}}}', "no JSON", {}),
    ("endingTimestamp", '{"orders": "noon"}', "'noon' for orders is no time", {}),
    ("pushFilters", "yes", "true or false", {}),
    ("endingOffsets", "earliest", "'latest'", {}),
    ("endingOffsets", '{"orders": -2}', "-2 for orders", {}),
    ("endingTimestamp", "2024-05-01T12:00:00", "no time zone", {}),
    ("consumerGroup", "a b", "a b", {}),
    ("consumerGroup", "DEFAULT_CONSUMER", "reserved", {}),
    ("commitOffsets", "true", "consumerGroup", {}),
    ("commitOffsets", "yes", "true or false", {"consumerGroup": "app"}),
    ("failOnDataLoss", "1", "true or false", {}),
    ("maxOffsetsPerTrigger", "0", "at least 1", {}),
    ("maxOffsetsPerTrigger", "many", "whole number", {}),
    ("maxOffsetsPerTrigger", "1.5", "whole number", {}),
    ("minOffsetsPerTrigger", "0", "at least 1", {}),
    ("minOffsetsPerTrigger", "10", "above maxOffsetsPerTrigger=9", {"maxOffsetsPerTrigger": "9"}),
    ("maxTriggerDelay", "soon", "15m", {}),
    ("maxTriggerDelay", "-1s", "15m", {}),
    ("minPartitions", "0", "at least 1", {}),
    ("maxPartitions", "0", "at least 1", {}),
    ("maxPartitions", "3", "below minPartitions=4", {"minPartitions": "4"}),
    ("minRecordsPerPartition", "-1", "at least 0", {}),
    ("maxRecordsPerPartition", "0", "at least 1", {}),
    ("pullBatchSize", "0", "from 1 to 1024", {}),
    ("pullsInFlight", "0", "from 1 to 1024", {}),
    ("requestTimeoutMs", "0", "from 10", {}),
    ("maxFrameBytes", "65535", "from 65536 to 1073741824", {}),
    ("retries", "0", "from 1", {}),
    ("readTimeoutMs", "0", "from 10", {}),
    ("failOnUnreachable", "", "empty", {}),
    ("maxBodyBytes", "1023", "from 1024 to 1073741824", {}),
    ("damagedBodies", "leave", "give fail, skip, raw", {}),
    ("planningIntervalMs", "-1", "from 0", {}),
    ("secretKey", "k", "accessKey is missing", {}),
    ("accessKey", "k", "secretKey is missing", {}),
    ("secretKey", "k\n", "printable ASCII", {"accessKey": "k"}),
    ("tls", "maybe", "true or false", {}),
    ("tlsCaFile", "ca.pem", "tls=true", {}),
    ("allowedAddresses", "10.0.0.1/8", "allowedAddresses: '10.0.0.1/8'", {}),
    ("sendTimeoutMs", "0", "from 10", {}),
    ("sendRetries", "0", "from 1 to 99", {}),
    ("maxMessageBytes", "0", "from 1", {}),
    ("autoCreateTopic", "yes", "true or false", {}),
    ("nameServer", "here", "nameServer 'here' is not host:port", {}),
    ("maxInFlight", "0", "from 1", {}),
    ("acceptDegraded", "ja", "true or false", {}),
    ("dedupProperties", "", "empty", {}),
]


@for_each("name, value, text, others", WRONG, ids=lambda each: str(each)[:40])
def test_a_wrong_value_is_refused_whatever_the_source_is_for(name, value, text, others):
    with pytest.raises(ConfigError) as refused:
        check_options(given(**{**others, name: value}))
    assert name in str(refused.value)
    assert text in str(refused.value)


@for_each(
    "text, said",
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "names no queue"),
        ('{"orders": [0]}', "[0] of topic 'orders'"),
        ('{"orders": {"b": []}}', "[] of broker 'b'"),
        ('{"orders": {"b": [-1]}}', "[-1] of broker 'b'"),
        ('{"orders": {"b": ["0"]}}', "['0'] of broker 'b'"),
        (f'{{"orders": {{"b": [{"9" * 5000}]}}}}', "no JSON"),
    ],
)
def test_a_wrong_assignment_is_refused(text, said):
    with pytest.raises(ConfigError) as refused:
        check_options(given(SERVER, assign=text))
    assert said in str(refused.value)
    assert "give JSON like" in str(refused.value)


def test_a_bad_pattern_and_no_name_server_are_refused():
    with pytest.raises(ConfigError, match=r"subscribePattern='\(' is no regular expression"):
        check_options(given(SERVER, subscribePattern="("))
    with pytest.raises(ConfigError, match="nameServer is missing"):
        check_options({"subscribe": "orders"})


def test_a_read_needs_something_to_read():
    check_options(SERVER)  # a sink may have a column instead
    with pytest.raises(ConfigError, match="no topic to read: .*subscribe, subscribePattern and assign"):
        parse_source(SERVER, streaming=None)


@for_each(
    "streaming, options, text",
    [
        (True, {"endingOffsets": "latest"}, "endingOffsets is for batch reads"),
        (True, {"endingTimestamp": "5"}, "endingTimestamp is for batch reads"),
        (True, {"pushFilters": "true"}, "pushFilters=true is for batch reads"),
        (False, {"startingOffsets": "latest"}, "startingOffsets='latest' is for streams"),
        (False, {"startingOffsets": '{"orders": {"b": {"0": -1}}}'}, "startingOffsets has -1"),
        (False, {"startingTimestamp": "6", "endingTimestamp": "5"}, "endingTimestamp is before startingTimestamp;"),
        (False, {"startingTimestamp": '{"orders": 6}', "endingTimestamp": "5"}, "before startingTimestamp for orders"),
        (False, {"startingTimestamp": "6", "endingTimestamp": '{"orders": 5}'}, "before startingTimestamp for orders"),
    ],
)
def test_what_a_stream_or_a_batch_cannot_have(streaming, options, text):
    parse_source(given(**options), streaming=None)
    with pytest.raises(ConfigError, match=text):
        parse_source(given(**options), streaming=streaming)


@for_each(
    "name, told",
    [
        ("subscribes", "did you mean subscribe"),
        ("nameservers", "did you mean nameServer"),
        ("startingoffset", "did you mean startingOffsets"),
        ("sendTimeOut", "did you mean sendTimeoutMs"),
        ("zzz", "there are nameServer, subscribe"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest(name, told):
    with pytest.raises(ConfigError, match=f"option '{name}' is unknown; {told}"):
        check_options({**ORDERS, name: "x"})


def test_options_of_spark_itself_pass():
    check_options(given(path="x", checkpointLocation="y", queryName="z"))


def test_no_text_shows_a_secret():
    hidden = {"accessKey": "HUSH1", "secretKey": "HUSH2", "securityToken": "HUSH3"}
    options = parse_source(given(**hidden), streaming=True)
    assert options.client.config().secret_key == "HUSH2"
    assert "HUSH" not in repr(options) + repr(parse_sink(given(SERVER, **hidden))) + repr(options.client.config())
    for alone in ("accessKey", "secretKey"):
        with pytest.raises(ConfigError) as refused:
            check_options(given(**{alone: "HUSH"}))
        assert "HUSH" not in str(refused.value)


def test_options_travel():
    text = json.dumps({"orders": {"b": {"0": 3}}})
    options = parse_source(given(tls="true", startingOffsets=text), streaming=True)
    assert pickle.loads(pickle.dumps(options)) == options
    assert pickle.loads(pickle.dumps(parse_sink(ORDERS))) == parse_sink(ORDERS)


def test_every_option_is_known_by_one_name():
    assert len({name.lower() for name in NAMES}) == len(NAMES)


def test_allowed_addresses_are_joined_by_commas():
    options = given(allowedAddresses="10.0.0.0/8, broker-a:10911")
    assert parse_source(options, None).client.config().allowed_addresses == ("10.0.0.0/8", "broker-a:10911")
