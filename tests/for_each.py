"""Many small cases in one item, because each item costs pytest milliseconds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

Test = Callable[..., Any]
Case = tuple[dict[str, Any], tuple[Callable[[], object], ...]]
"""The arguments of a case, and functions that return their names."""


def for_each(
    names: str,
    cases: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Iterable[object] | Callable[[Any], object] = repr,
) -> Callable[[Test], Test]:
    """Run a test for each case, as `pytest.mark.parametrize` does, but all in one item.

    A failing case is a failed subtest, named by its id or its values. The other cases still run.
    All cases share the fixtures. A function as `cases` is called when the test runs.
    """
    keys = [name.strip() for name in names.split(",")]

    def decorate(test: Test) -> Test:
        body, inner = getattr(test, "cases", (test, lambda: [({}, ())]))  # several decorators make all combinations

        def combined() -> Iterator[Case]:
            given = list(cases if isinstance(cases, Iterable) else cases())
            assert given, f"there is no case of {names}"
            labels = [None] * len(given) if callable(ids) else list(ids)
            assert len(labels) == len(given), f"{len(labels)} ids for {len(given)} cases of {names}"
            for case, name in zip(given, labels, strict=True):
                values = case if len(keys) > 1 else (case,)
                assert len(values) == len(keys), f"{case!r} is not a value each for {', '.join(keys)}"
                captions = [partial(ids, value) for value in values] if callable(ids) else [partial(str, name)]
                for arguments, more in inner():
                    yield dict(zip(keys, values, strict=True)) | arguments, (*captions, *more)

        @contextmanager
        def recording(subtests: pytest.Subtests, captions: Iterable[Callable[[], object]]) -> Iterator[None]:
            """Report a failing case as a subtest. A passing case reports no subtest, because that costs as an item."""
            try:
                yield
            except BaseException:
                with subtests.test(", ".join(str(caption())[:100] for caption in captions)):
                    raise

        @functools.wraps(test)
        def loop(subtests: pytest.Subtests, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for arguments, captions in combined():
                with recording(subtests, captions):
                    body(**fixtures, **arguments)

        @functools.wraps(test)
        async def loop_of_coroutines(subtests: pytest.Subtests, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for arguments, captions in combined():
                with recording(subtests, captions):
                    await body(**fixtures, **arguments)

        made: Test = loop_of_coroutines if inspect.iscoroutinefunction(body) else loop
        every = inspect.signature(test).parameters.values()
        left = [parameter for parameter in every if parameter.name not in (*keys, "subtests")]
        subtests = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        vars(made).update(__signature__=inspect.Signature([*left, subtests]), cases=(body, combined))
        return made

    return decorate
