"""Every code block of the README and of the page on usage runs as a reader runs it."""

from __future__ import annotations

import subprocess

import pytest

from tests.pages import ROOT, blocks, orders_arriving, run_pyrocket, run_python, title

pytestmark = pytest.mark.live
README, USAGE = ROOT / "README.md", ROOT / "docs" / "usage.md"
PYTHON = [block for page in (README, USAGE, ROOT / "docs" / "events.md") for block in blocks(page, "python")]
SHELL = blocks(README, "sh")


@pytest.fixture
def orders():
    with orders_arriving() as cluster:
        yield cluster


@pytest.mark.slow("a program waits as the page says")
@pytest.mark.parametrize("block", PYTHON, ids=title)
def test_a_python_block_runs(block, orders, tmp_path):
    printed = run_python(block, orders, tmp_path)
    if "consumer.join()" in block:
        assert "b'an order'" in printed.splitlines()[0]
    assert printed or "print(" not in block


def test_the_shell_blocks_name_targets_that_exist():
    """The targets of make exist. CI runs `make demo` and `make test`."""
    targets = [line.split()[1] for block in SHELL for line in block.splitlines() if line.startswith("make ")]
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_pyrocket_commands_run(orders, tmp_path):
    (block,) = blocks(USAGE, "sh")
    for printed in run_pyrocket(block, orders, tmp_path):
        assert "orders" in printed
