"""Filters that Spark pushes skip messages, and miss no row."""

from __future__ import annotations

import logging
import random
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import cycle

import pytest
from pyspark.sql import datasource
from pyspark.sql import functions as f

from pyrocket_consumer.errors import BrokerError, ConfigError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.subscription import parse_subscription
from pyrocket_consumer.spark.broker_offsets import CLOCK_SKEW_MS
from pyrocket_consumer.spark.data_source import PUSHES_FILTERS, project_schema
from pyrocket_consumer.spark.failures import DataLoss
from pyrocket_consumer.spark.offsets import QueueRange
from pyrocket_consumer.spark.pushed_filters import MAX_TAGS, MAX_TAGS_LENGTH, PushedFilters, Span, push_filters
from pyrocket_consumer.testing import EmbeddedCluster, answer, rewrite
from tests.for_each import for_each
from tests.spark.spark_calls import data_source, rows, stored_at, with_options

if not PUSHES_FILTERS:
    pytest.skip("this release of PySpark pushes no filters", allow_module_level=True)

FIRST_MS = 1_767_225_600_000
SWITCH = "spark.sql.python.filterPushdown.enabled"


def where(kind, column, *value):
    """Return a filter as Spark makes it: `where("In", "queueId", (1, 2))`."""
    return getattr(datasource, kind)((column,), *value)


