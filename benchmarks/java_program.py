"""Compile the Java programs of the benchmarks against the jars of a release, and run them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.real_brokers.jars import cache_directory, jars, java_tool

HERE = Path(__file__).parent / "java"


def class_path(program: str, version: str) -> str:
    """Return the class path of `java/<program>.java` with the jars of a RocketMQ release. Compile it if it changed.

    Raises:
        subprocess.CalledProcessError: javac failed; standard error has its output.
    """
    source = HERE / f"{program}.java"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    target = cache_directory() / f"benchmark-{program}-{version}-{digest}"
    libraries = f"{jars(version)}/*"
    with FileLock(f"{target}.lock"):
        if not (target / f"{program}.class").exists():
            subprocess.run(
                [java_tool("javac"), "-nowarn", "-proc:none", "-d", str(target), "-cp", libraries, str(source)],
                check=True,
                timeout=300,
            )
    return f"{target}{os.pathsep}{libraries}"


def run(program: str, version: str, options: Mapping[str, object], *, timeout_s: float) -> dict[str, Any]:
    """Run a program with `name=value` arguments and return the JSON object it prints last.

    The virtual machine selects its heap and collector, because no option changes its speed.

    Raises:
        RuntimeError: the program failed; the text has its output.
        subprocess.TimeoutExpired: the program did not end.
    """
    with tempfile.TemporaryDirectory(prefix="pyrocket-bench-") as home:  # for logs and offset files
        command = [
            java_tool("java"),
            f"-Duser.home={home}",
            f"-Drocketmq.client.localOffsetStoreDir={home}",
            "-cp",
            class_path(program, version),
            program,
            *(f"{name}={_text(value)}" for name, value in options.items()),
        ]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=home)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("{")]
    if answer.returncode or not lines:
        raise RuntimeError(f"{program} ended with {answer.returncode}:\n{answer.stdout[-1500:]}{answer.stderr[-1500:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
