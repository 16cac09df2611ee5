"""Facts about the machine of a benchmark. Figures are meaningless without them."""

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
    """Return the facts about interpreter and machine that affect figures; `java` is the Java program."""
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
    """Return the heading line of the figures."""
    java = f", Java {facts['java']}" if "java" in facts else ""
    how = "accelerated" if facts["accelerated"] else "pure Python"
    return (
        f"{facts['python']} ({facts['gil']}), {how}, orjson {facts['orjson']}{java}, "
        f"{facts['cores']} cores of {facts['cpu']}, {facts['system']}, load {facts['load']} before, {facts['time']}"
    )


def accelerated() -> bool:
    """Return whether the package uses its C extension in this process. Older packages have none."""
    return bool(getattr(pyrocket_consumer, "ACCELERATED", False))


def has_gil() -> bool:
    """Return whether this interpreter has a GIL."""
    enabled = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or bool(enabled())


def cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the name of the processor from the system."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def java_version(java: str) -> str:
    """Return the version of a Java program, or "unknown"."""
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    _, _, rest = answer.stderr.partition('version "')
    return rest.partition('"')[0] or "unknown"
