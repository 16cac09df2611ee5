"""The options of the data source: the effect of each, and the error of a wrong one. Without Spark or brokers."""

from __future__ import annotations

import json
import pickle
from operator import attrgetter

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.offsets import EARLIEST, LATEST, GivenOffsets, NamedOffset, StoredAt
from pyrocket_consumer.spark.options import DEFAULT_GROUP, NAMES, check_options, parse_sink, parse_source
from tests.for_each import for_each

SERVER = {"nameserver": "127.0.0.1:9876"}
ORDERS = {**SERVER, "subscribe": "orders"}


def given(base: dict[str, str] = ORDERS, **options: str) -> dict[str, str]:
    """Return options as Spark passes them, with their names in lower case."""
    return {**base, **{name.lower(): value for name, value in options.items()}}


NAMED = {
    "first": NamedOffset.EARLIEST,
    "Earliest": NamedOffset.EARLIEST,
    "LATEST": NamedOffset.LATEST,
    "last": NamedOffset.LATEST,
}
TIME_MS = 1714557600000
TIMES = ["2024-05-01T12:00:00+02:00", "2024-05-01T10:00:00Z", str(TIME_MS)]
BY_TOPIC = '{"orders": "2024-05-01T12:00:00+02:00", "payments": 1714557600001}'
OF_TOPICS = StoredAt("startingTimestamp", {"ns%orders": TIME_MS, "ns%payments": TIME_MS + 1})
OF_PAYMENTS = StoredAt("endingTimestamp", {"payments": 5})
DURATIONS = {"500ms": 0.5, "90": 0.09, "30s": 30, "15m": 900, "2 hours": 7200, "1d": 86400}


@for_each(
    "options, names, values",
    [
        ({}, "topics pattern assigned start end", (("orders",), None, (), None, NamedOffset.LATEST)),
        ({}, "read.group read.selector.expression read.pull_batch_size", (DEFAULT_GROUP, "*", 32)),
        ({}, "read.pulls_in_flight read.fail_on_data_loss read.read_timeout_s", (16, True, 120)),
        ({}, "commit_offsets max_offsets min_offsets max_delay_s", (False, None, None, 900)),
        ({}, "planning_interval_s client.request_timeout_s client.retries", (0.1, 10, None)),
        ({}, "tasks.min_partitions tasks.max_partitions", (None, None)),
        ({}, "tasks.min_records tasks.max_records", (1000, None)),
        ({"subscribe": "b, a,b"}, "topics", ("b", "a")),
        ({"topic": "b, a,b"}, "topics", ("b", "a")),
        ({"subscribe": "orders", "tags": "a || b"}, "read.selector.tags", {"a", "b"}),
        ({"subscribe": "orders", "subExpression": "a || b"}, "read.selector.tags", {"a", "b"}),
        ({"sqlFilter": "a > 1"}, "read.selector.expression read.selector.expression_type", ("a > 1", "SQL92")),
        ({"startingOffsets": "earliest"}, "start", NamedOffset.EARLIEST),
        ({"startingOffsets": "group", "consumerGroup": "app"}, "start", NamedOffset.GROUP),
        *[({"startingOffsets": name}, "start", bound) for name, bound in NAMED.items()],
        *[
            ({"startingTimestamp": text, "startingOffsets": "latest"}, "start", StoredAt("startingTimestamp", TIME_MS))
            for text in TIMES
        ],
        ({"startingTimestamp": "2024-05-01T10:00:00.000001Z"}, "start", StoredAt("startingTimestamp", TIME_MS + 1)),
        ({"startingTimestamp": "0"}, "start", StoredAt("startingTimestamp", 0)),
        ({"subscribe": "orders,payments", "startingTimestamp": BY_TOPIC, "namespace": "ns"}, "start", OF_TOPICS),
        ({"subscribePattern": "pay.*", "endingTimestamp": '{"payments": "5"}'}, "end", OF_PAYMENTS),
        ({"endingOffsets": "latest"}, "end", NamedOffset.LATEST),
        ({"endingTimestamp": "5"}, "end", StoredAt("endingTimestamp", 5)),
        *[({"maxTriggerDelay": text}, "max_delay_s", pytest.approx(delay_s)) for text, delay_s in DURATIONS.items()],
        ({"consumerGroup": "app"}, "commit_offsets read.group", (True, "app")),
        ({"consumerGroup": "app", "commitOffsets": "FALSE"}, "commit_offsets", False),
        ({"consumerGroup": "app", "namespace": "ns"}, "read.group client.namespace", ("ns%app", "ns")),
        ({"namespace": "ns"}, "topics", ("ns%orders",)),
    ],
)
def test_options_of_a_read(options, names, values):
    chosen = {"topic", "subscribePattern"} & options.keys()
    streaming = not {"endingOffsets", "endingTimestamp"} & options.keys()
    found = parse_source(given(SERVER if chosen else ORDERS, **options), streaming)
    assert attrgetter(*names.split())(found) == values


