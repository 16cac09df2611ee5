"""Wrong arguments of an embedded cluster raise a ConfigError of one sentence, and change nothing."""

from __future__ import annotations

import pytest

from pyrocket_consumer import ConfigError
from pyrocket_consumer.testing import EmbeddedCluster, Gate
from tests.for_each import for_each

NO_NAMES = ["bad name!", "", 5, None, b"T", "x" * 128, ["T"], "ö"]
NO_COUNTS = [0, -1, "4", 1.5, True, 65_536, [4]]
CALLS = {
    "create_topic": (
        {"name": "U"},
        {
            "name": NO_NAMES,
            "queues": NO_COUNTS,
            "read_queues": [-1, "4", True],
            "write_queues": [-1, "4", True],
            "perm": [-1, 8, "rw", None],
            "order": ["yes", 1],
            "brokers": [5, [5], b"broker-a", ["broker-z"]],
        },
    ),
    "delete_topic": ({"name": "T"}, {"name": NO_NAMES}),
    "broker": ({"name": "broker-a"}, {"name": ["broker-z", "broker-a-1", 5, None, []]}),
    "switch_master": ({"name": "broker-a"}, {"name": ["broker-z", 5, None, []]}),
    "committed": ({"group": "G", "topic": "T"}, {"broker_name": ["broker-z", 5]}),
    "members": ({"group": "G"}, {"broker_name": ["broker-z", 5]}),
    "send": (
        {"topic": "T"},
        {
            "topic": NO_NAMES,
            "body": ["text", 5, None, lambda number: "text"],
            "count": [-1, "4", None, True, 1.5],
            "tags": [5, b"t", ["t"]],
            "keys": [5, None, [5], b"k"],
            "properties": [5, "a=b", {"a": 1}, {1: "a"}],
            "queue_id": [-1, "0", True],
            "delay_level": [-1, "1", None],
            "broker_name": [5, "", "broker-z", []],
            "stored_at_ms": [-1, "now", 1.5],
        },
    ),
}
BROKER_CALLS = {
    "commit": (
        {"group": "G", "topic": "T", "offsets": {0: 1}},
        {
            "group": NO_NAMES,
            "topic": NO_NAMES,
            "offsets": [5, None, [1], {"0": 1}, {0: "1"}, {0: None}],
        },
    ),
    "create_group": ({"group": "H"}, {"group": NO_NAMES, "retryMaxTimes": ["many"], "consumeEnable": [1j]}),
    "delete_before": ({"topic": "T", "queue_id": 0, "offset": 0}, {"offset": ["1", None, -1, 0.5]}),
    "truncate": ({"topic": "T", "queue_id": 0, "offset": 1}, {"offset": ["1", None, -1, 0.5]}),
    "wait_for": (
        {"code": 1, "count": 0, "timeout_s": 0},
        {"count": ["1", None, -1], "timeout_s": ["1", None, -1], "when": [5, "always"]},
    ),
}
TABLE = [
    (owner, method, name)
    for owner, calls in (("cluster", CALLS), ("broker", BROKER_CALLS))
    for method, (_, wrong) in calls.items()
    for name in wrong
]


@pytest.fixture
def cluster():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=1)
        cluster.send("T", b"one")
        yield cluster


@for_each("owner, method, name", TABLE)
def test_a_wrong_argument_raises_and_changes_nothing(cluster, owner, method, name):
    broker = cluster.broker("broker-a")
    right, wrong = (CALLS if owner == "cluster" else BROKER_CALLS)[method]
    for value in wrong[name]:
        with pytest.raises(ConfigError) as raised:
            getattr(cluster if owner == "cluster" else broker, method)(**{**right, name: value})
        assert len(str(raised.value)) > 15, value
    assert [each.body for each in cluster.messages("T")] == [b"one"]
    assert cluster.committed("G", "T") == {}


NO_NUMBERS = ["1", None, True, -1, [1]]
WRONG_OPTIONS = {
    **dict.fromkeys(["slaves", "name_servers", "port", "side_by_side_s", "record_limit"], NO_NUMBERS),
    **dict.fromkeys(
        ["member_expiry_s", "flush_offsets_s", "idle_timeout_s", "delay_scale", "lock_expiry_s"], NO_NUMBERS
    ),
    "seed": ["1", None, 0.5],
    "first_port": ["1", 0.5],
    "brokers": [None, 0.5, "broker-a", [], [5], True, 27],
    "version": [None, 5, ["5.5.0"], "five"],
    "cluster_name": [None, 5, "", "a b"],
    "settings": [5, ["brokerPermission"], {"brokerPermission": "all"}, {"messageDelayLevel": "soon"}, {5: 5}],
    "account": [5, "ak:sk", ("ak",), ("ak", 5), ("ak", "")],
    "tls": [True, "cert.pem"],
}


@for_each("option, value", [(option, value) for option, values in WRONG_OPTIONS.items() for value in values])
def test_wrong_options_raise_before_the_start(option, value):
    with pytest.raises(ConfigError, match="messageDelayLevel" if "soon" in str(value) else option[:7]):
        EmbeddedCluster(**{option: value})


def test_a_gate_refuses_a_wrong_number_of_requests():
    for count, timeout_s in (("1", 0), (None, 0), (-1, 0), (1, "1"), (1, None), (1, -1)):
        with pytest.raises(ConfigError, match="count" if timeout_s == 0 else "timeout_s"):
            Gate().wait_held(count, timeout_s)
