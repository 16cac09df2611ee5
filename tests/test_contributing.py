"""The commands, files and marks of CONTRIBUTING.md exist, and its examples run."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from tests.for_each import for_each
from tests.hazards.members import faulty, ours
from tests.hazards.naive import NaiveMember
from tests.pages import ROOT, blocks

PAGE = ROOT / "CONTRIBUTING.md"
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_targets_exist():
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", PAGE.read_text(), re.MULTILINE))
    assert {target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)} == set()


def test_the_marks_are_those_of_the_suite(request):
    marks = {line.split(":")[0].split("(")[0] for line in request.config.getini("markers")}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) <= marks


def names_of(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "contributing"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


VIRTUAL, HAZARD = blocks(PAGE, "python")


@pytest.mark.virtual
def test_the_example_of_virtual_time_runs(rocketmq_cluster):
    names_of(VIRTUAL)["test_an_idle_consumer_receives_a_message_an_hour_later"](rocketmq_cluster)


@pytest.mark.parametrize("member", [ours, faulty(NaiveMember, "committed while it runs")], ids=["ours", "faulty"])
def test_the_example_of_a_hazard_runs(embedded, names, member):
    example = names_of(HAZARD)
    kind = example["CommitsWhatItPulled"] if member is NaiveMember else member
    example["test_a_running_message_is_not_committed"](embedded, names, kind)


@for_each("path", sorted(set(re.findall(r"`((?:tests|docs|pyrocket_consumer|\.ci)/[\w/.]+)`", PAGE.read_text()))))
def test_the_files_exist(path):
    assert (ROOT / path).exists()


@for_each("module", sorted(set(re.findall(r"python -m (tests[\w.]+)", PAGE.read_text()))))
def test_the_commands_exist(module):
    assert importlib.util.find_spec(module)
