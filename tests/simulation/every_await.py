"""Interfere with each call of a consumer at each of its steps: python -m tests.simulation.every_await --call reset

A step is a callback of the process on the event loop, so a fault can occur between any two callbacks of its tasks. The
caller stops waiting, the broker loses requests or responses for a while, or the process is killed. The call runs once
undisturbed, to count its steps. Then it runs once for each step, in worlds that are equal up to that step.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from pyrocket_consumer.testing import drop, drop_answer
from tests.simulation.history import History
from tests.simulation.member import Member
from tests.simulation.plans import DEFAULTS, Plan
from tests.simulation.running import parse_options, run_worlds
from tests.simulation.scenario import Scenario

BEGINS_S = 12.0
"""When the call is made. All members have settled by then, and the last commit is recent."""

LASTS_S = 4.0
"""How long steps count as part of the call. This covers rounds of rebalance, and the grace time of a hand-over."""

SILENT_S = 12.0

PLAN = Plan(
    options=DEFAULTS,
    members=0,
    queues=3,
    faults=(),
    failing=0.0,
    slow=0.1,
    slowest_s=3.0,
    quickest_s=0.02,
    rate=4.0,
    bursts=(1, 2),
    calm_s=70.0,
)

CALLS = ("start", "take-over", "hand-over", "reset", "unsubscribe", "close")

INTERFERENCES = ("cancelled", "requests-lost", "answers-lost", "killed")

KINDS = {"clustering": {}, "orderly": {"orderly": True}, "broadcasting": {"broadcasting": True}}


@dataclass(frozen=True)
class Case:
    """A call, the interference, and the step before which it happens; None to count the steps."""

    kind: str
    call: str
    interference: str = "none"
    step: int | None = None

    def __str__(self) -> str:
        return f"--kind {self.kind} --call {self.call} --interference {self.interference} --step {self.step}"


class Interfered(Scenario):
    """A world that interferes with one call. Member 0 makes the call."""

    def __init__(self, case: Case) -> None:
        super().__init__(1, replace(PLAN, **KINDS[case.kind]))
        self.case = case
        self.steps = 0

    async def _trouble(self) -> None:
        """Make the call while messages are sent and consumed."""
        case, subject, other = self.case, self._member(), self._member()
        if case.call != "start":
            (other if case.call == "take-over" else subject).start()
        await asyncio.sleep(BEGINS_S)
        calls: dict[str, Callable[[int | None], None]] = {
            "start": subject.start,
            "take-over": subject.start,
            "hand-over": lambda at: other.start(),
            "reset": lambda at: subject.reset(lambda: 0.5, at),
            "unsubscribe": lambda at: subject.unsubscribe(LASTS_S + 1, at),
            "close": lambda at: subject.cancel_close(at, 60.0),
        }
        self._interfere(subject, calls[case.call])
        begun = self._steps_of(subject)
        await asyncio.sleep(LASTS_S)
        self.steps = self._steps_of(subject) - begun
        await asyncio.sleep(30.0)
        if not other.running:
            other.start()  # continues at the stored offsets

    def _member(self) -> Member:
        member = Member(str(len(self.members)), self.world, self.history, self.cluster, self.plan)
        self.members.append(member)
        return member

    def _steps_of(self, member: Member) -> int:
        return member.process.steps if member.process is not None else 0

    def _interfere(self, member: Member, call: Callable[[int | None], None]) -> None:
        """Make the call, and interfere before its step."""
        step = None if self.case.step is None else self._steps_of(member) + self.case.step
        call(step if self.case.interference == "cancelled" else None)
        if step is None or self.case.interference == "cancelled":
            return

        def happen() -> None:
            if self.case.interference == "killed":
                member.kill()
                self.world.call_later(3, member.start)
                return
            broker = self.cluster.brokers[0]
            self.history.disturbed_at.append(self.world.now)
            broker.on(None, drop if self.case.interference == "requests-lost" else drop_answer, times=None)
            self.world.call_later(SILENT_S, broker.clear_faults)

        member.process.before(step, happen)


def run_case(case: Case) -> int:
    """Run one case and check the rules. Return the number of steps of the call.

    Raises:
        Wrong: a rule was broken.
    """
    world = Interfered(case)
    history = world.run()
    check(history, case.kind)
    return world.steps


def check(history: History, kind: str) -> None:
    """Check all rules that apply to the kind."""
    history.check_group_is_empty()
    history.check_nothing_is_left()
    history.check_starts_and_closes_end(start_s=SILENT_S + 5, close_s=10)
    if kind == "broadcasting":
        history.check_every_member_consumed_everything()
        return
    history.check_no_message_is_skipped()
    history.check_resets_are_kept()
    history.check_everything_was_consumed()
    if kind == "orderly":
        history.check_unlocked_only_after_the_last_commit()


def sample(steps: int, most: int | None) -> list[int]:
    """Return all steps, or `most` of them. A sample has more early steps, because a call does most work there."""
    if most is None or most >= steps:
        return list(range(steps))
    return sorted({int(steps * (number / most) ** 2) for number in range(most)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS], action="append", help="default: all; repeatable, as the next two")
    parser.add_argument("--call", choices=CALLS, action="append")
    parser.add_argument("--interference", choices=INTERFERENCES, action="append")
    parser.add_argument("--step", type=int, help="only before this step")
    parser.add_argument("--sample", type=int, metavar="N", help="before N steps of each, not before all")
    options = parse_options(parser)

    def worlds() -> Iterator[tuple[str, str, Callable[[], object]]]:
        for kind, call in product(options.kind or KINDS, options.call or CALLS):
            steps = [options.step] if options.step is not None else sample(run_case(Case(kind, call)), options.sample)
            for interference, step in product(options.interference or INTERFERENCES, steps):
                if (call, interference) != ("hand-over", "cancelled"):  # no caller waits for it
                    case = Case(kind, call, interference, step)
                    yield kind, f"tests.simulation.every_await {case}", partial(run_case, case)

    return run_worlds(worlds())


if __name__ == "__main__":
    sys.exit(main())
