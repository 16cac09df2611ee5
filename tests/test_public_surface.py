"""The public surface equals the stored snapshot, so that it changes on purpose only."""

from __future__ import annotations

import pytest

from tests.public_surface import SNAPSHOT, STORE, difference, stored, surface


def test_the_public_surface_is_as_stored():
    if changes := difference(stored(), surface()):
        listed = "\n".join(changes)
        pytest.fail(
            f"the public surface differs from tests/{SNAPSHOT.name} (-: stored, and gone; +: new):\n{listed}\n"
            f"If users shall have it so, store it: {STORE}",
            pytrace=False,
        )
