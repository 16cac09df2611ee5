"""Programs written for the package that the facade stands in for, as processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.consumer.processes import Child

INSTALL = "from pyrocket_consumer import compat; compat.install(); "


@contextmanager
def running(
    program: Path, *arguments: str, installed: bool = True, name: str = "__main__", then: str = ""
) -> Iterator[Child]:
    """Run a program that is not changed, with the facade installed if it needs that. Warnings are errors.

    `name` is the module's name; with another than `__main__`, `then` may call what it has: `['main'](10)`.
    """
    first = f"import faulthandler, runpy, signal; faulthandler.register(signal.SIGUSR1); {INSTALL if installed else ''}"
    child = Child(
        "-u", "-W", "error", "-c", f"{first}runpy.run_path({str(program)!r}, None, {name!r}){then}", *arguments
    )
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.process.kill()
        child.ended()
