"""The compiled part under sanitizers, and with planted mistakes, which a comparison with Python must find."""

from __future__ import annotations

import subprocess

import pytest

from tests.interpreters import pythons
from tests.planted_mistakes import DIED
from tests.protocol.building import SANITIZED, SANITIZERS_STATUS, SOURCE, build, compiler, run
from tests.protocol.mistakes import ALL, COLUMNS, MISTAKES, OF_SANITIZERS, RIGHT, SEED, STORE, TARGETS, run_checks
from tests.trials import trials

ANEW = f"the kept input finds it no longer: {STORE}"


@pytest.mark.live
@pytest.mark.slow("compiles the source with each mistake, and with sanitizers")
@pytest.mark.parametrize("mistakes", [MISTAKES, OF_SANITIZERS], ids=["compared", "sanitized"])
def test_kept_inputs_find_each_mistake(mistakes, subtests):
    compiler()
    found = run_checks("replay", mistakes)
    assert found.pop(RIGHT) == ""
    for mistake, wrong in found.items():
        with subtests.test(mistake):
            assert wrong if mistakes is MISTAKES else wrong == f"{DIED} {SANITIZERS_STATUS}", ANEW


@pytest.mark.search
@pytest.mark.parametrize("mistake", [*ALL][: trials(len(ALL))])
def test_a_search_finds_a_mistake(mistake):
    compiler()
    assert run_checks("search", {mistake: ALL[mistake]})[mistake]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    build(folder, SOURCE.read_text(), *SANITIZED)
    return folder


@pytest.mark.search
def test_sanitizers_find_no_defect(sanitized):
    fuzz = ("-m", "tests.fuzz", *TARGETS, COLUMNS, "--engine", "mutation", "--seed", str(SEED))
    response = run(sanitized, *fuzz, "--seconds", str(trials(20)), sanitized=True)
    assert response.returncode == 0 and " 0 findings" in response.stdout, response.stdout + response.stderr


@pytest.mark.slow("runs the tests of the wire format under sanitizers", proof=True)
@pytest.mark.search
def test_sanitizers_find_nothing_in_the_tests(sanitized):
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(SOURCE.parents[2]), "--real=none")
    tests = SOURCE.parents[2] / "tests" / "protocol"
    chosen = [str(tests / name) for name in ("test_accelerator.py", "test_message.py")]
    unsuited = "not memory and not variable and not build and not nothing_is_left"  # processes of their own; memory
    response = run(sanitized, *command, *chosen, "-k", unsuited, sanitized=True)
    assert response.returncode == 0 and " passed" in response.stdout, response.stdout + response.stderr


@pytest.mark.live
def test_a_build_for_free_threaded_python_is_right():
    """Uses the headers of an ordinary Python with the macro of a free-threaded one, which exists from 3.13 on."""
    if "3.13" not in pythons():
        pytest.skip("there is no Python 3.13")
    ask_headers = "import sysconfig; print(sysconfig.get_path('include'))"
    done = subprocess.run([pythons()["3.13"], "-c", ask_headers], capture_output=True, text=True, check=True)
    headers = done.stdout.strip()
    flags = ("-fsyntax-only", "-Wall", "-Werror", "-DPy_GIL_DISABLED=1", '-DSOURCE=""', "-I", headers)
    command = [compiler(), *flags, str(SOURCE)]
    response = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert response.returncode == 0, response.stderr
