"""The lag of a query, from the progress reports of each version of Spark."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.spark.progress import Lag, LagListener, lag
from tests.for_each import for_each


def offset(**queues):
    table = {str(number): value for number, value in enumerate(queues.values())}
    return {"version": 1, "queues": {"orders": {"broker-a": table}}}


END, LATEST = offset(a=10, b=20, c=5), offset(a=10, b=26, c=8)
END_TEXT, LATEST_TEXT = json.dumps(END), json.dumps(LATEST)


def progress(*sources, **more):
    return {"id": "id-1", "name": "copy", "batchId": 3, "sources": list(sources), **more}


def source(end, latest):
    return {"description": "rocketmq", "startOffset": None, "endOffset": end, "latestOffset": latest}


@for_each("written", [json.dumps, lambda found: json.dumps(found, indent=2), str, lambda found: found])
def test_the_lag_of_each_queue_counts(written):
    found = lag(progress(source(written(END), written(LATEST))))
    assert found is not None
    assert (found.max, found.avg, found.min, found.total) == (6, 3.0, 0, 9)
    assert found.queues[MessageQueue("orders", "broker-a", 1)] == 6
    assert "9 offsets behind in 3 queues" in str(found)


def test_the_queues_of_all_sources_count():
    other = END_TEXT.replace("orders", "audit")
    found = lag(progress(source(END_TEXT, LATEST_TEXT), source(other, other)))
    assert found is not None and (len(found.queues), found.total) == (6, 9)
    assert lag(progress(source(LATEST_TEXT, END_TEXT))).max == 0, "a position beyond the end is not behind"


@for_each(
    "found",
    [
        *[None, {}, progress()],
        *[progress(source(*ends)) for ends in ((END_TEXT, None), (END_TEXT, "null"), (None, None))],
        *[progress(source(*ends)) for ends in (('{"topic":{"0":5}}', '{"topic":{"0":9}}'), ("17", "20"))],
        progress(source("not an offset {", "")),
    ],
)
def test_a_progress_of_other_sources_has_no_lag(found):
    assert lag(found) is None


def event(found):
    return SimpleNamespace(progress=found)


def test_a_listener_is_called_after_each_batch():
    reported = []
    listener = LagListener(lambda name, found: reported.append((name, found)))
    listener.onQueryStarted(event({}))
    listener.onQueryProgress(event(progress(source(END_TEXT, LATEST_TEXT))))
    listener.onQueryProgress(event(progress(source(END_TEXT, LATEST_TEXT), name=None)))
    listener.onQueryProgress(event(progress()))
    listener.onQueryIdle(event({}))
    listener.onQueryTerminated(event({}))
    assert [name for name, _ in reported] == ["copy", "id-1"]
    assert all(isinstance(found, Lag) and found.total == 9 for _, found in reported)


def test_a_report_that_raises_is_logged(caplog):
    LagListener(lambda name, found: 1 / 0).onQueryProgress(event(progress(source(END, LATEST))))
    assert "could not be reported" in caplog.text


def test_the_lag_is_logged_by_default(caplog):
    with caplog.at_level(logging.INFO, logger="pyrocket_consumer.spark"):
        LagListener().onQueryProgress(event(progress(source(END, LATEST))))
    assert "query=copy lag: 9 offsets behind" in caplog.text
