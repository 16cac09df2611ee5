"""Tests of parts are coroutines."""

from tests.consumer.coroutines import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
