"""Signals that come while a program joins its consumer: at whatever moment, it can be closed afterwards."""

from __future__ import annotations

import signal

import pytest

from tests.consumer.processes import Child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_step_of_a_join_leaves_a_consumer_that_can_be_closed(number):
    """Not even one that comes between two instructions while the wait begins or ends."""
    child = Child("-m", "tests.consumer.lifecycle.joining", str(int(number)))
    try:
        child.wait_for_line("through")
        assert child.ended() == 0
    finally:
        child.process.kill()
    assert len(child.lines) > 20
