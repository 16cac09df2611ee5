"""A cluster with a topic for each test, and the command in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator

import pytest

from pyrocket_consumer.cli import main
from pyrocket_consumer.testing import EmbeddedCluster

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """A cluster with the module's CLUSTER options and its TOPIC."""
    with EmbeddedCluster(**getattr(request.module, "CLUSTER", {})) as cluster:
        cluster.create_topic(getattr(request.module, "TOPIC", "orders"), queues=getattr(request.module, "QUEUES", 1))
        yield cluster


@pytest.fixture
def pyrocket(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `pyrocket …` in this process; return the exit code, its output, and its standard error."""

    def run(*arguments: str, given: bytes = b"") -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run
