"""`python -m tests.fuzz`: fuzz everything that reads bytes of other programs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.running import each, has_atheris, try_input
from tests.fuzz.targets import TARGETS

EXAMPLES = """\
examples:
  python -m tests.fuzz                                  all targets, a minute, where atheris is with it
  python -m tests.fuzz --executions 10000000 --seconds 3600
  python -m tests.fuzz message packed --seconds 600     two targets, five minutes each
  python -m tests.fuzz message --input FILE             one input again: a finding
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"which (default: all): {', '.join(TARGETS)}")
    parser.add_argument("--executions", type=int, default=1 << 62, metavar="N", help="how many inputs in all")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long in all (default: 60)")
    parser.add_argument("--seed", type=int, help="repeats a run of the engine `mutation` (default: by the clock)")
    parser.add_argument(
        "--engine",
        choices=["auto", "atheris", "mutation"],
        default="auto",
        help="atheris uses the covered lines; mutation is several times as fast",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="read this file, with the target named, alone")
    options = parser.parse_args()
    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown:
        parser.error(f"target {unknown[0]!r} is unknown; known are {', '.join(TARGETS)}")
    if options.input:
        if len(options.targets) != 1:
            parser.error("--input wants one target")
        finding = try_input(TARGETS[options.targets[0]], options.input.read_bytes())
        print(finding or "borne")
        return 1 if finding else 0
    if options.engine == "atheris" and not has_atheris():
        parser.error("atheris is not installed: pip install atheris (or --engine mutation)")
    engine = options.engine if options.engine != "auto" else "atheris" if has_atheris() else "mutation"
    seed = options.seed if options.seed is not None else time.time_ns() & 0x7FFFFFFF
    names = options.targets or list(TARGETS)
    print(f"engine {engine}, seed {seed}, {len(names)} targets, {options.seconds:g} s in all")
    print(f"{'target':<32}{'executions':>12}{'per s':>9}{'slowest ms':>12}  finding")
    total = found = 0
    for run in each(names, engine, options.executions, options.seconds, seed):
        total += run.executions
        slowest = f"{run.slowest_s * 1000:.1f}" if run.slowest_s else "-"
        finding = run.finding.again if run.finding else "-"
        per_s = run.executions / max(run.seconds, 1e-9)
        print(f"{run.target:<32}{run.executions:>12}{per_s:>9.0f}{slowest:>12}  {finding}", flush=True)
        if run.finding:
            found += 1
            print(run.finding.text, file=sys.stderr)
    print(f"{total} executions, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
