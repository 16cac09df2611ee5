"""The plugins of the suite, and names that no other test has used."""

from __future__ import annotations

import re
import signal
import uuid

import pytest

from tests.virtual import install

install()  # before anything is imported that looks at a clock or makes a lock

pytest_plugins = ("tests.plugins.costs", "tests.plugins.brokers", "tests.plugins.databases", "tests.plugins.hazards")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what is in the background; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Names:
    """Topic and group names that no other test has used."""

    def __init__(self, test: str) -> None:
        self._test = re.sub(r"[^A-Za-z0-9_]+", "_", test)[:60].strip("_")

    def topic(self, hint: str = "topic") -> str:
        return self._name(hint)

    def group(self, hint: str = "group") -> str:
        return self._name(hint)

    def _name(self, hint: str) -> str:
        return f"{self._test}-{hint}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Names:
    return Names(request.node.name)
