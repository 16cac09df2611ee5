"""Run programs that were written for the package that the facade replaces, in their own processes."""

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
    """Run an unchanged program, with the facade installed if it needs that. Warnings are errors.

    `name` is the module's name. If it is not `__main__`, `then` may call a function of the module: `['main'](10)`.
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
