"""Runs one target with atheris, which ends its process; so `tests.fuzz.running` starts this in a new process."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["pyrocket_consumer"], enable_loader_override=False):
    from tests.fuzz.mutation import Mutator
    from tests.fuzz.running import try_input
    from tests.fuzz.targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv[1]]
    originals = list(target.originals())
    mutators: dict[int, Mutator] = {}

    def read(data: bytes) -> None:
        if finding := try_input(target, data):
            raise AssertionError(finding)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        """Mutate `data`: half of the changes are atheris's own, half are `Mutator`'s, which knows the format."""
        if len(data) < 2:  # the first inputs
            return random.Random(seed).choice(originals)[:max_size]
        if seed & 1:
            return bytes(atheris.Mutate(data, max_size))
        mutator = mutators.setdefault(0, Mutator(originals, seed))
        return mutator.changed(data, max_size)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], read, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
