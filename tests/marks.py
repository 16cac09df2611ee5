"""The source of tests, for pages that are made from their marks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

Test = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def functions(path: Path) -> list[Test]:
    """Return the tests of a file."""
    body = ast.parse(path.read_text()).body
    return [node for node in body if isinstance(node, Test) and node.name.startswith("test_")]


def marked_with(mark: str, *more: Path) -> Iterator[tuple[Path, Test]]:
    """Yield the tests of all files that contain a mark, and of the files `more`."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if path in more or f"mark.{mark}(" in path.read_text():
            yield from ((path, node) for node in functions(path))


def arguments(node: Test, mark: str) -> list[str]:
    """Return the arguments of a test's mark."""
    calls = (each for each in node.decorator_list if isinstance(each, ast.Call))
    return [
        str(ast.literal_eval(argument))
        for call in calls
        if ast.unparse(call.func) == f"pytest.mark.{mark}"
        for argument in call.args
    ]


def fixtures(node: Test) -> frozenset[str]:
    return frozenset(argument.arg for argument in node.args.args)


def page_path(path: Path) -> str:
    """Return the path of a file for pages."""
    return path.relative_to(TESTS.parent).as_posix()