def at(ms, us=0):
    """Return a time as Spark passes it."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms, microseconds=us)


def stored(kind, after_ms):
    """Return a filter for messages stored before or after a time, relative to the first message."""
    return where(kind, "storeTimestamp", at(FIRST_MS + after_ms))


def pushed(*filters, tags="*"):
    return push_filters(filters, parse_subscription("", tags))[0]


# ---- what filters mean


@for_each(
    "filters, span",
    [
        ([where("EqualTo", "queueOffset", 5)], Span(5, 5)),
        ([where("EqualNullSafe", "queueOffset", 5)], Span(5, 5)),
        ([where("GreaterThan", "queueOffset", 5)], Span(6)),
        ([where("GreaterThanOrEqual", "queueOffset", 5)], Span(5)),
        ([where("LessThan", "queueOffset", 5)], Span(None, 4)),
        ([where("LessThanOrEqual", "queueOffset", 5)], Span(None, 5)),
        ([where("In", "queueOffset", [9, None, 3, 5])], Span(3, 9)),
        ([where("GreaterThan", "queueOffset", 5), where("LessThan", "queueOffset", 9)], Span(6, 8)),
        ([where("GreaterThan", "queueOffset", 5), where("GreaterThan", "queueOffset", 3)], Span(6)),
        ([where("EqualTo", "queueOffset", None)], Span()),
        ([where("EqualTo", "queueOffset", True)], Span()),
        ([where("GreaterThan", "queueOffset", 1.5)], Span()),
        ([where("In", "queueOffset", [])], Span()),
        ([where("In", "queueOffset", [None])], Span()),
        ([where("In", "queueOffset", [1, "2"])], Span()),
        ([where("IsNotNull", "queueOffset")], Span()),
        ([where("IsNull", "queueOffset")], Span()),
        ([datasource.Not(where("EqualTo", "queueOffset", 5))], Span()),
        ([datasource.EqualTo(("properties", "queueOffset"), 5)], Span()),
        ([where("EqualTo", "reconsumeTimes", 5)], Span()),
    ],
)
def test_offsets(filters, span):
    assert pushed(*filters).offsets == span


@for_each(
    "each, span",
    [
        (where("GreaterThanOrEqual", "storeTimestamp", at(7)), Span(7)),
        (where("GreaterThanOrEqual", "storeTimestamp", at(7, 1)), Span(8)),
        (where("GreaterThan", "storeTimestamp", at(7)), Span(8)),
        (where("GreaterThan", "storeTimestamp", at(7, 999)), Span(8)),
        (where("LessThanOrEqual", "storeTimestamp", at(7)), Span(None, 7)),
        (where("LessThanOrEqual", "storeTimestamp", at(7, 999)), Span(None, 7)),
        (where("LessThan", "storeTimestamp", at(7)), Span(None, 6)),
        (where("LessThan", "storeTimestamp", at(7, 1)), Span(None, 7)),
        (where("EqualTo", "storeTimestamp", at(7)), Span(7, 7)),
        (where("EqualNullSafe", "storeTimestamp", at(7)), Span(7, 7)),
        (where("In", "storeTimestamp", [at(7), None, at(3)]), Span(3, 7)),
        (where("LessThan", "storeTimestamp", at(-1)), Span(None, -2)),
        (where("GreaterThan", "storeTimestamp", at(7).astimezone(timezone(timedelta(hours=5)))), Span(8)),
        (where("GreaterThan", "storeTimestamp", datetime(2026, 1, 1)), Span()),
        (where("GreaterThan", "storeTimestamp", date(2026, 1, 1)), Span()),
        (where("EqualNullSafe", "storeTimestamp", None), Span()),
        (where("GreaterThan", "bornTimestamp", at(7)), Span()),
    ],
)
def test_store_times(each, span):
    assert pushed(each).stored_ms == span


QUEUE = MessageQueue("orders", "broker-b", 3)


@for_each(
    "each, may_be_there",
    [
        (where("EqualTo", "queueId", 3), True),
        (where("EqualTo", "queueId", 2), False),
        (where("GreaterThan", "queueId", 3), False),
        (where("In", "queueId", [1, None, 3]), True),
        (where("In", "queueId", [1, None]), False),
        (datasource.Not(where("EqualTo", "queueId", 3)), False),
        (datasource.Not(where("In", "queueId", [1, None])), True),
        (where("EqualTo", "queueId", 2.0), True),
        (where("EqualTo", "brokerName", "broker-a"), False),
        (where("EqualNullSafe", "brokerName", "broker-b"), True),
        (where("LessThan", "brokerName", "broker-b"), False),
        (where("StringStartsWith", "brokerName", "x"), True),
        (where("IsNull", "brokerName"), True),
        (where("EqualTo", "topic", "payments"), False),
        (where("EqualTo", "topic", "orders"), True),
    ],
)
def test_queues(each, may_be_there):
    assert pushed(each).select(QUEUE) is may_be_there


@for_each(
    "filters, given, expression",
    [
        ([where("EqualTo", "tags", "paid")], "*", "paid"),
        ([where("EqualNullSafe", "tags", "paid")], "*", "paid"),
        ([where("In", "tags", ["paid", None, "open"])], "*", "open || paid"),
        ([where("In", "tags", ["paid", "open"]), where("EqualTo", "tags", "open")], "*", "open"),
        ([where("In", "tags", ["paid", "open"])], "open || lost", "open"),
        ([where("EqualTo", "tags", "a='b")], "*", "a='b"),
        *[
            ([where("EqualTo", "tags", tag)], "open||lost", "open||lost")
            for tag in ("", "*", "a*", "a|b", "a b", " a", "a\t", "a\x02", "a\x00", "a\u2003b", "\ufffd", None)
        ],
        ([where("In", "tags", ["paid", "a b"])], "*", "*"),
        ([where("In", "tags", [str(number) for number in range(MAX_TAGS + 1)])], "*", "*"),
        ([where("EqualTo", "tags", "x" * MAX_TAGS_LENGTH)], "*", "x" * MAX_TAGS_LENGTH),
        ([where("EqualTo", "tags", "x" * (MAX_TAGS_LENGTH + 1))], "*", "*"),
        ([where("In", "tags", ["x" * MAX_TAGS_LENGTH, "y"])], "*", "*"),
        ([where("GreaterThan", "tags", "paid")], "*", "*"),
        ([where("StringStartsWith", "tags", "paid")], "*", "*"),
        ([datasource.Not(where("EqualTo", "tags", "paid"))], "*", "*"),
        ([where("IsNull", "tags")], "*", "*"),
    ],
)
def test_tags(filters, given, expression):
    found, selector = push_filters(filters, parse_subscription("", given))
    assert selector.expression == expression
    assert not found.match_nothing


def test_contradicting_filters_match_nothing():
    assert pushed(where("EqualTo", "storeTimestamp", at(7, 500))).match_nothing
    assert pushed(where("EqualTo", "tags", "paid"), tags="open || lost").match_nothing


def test_with_sql_no_tags_are_requested():
    given = Subscription("", "a > 1", frozenset(), "SQL92")
    found, selector = push_filters([where("EqualTo", "tags", "paid")], given)
    assert (found, selector) == (PushedFilters(), given)


# ---- what is read


@pytest.fixture
def cluster():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=2)
        for number in range(200):
            cluster.send(
                "orders",
                tags=("paid", "open", None)[number % 3],
                queue_id=number % 2,
                stored_at_ms=FIRST_MS + number * 1000,
            )
        yield cluster


def reader_of(cluster, *filters, **options):
    """Return a reader with pushed filters. It returns all of them to Spark."""
    reader = data_source(cluster, pushFilters=True, **options).reader(project_schema(None))
    assert list(reader.pushFilters(iter(filters))) == list(filters)
    return reader


def ranges(cluster, *filters, **options):
    """Return the start and end of each range, by broker and queue id."""
    found = [each for task in reader_of(cluster, *filters, **options).partitions() for each in task.ranges]
    return {(each.queue.topic, each.queue.queue_id): (each.begin, each.end) for each in found}


def read(cluster, *filters, **options):
    reader = reader_of(cluster, *filters, **options)
    return sorted((queue.queue_id, offset) for queue, offset in rows(reader, reader.partitions()))


def test_without_filters_all_is_read(cluster):
    assert ranges(cluster) == BOTH


@pytest.mark.live
def test_only_the_offsets_asked_for_are_read(cluster):
    bounds = where("GreaterThan", "queueOffset", 89), where("LessThan", "queueOffset", 95)
    assert ranges(cluster, *bounds) == {("orders", 0): (90, 95), ("orders", 1): (90, 95)}
    assert read(cluster, *bounds, where("EqualTo", "queueId", 1)) == [(1, offset) for offset in range(90, 95)]


@pytest.mark.parametrize("version", ["4.9.7", "5.3.2"])
def test_store_times_become_offsets_with_a_margin_for_clocks(version):
    skew = CLOCK_SKEW_MS // 1000
    with stored_at([FIRST_MS + number * 1000 for number in range(200)], version=version) as cluster:
        low = stored("GreaterThanOrEqual", 150_000)
        high = stored("LessThan", 160_000)
        assert ranges(cluster, low) == {("orders", 0): (150 - skew, 200)}
        assert ranges(cluster, high) == {("orders", 0): (0, 160 + skew)}
        assert ranges(cluster, low, high) == {("orders", 0): (150 - skew, 160 + skew)}
        nothing = stored("LessThan", -FIRST_MS - 1), stored("LessThan", -60_000), stored("GreaterThan", 900_000)
        assert [ranges(cluster, each) for each in nothing] == [{}, {}, {}]


@pytest.mark.live
def test_tags_are_requested_from_the_broker(cluster):
    broker = cluster.broker("broker-a")
    assert read(cluster, where("EqualTo", "tags", "paid")) == sorted(
        (number % 2, number // 2) for number in range(200) if number % 3 == 0
    )
    pulls = [each.command.fields["subscription"] for each in broker.requests(RequestCode.PULL_MESSAGE)]
    assert set(pulls) == {"paid"}


@for_each(
    "filters",
    [
        [where("GreaterThan", "queueOffset", 5), where("LessThan", "queueOffset", 5)],
        [where("EqualTo", "queueId", 7)],
        [where("EqualTo", "tags", "paid"), where("EqualTo", "tags", "open")],
        [where("GreaterThan", "storeTimestamp", at(9)), where("LessThan", "storeTimestamp", at(9))],
        [where("GreaterThan", "queueOffset", 2**63 - 1)],
    ],
)
def test_contradicting_filters_read_nothing(cluster, filters):
    reader = reader_of(cluster, *filters)
    partitions = reader.partitions()
    assert len(partitions) == 1  # or Spark would add its own
    assert rows(reader, partitions) == []


@pytest.mark.live
def test_an_excluded_queue_may_be_unreachable(cluster):
    only_queue_1 = {"when": lambda command: command.fields.get("queueId") == "1", "times": None}
    for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET, RequestCode.PULL_MESSAGE):
        cluster.broker("broker-a").on(code, answer(ResponseCode.NO_PERMISSION), **only_queue_1)
    with pytest.raises(BrokerError):
        read(cluster)
    assert len(read(cluster, where("EqualTo", "queueId", 0))) == 100


def test_pushed_filters_are_logged(cluster, caplog):
    caplog.set_level(logging.INFO)
    ranges(cluster, where("GreaterThanOrEqual", "queueOffset", 90), where("EqualTo", "tags", "paid"))
    assert "filters=queueOffset=90.. tags=paid leave offsets=20 of=200" in caplog.text


# ---- with other options


def test_filters_only_narrow_what_the_options_choose(cluster):
    options = {
        "startingOffsets": '{"orders": {"broker-a": {"0": 20, "1": 50}}}',
        "endingOffsets": '{"orders": {"broker-a": {"0": 60, "1": 55}}}',
    }
    low, high = where("GreaterThanOrEqual", "queueOffset", 30), where("LessThan", "queueOffset", 53)
    assert ranges(cluster, low, high, **options) == {("orders", 0): (30, 53), ("orders", 1): (50, 53)}
    assert ranges(cluster, where("EqualTo", "queueId", 1), **options) == {("orders", 1): (50, 55)}
    late = stored("GreaterThan", 110_000)
    assert ranges(cluster, late, **options) == {("orders", 0): (50, 60), ("orders", 1): (50, 55)}


def test_excluded_queues_need_given_offsets_too(cluster):
    offsets = '{"orders": {"broker-a": {"0": 20}}}'
    with pytest.raises(ConfigError, match="it lacks .*orders"):
        ranges(cluster, where("EqualTo", "queueId", 0), startingOffsets=offsets)


def test_tasks_are_planned_for_the_remaining_offsets(cluster):
    reader = reader_of(cluster, where("LessThan", "queueOffset", 20), minPartitions=4, minRecordsPerPartition=0)
    assert [len(each) for task in reader.partitions() for each in task.ranges] == [10, 10, 10, 10]


def test_lost_messages_that_filters_exclude_are_not_data_loss(cluster):
    cluster.broker("broker-a").delete_before("orders", 0, 50)
    options = {"startingOffsets": '{"orders": {"broker-a": {"0": 0, "1": 0}}}'}
    low, late = where("GreaterThanOrEqual", "queueOffset", 50), stored("GreaterThan", 150_000)
    assert ranges(cluster, low, **options)["orders", 0] == (50, 100)
    assert ranges(cluster, late, **options)["orders", 0] == (70, 100)
    lower = where("GreaterThanOrEqual", "queueOffset", 49)
    for bounds in ([], [lower], [stored("GreaterThan", 90_000)], [stored("LessThan", 1000)]):
        with pytest.raises(DataLoss):  # the lost messages might match the filters
            ranges(cluster, *bounds, **options)


def test_an_end_above_the_last_message_matters_only_if_it_is_read(cluster):
    options = {"endingOffsets": '{"orders": {"broker-a": {"0": 150, "1": -1}}}', "requestTimeoutMs": "100"}
    with pytest.raises(DataLoss):
        ranges(cluster, where("GreaterThan", "queueOffset", 10), **options)
    assert ranges(cluster, where("LessThan", "queueOffset", 90), **options)["orders", 0] == (0, 90)


def test_topics_are_named_as_in_rows():
    with stored_at(range(5), ("ns%orders", "ns%payments")) as cluster:
        options = {"namespace": "ns", "subscribe": "orders,payments"}
        assert ranges(cluster, where("EqualTo", "topic", "orders"), **options) == {("ns%orders", 0): (0, 5)}


# ---- no row is missed


def at_offset(offset):
    """Make a broker return this offset for a time."""

    def lying(command):
        command.fields["offset"] = str(offset)
        return command

    return rewrite(lying)


BOTH = {("orders", 0): (0, 100), ("orders", 1): (0, 100)}


@pytest.mark.parametrize("lie", [0, 10**6, -1])
def test_a_found_offset_counts_only_if_messages_confirm_it(cluster, lie):
    cluster.broker("broker-a").on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, at_offset(lie), times=None)
    for kind in ("GreaterThan", "LessThan"):
        assert ranges(cluster, stored(kind, 50_000)) == BOTH


@pytest.mark.parametrize("code", [RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, RequestCode.PULL_MESSAGE])
@pytest.mark.parametrize("refusal", [answer(ResponseCode.NO_PERMISSION), answer(ResponseCode.SUCCESS)])
def test_a_broker_that_cannot_search_by_time_is_read_completely(cluster, code, refusal):
    cluster.broker("broker-a").on(code, refusal, times=None)
    assert ranges(cluster, stored("GreaterThan", 90_000)) == BOTH


def test_a_search_is_retried_at_a_busy_broker(cluster):
    cluster.broker("broker-a").on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, answer(ResponseCode.SYSTEM_BUSY))
    assert ranges(cluster, stored("GreaterThan", 90_000))["orders", 0] == (40, 100)


def test_each_busy_response_costs_one_more_request(cluster):
    busy, turns = answer(ResponseCode.SYSTEM_BUSY), cycle((True, False))
    for code in (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, RequestCode.PULL_MESSAGE):
        cluster.broker("broker-a").on(
            code, lambda exchange: busy(exchange) if next(turns) else exchange.handle(exchange.answer), times=None
        )
    bounds = stored("GreaterThanOrEqual", 90_000), stored("LessThan", 100_000), where("EqualTo", "queueId", 0)
    assert ranges(cluster, *bounds, retries=1) == {("orders", 0): (40, 55)}


def search_of_java(times_ms, wanted_ms):
    """Return the offset that a broker's binary search by time finds. From a hit it goes back over equal times only."""
    if times_ms[-1] < wanted_ms:
        return len(times_ms)
    low, high = 0, len(times_ms)
    while low < high:
        middle = (low + high - 1) // 2
        if times_ms[middle] == wanted_ms:
            while middle > 0 and times_ms[middle - 1] == wanted_ms:
                middle -= 1
            return middle
        low, high = (middle + 1, high) if times_ms[middle] < wanted_ms else (low, middle)
    return low


