from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from tests.for_each import for_each


class Subtests:
    """Records failures and continues, as pytest's subtests do."""

    def __init__(self):
        self.failed = []

    @contextmanager
    def test(self, name):
        try:
            yield
        except AssertionError as error:
            self.failed.append((name, str(error).partition("\n")[0]))


def test_each_case_runs_and_a_failure_is_named():
    subtests, ran = Subtests(), []

    @for_each("number", lambda: [1, 2])
    @for_each("text, length", [("one", 3), ("two", 4)], ids=["right", "wrong"])
    def test(number, text, length, tmp_path):
        ran.append((number, text, tmp_path))
        assert len(text) == length, text

    test(subtests=subtests, tmp_path="/")
    assert ran == [(1, "one", "/"), (1, "two", "/"), (2, "one", "/"), (2, "two", "/")]
    assert subtests.failed == [("1, wrong", "two"), ("2, wrong", "two")]


def test_coroutines_are_awaited():
    subtests = Subtests()

    @for_each("text", ["one", "three"])
    async def test(text):
        assert len(text) == 3, text

    asyncio.run(test(subtests=subtests))
    assert subtests.failed == [("'three'", "three")]


@pytest.mark.parametrize(
    ("names", "cases", "ids", "match"),
    [
        ("number", [], repr, "no case of number"),
        ("number, text", [(1, "one"), (2,)], repr, r"\(2,\) is not a value each for number, text"),
        ("number,text", [(1, "one", "more")], repr, "not a value each for number, text"),
        ("number", [1, 2], ["one"], "1 ids for 2 cases of number"),
    ],
)
def test_a_wrong_table_is_named(names, cases, ids, match):
    @for_each(names, cases, ids)
    def test(number, text=""):
        pass

    with pytest.raises(AssertionError, match=match):
        test(subtests=Subtests())
