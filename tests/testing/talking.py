"""A broker and a raw client that talks to it, for tests that make several, or whose fixtures do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster
from pyrocket_consumer.wire.frame import RemotingCommand
from tests.testing.raw_client import RawClient

VERSIONS = ("4.9.7", "5.1.4", "5.3.3", "5.5.0")
every_version = pytest.mark.parametrize("version", VERSIONS)


@contextmanager
def talking_to(queues: int = 2, **options: Any) -> Iterator[EmbeddedBroker]:
    """Yield a broker with the topic `T`."""
    with EmbeddedCluster(**{"long_poll_tick_s": 0.2, "delay_scale": 0.01, **options}) as cluster:
        cluster.create_topic("T", queues=queues)
        yield cluster.broker("broker-a")


@contextmanager
def talking(**options: Any) -> Iterator[tuple[EmbeddedBroker, RawClient]]:
    """Yield a broker with the topic `T`, and a client connected to it."""
    with talking_to(**options) as broker, RawClient(broker.address) as client:
        yield broker, client


def facts(answer: RemotingCommand) -> tuple[int, str | None, int, int, int]:
    """Return what a pull's answer says: code, remark, next, min and max offset."""
    fields = answer.fields
    return (
        answer.code, answer.remark, int(fields["nextBeginOffset"]), int(fields["minOffset"]), int(fields["maxOffset"])
    )
