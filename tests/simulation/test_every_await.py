"""Whatever a consumer does when its caller stops waiting, its broker falls silent or its process dies: all is right.

The whole of it takes the better part of an hour, in `make soak`; here it is a sample.
"""

from __future__ import annotations

import pytest

from tests.simulation.every_await import CALLS
from tests.simulation.running import simulate
from tests.trials import trials


@pytest.mark.search
@pytest.mark.parametrize("call", CALLS[: trials(len(CALLS))])
def test_no_interference_with_a_call_does_harm(call):
    done = simulate("--call", call, "--sample", str(trials(5)), module="tests.simulation.every_await")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 wrong" in done.stdout
    assert done.stderr == "", "the dead are heard of"
