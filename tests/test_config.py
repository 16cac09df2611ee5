"""Settings: what is taken alike."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pyrocket_consumer import ConfigError
from pyrocket_consumer.config import ConsumerConfig


def consume_from(value):
    return ConsumerConfig(group="G", name_server="127.0.0.1:9876", consume_from=value).consume_from


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("first", "first"),
        ("earliest", "first"),
        ("last", "last"),
        ("latest", "last"),
        ("2026-11-21T08:00:00Z", datetime(2026, 11, 21, 8, tzinfo=UTC)),
    ],
)
def test_where_to_begin_is_one_word_whichever_is_given(given, means):
    assert consume_from(given) == means


def test_what_is_no_place_to_begin_at_is_told():
    with pytest.raises(ConfigError, match="consume_from='begin' is not allowed; use 'first' or 'earliest'"):
        consume_from("begin")
