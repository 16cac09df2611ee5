"""Calls in random order at faulty nodes, for tests of consumers and producers."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.testing import (
    EmbeddedCluster,
    answer,
    close_connection,
    delay,
    delay_request,
    drop_answer,
    duplicate,
    handle_and_close,
)
from tests.consuming import until
from tests.trials import trials

FAULTS = {
    "late": delay(0.05),
    "held": delay_request(0.05),
    "twice": duplicate,
    "busy": answer(ResponseCode.SYSTEM_BUSY, "not now"),
    "error": answer(ResponseCode.SYSTEM_ERROR, "not now"),
    "cut": close_connection,
    "done and cut": handle_and_close,
    "unanswered": drop_answer,
}


def search() -> settings:
    return settings(
        max_examples=trials(8),
        stateful_step_count=25,
        deadline=None,
        derandomize=trials(1) == 1,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # threads do not repeat an example exactly
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pyrocket-")}


class World(RuleBasedStateMachine):
    """A cluster whose clients must leave no thread and no open file."""

    faults: ClassVar = FAULTS

    def open_cluster(self, **options: Any) -> None:
        gc.collect()
        self.before = self._in_use()
        self.threads_before = ours()  # left by tests of hanging stores
        self.cluster = EmbeddedCluster(**options)
        self.cluster.start()

    def _in_use(self) -> tuple[int, int]:
        return len(os.listdir("/dev/fd")), threading.active_count()

    @rule(fault=st.sampled_from(sorted(FAULTS)), times=st.integers(1, 4), of_name_server=st.booleans())
    def err(self, fault: str, times: int, of_name_server: bool) -> None:
        """Apply a fault to the next requests of a node."""
        node = self.cluster.name_server_node if of_name_server else self.cluster.brokers[0]
        node.clear_faults()
        node.on(None, self.faults[fault], times)

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        try:
            for node in (*self.cluster.nodes, self.cluster.name_server_node):
                node.clear_faults()
            self.finish()
        finally:
            left = self.end()
        assert left == []
        now = self._in_use()
        assert all(after <= before for after, before in zip(now, self.before, strict=True)), (now, self.before)

    def finish(self) -> None:
        """Close the clients without faults, and check their results."""
        raise NotImplementedError

    def end(self) -> list[str]:
        """Close the cluster, and return the threads that closed clients have left."""
        left: list[str] = []
        try:
            until(lambda: ours() <= self.threads_before, "threads end")
        except AssertionError:
            left = [thread.name for thread in ours() - self.threads_before]
        self.cluster.close()
        gc.collect()
        return left
