"""Is this commit slower than an earlier one?

    make compare BASE=main~10
    python -m benchmarks.compare 6519c95 --only 'consume*,latency' --rounds 15
    python -m benchmarks.compare v1.0 --new v1.1 -o json > figures.json

Both commits are installed in new virtual environments with the versions of .ci/lock.txt. The same program measures
both, through public names only. One embedded broker of the new commit serves both. Every sample runs in a new process,
except Spark sessions. The order is base, new, new, base, and so on, round after round.

The program measures the wall time and the CPU time of the client for each operation. Each round gives a ratio
new ÷ base; above 1 the new commit is slower. The spread is Wilcoxon's signed-rank interval of the median. The median is
above its lower end with a confidence of at least 95 %, and the same holds for its upper end. Fewer than 5 rounds do not
allow that confidence. Then the spread is the smallest and the largest ratio, and one round finds only large changes.

A subject is slower if the lower end of the CPU spread is above 1.05, or that of the wall time above 1.25. CPU time
decides, because other programs affect it least. It misses waits, but a longer wait usually grows by more than that.

Exit status: 1 if a subject is slower, or fails on the new commit only; 2 if no subject can be compared; otherwise 0.
TMPDIR selects the disk. Environments need 1.6 GB there with Spark and 0.1 GB without.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.arguments import one_or_more
from benchmarks.compare_side import SUBJECTS, Task
from benchmarks.watch import Figures

ROOT = Path(__file__).parent.parent
LOCK = ROOT / ".ci" / "lock.txt"
BASE, NEW = "base", "new"
CPU_LIMIT, WALL_LIMIT = 1.05, 1.25
CONFIDENCE = 0.95
INSTALL_S, WITH_SPARK_S, BROKER_S = 20, 60, 15
LIMIT_S = 300.0  # for one sample


class CannotCompare(Exception):
    """No subject can be measured. The text has the reason and a remedy."""


class Failed(Exception):
    """A subject cannot be measured on one side. The text has the reason."""


# --- verdicts


@dataclass(frozen=True, slots=True)
class Ratio:
    """new ÷ base over the rounds: the median, and the ends of its spread."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:5.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(base: Sequence[float], new: Sequence[float]) -> Ratio:
    """Return the ratio of paired samples, with the spread that --help describes."""
    logs = sorted(math.log(ours / theirs) for theirs, ours in zip(base, new, strict=True))
    means = sorted((one + other) / 2 for one, other in itertools.combinations_with_replacement(logs, 2))
    excluded = excluded_ranks(len(logs))
    return Ratio(*(math.exp(each) for each in (statistics.median(logs), means[excluded], means[-1 - excluded])))


def excluded_ranks(rounds: int) -> int:
    """Return the number of pairwise means beyond each end of the spread.

    It is the largest sum of signed ranks that is still improbable, if each rank counts with probability one half.
    """
    ways = [1]  # by sum: the number of subsets of the ranks 1 to `rounds`
    for rank in range(1, rounds + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    probable = itertools.accumulate(way / 2**rounds for way in ways)
    return max(0, sum(each <= 1 - CONFIDENCE for each in probable) - 1)


def verdict(cpu: Ratio, wall: Ratio) -> str:
    """Return the verdict on the new commit from the spreads of both times."""
    if cpu.low > CPU_LIMIT:
        return "slower"
    if wall.low > WALL_LIMIT:
        return "slower: it waits longer"
    if cpu.high > CPU_LIMIT:
        return "unclear"
    return "quicker" if cpu.high < 1 else "no slower"


@dataclass(slots=True)
class Row:
    """The samples of one subject, in seconds for each operation: side -> one for each round."""

    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {BASE: [], NEW: []})
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {BASE: [], NEW: []})
    failed: dict[str, str] = field(default_factory=dict)

    def cpu(self) -> Ratio:
        return ratio(self.cpu_s[BASE], self.cpu_s[NEW])

    def wall(self) -> Ratio:
        return ratio(self.wall_s[BASE], self.wall_s[NEW])

    def verdict(self) -> str:
        """Return the verdict. A subject that fails on one side only has a verdict of its own."""
        if self.failed:
            return "fails" if len(self.failed) == 2 else "fails on new" if NEW in self.failed else "fails on base"
        return verdict(self.cpu(), self.wall())

    def is_worse(self) -> bool:
        return self.verdict().startswith(("slower", "fails on new"))


