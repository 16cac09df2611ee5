"""`python -m pyrocket_consumer.testing` and the pytest plugin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyrocket_consumer.protocol import bodies
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster
from pyrocket_consumer.testing.__main__ import main
from tests.for_each import for_each
from tests.testing.raw_client import RawClient

pytestmark = pytest.mark.live
pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the module; yield the process and the name server's address it prints."""
    command = [sys.executable, "-m", "pyrocket_consumer.testing", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyrocket_consumer.testing", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_cluster_in_a_process_of_its_own() -> None:
    options = ("--brokers", "2", "--topic", "orders:3", "--topic", "audit", "--fill", "10", "--version", "4.9.7")
    with running(*options) as (process, name_server):
        with RawClient(name_server) as client:
            for topic, queues in (("orders", 3), ("audit", 4)):
                route = client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
                found = bodies.decode_route(topic, route.body)
                assert [data.read_queues for data in found.queues] == [queues, queues]
            assert route.version == 407
            address = found.brokers[0].addresses[0]
        with RawClient(address) as client:
            assert client.pull("orders", 0, 0).code == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_it_ends_with_its_standard_input() -> None:
    with running("--until-stdin-ends") as (process, name_server):
        assert name_server.startswith("127.0.0.1:")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0
        process.stdin = None


@for_each(
    "option, value, text",
    [
        ("--version", "1", "4.9.7"),
        ("--topic", "a:b", "orders:4"),
        ("--topic", "a:0", "queues=0 is not allowed; it must be a whole number from 1 to"),
        ("--brokers", "0", "26"),
        ("--slaves", "-1", "slaves=-1 is not allowed; it must be a whole number from 0 to"),
        ("--port", "99999", "port=99999 is not allowed; it must be a whole number from 0 to 65535"),
        ("--fill", "-1", "'-1' is not a number from 0 on"),
        ("--body-bytes", "1k", "'1k' is not a number from 0 on"),
        ("--delay-scale", "-1", "delay_scale=-1.0 is not allowed; it must be a number from 0 to"),
        ("--delay-scale", "nan", "delay_scale=nan is not allowed; it must be a number from 0 to"),
    ],
)
def test_wrong_arguments_are_explained(capsys, option: str, value: str, text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main([option, value]))
    assert (ended.value.code, text in capsys.readouterr().err) == (2, True)


def test_a_taken_port_is_an_error(embedded: EmbeddedCluster) -> None:
    done = ended("--port", embedded.name_server.rpartition(":")[2])
    assert (done.returncode, "in use" in done.stderr) == (2, True)


def test_help_has_an_example() -> None:
    assert "--topic orders:4" in ended("--help").stdout


def test_the_plugin_gives_a_fresh_cluster(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_one(rocketmq_cluster):
            rocketmq_cluster.send("orders", b"hello")
            assert len(rocketmq_cluster.messages("orders")) == 1

        @pytest.mark.rocketmq_cluster(brokers=2, version="4.9.7")
        def test_two(rocketmq_cluster):
            assert rocketmq_cluster.messages("orders") == []
            assert len(rocketmq_cluster.brokers) == 2
            assert rocketmq_cluster.version == "4.9.7"
        """
    )
    plugin = ["-p", "pyrocket_consumer.testing.pytest_plugin", "--strict-markers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin, str(pytester.path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    assert "2 passed" in done.stdout, done.stdout
