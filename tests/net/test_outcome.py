"""What one thread waits for and another one tells."""

from __future__ import annotations

import threading

import pytest

from pyrocket_consumer.net.outcome import Outcome


def test_a_result_is_waited_for():
    outcome = Outcome[int]()
    assert not outcome.wait(0)
    threading.Timer(0.01, outcome.set_result, (7,)).start()
    assert outcome.wait(30)
    assert outcome.result() == 7


def test_an_error_is_raised():
    outcome = Outcome[int]()
    outcome.set_exception(KeyError("no"))
    assert outcome.wait()
    with pytest.raises(KeyError, match="no"):
        outcome.result()


def test_no_timeout_is_too_long_or_too_short():
    outcome = Outcome[None]()
    assert not outcome.wait(-1)
    outcome.set_result(None)
    assert outcome.wait(1e12)
