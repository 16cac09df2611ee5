"""The effect of marks and limits, and of tests that leave virtual time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow("starts pytest")]

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.virtual import install
install()
pytest_plugins = ("tests.plugins.costs",)
"""
TESTS = """
import os, pytest, subprocess, sys, threading, time
from tests import speed
speed.USUAL_S = 1000

def test_pure(): pass
def test_virtual(): time.sleep(1000)
def test_caught():
    try: subprocess.run([sys.executable, "-c", ""])
    except Exception: pass
@pytest.mark.live
def test_live(): subprocess.run([sys.executable, "-c", ""])
def work():
    until = time.process_time() + 2.1
    while time.process_time() < until: pass
@pytest.mark.live
def test_long(): work()
@pytest.mark.live
@pytest.mark.slow("works")
def test_long_with_reason(): work()
@pytest.mark.live
def test_long_on_a_slow_machine():
    speed.USUAL_S = 0.0001
    work()
@pytest.mark.search
def test_search(): pass
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")

    for name in [name for name in os.environ if name.startswith("PYROCKET_")]:
        monkeypatch.delenv(name)

    def pytest_(*arguments):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        ).stdout

    return pytest_


def test_marks_choose_and_limits_hold(run):
    everything, units = run(), run("-m", "unit")
    passed = ("pure", "virtual", "live", "long_with_reason", "long_on_a_slow_machine", "search")
    assert [name for name in passed if f"PASSED test_it.py::test_{name}\n" not in everything] == []
    assert "mark this test live; it left virtual time: subprocess.Popen" in everything
    assert "2.1 s, or 2.1 s at the usual speed, more than 2 s: make it quicker, or mark it slow(reason)" in everything
    assert "2 failed, 6 passed" in everything
    assert "1 failed, 2 passed, 5 deselected" in units


def test_wrong_marks_are_named(run, tmp_path):
    (tmp_path / "test_wrong.py").write_text(
        "import pytest\n@pytest.mark.unit\n@pytest.mark.live\ndef test_both(): pass\n"
        "@pytest.mark.unit\n@pytest.mark.live\n@pytest.mark.slow\ndef test_why(): pass\n"
    )
    assert "FAILED" not in (chosen := run("-n", "1", "-m", "unit and live"))
    assert "ERROR test_wrong.py::test_both - Failed: marked unit and live; keep one" in chosen
    assert "ERROR test_wrong.py::test_why - Failed: marked slow without a reason" in chosen


def test_real_time_skips_virtual_tests(run, tmp_path):
    (tmp_path / "test_hours.py").write_text(
        "import pytest, time\n@pytest.mark.virtual\ndef test_hours(): time.sleep(3600)\n"
    )
    assert "1 deselected" in run("--real-time", "test_hours.py")
    assert "1 passed" in run("test_hours.py")


@pytest.mark.parametrize(
    ("name", "value"),
    [("SEED", "abc"), ("SEED", ""), ("TRIALS", "much"), ("TRIALS", "nan"), ("TRIALS", "inf"), ("TRIALS", "-1")],
)
def test_a_variable_that_is_no_number_is_refused(run, monkeypatch, name, value):
    monkeypatch.setenv(f"PYROCKET_{name}", value)
    assert run("-n", "1").startswith(f"ERROR: PYROCKET_{name}={value}: give ")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_ci_without_java_fails(workers):
    nowhere = {"CI": "true", "JAVA_HOME": "/nonexistent", "PATH": str(Path(sys.executable).parent)}
    which = ["tests/conformance/test_clustering.py", "-k", "seen_once"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, *which],
        cwd=ROOT,
        env=os.environ | nowhere,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert "tests against real brokers cannot run: java was not found" in done.stdout
    assert "INTERNALERROR" not in done.stdout
    assert done.returncode != 0