@pytest.mark.live
@pytest.mark.parametrize("kind", ["EqualTo", "GreaterThanOrEqual"])
def test_clocks_may_differ_by_the_whole_margin(kind):
    wanted_ms = FIRST_MS + 100_000
    after_ms = (-60_000, 0, -1, -CLOCK_SKEW_MS, -CLOCK_SKEW_MS // 2, 60_000, 61_000)
    times_ms = [wanted_ms + each for each in after_ms]
    with stored_at(times_ms) as cluster:

        def search(exchange):
            at_offset(search_of_java(times_ms, int(exchange.request.fields["timestamp"])))(exchange)

        cluster.broker("broker-a").on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search, times=None)
        found = {offset for _, offset in read(cluster, where(kind, "storeTimestamp", at(wanted_ms)))}
        assert found >= ({1} if kind == "EqualTo" else {1, 5, 6})


@pytest.mark.live
@pytest.mark.parametrize("version", ["4.9.7", "5.3.2"])
@pytest.mark.parametrize(
    ("odd_by_s", "kind", "limit_s"),
    [(3600, "LessThan", 1000), (3600, "LessThan", 60), (-86_400, "GreaterThan", -3600), (-86_400, "GreaterThan", 40)],
)
def test_one_message_with_a_wrong_clock_hides_no_others(version, odd_by_s, kind, limit_s):
    times_s = [number + (odd_by_s if number == 50 else 0) for number in range(101)]
    with stored_at([FIRST_MS + each * 1000 for each in times_s], version=version) as cluster:
        found = {offset for _, offset in read(cluster, stored(kind, limit_s * 1000))}
        right = set(range(101)) - {50}
        assert found >= {each for each in right if (each < limit_s if kind == "LessThan" else each > limit_s)}


