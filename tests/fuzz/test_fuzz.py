"""Short runs of `python -m tests.fuzz`, and tests that it finds planted defects."""

from __future__ import annotations

import time

import pytest

from pyrocket_consumer.errors import ProtocolError
from tests.fuzz import running
from tests.fuzz.mutation import MAX_BYTES, Mutator
from tests.fuzz.running import each, mutate
from tests.fuzz.targets import TARGETS, Target, accepting
from tests.trials import trials


@pytest.mark.search
@pytest.mark.parametrize("name", TARGETS)
def test_all_bytes_are_accepted_or_refused(name):
    run = mutate(TARGETS[name], trials(500), 60, seed=1)
    assert run.finding is None, run.finding.text


@pytest.mark.slow("the stream of each frame comes byte by byte, too")
@pytest.mark.parametrize("name", TARGETS)
def test_real_bytes_are_accepted(name):
    for data in TARGETS[name].originals():
        TARGETS[name].read(data)


def raising(data):
    if b"\xff" in data:
        raise RecursionError("deep")


def slow(data):
    begin = time.thread_time()
    while len(data) > 100 and time.thread_time() - begin < 0.06:
        pass


def wordy(data):
    raise ProtocolError("x" * 5000)


@pytest.mark.parametrize(
    ("read", "expected"), [(raising, "RecursionError"), (slow, "of CPU time"), (accepting(wordy), "5000 characters")]
)
def test_what_is_planted_is_found_and_kept(read, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "FINDINGS", tmp_path)
    monkeypatch.setattr(running, "LONGEST_S", 0.05)
    target = Target("planted", read, lambda: [b"a" * 90])
    run = mutate(target, 100_000, 60, seed=1)
    assert expected in run.finding.text
    assert [path.name for path in tmp_path.iterdir()] == [run.finding.path.name]
    assert expected in running.try_input(target, run.finding.path.read_bytes())


def test_a_seed_makes_the_same_inputs():
    made = [[mutator.next() for _ in range(50)] for mutator in (Mutator([b"abc", b"x" * 1000], 5) for _ in range(2))]
    assert made[0] == made[1]
    assert len(set(made[0])) > 30
    assert max(map(len, made[0])) <= MAX_BYTES


def test_executions_are_shared_out():
    runs = list(each(["tags", "batch"], "mutation", 100, 60, seed=1))
    assert [run.executions for run in runs] == [50, 50]
