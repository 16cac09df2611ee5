"""Calls of a store with wrong arguments: each raises an error that names the argument."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.offsets.database.claim import Claim, ClaimHolder, claim_of_call
from pyrocket_consumer.protocol.message import StoredMessage, decode_messages, encode_message
from tests.for_each import for_each

QUEUE = MessageQueue("orders", "broker-a", 0)


class Holder(ClaimHolder):
    failed_result = "failed"

    def is_success(self, result: object) -> bool:
        return result is None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DatabaseOffsets]:
    engine = create_engine(f"sqlite:///{tmp_path}/offsets.db")
    store = DatabaseOffsets(engine, inbox_days=None)
    store.create_tables()
    yield store
    engine.dispose()


@pytest.fixture
def claim(store: DatabaseOffsets) -> Iterator[Claim]:
    """Let the test be a listener call with two messages."""
    claim = store.begin(Holder(), "billing", QUEUE, "member", 0)
    body = b"".join(encode_message(StoredMessage(topic="orders", body=b"x", queue_offset=n)) for n in range(2))
    claim.begin_call(decode_messages(body, QUEUE))
    token = claim_of_call.set(claim)
    yield claim
    claim_of_call.reset(token)


CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "a group that is a number": ("offsets", (5,)),
    "a group that is a list": ("offsets", ([],)),
    "a topic that is a number": ("offsets", ("billing", 5)),
    "a group to reset": ("reset", (None, {QUEUE: 5}, 1)),
    "targets in a list": ("reset", ("billing", [QUEUE], 1)),
    "targets by name": ("reset", ("billing", {"orders": 5}, 1)),
    "a target that is a text": ("reset", ("billing", {QUEUE: "5"}, 1)),
    "an epoch that is a text": ("reset", ("billing", {QUEUE: 5}, "1")),
}


@for_each("what", list(CALLS))
def test_a_wrong_argument_is_refused(store, what):
    name, arguments = CALLS[what]
    store.reset("billing", {QUEUE: 3}, 1)
    with pytest.raises(ConfigError, match="is not allowed|pass a MessageQueue"):
        getattr(store, name)(*arguments)
    assert [row.next_offset for row in store.offsets("billing")] == [3]


@for_each("messages", [5, None, "orders", ["x"], [b"body", b"body"]])
def test_only_messages_are_consumed(store, claim, messages):
    listener = store.exactly_once(lambda given, connection: None)
    with store._database.engine.begin() as connection, pytest.raises(ConfigError, match="messages"):
        store.advance(connection, messages)
    with pytest.raises(ConfigError, match="messages"):
        listener(messages)
    assert [row.next_offset for row in store.offsets("billing")] == [0]
