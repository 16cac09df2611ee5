"""A consumer with default options, in a process of its own, between an honest broker and each attack for a moment.

`python -m tests.hostile` runs longer, and prints exact figures. The bounds here allow for a busy machine.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.for_each import for_each
from tests.hostile.attacks import ATTACKS
from tests.hostile.running import world
from tests.trials import factor

SECONDS = max(0.3, float(factor()))
MOST_BYTES = 500 << 20
LONGEST_CPU_S = 0.3
MOST_LINES = 500
LONGEST_LINE = 4100


@pytest.fixture
def between(tmp_path):
    """`between()` returns a world; a new one if the consumer still pauses because of the previous attack.

    In `make proof` the consumer must come back to the server itself.
    """
    with ExitStack() as worlds:
        made = []

        def current():
            if not made or not (SECONDS >= 1 or made[-1].is_pulled_from(4.0)):
                worlds.close()
                made.append(worlds.enter_context(world(tmp_path / str(len(made)))))
            return made[-1]

        yield current


@pytest.mark.live
@pytest.mark.slow("there are 40 attacks, and each lasts a moment")
@for_each("name", ATTACKS)
def test_messages_of_an_honest_broker_are_consumed(between, name):
    here = between()
    report = here.attack(name, SECONDS)
    assert report.was_pulled, report
    assert report.state.endswith("RUNNING"), report
    assert report.consumed >= report.sent, report
    assert here.samples[-1]["consumed"] == here.sent, report
    assert report.rss < MOST_BYTES, report
    assert report.pause_cpu_s < LONGEST_CPU_S, report
    assert report.lines < MOST_LINES, report
    assert report.longest_line < LONGEST_LINE, report
    assert report.forged == 0, report
    assert report.threads < 100, report