def test_defaults_of_a_write():
    options = parse_sink(SERVER)
    assert (options.topic, options.send_timeout_s, options.send_retries, options.max_in_flight) == (None, 120, 5, 256)
    assert (options.accept_degraded, options.dedup_properties) == (False, True)


def test_names_match_in_any_case():
    options = parse_source({"NAMESERVER": "h:1", "Subscribe": "orders", "minPartitions": "3"}, None)
    assert options.tasks.min_partitions == 3


@for_each(
    "name, text, parts",
    [
        *[("nameServer", text, ("a:1", "b:2")) for text in ("a:1;b:2", "a:1,b:2", " a:1 ; b:2 ")],
        ("allowedAddresses", "10.0.0.0/8, broker-a:10911", ("10.0.0.0/8", "broker-a:10911")),
    ],
)
def test_an_option_may_have_several_values(name, text, parts):
    config = parse_source(given(**{name: text}), None).client.config()
    assert parts == (config.name_servers if name == "nameServer" else config.allowed_addresses)


def test_assigned_queues():
    options = parse_source(given(SERVER, assign='{"orders": {"broker-b": [1, 0], "broker-a": [2]}}'), None)
    assert [str(queue) for queue in options.assigned] == ["orders/broker-a/2", "orders/broker-b/0", "orders/broker-b/1"]


def test_starting_offsets_for_queues_brokers_and_topics():
    text = '{"a": {"x": {"0": 23, "1": -2}, "y": -1}, "b": -2}'
    start = parse_source(given(SERVER, subscribe="a,b", startingOffsets=text), True).start
    assert isinstance(start, GivenOffsets)
    queues = [MessageQueue(*each) for each in [("a", "x", 0), ("a", "x", 1), ("a", "y", 7), ("b", "z", 0)]]
    assert [start.offset(queue) for queue in queues] == [23, EARLIEST, LATEST, EARLIEST]
    start.check(queues)
    with pytest.raises(ConfigError, match="startingOffsets covers all queues .* lacks a/x/2"):
        start.check([*queues, MessageQueue("a", "x", 2)])
    with pytest.raises(ConfigError, match="startingOffsets names a/y, which the query does not read"):
        start.check([*queues[:2], queues[3]])


@for_each(
    "options, expected",
    [
        ({"subscribe": "orders,payments", "startingTimestamp": '{"orders": 5}'}, "lacks payments"),
        ({"subscribe": "orders", "startingTimestamp": '{"orders": 5, "other": 5}'}, "names other"),
        ({"subscribePattern": "pay.*", "startingTimestamp": '{"orders": 5}'}, "names orders, which no option chooses"),
    ],
)
def test_times_by_topic_must_cover_the_topics_to_read(options, expected):
    with pytest.raises(ConfigError, match=f"startingTimestamp .*{expected}"):
        parse_source(given(SERVER, **options), None)


def test_given_offsets():
    end = parse_source(given(endingOffsets='{"orders": {"b": {"0": 7, "1": -1}}}'), False).end
    assert isinstance(end, GivenOffsets)
    assert end.offset(MessageQueue("orders", "b", 1)) == LATEST
    start = parse_source(given(namespace="ns", startingOffsets='{"orders": -2}'), True).start
    assert isinstance(start, GivenOffsets)
    assert start.offset(MessageQueue("ns%orders", "b", 0)) == EARLIEST
    assert (
        parse_sink(given(SERVER, namespace="ns", topic="orders")).topic == "orders"
    )  # the producer adds the namespace


