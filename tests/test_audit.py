"""CI installs versions that the metadata requires, without a known vulnerability. `make audit` reports its sources."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.audit import ADVISORIES, CI, KNOWN_TO_BE_WEAK, LOCK, ONLY_TESTS, advisories, pinned, too_old

ROOT = CI.parent
TEXT = ADVISORIES.read_text()
FOR_USERS = advisories(TEXT.partition(ONLY_TESTS)[0])


def demanded() -> dict[str, list[Requirement]]:
    """Return the requirements of setup.cfg by extra; "" is the package itself."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    texts = {"": metadata["options"]["install_requires"], **metadata["options.extras_require"]}
    return {extra: [Requirement(line) for line in text.split("\n") if line] for extra, text in texts.items()}


def test_the_lock_has_all_that_ci_needs():
    locked = {name for name, _ in pinned(LOCK.read_text())}
    wanted, extras = dict[str, Requirement](), ["", "dev", "docs"]
    for extra in extras:
        for each in demanded()[extra]:
            if each.name == "pyrocket-consumer":
                extras += [one for one in sorted(each.extras) if one not in extras]
            wanted[canonicalize_name(each.name)] = each
    del wanted["pyrocket-consumer"]
    assert wanted.keys() <= locked, "make lock"
    for name, version in pinned(LOCK.read_text()):
        if name in wanted:
            assert version in wanted[name].specifier, "make lock"


@pytest.mark.parametrize("lock", ["lock.txt", "lock-audit.txt"])
def test_the_lock_pins_versions_and_hashes(lock):
    blocks = (CI / lock).read_text().split("\n    --hash=sha256:")
    assert len(blocks) > 200
    assert all("--hash" not in block for block in blocks)
    heads = [line for line in (CI / lock).read_text().splitlines() if not line.startswith("    ")]
    assert all("==" in head and head.endswith("\\") for head in heads)


def test_what_ci_installs_has_no_known_vulnerability():
    assert list(too_old(LOCK.read_text(), advisories(TEXT))) == []


def test_what_users_install_has_no_known_vulnerability():
    oldest = {each.name: each for extra in demanded().values() for each in extra}
    assert {advisory.name for advisory in FOR_USERS} <= oldest.keys()
    for advisory in FOR_USERS:
        (bound,) = oldest[advisory.name].specifier
        assert bound.operator == ">="
        assert list(too_old(f"{advisory.name}=={bound.version}", FOR_USERS)) == []


def test_a_weak_version_is_found():
    lock = "orjson==3.9.10 \\\n    --hash=sha256:00\npytest==9.2.0 ; python_version >= '3.11' \\\n"
    (found,) = too_old(lock, FOR_USERS)
    assert found.startswith("orjson 3.9.10 is older than 3.9.15: CVE-2024-27454")


WEAK = {"name": "orjson", "version": "3.9.14"}
VULNERABILITY = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}


def audited(tmp_path: Path, *, weak: list[dict[str, object]], lock: list[dict[str, object]]) -> tuple[int, str]:
    """Run the audit with a pip-audit that reports `weak` for the known vulnerability, and `lock` for the lock."""
    answers, program = tmp_path / "answers.json", tmp_path / "pip-audit"
    answers.write_text(json.dumps([{"dependencies": weak}, {"dependencies": lock}]))
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"weak, lock = json.load(open({str(answers)!r}))\n"
        f"print(json.dumps(weak if {KNOWN_TO_BE_WEAK!r} in open(sys.argv[-1]).read() else lock))\n"
    )
    program.chmod(0o700)
    return run("--pip-audit", str(program))


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.audit", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.live
def test_a_vulnerability_without_a_fix_does_not_fail_the_audit(tmp_path):
    weak = [{**WEAK, "vulns": [VULNERABILITY]}]
    code, text = audited(tmp_path, weak=weak, lock=[{"name": "rich", "version": "15.0.0", "vulns": []}])
    assert (code, "PyPI's database was searched" in text, "no vulnerability was found" in text) == (0, True, True)
    code, text = audited(tmp_path, weak=weak, lock=[{"name": "rich", "version": "1", "vulns": [VULNERABILITY]}])
    assert (code, "rich 1: PYSEC-1, CVE-1, fixed in 2" in text) == (1, True)
    lock = [{"name": "rich", "version": "1", "vulns": [{**VULNERABILITY, "fix_versions": []}]}]
    code, text = audited(tmp_path, weak=weak, lock=lock)
    assert (code, "rich 1: PYSEC-1, CVE-1, fixed in no version" in text) == (0, True)


@pytest.mark.live
def test_a_database_without_the_known_vulnerability_is_not_used(tmp_path):
    code, text = audited(tmp_path, weak=[{"name": "orjson", "skip_reason": "not found on PyPI"}], lock=[])
    assert (code, "WAS NOT USED" in text) == (0, True)


@pytest.mark.live
def test_the_known_vulnerabilities_are_used_without_a_database(tmp_path):
    code, text = run("--pip-audit", str(tmp_path / "not-there"))
    assert (code, "WAS NOT USED" in text) == (0, True)
    lock = tmp_path / "lock.txt"
    lock.write_text("orjson==3.9.10 \\\n    --hash=sha256:00\n")
    code, text = run("--pip-audit", str(tmp_path / "not-there"), "--lock", str(lock))
    assert (code, "orjson 3.9.10 is older" in text) == (1, True)
