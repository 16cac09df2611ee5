"""Files with the input or seed that finds each planted mistake, one line each, for a replay."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DIED = "the process ended with"


def read(path: Path) -> dict[str, Any]:
    """Return the inputs or seeds of a file, by the name of a mistake."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return kept


def write(path: Path, kept: Mapping[str, Any]) -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def in_fork(work: Callable[[], Any]) -> Any:
    """Run `work` in a fork of this process and return its result; if the fork dies, a text with its exit status.

    Raises:
        RuntimeError: `work` has raised an error, which is printed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        status = 1
        try:
            with os.fdopen(writing, "w") as pipe:
                json.dump(work(), pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 1:
        raise RuntimeError("see above")
    return json.loads(answer) if status == 0 else f"{DIED} {status}"