@pytest.mark.live
@pytest.mark.parametrize("version", ["4.9.7", "5.3.2"])
@pytest.mark.parametrize("seed", range(4))
def test_filters_miss_no_row(version, seed):
    chance = random.Random(seed)
    with EmbeddedCluster(version=version) as cluster:
        cluster.create_topic("orders", queues=2)
        now_ms, messages = FIRST_MS, []
        for _ in range(120):
            now_ms += chance.choice((0, 0, 1, 40, 3000, 60_000))
            queue_id, tag = chance.randrange(2), chance.choice(("a", "b", "AaAa", "BBBB", None))
            stored_ms = now_ms - chance.choice((0, 0, 0, 1, CLOCK_SKEW_MS))  # stored by a master whose clock is slow
            (sent,) = cluster.send("orders", tags=tag, queue_id=queue_id, stored_at_ms=stored_ms)
            messages.append((queue_id, sent.queue_offset, stored_ms, tag))
        kinds = {
            "EqualTo": lambda a, b: a == b,
            "GreaterThan": lambda a, b: a > b,
            "LessThan": lambda a, b: a < b,
            "GreaterThanOrEqual": lambda a, b: a >= b,
            "LessThanOrEqual": lambda a, b: a <= b,
        }
        for _ in range(15):
            filters, left = [], messages
            for _ in range(chance.randrange(1, 4)):
                column, place = chance.choice((("queueOffset", 1), ("queueId", 0), ("storeTimestamp", 2), ("tags", 3)))
                kind = chance.choice(list(kinds)) if column != "tags" else "EqualTo"
                value = chance.choice(messages)[place] or "a" if column == "tags" else chance.choice(messages)[place]
                filters.append(where(kind, column, at(value) if column == "storeTimestamp" else value))
                left = [each for each in left if each[place] is not None and kinds[kind](each[place], value)]
            found = read(cluster, *filters)
            assert {each[:2] for each in left} <= set(found), filters


