"""How far a query is behind, from the progress that each version of Spark reports."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.query_lag import Lag, LagListener, lag
from tests.for_each import for_each


def offset(**queues):
    table = {str(number): value for number, value in enumerate(queues.values())}
    return {"version": 1, "queues": {"orders": {"broker-a": table}}}


END, LATEST = offset(a=10, b=20, c=5), offset(a=10, b=26, c=8)


def progress(*sources, **more):
    return {"id": "id-1", "name": "copy", "batchId": 3, "sources": list(sources), **more}


def source(end, latest):
    return {"description": "rocketmq", "startOffset": None, "endOffset": end, "latestOffset": latest}


@for_each(
    "written",
    [json.dumps, lambda found: json.dumps(found, indent=2), str, lambda found: found],
    ids=["json", "indented", "python", "dict"],
)
def test_the_distance_of_each_queue_counts(written):
    found = lag(progress(source(written(END), written(LATEST))))
    assert found is not None
    assert (found.max, found.avg, found.min, found.total) == (6, 3.0, 0, 9)
    assert found.queues[MessageQueue("orders", "broker-a", 1)] == 6
    assert "9 offsets behind in 3 queues" in str(found)


def test_the_queues_of_all_sources_count():
    other = json.dumps(END).replace("orders", "audit")
    found = lag(progress(source(json.dumps(END), json.dumps(LATEST)), source(other, other)))
    assert found is not None and (len(found.queues), found.total) == (6, 9)


def test_a_position_beyond_the_end_is_not_behind():
    assert lag(progress(source(json.dumps(LATEST), json.dumps(END)))).max == 0


@for_each(
    "found",
    [
        None,
        {},
        progress(),
        progress(source(json.dumps(END), None)),
        progress(source(json.dumps(END), "null")),
        progress(source(None, None)),
        progress(source('{"topic":{"0":5}}', '{"topic":{"0":9}}')),
        progress(source("17", "20")),
        progress(source("not an offset {", "")),
    ],
)
def test_without_offsets_of_ours_there_is_no_lag(found):
    assert lag(found) is None


def event(found):
    return SimpleNamespace(progress=found)


def test_a_listener_is_told_after_each_batch():
    told = []
    listener = LagListener(lambda name, found: told.append((name, found)))
    listener.onQueryStarted(event({}))
    listener.onQueryProgress(event(progress(source(json.dumps(END), json.dumps(LATEST)))))
    listener.onQueryProgress(event(progress(source(json.dumps(END), json.dumps(LATEST)), name=None)))
    listener.onQueryProgress(event(progress()))
    listener.onQueryIdle(event({}))
    listener.onQueryTerminated(event({}))
    assert [name for name, _ in told] == ["copy", "id-1"]
    assert all(isinstance(found, Lag) and found.total == 9 for _, found in told)


def test_a_report_that_raises_is_logged(caplog):
    def fail(name, found):
        raise ValueError("no gauge")

    LagListener(fail).onQueryProgress(event(progress(source(END, LATEST))))
    assert "could not be reported" in caplog.text


def test_the_lag_is_logged_unless_told_otherwise(caplog):
    with caplog.at_level(logging.INFO, logger="pyrocket_consumer.spark"):
        LagListener().onQueryProgress(event(progress(source(END, LATEST))))
    assert "query=copy lag: 9 offsets behind" in caplog.text
