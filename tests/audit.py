"""Searches for known vulnerabilities of the versions in .ci/lock.txt: `make audit`.

It compares the versions with .ci/advisories.txt, and with PyPI's database by pip-audit. If a mirror lacks the database,
pip-audit reports no vulnerability. So the audit first checks a version with a known vulnerability. If pip-audit does
not report it, the audit does not use the database, and prints that.
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
    """The oldest version of a package without a vulnerability."""

    name: str
    oldest: Version
    what: str


def advisories(text: str) -> list[Advisory]:
    """Return the known vulnerabilities of a file such as .ci/advisories.txt."""
    found = []
    for line in text.splitlines():
        wanted, _, what = line.partition("#")
        if wanted.strip():
            name, _, oldest = wanted.partition(">=")
            found.append(Advisory(name.strip(), Version(oldest.strip()), what.strip()))
    return found


def pinned(lock: str) -> list[tuple[str, Version]]:
    """Return the names and versions of a lock, for all Pythons and machines."""
    lines = [line.removesuffix("\\").strip() for line in lock.splitlines() if line and not line[0].isspace()]
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return [(each.name, Version(next(iter(each.specifier)).version)) for each in requirements]


def too_old(lock: str, known: list[Advisory]) -> Iterator[str]:
    """Yield a sentence for each version of a lock that has a known vulnerability."""
    for name, version in pinned(lock):
        for advisory in known:
            if advisory.name == name and version < advisory.oldest:
                yield f"{name} {version} is older than {advisory.oldest}: {advisory.what}"


class Database:
    """PyPI's database of vulnerabilities."""

    def __init__(self, pip_audit: str) -> None:
        self._pip_audit = pip_audit

    def read_report(self, requirements: Path) -> list[dict[str, Any]] | None:
        """Return pip-audit's report of each version; None if the database did not respond."""
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

    def is_usable(self) -> bool:
        """Whether it reports a known vulnerability."""
        with tempfile.TemporaryDirectory() as directory:
            weak = Path(directory) / "requirements.txt"
            weak.write_text(f"{KNOWN_TO_BE_WEAK}\n")
            report = self.read_report(weak)
        return bool(report and report[0].get("vulns"))

    def vulnerabilities(self, lock: Path) -> Iterator[tuple[str, bool]]:
        """Yield a sentence for each vulnerability of a lock's versions, and whether a fix exists."""
        report = self.read_report(lock)
        if report is None:
            yield "pip-audit got no response for the lock", True
        for each in report or ():
            if "skip_reason" in each:
                yield f"{each['name']}: {each['skip_reason']}", False
            for vulnerability in each.get("vulns", ()):
                names = ", ".join([vulnerability["id"], *vulnerability.get("aliases", ())])
                fixed = " or ".join(vulnerability["fix_versions"])
                yield f"{each['name']} {each['version']}: {names}, fixed in {fixed or 'no version'}", bool(fixed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("--pip-audit", default="pip-audit", help="the command (%(default)s)")
    parser.add_argument("--lock", type=Path, default=LOCK)
    options = parser.parse_args()
    lock, known = options.lock.read_text(), advisories(ADVISORIES.read_text())
    wrong = list(too_old(lock, known))
    print(f"{len(pinned(lock))} versions of {options.lock.name} were compared with {len(known)} known vulnerabilities")
    database = Database(options.pip_audit)
    if database.is_usable():
        print("PyPI's database was searched for each")
        for sentence, has_fix in database.vulnerabilities(options.lock):
            if has_fix:
                wrong.append(sentence)
            else:
                print(sentence)
    else:
        print(f"PyPI's database WAS NOT USED: it does not respond, or does not report {KNOWN_TO_BE_WEAK}")
    print("\n".join(wrong) or "no vulnerability was found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