WRONG = [
    # name, value, the expected text in addition to the name, other options
    *[(name, "", "empty", {}) for name in ("nameServer", "subscribe", "failOnUnreachable", "dedupProperties")],
    *[(name, "0", "at least 1", {}) for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "minPartitions")],
    *[(name, "0", "at least 1", {}) for name in ("maxPartitions", "maxRecordsPerPartition")],
    *[(name, "0", "from 10", {}) for name in ("requestTimeoutMs", "readTimeoutMs", "sendTimeoutMs")],
    *[(name, "0", "from 1", {}) for name in ("retries", "maxMessageBytes", "maxInFlight")],
    *[(name, "0", "from 1 to 1024", {}) for name in ("pullBatchSize", "pullsInFlight")],
    *[(name, "yes", "true or false", {}) for name in ("pushFilters", "autoCreateTopic")],
    *[("failOnDataLoss", "1", "true or false", {}), ("tls", "maybe", "true or false", {})],
    ("acceptDegraded", "ja", "true or false", {}),
    ("nameServer", "nowhere", "host:port", {}),
    ("subscribe", " , ", "names no topic", {}),
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
    ("sqlFilter", "a = '\udcff'", "unpaired surrogate at position 5", {}),
    ("startingOffsets", "yesterday", "'earliest', 'latest', 'group'", {}),
    ("startingOffsets", "{", "is not JSON", {}),
    ("startingOffsets", '{"orders": 5}', "5 for orders", {}),
    ("startingOffsets", '{"orders": {"b": 5}}', "5 for orders/b", {}),
    ("startingOffsets", '{"orders": {"b": {"0": -3}}}', "-3 for orders/b/0", {}),
    ("startingOffsets", '{"orders": {"b": {"0": "5"}}}', "'5' for orders/b/0", {}),
    ("startingOffsets", '{"orders": {"b": {"0": true}}}', "True for orders/b/0", {}),
    ("startingOffsets", '{"orders": {"b": {"x": 1}}}', "'x' of orders/b", {}),
    ("startingOffsets", '{"orders": {"b": {"0": 1, "0": 2}}}', "twice", {}),
    ("startingOffsets", '{"orders": {"b": {"0": 1, "00": 2}}}', "'00' of orders/b is not a queue id", {}),
    ("startingOffsets", f'{{"orders": {{"b": {{"{"9" * 5000}": 1}}}}}}', "is not a queue id", {}),
    ("startingOffsets", f'{{"orders": {{"b": {{"0": {"9" * 5000}}}}}}}', "is not JSON", {}),
    ("startingOffsets", "group", "consumerGroup", {}),
    ("startingTimestamp", "2024-05-01T12:00:00", "no time zone", {}),
    ("startingTimestamp", "-5", "out of range", {}),
    ("startingTimestamp", "1969-12-31T00:00:00Z", "out of range", {}),
    ("startingTimestamp", "noon", "is not a time", {}),
    ("startingTimestamp", "9" * 5000, "is not a time", {}),
    ("startingTimestamp", '{"orders": "noon"}', "'noon' for orders is not a time", {}),
    ("startingTimestamp", '{"orders": "2024-05-01T12:00:00"}', "for orders has no time zone", {}),
    ("startingTimestamp", '{"orders": -5}', "for orders is out of range", {}),
    ("startingTimestamp", '{"orders": 1.5}', "1.5 for orders is not allowed; give one time, or JSON like", {}),
    ("startingTimestamp", '{"orders": {"b": 5}}', "for orders is not allowed", {}),
    ("startingTimestamp", '{"orders": true}', "True for orders is not allowed", {}),
    ("startingTimestamp", '{"orders": 5, "orders": 6}', "one of them twice", {}),
    ("startingTimestamp", '{"a b": 5}', "a b", {}),
    ("startingTimestamp", "{}", "names no topic", {}),
    ("startingTimestamp", '{"orders"', "is not JSON", {}),
    ("startingTimestamp", f'{{"orders": {"9" * 5000}}}', "is not JSON", {}),
    ("endingTimestamp", '{"orders": "noon"}', "'noon' for orders is not a time", {}),
    ("endingOffsets", "earliest", "'latest'", {}),
    ("endingOffsets", '{"orders": -2}', "-2 for orders", {}),
    ("endingTimestamp", "2024-05-01T12:00:00", "no time zone", {}),
    ("consumerGroup", "a b", "a b", {}),
    ("consumerGroup", "DEFAULT_CONSUMER", "reserved", {}),
    ("commitOffsets", "true", "consumerGroup", {}),
    ("commitOffsets", "yes", "true or false", {"consumerGroup": "app"}),
    ("maxOffsetsPerTrigger", "many", "whole number", {}),
    ("maxOffsetsPerTrigger", "1.5", "whole number", {}),
    ("minOffsetsPerTrigger", "10", "above maxOffsetsPerTrigger=9", {"maxOffsetsPerTrigger": "9"}),
    ("maxTriggerDelay", "soon", "15m", {}),
    ("maxTriggerDelay", "-1s", "15m", {}),
    ("maxPartitions", "3", "below minPartitions=4", {"minPartitions": "4"}),
    ("minRecordsPerPartition", "-1", "at least 0", {}),
    ("maxFrameBytes", "65535", "from 65536 to 1073741824", {}),
    ("maxBodyBytes", "1023", "from 1024 to 1073741824", {}),
    ("damagedBodies", "leave", "give fail, skip, raw", {}),
    ("planningIntervalMs", "-1", "from 0", {}),
    ("secretKey", "k", "accessKey is missing", {}),
    ("accessKey", "k", "secretKey is missing", {}),
    ("secretKey", "k\n", "printable ASCII", {"accessKey": "k"}),
    ("tlsCaFile", "ca.pem", "tls=true", {}),
    ("tlsCaFile", "", "is empty; give a value, or remove it", {"tls": "true"}),
    ("allowedAddresses", "10.0.0.1/8", "allowedAddresses: '10.0.0.1/8'", {}),
    ("sendRetries", "0", "from 1 to 99", {}),
    ("nameServer", "here", "nameServer 'here' is not host:port", {}),
]


