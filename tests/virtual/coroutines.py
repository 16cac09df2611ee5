"""An event loop whose clock stops while there is work, and jumps to the next timer otherwise."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.virtual.scheduler import NotVirtual

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Never waits; adds the timeout to the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            hint = "a test with threads or connections needs RUN = asyncio.run in its module"
            raise AssertionError(f"nothing is due and nobody will call; {hint}")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop for tests without sockets and threads, on which an hour passes at once."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, *work: Any) -> Any:
        raise NotVirtual("this loop has no threads; say RUN = asyncio.run in the module")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario in virtual time. Exceptions that nothing else handles fail the test."""
    unhandled: list[dict[str, Any]] = []
    loop = VirtualTimeLoop()
    loop.set_exception_handler(lambda loop, context: unhandled.append(context))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(scenario)
    assert unhandled == []
    return result
