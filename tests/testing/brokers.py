"""A broker and a connected raw client, for tests that make several, or that need other options than the fixtures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster
from tests.for_each import for_each
from tests.testing.raw_client import RawClient

VERSIONS = ("4.9.7", "5.1.4", "5.3.3", "5.5.0")


@contextmanager
def broker_with_topic(queues: int = 2, **options: Any) -> Iterator[EmbeddedBroker]:
    """Yield a broker with the topic `T`."""
    with EmbeddedCluster(**{"long_poll_tick_s": 0.2, "delay_scale": 0.01, **options}) as cluster:
        cluster.create_topic("T", queues=queues)
        yield cluster.broker("broker-a")


@contextmanager
def broker_and_client(**options: Any) -> Iterator[tuple[EmbeddedBroker, RawClient]]:
    """Yield a broker with the topic `T`, and a client connected to it."""
    with broker_with_topic(**options) as broker, RawClient(broker.address) as client:
        yield broker, client


def every_version(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on each release, all in one item. Its `broker` and `client` have that release."""
    body, inner = getattr(test, "cases", (test, None))
    takes = inspect.signature(body).parameters.keys()

    @functools.wraps(body)
    def on_release(version: str, **given: Any) -> None:
        opened = broker_and_client(version=version) if takes & {"broker", "client"} else nullcontext((None, None))
        with opened as (broker, client):
            made = {"version": version, "broker": broker, "client": client}
            body(**given, **{name: made[name] for name in takes & made.keys()})

    every = inspect.signature(test).parameters.values()
    fixtures = [each for each in every if each.name not in ("version", "broker", "client")]
    vars(on_release)["__signature__"] = inspect.Signature(fixtures)
    if inner is not None:
        vars(on_release)["cases"] = on_release, inner
    return for_each("version", VERSIONS)(on_release)


def pull_result(answer: RemotingCommand) -> tuple[int, str | None, int, int, int]:
    """Return the code, the remark and the next, min and max offset of a pull response."""
    fields = answer.fields
    return (
        answer.code,
        answer.remark,
        int(fields["nextBeginOffset"]),
        int(fields["minOffset"]),
        int(fields["maxOffset"]),
    )
