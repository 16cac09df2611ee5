"""What the Java client calls things: recorded, so that the page can be made where there is no Java.

`python -m tests.migration.java` records it anew, with the jars that tests on real brokers run.
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
    """Return the names as they were recorded."""
    names: Names = json.loads(RECORDED.read_text())
    return names


def fetched() -> Names:
    """Return the names of the newest release, from its jars.

    Raises:
        CannotRun: there is no Java, or no way to get the jars.
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
