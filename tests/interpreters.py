"""The Pythons that are on this machine, of those the metadata names."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path


@cache
def pythons() -> dict[str, str]:
    """Return version -> interpreter."""
    found = {}
    for minor in (11, 12, 13, 14):
        name = f"python3.{minor}"
        places = [*sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")), shutil.which(name)]
        for place in filter(None, map(str, filter(None, places))):
            asked = subprocess.run([place, "-c", "import venv, ensurepip"], capture_output=True, check=False)
            if asked.returncode == 0:
                found[f"3.{minor}"] = place
                break
    return found
