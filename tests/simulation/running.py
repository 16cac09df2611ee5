"""Simulations are run as processes of their own: the order of sets of text depends on a setting of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def simulate(*arguments: str, module: str = "tests.simulation") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # else the process starts itself anew
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
