"""Mistakes planted in the compiled part, and the inputs that find them, which `mistakes.json` stores.

python -m tests.protocol.mistakes            replays all inputs
python -m tests.protocol.mistakes --store    searches new ones where an input finds its mistake no longer
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

from tests import planted_mistakes
from tests.fuzz.mutation import MAX_BYTES, Mutator
from tests.fuzz.running import try_input
from tests.fuzz.targets import of_the_compiled_part
from tests.protocol import both
from tests.protocol.building import ROOT, SANITIZED, SOURCE, compile_c, sanitizing

KEPT = Path(__file__).with_name("mistakes.json")
STORE = "python -m tests.protocol.mistakes --store"
SEED = 14
RIGHT = "nothing"
"""The name of a build without a mistake, which must accept every input."""

TARGETS = ("compiled-as-python", "compiled-record-as-python", "compiled-properties-as-python")
COLUMNS = "compiled-columns-as-python"


@dataclass(frozen=True)
class Mistake:
    """A mistake that a developer might make: the right source text, and the wrong text that replaces it."""

    right: str
    wrong: str
    targets: tuple[str, ...] = TARGETS
    executions: int = 60_000
    flags: tuple[str, ...] = ("-O1",)

    def source(self) -> str:
        text = SOURCE.read_text()
        assert self.right == self.wrong or text.count(self.right) == 1, f"the source has no longer once: {self.right}"
        return text.replace(self.right, self.wrong)


def _of_columns(right: str, wrong: str) -> Mistake:
    return Mistake(right, wrong, (COLUMNS,), 20_000)


MISTAKES = {
    "an empty value counts": Mistake("name_end + 1 < stop", "name_end + 1 <= stop"),
    "an empty name counts": Mistake("name_end > start &&", "name_end >= start &&"),
    "the last item needs an end": Mistake("stop = end; /*", "return 0; /*"),
    "the first value of a name counts": Mistake("            found = item;\n", "            found = item; break;\n"),
    "a record may be longer than its data": Mistake("total <= size - start &&", "total <= size &&"),
    "a body may be longer than its record": Mistake("body_length <= total - MIN_RECORD_BYTES", "body_length <= total"),
    "offsets have 32 bits": Mistake(
        "i64_at(head + QUEUE_OFFSET), sys_flag", "u32_at(head + QUEUE_OFFSET + 4), sys_flag"
    ),
    "names are distinguished only by length": Mistake(
        "kept->length == length && memcmp(kept->bytes, bytes, (size_t)length) == 0", "kept->length == length"
    ),
    "both hosts are IPv4": Mistake("start += (flag & BORN_HOST_V6 ? 12 : 0)", "start += (flag & 0 ? 12 : 0)"),
    "an IPv6 host is as long as an IPv4 host": _of_columns(
        "uint32_t shift = born_v6(&row) + store_v6(&row);", "uint32_t shift = 0;"
    ),
    "a batch's own record is a row": _of_columns("(row.sys_flag & UNPACK) == UNPACK ||", ""),
    "any magic is accepted": _of_columns("(magic != MAGIC_V1 && magic != MAGIC_V2)", "0"),
    "the end of the range is included": _of_columns(
        "first <= offset && offset < end", "first <= offset && offset <= end"
    ),
    "bytes too few for a record are skipped": _of_columns("return left ? IRREGULAR : REGULAR;", "return REGULAR;"),
    "bytes that are not UTF-8 are text": _of_columns("if (!is_utf8((const", "if (0 && !is_utf8((const"),
    "the first value is as long as the last": _of_columns(
        "        span->value_length = (uint16_t)item.value_length;\n    }\n",
        "        if (!span->value_length) {span->value_length = (uint16_t)item.value_length;}\n    }\n",
    ),
    "a time outside the range of dates is a date": _of_columns("number < MIN_MS || number > MAX_MS", "number < MIN_MS"),
    "texts overlap": _of_columns(
        "            at += texts[each].length;\n", "            at += texts[each].length - 1;\n"
    ),
    "rows with any tag are kept": _of_columns(
        "if (has_one_of(tags_of(self, &self->rows[each], NULL), tags, count))", "if (1)"
    ),
    "an id contains the producer's host": _of_columns(
        "Text host = store_host_of(self, row, NULL);", "Text host = born_host_of(self, row, NULL);"
    ),
}
"""Each name describes the behaviour of the compiled part with this mistake."""

OF_SANITIZERS = {
    "a length is not checked": Mistake(  # it may point behind the response
        "if (start > record->end || start + (data[start - 2] << 8 | data[start - 1]) != record->end) {",
        "if (start + (data[start - 2] << 8 | data[start - 1]) != record->end) {",
        flags=SANITIZED,
    )
}
"""The mistakes that only AddressSanitizer finds."""

TARGETS_BY_NAME = {target.name: target for target in of_the_compiled_part()}

ALL = MISTAKES | OF_SANITIZERS


def build(folder: Path, mistakes: dict[str, Mistake]) -> dict[str, Path]:
    """Compile the source with each mistake, two at a time."""
    libraries = {name: folder / f"build_{number}.so" for number, name in enumerate(mistakes)}
    unused = ("-Wno-unused-function", "-Wno-unused-variable")

    def compile_one(name: str) -> None:
        compile_c(mistakes[name].source(), libraries[name], *unused, *mistakes[name].flags)

    with ThreadPoolExecutor(2) as jobs:
        list(jobs.map(compile_one, mistakes))
    return libraries


def run_checks(what: str, mistakes: dict[str, Mistake]) -> dict[str, Any]:
    """Build `mistakes`, and run `replay`, `search` or `store` in a process, which forks for each of them.

    Returns by name what was found, and under `RIGHT`, when replaying, what is wrong without any mistake.
    """
    (flags,) = {mistake.flags for mistake in mistakes.values()}
    nothing = {RIGHT: Mistake("", "", flags=flags)} if what == "replay" else {}
    fresh = {"PYTHONMALLOC": "debug", "MALLOC_PERTURB_": "165"}  # uninitialized memory is never zero
    environment = sanitizing() if flags is SANITIZED else dict(os.environ) | fresh
    with tempfile.TemporaryDirectory() as folder:
        libraries = {name: str(path) for name, path in build(Path(folder), nothing | mistakes).items()}
        response = subprocess.run(
            [sys.executable, "-m", "tests.protocol.mistakes", "--process", what],
            cwd=ROOT,
            env=environment | {"CI": "true"},
            input=json.dumps(libraries),
            capture_output=True,
            text=True,
            check=False,
        )
    assert response.returncode == 0, response.stderr
    found: dict[str, Any] = json.loads(response.stdout)
    return found


# --- in the process that reads inputs


def replay(name: str) -> str:
    """Return the failure of a build on its stored input; the right build reads all inputs."""
    kept = planted_mistakes.read(KEPT)
    inputs = kept.values() if name == RIGHT else [kept[name]] if name in kept else []
    return "".join(_read_after_others(target, bytes.fromhex(data)) for target, data in inputs)


def search(name: str) -> list[str]:
    """Return a target and an input in hex that the build reads wrongly, or nothing."""
    mistake, shared = ALL[name], mmap(-1, 16 + MAX_BYTES)
    for target in mistake.targets:
        number, most = 0, mistake.executions // len(mistake.targets)
        while planted_mistakes.in_fork(partial(_mutate, target, range(number, most), shared)):
            number, size = (int.from_bytes(shared[at : at + 8]) for at in (0, 8))
            data = shared[16 : 16 + size]
            if _finds(target, data):  # else the failure also needs earlier inputs
                return [target, data.hex()]
            number += 1
    return []


def search_smallest(name: str) -> list[str]:
    """Return the same, with the smallest input."""
    found = search(name)
    if not found:
        return []
    target, data = found[0], bytes.fromhex(found[1])
    smaller = planted_mistakes.in_fork(partial(_smallest_in_hex, target, data))
    is_smaller = planted_mistakes.DIED not in smaller and _finds(target, bytes.fromhex(smaller))
    return [target, smaller if is_smaller else _smallest(data, partial(_finds, target)).hex()]


def _mutate(target: str, numbers: range, shared: mmap) -> str:
    """Return the failure of the first input that fails. `shared` contains it even if this process dies."""
    mutator = Mutator(TARGETS_BY_NAME[target].originals(), SEED)
    for number in range(numbers.stop):
        data = mutator.next()
        if number in numbers:
            shared[: 16 + len(data)] = number.to_bytes(8) + len(data).to_bytes(8) + data
            if finding := _read(target, data):
                return finding
    return ""


def _read_after_others(target: str, data: bytes) -> str:
    """Return the failure on `data` after usual inputs, because the compiled part caches names."""
    for original in TARGETS_BY_NAME[target].originals():
        _read(target, original)
    return _read(target, data)


def _read(target: str, data: bytes) -> str:
    both.copy(pure=False)
    return try_input(TARGETS_BY_NAME[target], data)


def _finds(target: str, data: bytes) -> bool:
    return bool(planted_mistakes.in_fork(partial(_read_after_others, target, data)))


def _smallest_in_hex(target: str, data: bytes) -> str:
    """Return the smallest input that fails in this process, which has read others before."""
    _read_after_others(target, data)
    return _smallest(data, lambda shorter: bool(_read(target, shorter))).hex()


def _smallest(data: bytes, finds: Callable[[bytes], bool]) -> bytes:
    """Remove bytes that are not needed, and set the others to zero."""
    size = len(data) // 2
    while size:
        for at in reversed(range(0, len(data), size)):
            if finds(shorter := data[:at] + data[at + size :]):
                data = shorter
        size //= 2
    for at in range(len(data)):
        if finds(plain := data[:at] + b"\0" + data[at + 1 :]):
            data = plain
    return data


PROCESSES: dict[str, Callable[[str], Any]] = {"replay": replay, "search": search, "store": search_smallest}


def _process(what: str) -> None:
    """Read libraries by name from stdin, and print the result of each."""
    both.copy(pure=True).module("protocol.columns")
    work = PROCESSES[what]
    found = {}
    for name, library in json.load(sys.stdin).items():
        both.library = Path(library)  # the forks import it
        found[name] = planted_mistakes.in_fork(partial(work, name))
    print(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="search what is missing, and keep it")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        _process(options.process)
        return 0
    kept = planted_mistakes.read(KEPT)
    for mistakes in (MISTAKES, OF_SANITIZERS):
        finding = run_checks("replay", mistakes)
        lost = {name: mistake for name, mistake in mistakes.items() if finding[RIGHT] or not finding[name]}
        print(f"{len(mistakes) - len(lost)} of {len(mistakes)} are found")
        if options.store and lost:
            kept |= {name: found for name, found in run_checks("store", lost).items() if found}
            planted_mistakes.write(KEPT, {name: kept[name] for name in ALL if name in kept})
    missing = [name for name in ALL if name not in kept]
    print(f"nothing finds: {', '.join(missing)}" if missing else "an input is kept for each")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
