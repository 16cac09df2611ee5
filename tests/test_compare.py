"""The comparison of two commits: the verdict, refused arguments, and that both are installed and measured."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare import Row, chosen, excluded_ranks, ratio, summary, table
from benchmarks.compare_side import SUBJECTS
from tests.for_each import for_each

ROOT = Path(__file__).parents[1]
live = pytest.mark.live


def run(*arguments, **environment):
    command = [sys.executable, "-m", "benchmarks.compare", *arguments]
    where = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=280, check=False)


def row(cpu, wall=None, rounds=7, noise=0.02, seed=1):
    """Return samples of a subject whose new commit takes `cpu` and `wall` times as much, plus noise."""
    draw, made = random.Random(seed), Row()
    for times, factor in ((made.cpu_s, cpu), (made.wall_s, wall or cpu)):
        for _ in range(rounds):
            machine = draw.uniform(1, 2)  # slows both sides
            times["base"].append(machine * draw.gauss(1, noise))
            times["new"].append(machine * draw.gauss(factor, noise))
    return made


@for_each(
    "cpu, wall, expected",
    [
        (1.0, 1.0, "no slower"),
        (1.2, 1.2, "slower"),
        (0.8, 0.8, "quicker"),
        (1.05, 1.05, "unclear"),
        (1.0, 1.5, "slower: it waits longer"),
        (1.0, 1.15, "no slower"),  # the noise of the machine
        (1.2, 0.9, "slower"),
    ],
)
def test_a_verdict_uses_both_times(cpu, wall, expected):
    made = row(cpu, wall)
    assert made.verdict() == expected
    assert made.is_worse() == expected.startswith("slower")


def test_noise_alone_is_hardly_ever_slower():
    found = [row(1.0, noise=0.1, seed=seed).verdict() for seed in range(400)]
    assert sum(verdict.startswith("slower") for verdict in found) <= 8


def test_a_slowdown_of_a_fifth_is_nearly_always_found():
    found = [row(1.2, noise=0.04, seed=seed).verdict() for seed in range(400)]
    assert found.count("slower") >= 380


def test_the_spread_contains_the_median_as_often_as_documented():
    below = above = 0
    for seed in range(2000):
        draw = random.Random(seed)
        found = ratio([1.0] * 7, [1.1 * draw.lognormvariate(0, 0.1) for _ in range(7)])
        below, above = below + (found.high < 1.1), above + (found.low > 1.1)
    assert max(below, above) <= 2000 * 0.05 + 20


def test_the_spread_follows_the_tables_of_signed_ranks():
    # One-sided 5 %: 0 of 5 rounds, 2 of 6, 3 of 7, 5 of 8, 10 of 10, 60 of 20.
    assert [excluded_ranks(rounds) for rounds in (1, 4, 5, 6, 7, 8, 10, 20)] == [0, 0, 0, 2, 3, 5, 10, 60]


@for_each(
    "base, new, spread",
    [
        ([2.0], [3.0], (1.5, 1.5, 1.5)),  # the spread of one round is its value
        ([1, 10, 100, 1000, 10_000], [2, 20, 200, 2000, 20_000], (2, 2, 2)),
    ],
)
def test_samples_count_in_pairs(base, new, spread):
    found = ratio(base, new)
    assert (found.low, found.median, found.high) == pytest.approx(spread)


def test_a_failure_of_the_new_side_only_is_worse():
    verdicts = {("base",): "fails on base", ("new",): "fails on new", ("base", "new"): "fails"}
    for sides, expected in verdicts.items():
        made = Row(failed=dict.fromkeys(sides, "ConfigError: unknown option"))
        assert (made.verdict(), made.is_worse()) == (expected, expected == "fails on new")


def test_the_table_has_both_times_and_the_verdict():
    rows = {"consume": row(1.2), "import": row(1.0), "start": Row(failed={"base": "TimeoutError: late"})}
    _, slower, same, failed = table(rows)
    assert slower.startswith("consume ")
    assert slower.endswith(" slower")
    assert same.endswith("no slower")
    assert failed.split() == ["start", "fails", "on", "base:", "TimeoutError:", "late"]
    assert summary(rows) == "slower: consume"
    assert summary({"import": row(1.05)}) == "no subject is slower; unclear, use more rounds: import"


def test_subjects_are_chosen_by_name_and_by_pattern():
    assert chosen(None) == list(SUBJECTS)
    assert chosen("import,consume") == ["consume", "import"]
    assert len(chosen("persist-*")) == 12


@live
def test_the_list_names_every_subject_and_help_what_slower_means():
    listed, helped = run("--list"), run("--help")
    assert (listed.returncode, helped.returncode) == (0, 0)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(SUBJECTS)
    assert "make compare BASE=" in helped.stdout
    assert "lower end" in helped.stdout


@live
@for_each(
    "arguments, expected",
    [
        ([], "BASE is missing"),
        (["HEAD", "--rounds", "0"], "'0' is not allowed; give a whole number"),
        (["HEAD", "--only", "consum"], "no subject is called 'consum'; --list has them all"),
        (["no-such-commit"], "'no-such-commit' is no commit here; `git log"),
        (["--new", "-x"], "expected one argument"),
    ],
)
def test_bad_input_is_named_with_its_remedy(arguments, expected):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr.splitlines()[-1]


needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


@live
@needs_git
@pytest.mark.parametrize(("tools", "expected"), [([], "no C compiler"), (["cc", "gcc"], "no Java")])
def test_a_missing_tool_is_named_with_its_remedy(tools, expected, tmp_path):
    for tool in (*tools, "git"):
        (tmp_path / tool).symlink_to(shutil.which("git"))
    done = run("HEAD", "--only", "spark-read", PATH=str(tmp_path), JAVA_HOME="", PYROCKET_PURE="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert expected in line
    assert "make system-packages" in line


@live
@needs_git
@pytest.mark.slow("installs two environments", proof=True)
@pytest.mark.timeout(300)
def test_a_commit_is_compared_with_itself():
    done = run("HEAD", "--only", "import", "--rounds", "1", "-o", "json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["commits"]["base"] == found["commits"]["new"]
    assert found["environments"]["base"]["accelerated"] == found["environments"]["new"]["accelerated"]
    (subject,) = found["subjects"].values()
    assert not subject["failed"]
    for times in (subject["cpu_s"], subject["wall_s"]):
        assert len(times["base"]) == len(times["new"]) == 1
        assert min(*times["base"], *times["new"]) > 0
    assert done.returncode == subject["verdict"].startswith("slower")  # a single round may be slower
