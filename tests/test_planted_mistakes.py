"""The number of planted mistakes, and that each has a stored input or seed that finds it."""

from __future__ import annotations

import pytest

from tests import planted_mistakes
from tests.protocol import mistakes as compiled
from tests.simulation import finding, mistakes


def test_each_mistake_has_an_input_or_a_seed():
    assert (len(compiled.MISTAKES), len(compiled.OF_SANITIZERS)) == (20, 1)
    groups = (finding.OF_CONSUMERS, finding.OF_DATABASES, finding.OF_KEYS, finding.OF_PRODUCERS)
    assert [len({mistake for mistake, *_ in group}) for group in groups] == [10, 8, 4, 4]
    planned = {mistake for mistake, *_ in finding.ALL.values()}
    assert planned == {*mistakes.MISTAKES, *mistakes.PRODUCER_MISTAKES}
    assert [*planted_mistakes.read(compiled.KEPT)] == [*compiled.ALL]
    assert [*planted_mistakes.read(finding.KEPT)] == [*finding.ALL]


@pytest.mark.live
def test_a_dying_fork_reports_its_exit_status(capfd):
    assert planted_mistakes.in_fork(lambda: ["a", 1]) == ["a", 1]
    assert planted_mistakes.in_fork(lambda: planted_mistakes.os._exit(7)) == f"{planted_mistakes.DIED} 7"
    with pytest.raises(RuntimeError):
        planted_mistakes.in_fork(lambda: 1 // 0)
    assert "ZeroDivisionError" in capfd.readouterr().err