@for_each("name, value, text, others", WRONG, ids=lambda each: str(each)[:40])
def test_a_wrong_value_is_refused_for_reads_and_writes(name, value, text, others):
    with pytest.raises(ConfigError) as refused:
        check_options(given(**{**others, name: value}))
    assert name in str(refused.value)
    assert text in str(refused.value)


@for_each(
    "options, expected",
    [
        ({"assign": "{"}, "not JSON.*give JSON like"),
        ({"assign": "[]"}, "is not a JSON object.*give JSON like"),
        ({"assign": "{}"}, "names no queue.*give JSON like"),
        ({"assign": '{"orders": [0]}'}, r"\[0\] of topic 'orders'.*give JSON like"),
        ({"assign": '{"orders": {"b": []}}'}, r"\[\] of broker 'b'.*give JSON like"),
        ({"assign": '{"orders": {"b": [-1]}}'}, r"\[-1\] of broker 'b'.*give JSON like"),
        ({"assign": '{"orders": {"b": ["0"]}}'}, r"\['0'\] of broker 'b'.*give JSON like"),
        ({"assign": f'{{"orders": {{"b": [{"9" * 5000}]}}}}'}, "not JSON.*give JSON like"),
        ({"subscribePattern": "("}, r"subscribePattern='\(' is not a regular expression"),
        ({"nameServer": None, "subscribe": "orders"}, "nameServer is missing"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_selection_that_cannot_be_read_is_refused(options, expected):
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        check_options({name: text for name, text in given(SERVER, **options).items() if text is not None})


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
def test_options_that_a_stream_or_a_batch_cannot_have(streaming, options, text):
    parse_source(given(**options), streaming=None)
    with pytest.raises(ConfigError, match=text):
        parse_source(given(**options), streaming=streaming)


@for_each(
    "name, expected",
    [
        ("subscribes", "did you mean subscribe"),
        ("nameservers", "did you mean nameServer"),
        ("startingoffset", "did you mean startingOffsets"),
        ("sendTimeOut", "did you mean sendTimeoutMs"),
        ("zzz", "there are nameServer, subscribe"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_one(name, expected):
    with pytest.raises(ConfigError, match=f"option '{name}' is unknown; {expected}"):
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


def test_options_can_be_pickled():
    text = json.dumps({"orders": {"b": {"0": 3}}})
    options = parse_source(given(tls="true", startingOffsets=text), streaming=True)
    assert pickle.loads(pickle.dumps(options)) == options
    assert pickle.loads(pickle.dumps(parse_sink(ORDERS))) == parse_sink(ORDERS)


def test_every_option_is_known_by_one_name():
    assert len({name.lower() for name in NAMES}) == len(NAMES)
