"""Looks for known weaknesses in what .ci/lock.txt names: `make audit`.

Versions are compared with .ci/advisories.txt, and the database of PyPI is asked through pip-audit. A mirror without
that database is taken by pip-audit for one in which nothing is known. So it is asked first about a version with a
weakness; where it does not name that, it is not asked for more, and what is printed says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

CI = Path(__file__).parents[1] / ".ci"
LOCK, ADVISORIES = CI / "lock.txt", CI / "advisories.txt"
ONLY_TESTS = "# only tests\n"
KNOWN_TO_BE_WEAK = "orjson==3.9.14"
ANSWER_WITHIN_S = 120


@dataclass(frozen=True, slots=True)
class Advisory:
    """The oldest version of a package that lacks a weakness."""

    name: str
    oldest: Version
    what: str


def advisories(text: str) -> list[Advisory]:
    """Return the known weaknesses of a file such as .ci/advisories.txt."""
    found = []
    for line in text.splitlines():
        wanted, _, what = line.partition("#")
        if wanted.strip():
            name, _, oldest = wanted.partition(">=")
            found.append(Advisory(name.strip(), Version(oldest.strip()), what.strip()))
    return found


def pinned(lock: str) -> list[tuple[str, Version]]:
    """Return what a lock names, for whatever Python and machine."""
    lines = [line.removesuffix("\\").strip() for line in lock.splitlines() if line and not line[0].isspace()]
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return [(each.name, Version(next(iter(each.specifier)).version)) for each in requirements]


def too_old(lock: str, known: list[Advisory]) -> Iterator[str]:
    """Yield a sentence for each version of a lock that has a known weakness."""
    for name, version in pinned(lock):
        for advisory in known:
            if advisory.name == name and version < advisory.oldest:
                yield f"{name} {version} is older than {advisory.oldest}: {advisory.what}"


class Database:
    """PyPI's database of weaknesses."""

    def __init__(self, pip_audit: str) -> None:
        self._pip_audit = pip_audit

    def read_report(self, requirements: Path) -> list[dict[str, Any]] | None:
        """Return what pip-audit says of each version; None when it got no answer."""
        command = [self._pip_audit, "-s", "pypi", "--format", "json", "--progress-spinner", "off", "--disable-pip"]
        try:
            done = subprocess.run(
                [*command, "--no-deps", "--requirement", str(requirements)],
                capture_output=True,
                text=True,
                timeout=ANSWER_WITHIN_S,
                check=False,
            )
            found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
            return None
        return found

    def can_be_asked(self) -> bool:
        """Whether it knows what is known."""
        with tempfile.TemporaryDirectory() as directory:
            weak = Path(directory) / "requirements.txt"
            weak.write_text(f"{KNOWN_TO_BE_WEAK}\n")
            read_report = self.read_report(weak)
        return bool(read_report and read_report[0].get("vulns"))

    def weaknesses(self, lock: Path) -> Iterator[tuple[str, bool]]:
        """Yield a sentence for each weakness of what a lock names, and whether it can be mended."""
        read_report = self.read_report(lock)
        if read_report is None:
            yield "pip-audit got no answer for the lock", True
        for each in read_report or ():
            if "skip_reason" in each:
                yield f"{each['name']}: {each['skip_reason']}", False
            for weakness in each.get("vulns", ()):
                names = ", ".join([weakness["id"], *weakness.get("aliases", ())])
                mended = " or ".join(weakness["fix_versions"])
                yield f"{each['name']} {each['version']}: {names}, mended in {mended or 'no version'}", bool(mended)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("--pip-audit", default="pip-audit", help="the command (%(default)s)")
    parser.add_argument("--lock", type=Path, default=LOCK)
    options = parser.parse_args()
    lock, known = options.lock.read_text(), advisories(ADVISORIES.read_text())
    wrong = list(too_old(lock, known))
    print(f"{len(pinned(lock))} versions of {options.lock.name} were compared with {len(known)} known weaknesses")
    database = Database(options.pip_audit)
    if database.can_be_asked():
        print("PyPI's database was asked about each")
        for sentence, can_be_mended in database.weaknesses(options.lock):
            if can_be_mended:
                wrong.append(sentence)
            else:
                print(sentence)
    else:
        print(f"PyPI's database WAS NOT ASKED: it does not answer, or knows nothing of {KNOWN_TO_BE_WEAK}")
    print("\n".join(wrong) or "nothing was found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
