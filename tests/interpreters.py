"""The Pythons of the metadata that this machine has.

python -m tests.interpreters            # prints version and path of each
python -m tests.interpreters --others   # without the one that runs this
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

MINORS = (11, 12, 13, 14)
UNPACKED = Path(__file__).parents[1] / ".venv" / "pythons"
"""The directory where `.ci/pythons` unpacks missing Pythons."""


@cache
def pythons() -> dict[str, str]:
    """Return version -> interpreter."""
    found = {}
    for minor in MINORS:
        name = f"python3.{minor}"
        paths = [
            *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")),
            shutil.which(name),
            *UNPACKED.glob(f"3.{minor}/usr/bin/{name}"),
        ]
        for python in filter(None, map(str, filter(None, paths))):
            done = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False)
            if done.returncode == 0:
                found[f"3.{minor}"] = python
                break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.interpreters", description="Prints the Pythons of this machine."
    )
    parser.add_argument("--others", action="store_true", help="without the version that runs this")
    others = parser.parse_args().others
    for version, path in pythons().items():
        if not others or version != f"3.{sys.version_info.minor}":
            print(version, path)
    missing = [f"3.{minor}" for minor in MINORS if f"3.{minor}" not in pythons()]
    if missing:
        print("not on this machine: Python", ", ".join(missing), file=sys.stderr)


if __name__ == "__main__":
    main()
