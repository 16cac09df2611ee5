"""A consumer with default options, in a process of its own, between an honest broker and each attack for a moment.

`python -m tests.hostile` does it for longer, and tells exact figures; here the bounds leave room for a busy machine.
"""

from __future__ import annotations

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.running import world

SECONDS = 1.0
MOST_BYTES = 500 << 20
LONGEST_CPU_S = 0.3
MOST_LINES = 500
LONGEST_LINE = 4100


@pytest.fixture(scope="module")
def between(tmp_path_factory):
    with world(tmp_path_factory.mktemp("stores")) as made:
        yield made


@pytest.mark.parametrize("name", ATTACKS)
def test_whatever_one_server_does_the_messages_of_another_are_consumed(between, name):
    report = between.attack(name, SECONDS)
    assert report.is_met, report
    assert report.state.endswith("RUNNING"), report
    assert report.consumed >= report.sent, report
    assert between.told[-1]["consumed"] == between.sent, report
    assert report.rss < MOST_BYTES, report
    assert report.pause_cpu_s < LONGEST_CPU_S, report
    assert report.lines < MOST_LINES, report
    assert report.longest_line < LONGEST_LINE, report
    assert report.forged == 0, report
    assert report.threads < 100, report
