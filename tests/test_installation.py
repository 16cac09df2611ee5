"""Installation from the sources and from the wheel, with and without a compiler, on each installed Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyrocket_consumer
from tests.interpreters import pythons

pytestmark = [pytest.mark.live, pytest.mark.slow("builds wheels and makes environments")]
ROOT = Path(pyrocket_consumer.__file__).parent.parent

CONSUMES = """
import logging, threading
logging.basicConfig()
from pyrocket_consumer import ACCELERATED, Producer, PushConsumer
from pyrocket_consumer.testing import EmbeddedCluster
seen, all_there = [], threading.Event()

def handle(message):
    seen.append((message.body, message.properties["TAGS"], message.property("KEYS")))
    if len(seen) == 100:
        all_there.set()

with EmbeddedCluster() as cluster:
    cluster.create_topic("orders")
    with Producer(name_server=cluster.name_server) as producer:
        for number in range(100):
            producer.send("orders", str(number).encode(), tags="A", keys=f"k{number}")
    consumer = PushConsumer("g", name_server=cluster.name_server, consume_from="first")
    consumer.subscribe("orders", handle)
    consumer.start()
    assert all_there.wait(30)
    consumer.close()
assert sorted(seen) == sorted((str(number).encode(), "A", f"k{number}") for number in range(100))
print(ACCELERATED)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the sources, so that builds leave no files in the original."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    copy.mkdir()
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ("pyrocket_consumer", "pyspark_rocketmq"):
        shutil.copytree(ROOT / package, copy / package, ignore=ignore)
    return copy


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYROCKET_PURE")}
    command = [*map(str, command)]
    answer = subprocess.run(
        command, cwd=cwd, env=variables | environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer


def wheel_of(source: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """Build a wheel as pip does when it installs. Return the wheel and the output."""
    shutil.rmtree(source / "build", ignore_errors=True)
    command = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", out, source)
    answer = run(*command, cwd=out, **environment)
    return next(out.glob("*.whl")), answer.stdout + answer.stderr


def unpacked(wheel: Path, folder: Path) -> Path:
    """Return the directory of the wheel's modules."""
    run(sys.executable, "-m", "zipfile", "-e", wheel, folder, cwd=folder)
    return folder


def consumes(python: str | Path, folder: Path, **environment: str) -> str:
    """Consume with the installed package, which must log nothing, and return whether it is accelerated."""
    answer = run(python, "-P", "-W", "error", "-c", CONSUMES, cwd=folder, **environment)
    assert answer.stderr == ""
    return answer.stdout.strip()


@pytest.mark.parametrize(
    ("environment", "accelerated"),
    [({}, "True"), ({"CC": "no-such-one"}, "False"), ({"CC": "false"}, "False"), ({"PYROCKET_PURE": "1"}, "False")],
    ids=["a compiler", "none", "one that fails", "not wanted"],
)
def test_it_installs_with_a_compiler_and_without(source, tmp_path, environment, accelerated):
    if accelerated == "True" and not (shutil.which("gcc") or shutil.which("cc")):
        assert os.environ.get("CI") != "true", "no C compiler"
        pytest.skip("there is no C compiler")
    out, folder = tmp_path / "out", tmp_path / "installed"
    out.mkdir()
    folder.mkdir()
    wheel, output = wheel_of(source, out, **environment)
    assert "error" not in output.lower()
    assert consumes(sys.executable, unpacked(wheel, folder), PYTHONPATH=str(folder)) == accelerated


@pytest.mark.slow("makes an environment for each Python", proof=True)
def test_one_wheel_runs_on_each_python(source, tmp_path, subtests):
    """The wheel works in a new environment with the newest dependencies."""
    wheel, _ = wheel_of(source, tmp_path)
    for version, interpreter in pythons().items():
        with subtests.test(version):
            run(interpreter, "-m", "venv", tmp_path / version, cwd=tmp_path)
            python = tmp_path / version / "bin" / "python"
            run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
            assert consumes(python, tmp_path) == "True"


def test_this_python_is_among_those():
    assert f"3.{sys.version_info.minor}" in pythons()
