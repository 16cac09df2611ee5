"""Run simulated worlds: python -m tests.simulation --seeds 0-99; a seed repeats its world exactly."""

import sys

from tests.simulation.mistakes import MISTAKES
from tests.simulation.plans import PLANS
from tests.simulation.running import main
from tests.simulation.scenario import Scenario, check

if __name__ == "__main__":
    sys.exit(main("tests.simulation", __doc__, PLANS, MISTAKES, lambda *world: Scenario(*world).run(), check))
