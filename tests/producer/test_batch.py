"""Where batches are cut."""

from __future__ import annotations

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.producer.batch import MAX_MESSAGES, BatchMessage, cut
from pyrocket_consumer.wire.message import BatchItem, encode_batch


def messages(*body_bytes, properties=""):
    return [BatchMessage(BatchItem(b"x" * size, properties), str(number)) for number, size in enumerate(body_bytes)]


def encoded(part):
    return len(encode_batch(item for item, _ in part))


def test_what_fits_stays_together():
    given = messages(10, 20, 30)
    assert list(cut(given, encoded(given))) == [given]


def test_one_byte_too_many_makes_two_parts():
    given = messages(10, 20, 30)
    assert list(cut(given, encoded(given) - 1)) == [given[:2], given[2:]]


def test_properties_count_by_their_bytes():
    given = messages(10, 10, properties="a\x01éé\x02")
    assert [len(part) for part in cut(given, encoded(given) - 1)] == [1, 1]
    assert [len(part) for part in cut(given, encoded(given))] == [2]


def test_no_part_has_more_messages_than_brokers_can_count():
    given = messages(*[1] * (2 * MAX_MESSAGES + 1))
    assert [len(part) for part in cut(given, 1 << 30)] == [MAX_MESSAGES, MAX_MESSAGES, 1]


def test_every_part_fits_and_nothing_is_lost():
    given = messages(*(7 * number % 90 + 1 for number in range(500)))
    parts = list(cut(given, 500))
    assert [each for part in parts for each in part] == given
    assert max(encoded(part) for part in parts) <= 500


def test_a_message_that_fits_into_no_part_is_named():
    with pytest.raises(ConfigError, match="message 1 of the batch"):
        list(cut(messages(10, 500), 500))


def test_nothing_is_cut_into_nothing():
    assert list(cut([], 100)) == []
