from __future__ import annotations

from pyrocket_consumer.protocol.frame import RemotingCommand, sign, signature
from tests.for_each import for_each


@for_each(
    "fields, body, token, expected",
    [
        ({"consumerGroup": "g", "queueId": "3", "topic": "T"}, b"", None, "eMD/PTeT7TIDjJb8ZmV+06Z8VXs="),
        ({}, b'{"clientID":"c"}', "tok", "7kjl/F/fusLKNeQu1gmegV/+WDA="),
    ],
)
def test_the_worked_examples(fields, body, token, expected):
    signed = sign(fields, body, "RocketMQ", "12345678", token)
    assert signed["Signature"] == expected
    assert signed["AccessKey"] == "RocketMQ"
    assert signed.get("SecurityToken") == token
    assert {name: signed[name] for name in fields} == fields


def test_signing_again_gives_the_same_and_keeps_the_fields():
    fields = {"topic": "T"}
    once = sign(fields, b"x", "ak", "sk")
    assert sign(once, b"x", "ak", "sk") == once
    assert fields == {"topic": "T"}


def test_every_part_counts_but_names():
    parts = [
        ({"a": "1", "b": "2"}, b"", "sk"),
        ({"a": "2", "b": "1"}, b"", "sk"),
        ({"a": "1", "b": "2"}, b"x", "sk"),
        ({"a": "1", "b": "2"}, b"", "other"),
        ({"a": "1", "b": "é"}, b"", "sk"),
    ]
    assert len({signature(*each) for each in parts}) == 5
    # Names sort upper case first.
    assert signature({"b": "1", "Z": "2"}, b"", "sk") == signature({"x": "2", "y": "1"}, b"", "sk")


def test_a_signed_request_is_short_and_shows_no_secret():
    fields = sign({"topic": "orders", "long": "x" * 100_000}, b"body", "reader-1", "hidden-2", "hidden-3")
    shown = repr(RemotingCommand(10, fields, b"body" * 1000, remark="y" * 100_000))
    assert "orders" in shown and "AccessKey" in shown and "4000 bytes" in shown
    for secret in ("reader-1", "hidden", fields["Signature"]):
        assert secret not in shown
    assert len(shown) < 1000
