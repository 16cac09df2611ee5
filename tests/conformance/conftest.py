"""One topic and one group of its own for each test."""

from __future__ import annotations

import pytest


@pytest.fixture
def topic(names):
    return names.topic()


@pytest.fixture
def group(names):
    return names.group()
