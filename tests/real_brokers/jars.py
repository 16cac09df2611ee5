"""A cache of the jars of Apache RocketMQ releases, and of the tests' Java programs compiled against them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tests.releases import NEWEST, VERSIONS, CannotRun

__all__ = ["NEWEST", "VERSIONS", "CannotRun"]

HERE = Path(__file__).parent
RESOLVE_TIMEOUT_S = 900
RESOLVE_ATTEMPTS = 3
OLDEST_JAVA = 17
NO_MAVEN = "mvn was not found; `make system-packages` installs Maven"


def cache_directory() -> Path:
    """Return the directory of jars and classes: PYROCKET_TEST_CACHE, or ~/.cache/pyrocket-tests."""
    return Path(os.environ.get("PYROCKET_TEST_CACHE") or Path.home() / ".cache" / "pyrocket-tests")


def java_tool(name: str) -> str:
    """Return the path of `java` or `javac` from JAVA_HOME or the PATH; raise CannotRun if neither has it."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(name, path=os.path.join(home, "bin")) if home else None
    found = found or shutil.which(name)
    if found is None:
        raise CannotRun(f"{name} was not found; `make system-packages` installs Java ({OLDEST_JAVA} or newer)")
    return found


def check_machine() -> None:
    """Raise CannotRun unless the JDK and Maven that real brokers need are installed."""
    java_tool("java")
    answer = subprocess.run([java_tool("javac"), "-version"], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"javac (\d+)", answer.stdout + answer.stderr)
    if found is None or int(found[1]) < OLDEST_JAVA:
        raise CannotRun(f"the JDK is {(answer.stdout + answer.stderr).strip()!r}; {OLDEST_JAVA} or newer is needed")
    if shutil.which("mvn") is None and not all(_jars(version).is_dir() for version in VERSIONS):
        raise CannotRun(NO_MAVEN)


def jars(version: str) -> Path:
    """Return the directory with the jars of a release. The first call downloads 28 to 94 MB, or raises CannotRun."""
    return _made(_jars(version), lambda partial: _resolve(version, partial))


def _made(target: Path, make: Callable[[Path], None]) -> Path:
    """Return a directory; if it is missing, one process makes it under a temporary name."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():  # another process has not made it meanwhile
                partial = target.with_name(target.name + ".partial")
                shutil.rmtree(partial, ignore_errors=True)
                make(partial)
                partial.rename(target)
    return target


def _jars(version: str) -> Path:
    return cache_directory() / f"jars-{version}"


def _resolve(version: str, partial: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise CannotRun(NO_MAVEN)
    command = [
        maven,
        "-q",
        "-B",
        "-f",
        str(HERE / "pom.xml"),
        f"-Drocketmq={version}",
        "dependency:copy-dependencies",
        f"-DoutputDirectory={partial}",
        "-DincludeScope=runtime",
    ]
    for _ in range(RESOLVE_ATTEMPTS):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CannotRun(f"Maven did not resolve RocketMQ {version} within {RESOLVE_TIMEOUT_S} s") from error
        if answer.returncode == 0:
            return
    output = (answer.stdout + answer.stderr).strip()[-2000:]
    raise CannotRun(f"Maven could not resolve RocketMQ {version} in {RESOLVE_ATTEMPTS} attempts: {output}")


def classes(version: str) -> Path:
    """Return the directory with the Java programs compiled for a release; raise CannotRun if they do not compile."""
    sources = sorted((HERE / "java").glob("*.java"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    quiet = ["-nowarn", "-proc:none", "-Xlint:none", "-cp", f"{jars(version)}/*"]

    def compile_into(partial: Path) -> None:
        command = [java_tool("javac"), *quiet, "-d", str(partial), *map(str, sources)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if answer.returncode:
            raise CannotRun(f"javac failed: {answer.stdout}{answer.stderr}")

    return _made(cache_directory() / f"classes-{version}-{digest}", compile_into)


def class_path(version: str) -> str:
    """Return the class path of a release: the tests' programs first, then its jars."""
    return f"{classes(version)}{os.pathsep}{jars(version)}/*"
