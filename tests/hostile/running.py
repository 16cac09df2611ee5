"""Runs one attack after the other on a consumer between an honest and a hostile server, and measures the consumer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster
from tests.hostile.attacks import ATTACKS, GROUP, TOPIC
from tests.hostile.server import Attack, HostileServer

SETTLE_S = 120.0
"""How long a consumer may wait before it reconnects to a server that has sent other data than frames."""


@dataclass
class Report:
    """The state of the member during one attack: the worst of its reports."""

    attack: str
    was_pulled: bool = True
    """Whether the consumer pulled from the server before the attack."""
    seconds: float = 0.0
    rss: int = 0
    pause_s: float = 0.0
    pause_cpu_s: float = 0.0
    cpu_s: float = 0.0
    lines: int = 0
    longest_line: int = 0
    forged: int = 0
    threads: int = 0
    consumed: int = 0
    sent: int = 0
    latest_s: float = 0.0
    """How long after the end of the attack the last honest message sent during it was consumed."""
    state: str = ""
    events: dict[str, int] = field(default_factory=dict)


class World:
    """An embedded broker, the hostile server, and the member between them."""

    def __init__(
        self, cluster: EmbeddedCluster, server: HostileServer, directory: Path, options: dict[str, Any]
    ) -> None:
        self.cluster, self.server = cluster, server
        self.sent = 0
        self.samples: list[dict[str, Any]] = []
        self._reported = threading.Condition()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.hostile.member",
                server.name_server,
                GROUP,
                TOPIC,
                str(directory),
                json.dumps(options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._reported:
                self.samples.append(json.loads(line))
                self._reported.notify_all()
        with self._reported:
            self._reported.notify_all()

    def send(self, count: int = 1) -> None:
        """Send messages to the honest broker."""
        for _ in range(count):
            self.cluster.send(TOPIC, b"honest %d" % self.sent)
            self.sent += 1

    def wait_until(self, reached: Any, timeout_s: float) -> bool:
        """Wait until the last report of the member satisfies `reached`."""
        with self._reported:
            return self._reported.wait_for(
                lambda: self.process.poll() is not None or (bool(self.samples) and reached(self.samples[-1])), timeout_s
            ) and bool(self.samples and reached(self.samples[-1]))

    def is_pulled_from(self, within_s: float) -> bool:
        """Wait until the consumer pulls from the hostile server."""
        pulls, ends_at = self.server.requests[RequestCode.PULL_MESSAGE], time.monotonic() + within_s
        while self.server.requests[RequestCode.PULL_MESSAGE] == pulls and time.monotonic() < ends_at:
            time.sleep(0.02)
        return self.server.requests[RequestCode.PULL_MESSAGE] > pulls

    def attack(self, name: str, seconds: float, wait_s: float = 60.0) -> Report:
        """Let the server attack for some time, while honest messages are sent; then wait until they are consumed.

        It begins when the consumer pulls from it: after the attack before it may have left the server alone.
        """
        report = Report(name, was_pulled=self.is_pulled_from(SETTLE_S))
        first, sent = len(self.samples), self.sent
        before = self.samples[-1] if self.samples else {}
        begin = time.monotonic()
        self.server.do(ATTACKS[name]())
        while time.monotonic() - begin < seconds and self.process.poll() is None:
            self.send()
            time.sleep(0.05)
        self.server.do(Attack())
        ended = time.monotonic()
        wanted = self.sent
        self.wait_until(lambda samples: samples["consumed"] >= wanted, wait_s)
        report.latest_s = time.monotonic() - ended
        report.seconds = time.monotonic() - begin
        samples = self.samples[first:]
        if not samples:
            report.state = f"ended with {self.process.poll()}"
            return report
        last = samples[-1]
        for worst in ("rss", "pause_s", "pause_cpu_s", "longest_line", "threads"):
            setattr(report, worst, max(each[worst] for each in samples))
        for grown in ("cpu_s", "lines", "forged"):
            setattr(report, grown, last[grown] - before.get(grown, 0))
        report.sent, report.consumed = self.sent - sent, last["consumed"] - before.get("consumed", 0)
        report.state, report.events = last["state"], last["events"]
        return report

    def end(self) -> int:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._listening.join(10)
        self.process.stdout.close()
        return self.process.wait()


@contextmanager
def world(directory: Path, **options: Any) -> Iterator[World]:
    """A world whose member has started and consumed messages."""
    with EmbeddedCluster() as cluster:
        cluster.create_topic(TOPIC, queues=4)
        broker = cluster.brokers[0]
        with HostileServer(TOPIC, (broker.name, broker.address)) as server:
            made = World(cluster, server, directory, options)
            try:
                made.send(10)
                assert made.wait_until(lambda samples: samples["consumed"] >= 10, 60), "the member did not begin"
                yield made
            finally:
                made.end()
