"""What CONTRIBUTING.md says about commands and marks is so, and its example runs."""

from __future__ import annotations

import re

from tests.pages import ROOT, blocks

PAGE = ROOT / "CONTRIBUTING.md"
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_targets_exist():
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", PAGE.read_text(), re.MULTILINE))
    assert {target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)} == set()


def test_the_marks_are_those_of_the_suite(request):
    marks = {line.split(":")[0].split("(")[0] for line in request.config.getini("markers")}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) <= marks


def test_the_example_runs(rocketmq_cluster):
    (block,) = blocks(PAGE, "python")
    names: dict[str, object] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    names["test_an_idle_consumer_gets_what_comes_an_hour_later"](rocketmq_cluster)  # type: ignore[operator]