# ---- with Spark


@pytest.fixture
def switched_on(spark):
    spark.conf.set(SWITCH, "true")
    yield spark
    spark.conf.unset(SWITCH)


def orders(spark, cluster, **options):
    return with_options(spark.read, cluster, subscribe="orders", **options).load()


@pytest.mark.spark_versions
def test_spark_reads_the_same_rows_with_fewer_messages(switched_on, cluster):
    conditions = (
        "storeTimestamp >= timestamp'2026-01-01 00:02:30' and storeTimestamp < '2026-01-01 00:03:00' and queueId = 1",
        "queueId in (0, 5) and brokerName = 'broker-a' and tags in ('paid', 'open') and queueOffset % 2 = 0",
        "not tags = 'paid' and queueOffset > 2.5 and (queueOffset < 30 or tags is null)",
        "storeTimestamp > now()",
    )
    each = [f"coalesce({condition}, false)" for condition in conditions]
    all_rows = orders(switched_on, cluster).selectExpr("queueId", "queueOffset", *each).collect()
    loads = [orders(switched_on, cluster, pushFilters="true").filter(condition) for condition in conditions]
    found = [f.lit(number).alias("number") for number in range(len(loads))]
    together = loads[0].select(found[0], "queueId", "queueOffset")
    for load, number in zip(loads[1:], found[1:], strict=True):
        together = together.union(load.select(number, "queueId", "queueOffset"))
    assert sorted(map(tuple, together.collect())) == sorted(
        (number, row[0], row[1]) for row in all_rows for number in range(len(conditions)) if row[2 + number]
    )
    last = "storeTimestamp >= timestamp'2026-01-01 00:03:18'"
    cluster.broker("broker-a").forget_requests()
    assert orders(switched_on, cluster, pushFilters="true").filter(last).count() == 2
    pulls = [each.command.fields for each in cluster.broker("broker-a").requests(RequestCode.PULL_MESSAGE)]
    reads = [int(each["queueOffset"]) for each in pulls if each["maxMsgNums"] != "1"]  # planning pulls single messages
    assert reads
    assert min(reads) >= 93


@pytest.mark.spark_versions
def test_without_the_option_spark_pushes_no_filters(spark, cluster):
    assert orders(spark, cluster).filter("queueOffset > 89 and queueId = 1").count() == 10
    with pytest.raises(Exception, match="filterPushdown.enabled"):  # if the setting is off in Spark
        orders(spark, cluster, pushFilters="true").filter("queueOffset > 89").count()


def test_queue_ranges_are_narrowed():
    assert pushed(where("LessThan", "queueOffset", 5)).narrow(QueueRange(QUEUE, 0, 9)) == QueueRange(QUEUE, 0, 5)
