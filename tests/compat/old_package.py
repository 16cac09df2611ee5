"""The package that the facade replaces, from the package index. pip fetches it; it is read as text, never imported."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from filelock import FileLock

from tests.real_brokers.jars import cache_directory

PINNED = "rocketmq-client-python==2.0.0 --hash=sha256:692324adaa8107eebd0369117043871d90035ddb1562f9999c5681136f16f738"
NAME = "rocketmq-client-python-2.0.0"
FETCH_TIMEOUT_S = 120


def old_package() -> Path:
    """Return the directory of the source distribution; the first call for it downloads it (9 kB) into the cache.

    pip checks the digest before it unpacks the file.

    Raises:
        AssertionError: pip failed; the text has its output.
    """
    target = cache_directory() / NAME
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():  # or another process was faster
                _fetch(target)
    return target


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        partial = Path(directory)
        requirements = partial / "requirements.txt"
        requirements.write_text(PINNED)
        answer = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary=:all:",
                "--no-build-isolation",
                "--require-hashes",
                f"--requirement={requirements}",
                f"--dest={partial}",
            ],
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=False,
        )
        assert answer.returncode == 0, f"pip could not get {NAME}:\n{answer.stdout}{answer.stderr}"
        with tarfile.open(partial / f"{NAME}.tar.gz") as archive:
            archive.extractall(partial, filter="data")
        (partial / NAME).rename(target)
