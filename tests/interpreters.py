"""The Pythons that are on this machine, of those the metadata names."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def _found() -> Iterator[tuple[str, str]]:
    for minor in (11, 12, 13, 14):
        name = f"python3.{minor}"
        places = [*sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")), shutil.which(name)]
        for place in filter(None, map(str, filter(None, places))):
            asked = subprocess.run([place, "-c", "import venv, ensurepip"], capture_output=True, check=False)
            if asked.returncode == 0:
                yield f"3.{minor}", place
                break


PYTHONS = dict(_found())
"""Version -> interpreter."""
