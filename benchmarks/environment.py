"""What a benchmark ran on: a figure without it says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pyrocket_consumer


def environment(*, java: str | None = None) -> dict[str, str | int | float]:
    """Return the facts about interpreter and machine that figures depend on; `java` is the program for its version."""
    facts: dict[str, str | int | float] = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "gil": "GIL" if has_gil() else "free-threaded",
        "cores": cores(),
        "cpu": cpu_model(),
        "system": f"{platform.system()} {platform.release()}",
        "accelerated": accelerated(),
        "orjson": metadata.version("orjson"),
        "load": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    if java is not None:
        facts["java"] = java_version(java)
    return facts


def header(facts: dict[str, str | int | float]) -> str:
    """Return the line that stands above the figures."""
    java = f", Java {facts['java']}" if "java" in facts else ""
    how = "accelerated" if facts["accelerated"] else "pure Python"
    return (
        f"{facts['python']} ({facts['gil']}), {how}, orjson {facts['orjson']}{java}, "
        f"{facts['cores']} cores of {facts['cpu']}, {facts['system']}, load {facts['load']} before, {facts['time']}"
    )


def accelerated() -> bool:
    """Tell whether the package uses its C extension in this process. One that is older than it does not."""
    return bool(getattr(pyrocket_consumer, "ACCELERATED", False))


def has_gil() -> bool:
    """Tell whether threads of this interpreter take turns."""
    enabled = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or bool(enabled())


def cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the processor's name as the system knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def java_version(java: str) -> str:
    """Return the version of a Java program, "unknown" when it does not tell."""
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    _, _, rest = answer.stderr.partition('version "')
    return rest.partition('"')[0] or "unknown"
