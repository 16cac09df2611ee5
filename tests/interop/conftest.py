"""A Java virtual machine of the release under test, and one topic and one group of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.real_brokers import JavaMachine


class JavaMachines:
    """The machine that runs now, if any: one at a time, kept for as long as tests want the same release."""

    def __init__(self) -> None:
        self._machine: JavaMachine | None = None

    def get(self, version: str) -> JavaMachine:
        if self._machine is None or self._machine.version != version or not self._machine.running:
            self.close()
            self._machine = JavaMachine(version)
        return self._machine

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
            self._machine = None


@pytest.fixture(scope="session")
def java_machines() -> Iterator[JavaMachines]:
    machines = JavaMachines()
    yield machines
    machines.close()


@pytest.fixture
def java(real_version, java_machines) -> JavaMachine:
    """Java clients of the release under test. It is shared: close what you start."""
    return java_machines.get(real_version)


@pytest.fixture
def either_cluster(kind, real_version, request) -> Iterator[Any]:
    """By `kind`: a real cluster of the release under test, or the embedded one that behaves like it."""
    if kind == "real":
        yield request.getfixturevalue("real_cluster")
        return
    with EmbeddedCluster(version=real_version) as cluster:
        yield cluster


@pytest.fixture
def topic(names):
    return names.topic()


@pytest.fixture
def group(names):
    return names.group()