# --- installing


def commit_of(name: str) -> str:
    """Return the full hash of a commit."""
    done = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if done.returncode:
        raise CannotCompare(f"{name!r} is no commit here; `git log --oneline` lists them, `git fetch` gets more")
    return done.stdout.decode().strip()


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        raise CannotCompare("git was not found; install it") from None


def check_machine(*, with_spark: bool) -> None:
    """Check the prerequisites of the installation that pip does not provide."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if os.environ.get("PYROCKET_PURE", "0") in ("", "0") and not (shutil.which(compiler) or shutil.which("cc")):
        raise CannotCompare(
            f"no C compiler ({compiler}); `make system-packages` installs one, PYROCKET_PURE=1 compares without"
        )
    home = os.environ.get("JAVA_HOME")
    if with_spark and not (shutil.which("java") or home and shutil.which("java", path=f"{home}/bin")):
        raise CannotCompare("no Java, which Spark needs; `make system-packages` installs it, or leave spark-read out")


def install(commit: str, directory: Path, *, with_spark: bool) -> Path:
    """Install a commit in a new virtual environment. Return its interpreter."""
    sources, environment, constraints = (directory / name for name in ("sources", "environment", "constraints.txt"))
    archive = git("archive", "--format=tar", commit)
    if archive.returncode:
        raise CannotCompare(f"git archive {commit}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(sources, filter="data")
    locked = [line.rstrip(" \\") for line in LOCK.read_text().splitlines() if line[:1].isalpha()]
    constraints.write_text("\n".join(locked))
    python = environment / "bin" / "python"
    package = f"{sources}[spark]" if with_spark else str(sources)
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", package],
    ):
        where = {**os.environ, "PIP_CONSTRAINT": str(constraints)}  # also applies to the build of the wheel
        where.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, env=where, cwd=directory, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
            raise CannotCompare(f"{commit[:10]} cannot be installed: {command[2]}: {said[-1]}")
    return python


# --- measuring


class Side:
    """A process with the package of one environment. It runs one task after the other."""

    def __init__(self, python: Path, code: Path, hash_seed: int = 0) -> None:
        where = {**os.environ, "PYTHONPATH": str(code), "PYTHONHASHSEED": str(hash_seed)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # __exit__ closes it
        self._process = subprocess.Popen(
            [str(python), "-P", "-m", "benchmarks.compare_side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=where,
            cwd=code,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with self._errors, self._process:
            try:
                self._process.stdin.close()
                self._process.wait(30)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()

    def run(self, task: Task) -> Figures:
        """Return the figures of a task.

        Raises:
            Failed: the task has failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(LIMIT_S, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines() or [f"no answer in {LIMIT_S:g} s"]
            raise Failed(said[-1])
        answer: Figures = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer


class Bench:
    """Both environments and the broker. The `with` block closes the sides that stay open."""

    def __init__(self, pythons: Mapping[str, Path], code: Path) -> None:
        self._pythons, self._code = pythons, code
        self._kept: dict[str, Side] = {}
        self._stack = ExitStack()
        self._name_server = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def describe(self, side: str) -> Figures:
        with Side(self._pythons[side], self._code) as process:
            return process.run(Task("describe"))

    def start_broker(self) -> None:
        broker = self._stack.enter_context(Side(self._pythons[NEW], self._code))
        self._name_server = broker.run(Task("serve"))["name_server"]

    def sample(self, name: str, side: str, turn: int) -> Figures:
        """Return one sample of a subject. Both sides of a round have the same order of their hash tables."""
        task = Task(name, self._name_server, f"compare-{uuid.uuid4().hex[:12]}")
        if SUBJECTS[name].needs == "spark":
            if side not in self._kept:
                self._kept[side] = self._stack.enter_context(Side(self._pythons[side], self._code))
            return self._kept[side].run(task)
        with Side(self._pythons[side], self._code, turn) as process:
            return process.run(task)


def measure(bench: Bench, names: Sequence[str], rounds: int) -> dict[str, Row]:
    """Return all samples. The sides alternate, so that a short disturbance affects both, and few rounds."""
    rows = {name: Row() for name in names}
    for turn in range(1, rounds + 1):
        for name, row in rows.items():
            if row.failed:
                continue
            answers = {}
            for side in (BASE, NEW) if turn % 2 else (NEW, BASE):
                try:
                    answers[side] = bench.sample(name, side, turn)
                except Failed as error:
                    row.failed[side] = str(error)
            where = f"round {turn} of {rounds}, {name}"
            if row.failed:
                log_progress(f"{where}: " + "; ".join(f"fails on {side}: {text}" for side, text in row.failed.items()))
                continue
            for side, answer in answers.items():
                row.cpu_s[side].append(answer["cpu_s"] / answer["operations"])
                row.wall_s[side].append(answer["seconds"] / answer["operations"])
            cpu, wall = (times[NEW][-1] / times[BASE][-1] for times in (row.cpu_s, row.wall_s))
            log_progress(f"{where}: new ÷ base {cpu:.2f} CPU, {wall:.2f} wall")
    return rows


def log_progress(text: str) -> None:
    """Print progress to standard error."""
    print(f"  {time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


# --- output


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    factor, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{seconds * factor:.3g} {unit}"


def table(rows: Mapping[str, Row]) -> Iterator[str]:
    """Return the figures as lines: medians of both sides for each operation, and the ratios."""
    titles = "subject", "of one", "CPU: base", "new", "new ÷ base", "wall: base", "new", "new ÷ base"
    layout = "{:<24} {:<8} {:>10} {:>8}  {:<21}  {:>10} {:>8}  {:<21}  {}"
    yield layout.format(*titles, "").rstrip()
    for name, row in rows.items():
        if row.failed:
            yield f"{name:<24} " + "; ".join(f"fails on {side}: {text}" for side, text in row.failed.items())
            continue
        cpu, wall = (
            [duration(statistics.median(times[side])) for side in (BASE, NEW)] for times in (row.cpu_s, row.wall_s)
        )
        yield layout.format(name, SUBJECTS[name].operation, *cpu, str(row.cpu()), *wall, str(row.wall()), row.verdict())


def summary(rows: Mapping[str, Row]) -> str:
    """Return the verdict of the whole run, in one line."""
    worse = [name for name, row in rows.items() if row.is_worse()]
    unclear = [name for name, row in rows.items() if row.verdict() == "unclear"]
    text = f"slower: {', '.join(worse)}" if worse else "no subject is slower"
    return text + (f"; unclear, use more rounds: {', '.join(unclear)}" if unclear else "")


def as_json(commits: Mapping[str, str], facts: Mapping[str, Figures], rounds: int, rows: Mapping[str, Row]) -> str:
    """Return all figures, with the times of each round in seconds."""
    subjects = {}
    for name, row in rows.items():
        ratios = {} if row.failed else {"cpu_ratio": asdict(row.cpu()), "wall_ratio": asdict(row.wall())}
        subjects[name] = {"operation": SUBJECTS[name].operation, **asdict(row), **ratios, "verdict": row.verdict()}
    return json.dumps({"commits": commits, "environments": facts, "rounds": rounds, "subjects": subjects}, indent=1)


def expected_s(names: Sequence[str], rounds: int) -> float:
    """Return the estimated duration."""
    samples_s = 2 * rounds * sum(SUBJECTS[name].sample_s for name in names)
    return INSTALL_S + WITH_SPARK_S * needed("spark", names) + BROKER_S * needed("broker", names) + samples_s


def needed(what: str, names: Sequence[str]) -> bool:
    """Return whether any of the subjects needs the broker, or Spark."""
    return any(what in (needs, "broker" if needs else "") for needs in (SUBJECTS[name].needs for name in names))


def chosen(patterns: str | None) -> list[str]:
    """Return the subjects that --only names. Each name may be a file pattern."""
    wanted = patterns.split(",") if patterns is not None else ["*"]
    for pattern in wanted:
        if not fnmatch.filter(SUBJECTS, pattern):
            raise CannotCompare(f"no subject is called {pattern!r}; --list has them all")
    return [name for name in SUBJECTS if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)]


def compare(options: argparse.Namespace) -> int:
    names = chosen(options.only)
    commits = {BASE: commit_of(options.base), NEW: commit_of(options.new)}
    with_spark = needed("spark", names)
    check_machine(with_spark=with_spark)
    if options.new == "HEAD" and git("diff", "--quiet", "HEAD", "--", ":!benchmarks", ":!tests", ":!docs").returncode:
        log_progress("uncommitted changes are not measured")
    minutes = expected_s(names, options.rounds) / 60
    log_progress(f"subjects: {len(names)}, rounds: {options.rounds}; about {minutes:.0f} min on two quiet cores")
    with tempfile.TemporaryDirectory(prefix="pyrocket-compare-") as name:
        code = Path(name, "code")
        shutil.copytree(ROOT / "benchmarks", code / "benchmarks")  # outside the directory of this package
        log_progress(f"installing {commits[BASE][:10]} and {commits[NEW][:10]}")
        places = {side: Path(name, f"{side:_<4}") for side in (BASE, NEW)}  # paths of one length
        for place in places.values():
            place.mkdir()
        with ThreadPoolExecutor() as pool:
            installing = {
                side: pool.submit(install, commits[side], place, with_spark=with_spark)
                for side, place in places.items()
            }
        with Bench({side: each.result() for side, each in installing.items()}, code) as bench:
            facts = {side: bench.describe(side) for side in (BASE, NEW)}
            if needed("broker", names):
                log_progress("starting the broker, and storing messages")
                bench.start_broker()
            rows = measure(bench, names, options.rounds)
    if options.output == "json":
        print(as_json(commits, facts, options.rounds, rows))
    else:
        machine = facts[NEW]
        print(
            f"{machine['python']} ({machine['gil']}), {machine['cores']} cores of {machine['cpu']}, "
            f"{machine['system']}, load {machine['load']} before, {machine['time']}"
        )
        for side, commit in commits.items():
            print(f"{side:<4} {commit[:10]}, {'accelerated' if facts[side]['accelerated'] else 'pure Python'}")
        spread = "spread of the median" if options.rounds >= 5 else "smallest to largest"
        print(f"rounds: {options.rounds}; times are medians, for each operation; in brackets: {spread}\n")
        print(*table(rows), "", summary(rows), sep="\n")
    if all(row.failed for row in rows.values()):
        return 2
    return 1 if any(row.is_worse() for row in rows.values()) else 0


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__, formatter_class=raw)
    parser.add_argument("base", nargs="?", metavar="BASE", help="the commit to compare with")
    parser.add_argument("--new", default="HEAD", metavar="COMMIT", help="the commit that may be slower (default: HEAD)")
    parser.add_argument("--only", metavar="NAMES", help="some subjects, comma-separated, or patterns: 'persist-*'")
    parser.add_argument("--rounds", type=one_or_more, default=7, help="samples of each side and subject (default: 7)")
    parser.add_argument("--list", action="store_true", help="name the subjects, and measure nothing")
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="for people, or for machines"
    )
    options = parser.parse_args()
    if options.list:
        for name, subject in SUBJECTS.items():
            print(f"{name:<24} {subject.what}")
        return 0
    if not options.base:
        parser.error("BASE is missing, the commit to compare with: make compare BASE=main~10")
    try:
        return compare(options)
    except (CannotCompare, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
