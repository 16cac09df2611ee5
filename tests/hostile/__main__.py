"""`python -m tests.hostile`: run a consumer against a malicious server, for as long as you choose."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.hostile.attacks import ATTACKS
from tests.hostile.running import world

EXAMPLES = """\
examples:
  python -m tests.hostile                       each attack for 5 s
  python -m tests.hostile Bombs Flood           two of them
  python -m tests.hostile --seconds 3600 -o soak.json
"""
TITLES = (
    f"{'attack':<20}{'s':>6}{'MiB':>7}{'pause ms':>10}{'cpu ms':>8}{'cpu %':>7}{'lines':>7}{'longest':>9}"
    f"{'honest':>12}{'late s':>8}  state"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"which (default: all): {', '.join(ATTACKS)}")
    parser.add_argument("--each", type=float, default=5.0, metavar="S", help="how long each lasts (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="go on, in any order, for so long")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="options of the consumer")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write what was measured as JSON")
    arguments = parser.parse_args()
    for name in arguments.attacks:
        if name not in ATTACKS:
            parser.error(f"attack {name!r} is unknown; known are {', '.join(ATTACKS)}")
    chance, names = random.Random(arguments.seed), arguments.attacks or list(ATTACKS)
    reports = []
    begin = time.monotonic()
    print(TITLES)
    with tempfile.TemporaryDirectory() as directory, world(Path(directory), **arguments.options) as made:
        todo = list(names)
        while todo:
            report = made.attack(todo.pop(0), arguments.each)
            reports.append(report)
            print(
                f"{report.attack:<20}{report.seconds:>6.1f}{report.rss / (1 << 20):>7.0f}{report.pause_s * 1000:>10.1f}"
                f"{report.pause_cpu_s * 1000:>8.1f}{100 * report.cpu_s / report.seconds:>7.0f}{report.lines:>7}"
                f"{report.longest_line:>9}{f'{report.consumed}/{report.sent}':>12}{report.latest_s:>8.1f}  "
                f"{report.state.rpartition('.')[2]}{'' if report.was_pulled else ', not pulled'}",
                flush=True,
            )
            if made.process.poll() is not None:
                print("the member has ended", file=sys.stderr)
                break
            if not todo and time.monotonic() - begin < arguments.seconds:
                todo = chance.sample(names, len(names))
        unpulled = sum(not report.was_pulled for report in reports)  # the consumer did not reconnect to the server
        consumed, sent = made.samples[-1]["consumed"], made.sent
        print(
            f"{time.monotonic() - begin:.0f} s, {len(reports)} attacks, {unpulled} not pulled; honest messages "
            f"{consumed} of {sent}, {made.samples[-1]['twice']} twice; "
            f"most memory {max(each.rss for each in reports) >> 20} MiB; "
            f"longest pause of the I/O thread {max(each.pause_s for each in reports) * 1000:.1f} ms, "
            f"{max(each.pause_cpu_s for each in reports) * 1000:.1f} ms of CPU; events {made.samples[-1]['events']}"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return 0 if consumed >= sent and not unpulled else 1


if __name__ == "__main__":
    sys.exit(main())
