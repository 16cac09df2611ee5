"""Settings: what is taken alike."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pyrocket_consumer import ConfigError
from pyrocket_consumer.config import ClientConfig, ConsumerConfig


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


def allowed(value):
    return ClientConfig(name_server="127.0.0.1:9876", allowed_addresses=value).allowed_addresses


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (None, None),
        ("broker-a", ("broker-a",)),
        ("10.0.0.5", ("10.0.0.5/32",)),
        (["10.0.0.0/8", "broker-a:10911"], ("10.0.0.0/8", "broker-a:10911")),
        (["[::1]:10911", "::1"], ("[::1]:10911", "::1/128")),
        ((each for each in ["a", " b "]), ("a", "b")),
    ],
)
def test_allowed_addresses_are_hosts_places_and_networks(given, means):
    assert allowed(given) == means
    assert allowed(means) == means


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "leave it out to allow any"),
        ("", "must be a name"),
        (5, "must be a name"),
        (["a", 5], "must be a name"),
        ("10.0.0.1/8", "has host bits set"),
        ("10.0.0.300", "give a host"),
        ("10.0.0.*", "give a host"),
        ("broker-a:99999", "port from 1 to 65535"),
        ("a, b", "give a host"),
        ("a\nb", "give a host"),
    ],
)
def test_what_is_no_allowed_address_is_told(given, told):
    with pytest.raises(ConfigError, match="allowed_addresses") as raised:
        allowed(given)
    assert told in str(raised.value)
