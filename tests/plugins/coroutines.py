"""Coroutine tests: each runs on a loop whose clock jumps, or in the `RUN` of its module."""

from __future__ import annotations

import inspect

import pytest

from tests.virtual.coroutines import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    getattr(pyfuncitem.module, "RUN", run)(pyfuncitem.obj(**arguments))
    return True
