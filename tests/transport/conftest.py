"""Coroutine tests, each on a loop of its own, and a connection with its peer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from pyrocket_consumer.transport.connection import Connection
from tests.transport.peer import Peer, connected

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    """A loop. Exceptions that nothing else handles fail the test."""
    unhandled: list[dict[str, Any]] = []
    with asyncio.Runner() as running:
        running.get_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        yield running
    assert unhandled == []


@pytest.fixture
def linked(runner: asyncio.Runner) -> Iterator[tuple[Connection, Peer]]:
    both = connected()
    yield runner.run(both.__aenter__())
    runner.run(both.__aexit__(None, None, None))


@pytest.fixture
def connection(linked: tuple[Connection, Peer]) -> Connection:
    return linked[0]


@pytest.fixture
def peer(linked: tuple[Connection, Peer]) -> Peer:
    return linked[1]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on the loop of its fixtures."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    pyfuncitem.funcargs["runner"].run(asyncio.wait_for(pyfuncitem.obj(**arguments), TIMEOUT_S))
    return True
