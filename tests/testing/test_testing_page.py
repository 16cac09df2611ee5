"""The examples of docs/testing.md run unchanged, and the page names every public name."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer import testing
from pyrocket_consumer.testing import message
from tests.for_each import for_each

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.slow("runs pytest")
@pytest.mark.live
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: re.findall(r"def (test_\w+)", block)[0])
def test_the_tests_of_the_page_pass(block, tmp_path):
    (tmp_path / "test_example.py").write_text(block)
    plugin = ["-p", "pyrocket_consumer.testing.pytest_plugin", "--strict-markers", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-c", os.devnull, "-W", "error", *plugin, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert re.search(rf"\b{block.count('def test_')} passed", done.stdout), done.stdout + done.stderr
    assert done.returncode == 0


@for_each("name", testing.__all__)
def test_it_names(name):
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", TEXT)


def test_it_names_each_argument_of_message():
    table = TEXT.split("| argument |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == set(inspect.signature(message).parameters)
