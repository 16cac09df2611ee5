"""The plugins of the suite, and fixtures with unique names."""

from __future__ import annotations

import re
import signal
import uuid
from itertools import count

import pytest

from tests.virtual import install

install()  # before other imports, which may read a clock or make a lock

pytest_plugins = (
    "tests.plugins.costs",
    "tests.plugins.coroutines",
    "tests.plugins.brokers",
    "tests.plugins.databases",
    "tests.plugins.hazards",
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs so; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Names:
    """Unique topic and group names. In virtual time they repeat, so that runs are equal."""

    def __init__(self, test: str, repeat: bool) -> None:
        self._test = re.sub(r"[^A-Za-z0-9_]+", "_", test)[:60].strip("_")
        self._suffixes = (str(number) if repeat else uuid.uuid4().hex[:8] for number in count(1))

    def topic(self, hint: str = "topic") -> str:
        return self._name(hint)

    def group(self, hint: str = "group") -> str:
        return self._name(hint)

    def _name(self, hint: str) -> str:
        return f"{self._test}-{hint}-{next(self._suffixes)}"


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Names:
    from tests.plugins.costs import is_virtual  # pytest must first load it as a plugin

    return Names(request.node.name, repeat=is_virtual(request.node))


@pytest.fixture
def topic(names: Names) -> str:
    """The name of a topic that no other test uses."""
    return names.topic()


@pytest.fixture
def group(names: Names) -> str:
    return names.group()
