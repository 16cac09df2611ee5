"""The plans of simulated worlds: their members, brokers, options and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

EPOCH = 1_700_000_000.0
"""The Unix time at which a world begins."""

ROUGH = {
    "consume_from": "first",
    "consume_threads": 4,
    "consume_timeout_s": 60,
    "shutdown_timeout_s": 10,
    "max_reconsume_times": 1000,
}
"""Options with which many things happen in a short time."""

DEFAULTS: dict[str, Any] = {}
"""The default options."""


def key_of(message: Any) -> tuple[str, str | None]:
    """Return the key of a message, as a program would choose it."""
    return "order", message.property("__SHARDINGKEY")


CRASHES = ("crash", "restart", "cut", "part", "broker", "name-server", "slow", "pause", "join")

KEEPING_LOCKS = ("crash", "restart", "cut", "part", "name-server", "slow", "pause", "join", "reset")
"""The faults without killed brokers, because those forget their locks."""

NODES = ("slow-node", "silent-node", "refusing-node", "late-node", "stammering-node", "no-route")
"""Faulty behaviour of brokers and name servers for a while."""

CALLS = ("reset", "cancelled-reset", "cancelled-close", "cancelled-start", "unsubscribe", "pause")
"""Calls of programs. For some, the program stops waiting for the result."""


@dataclass(frozen=True)
class Plan:
    """The settings of a scenario. Times are virtual seconds."""

    members: int = 2
    brokers: int = 1
    queues: int | tuple[int, ...] = 4  # of each broker; a tuple means one of these numbers
    trouble_s: float = 70.0
    calm_s: float = 90.0
    rate: float = 5.0
    bursts: tuple[int, ...] = (1, 1, 1, 5)
    faults: tuple[str, ...] = (
        "crash",
        "restart",
        "cut",
        "part",
        "broker",
        "name-server",
        "slow",
        "reset",
        "pause",
        "join",
    )
    fault_every_s: float = 8.0
    forgetting: bool = True  # a killed broker loses the offsets of the last seconds
    failing: float = 0.02  # the share of listener calls that fail
    slow: float = 0.02
    slowest_s: float = 12.0
    quickest_s: float = 0.05  # the longest time of other calls; 0 makes large chunks
    calling: float = 0.0  # the share of listener calls that close, pause or reset their consumer, or cancel themselves
    orderly: bool = False
    keys: int = 0  # the number of sharding keys; 0 means messages without key
    broadcasting: bool = False
    exactly_once: bool = False  # offsets and effects in one database
    lost_answers: float = 0.0  # the share of that database's commits whose response is lost
    version: str = "5.5.0"
    side_by_side_s: float = 0.0  # how far requests of one connection may overtake each other
    options: Mapping[str, Any] = field(default_factory=lambda: ROUGH)


PLANS = {
    "clustering": Plan(),
    "two-brokers": Plan(brokers=2, queues=3, members=3),
    "old-broker": Plan(version="4.9.7"),
    "orderly": Plan(orderly=True, slow=0.005, faults=(*CRASHES, "reset")),
    "broadcasting": Plan(broadcasting=True, failing=0.0, faults=("crash", "power", "restart", "cut", "broker", "slow")),
    "peaceful": Plan(faults=(), failing=0.0, slow=0.0),
    "moving": Plan(faults=("join", "restart"), fault_every_s=6.0, failing=0.0, slow=0.0),
    "resets": Plan(faults=("reset",), fault_every_s=5.0, slow=0.3, slowest_s=8.0, calm_s=400.0),
    "quiet": Plan(
        rate=0.3,
        slow=0.4,
        slowest_s=40.0,
        faults=("crash", "restart"),
        fault_every_s=30.0,
        trouble_s=150.0,
        calm_s=400.0,  # few workers, long listener calls, and some messages twice
    ),
    "corrections": Plan(faults=("misplace",), fault_every_s=5.0, trouble_s=60.0),
    # With default options, above all consume_from="last".
    "defaults": Plan(options=DEFAULTS, brokers=2, faults=(*CRASHES, "reset"), forgetting=False, calm_s=150.0),
    "from-a-time": Plan(
        options={"consume_from": datetime.fromtimestamp(EPOCH + 3, UTC)},
        faults=CRASHES,
        forgetting=False,
    ),
    "own-offsets": Plan(  # broadcasting
        options=DEFAULTS,
        broadcasting=True,
        failing=0.0,
        faults=("crash", "power", "restart", "cut", "slow"),
    ),
    "slow-brokers": Plan(
        options=DEFAULTS,
        brokers=2,
        queues=6,
        faults=(*NODES, "restart", "join"),
        forgetting=False,
        calm_s=200.0,
    ),
    "calls": Plan(
        options=DEFAULTS,
        faults=(*CALLS, "slow", "slow-node", "join"),
        fault_every_s=4.0,
        calling=0.02,
        calm_s=150.0,
    ),
    "cancelled-resets": Plan(options=DEFAULTS, faults=("cancelled-reset", "slow"), fault_every_s=4.0),
    "hand-overs": Plan(
        options=DEFAULTS,
        faults=("join", "restart"),
        fault_every_s=6.0,
        failing=0.0,
        slow=0.02,
        rate=20.0,
    ),
    "failures": Plan(
        options=DEFAULTS,
        members=1,
        faults=(),
        rate=2.0,
        bursts=(40, 80, 160),
        failing=0.03,
        slow=0.005,
        slowest_s=40.0,
        quickest_s=0.0,
    ),
    "failed-members": Plan(options=DEFAULTS, members=3, faults=("fail", "join", "restart"), fault_every_s=15.0),
    "side-by-side": Plan(
        options=DEFAULTS,
        brokers=2,
        faults=(*CRASHES, "reset", "late-node"),
        forgetting=False,
        rate=20.0,
        side_by_side_s=0.2,
        calm_s=150.0,
    ),
    "side-by-side-orderly": Plan(orderly=True, faults=(*CRASHES, "reset"), slow=0.005, side_by_side_s=0.2),
    "exactly-once": Plan(
        exactly_once=True,
        orderly=True,
        brokers=2,
        members=3,
        failing=0.05,
        slow=0.05,
        lost_answers=0.02,
        faults=(*CRASHES, "reset", "store-reset", "freeze", "freeze"),
        fault_every_s=5.0,
        trouble_s=150.0,
        calm_s=200.0,
        options={**ROUGH, "listener_batch_size": 4},
    ),
    "exactly-once-resets": Plan(
        exactly_once=True,
        orderly=True,
        slow=0.4,
        slowest_s=4.0,
        faults=("reset", "store-reset", "reset", "restart"),
        fault_every_s=2.0,
        options={**ROUGH, "listener_batch_size": 4},
        calm_s=150.0,
    ),
    "by-key": Plan(
        orderly=True,
        keys=6,
        faults=KEEPING_LOCKS,
        fault_every_s=6.0,
        slow=0.02,
        failing=0.05,
        rate=8.0,
        options={**ROUGH, "order_by": "sharding_key"},
        trouble_s=50.0,
        calm_s=110.0,
    ),
    "by-asked-key": Plan(  # in large chunks; a few get stuck
        orderly=True,
        keys=20,
        faults=KEEPING_LOCKS,
        fault_every_s=6.0,
        slow=0.01,
        failing=0.02,
        rate=3.0,
        bursts=(1, 10, 40),
        quickest_s=0.0,
        options={**ROUGH, "order_by": key_of},
        trouble_s=40.0,
        calm_s=110.0,
    ),
    "many-queues": Plan(
        options=DEFAULTS,
        brokers=2,
        queues=(50, 100, 200, 1000),
        faults=("join", "restart", "slow-node"),
        rate=50.0,
        trouble_s=40.0,
        calm_s=60.0,
        slow=0.002,
    ),
}
