"""Tests that are coroutines, and the topic `orders`."""

from __future__ import annotations

import inspect

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.consumer.orders import Orders
from tests.virtual.coroutines import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is an `async def` on a loop in virtual time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def orders(embedded: EmbeddedCluster) -> Orders:
    return Orders(embedded)
