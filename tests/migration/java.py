"""The names of the Java client, recorded so that the page can be made without Java.

`python -m tests.migration.java` records them again, from the jars that tests on real brokers use.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.real_brokers import NEWEST
from tests.real_brokers.process import Program

RECORDED = Path(__file__).with_name("java_client.json")

Names = dict[str, dict[str, str | None]]
"""Class -> public method, or constant -> the default of what it sets; None where it sets nothing."""

VARYING = {"setClientIP": "detected", "setConsumeTimestamp": "half an hour ago"}
"""Defaults that are not the same everywhere."""


def recorded() -> Names:
    """Return the recorded names."""
    names: Names = json.loads(RECORDED.read_text())
    return names


def fetched() -> Names:
    """Return the names in the jars of the newest release.

    Raises:
        CannotRun: Java is not installed, or the jars cannot be downloaded.
    """
    program = Program(NEWEST, "Names", {})
    try:
        names: Names = program.wait_for("names")["of"]
    finally:
        program.close()
    for methods in names.values():
        methods.update({name: default for name, default in VARYING.items() if name in methods})
    return names


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(fetched(), indent=1, sort_keys=True) + "\n")
