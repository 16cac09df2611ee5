"""The shape of the product does not grow unnoticed: raise a limit here only for a good reason."""

from __future__ import annotations

from tests import shape

MODULES, PROTOCOLS, TABLES = 175, 8, 6


def test_there_are_few_modules_protocols_and_tables():
    assert len(shape.sources()) <= MODULES
    assert len(shape.protocols()) <= PROTOCOLS, shape.protocols()
    assert len(shape.tables()) <= TABLES, shape.tables()


def test_a_message_and_a_reset_pass_few_modules():
    paths = shape.Paths.measure()
    message, reset = shape.modules_of(paths.message), shape.modules_of(paths.reset, "consumer/")
    assert "consumer/dispatch/workers.py" in message
    assert "consumer/assignment/held_queue.py" in reset
    assert len(message) <= 9, message
    assert len(reset) <= 12, reset
