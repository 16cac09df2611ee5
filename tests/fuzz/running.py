"""Runs targets, each for a number of executions or a time, and stores the inputs that failed."""

from __future__ import annotations

import hashlib
import re
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.mutation import MAX_BYTES, Mutator
from tests.fuzz.targets import TARGETS, Target

FINDINGS = Path(__file__).parent / "findings"

LONGEST_S = 1.0
"""The most CPU time for one input of up to 64 KiB."""

MOST_GROWTH_BYTES = 1 << 30
"""The most memory by which reading may grow the process."""

_LOOK_EVERY = 1000
_DONE = re.compile(r"(?:Done (\d+) runs|#(\d+)\s)")


@dataclass(frozen=True)
class Finding:
    """An input on which a target failed, in a file, and the failure."""

    target: str
    path: Path
    text: str

    @property
    def again(self) -> str:
        """The command that reproduces it."""
        return f"python -m tests.fuzz {self.target} --input {self.path}"


@dataclass
class Run:
    """The result of one target."""

    target: str
    engine: str
    executions: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    finding: Finding | None = None


def keep(target: Target, data: bytes, text: str) -> Finding:
    """Write an input to a new file."""
    FINDINGS.mkdir(exist_ok=True)
    path = FINDINGS / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return Finding(target.name, path, text)


def _describe(error: Exception) -> str:
    """Return the location and the text of an error, without the rest of its traceback."""
    lines = traceback.format_exception(error, limit=-4)
    return "".join(f"{line:.600}\n" if len(line) > 600 else line for line in lines)


def _too_slow(data: bytes, spent: float) -> str:
    return f"reading {len(data)} bytes took {spent:.1f} s of CPU time" if spent > LONGEST_S else ""


def try_input(target: Target, data: bytes) -> str:
    """Return the failure of `target` on `data`, "" without one."""
    begin = time.thread_time()
    try:
        target.read(data)
    except Exception as error:
        return _describe(error)
    return _too_slow(data, time.thread_time() - begin)


def mutate(target: Target, executions: int, seconds: float, seed: int) -> Run:
    """Run a target on random inputs until one fails."""
    run = Run(target.name, "mutation")
    mutator, read, clock = Mutator(target.originals(), seed), target.read, time.thread_time
    begin, memory, before = time.monotonic(), _peak_bytes(), clock()
    finding = ""
    while run.executions < executions and not finding:
        data = mutator.next()
        started = clock()
        try:
            read(data)
        except Exception as error:
            finding = _describe(error)
        run.executions += 1
        if not finding and (spent := clock() - started) > run.slowest_s:
            run.slowest_s = spent
            finding = _too_slow(data, spent)
        if run.executions % _LOOK_EVERY == 0 and not finding:
            if (grown := _peak_bytes() - memory) > MOST_GROWTH_BYTES:
                finding = f"memory grew by {grown} bytes: this input, or one before"
            elif time.monotonic() - begin > seconds:
                break
    if finding:
        run.finding = keep(target, data, finding)
    run.seconds = clock() - before
    return run


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def has_atheris() -> bool:
    """Return whether atheris, the coverage-guided fuzzer, is installed."""
    return find_spec("atheris") is not None


def guide(target: Target, executions: int, seconds: float, seed: int) -> Run:
    """Run a target with atheris, which prefers inputs that reach new lines. It runs in a new process, which it ends."""
    begin = time.monotonic()
    FINDINGS.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.guided",
        target.name,
        f"-runs={executions}",
        f"-max_total_time={max(1, int(seconds))}",
        f"-seed={seed}",
        f"-max_len={MAX_BYTES}",
        f"-timeout={int(20 * LONGEST_S)}",
        "-rss_limit_mb=3000",
        f"-artifact_prefix={FINDINGS}/{target.name}-",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + 120)
        output, failed = done.stdout + done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired as late:
        output, failed = f"did not end within {seconds + 120:.0f} s: {late}", True
    counts = [int(one or other) for one, other in _DONE.findall(output)]
    run = Run(target.name, "atheris", max(counts, default=0), time.monotonic() - begin)
    if failed:
        kept = re.findall(r"Test unit written to (\S+)", output)
        path = Path(kept[-1]) if kept else FINDINGS / f"{target.name}-none"
        run.finding = Finding(target.name, path, output[-3000:])
    return run


def each(names: list[str], engine: str, executions: int, seconds: float, seed: int) -> Iterator[Run]:
    """Run targets one after the other, each with its share of `executions` and `seconds`."""
    run_one = guide if engine == "atheris" else mutate
    deadline = time.monotonic() + seconds
    left = executions
    for number, name in enumerate(names):
        share = len(names) - number
        run = run_one(TARGETS[name], -(-left // share), max(1.0, (deadline - time.monotonic()) / share), seed)
        left = max(0, left - run.executions)
        yield run
