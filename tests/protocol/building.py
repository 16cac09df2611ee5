"""Builds of the compiled part: with sanitizers, or with a mistake planted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pyrocket_consumer
from pyrocket_consumer.protocol import accelerator

ROOT = Path(pyrocket_consumer.__file__).parent.parent
SOURCE = ROOT / "pyrocket_consumer" / "protocol" / "_accelerator.c"
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
SANITIZERS_STATUS = 99
"""The exit status that AddressSanitizer sets."""


def compiler() -> str:
    """Return a C compiler. Skip the test without one; in CI there must be one."""
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        assert os.environ.get("CI") != "true", "no C compiler, or no headers of Python"
        pytest.skip("there is no C compiler, or there are no headers of Python")
    return found


def copied(folder: Path) -> Path:
    """Copy the package without its compiled part into `folder`. Return the directory for the compiled part."""
    shutil.copytree(
        ROOT / "pyrocket_consumer",
        folder / "pyrocket_consumer",
        ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"),
    )
    return folder / "pyrocket_consumer" / "protocol"


def compile_c(source: str, library: Path, *flags: str) -> None:
    """Compile `source` into `library`. Warnings are errors."""
    file = library.with_suffix(".c")
    file.write_text(source)
    command = [
        compiler(),
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",
        "-Wno-missing-field-initializers",
        "-Wno-cast-function-type",
        "-DPy_LIMITED_API=0x030b0000",
        f'-DSOURCE="{accelerator.SOURCE}"',
        *flags,
        "-I",
        sysconfig.get_path("include"),
        str(file),
        "-o",
        str(library),
    ]
    response = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert response.returncode == 0, response.stderr


def build(folder: Path, source: str, *flags: str) -> None:
    """Build `source` as the compiled part of a copy of the package in `folder`."""
    compile_c(source, copied(folder) / "_accelerator.so", *flags)


def sanitizing() -> dict[str, str]:
    """Return the environment of a Python that loads a build with sanitizers."""
    find = [compiler(), "-print-file-name=libasan.so"]
    return dict(os.environ) | {
        "LD_PRELOAD": subprocess.run(find, capture_output=True, text=True, timeout=30, check=True).stdout.strip(),
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:exitcode={SANITIZERS_STATUS}",
        "PYTHONMALLOC": "malloc",  # each object has its own memory block, so that sanitizers see each overrun
    }


def run(folder: Path, *command: str, sanitized: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python with the package in `folder` and the tests of this tree."""
    environment = sanitizing() if sanitized else dict(os.environ)
    environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CI": "true"}
    environment.pop("PYROCKET_PURE", None)
    return subprocess.run(
        [sys.executable, "-P", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
