"""Whatever a listener does with what it is given, each effect is there once, and what cannot be is told."""

from __future__ import annotations

import pytest

from tests.exactly_once.ledgers import INSERT, once, row
from tests.exactly_once.test_exactly_once import BODIES, GROUP, TOPIC, billing, send, until_all


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("change", ["pop", "clear", "reverse"])
def test_a_listener_may_change_its_list(embedded, ledger, change):
    """What is committed with an effect is where the call ends, and not what is left of the list."""
    behind = []

    def book(messages, connection):
        behind.append(messages[0].queue_offset - (ledger.offset(GROUP, 0, TOPIC) or 0))
        connection.execute(INSERT, [row(message) for message in messages])
        while change == "pop" and messages:
            messages.pop()
        if change != "pop":
            getattr(messages, change)()

    send(embedded, queues=1)
    with billing(embedded, ledger, book, commit_interval_s=60):  # nothing but the listener's commits
        until_all(embedded, ledger)
    assert ledger.bodies() == once(BODIES)
    assert set(behind) == {0}
