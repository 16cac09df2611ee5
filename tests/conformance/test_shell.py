"""`pyrocket consume` and `offsets lag` on unmodified brokers."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from pyrocket_consumer.cli import main
from tests.consuming import until
from tests.resets import fill

COUNT = 40


@pytest.fixture
def pyrocket(cluster, capsys):
    """Run the command. Return its exit code and its output lines."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = main([*arguments, "-n", cluster.name_server])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_tailing_shows_all_messages_and_commits_nothing(cluster, topic, pyrocket):
    fill(cluster, topic, COUNT, queues=2)
    code, printed = pyrocket("consume", topic, "-o", "json")
    seen = [json.loads(line) for line in printed]
    assert (code, len({(each["queue"], each["offset"]) for each in seen})) == (0, COUNT)
    for queue in {each["queue"] for each in seen}:
        offsets = [each["offset"] for each in seen if each["queue"] == queue]
        assert offsets == sorted(offsets)
    broker, queue_id = seen[0]["queue"].split("/")[1:]
    code, printed = pyrocket("consume", topic, "--queue", f"{broker}/{queue_id}", "--offset", "3", "--count", "1")
    assert (code, printed[0].partition("  ")[0]) == (0, f"{topic}/{broker}/{queue_id}@3")
    hour = timedelta(hours=1)
    assert len(pyrocket("consume", topic, "--from", (datetime.now(UTC) - hour).isoformat())[1]) == COUNT
    assert pyrocket("consume", topic, "--from", (datetime.now(UTC) + hour).isoformat()) == (0, [])
    assert cluster.members("TOOLS_CONSUMER") == []
    assert cluster.committed("TOOLS_CONSUMER", topic) == {}


def test_a_member_changes_only_the_offsets_of_what_it_printed(cluster, topic, group, pyrocket):
    fill(cluster, topic, COUNT, queues=2)
    code, printed = pyrocket("consume", topic, "--group", group, "--from", "first", "--count", "3")
    assert (code, len(printed)) == (0, 3)
    until(lambda: cluster.members(group) == [], "it has left")
    assert sum(cluster.committed(group, topic).values()) == 3
    assert cluster.messages(f"%RETRY%{group}") == []
    code, others = pyrocket("consume", topic, "--group", group, "--count", str(COUNT - 3))
    assert (code, len({*printed, *others})) == (0, COUNT)


def test_lag_counts_failed_messages(cluster, topic, group, pyrocket):
    fill(cluster, topic, 3, queues=1)
    assert pyrocket("consume", topic, "--group", group, "--from", "first", "--count", "3")[0] == 0
    until(lambda: cluster.members(group) == [], "it has left")
    assert pyrocket("offsets", "lag", group, "--max", "0")[0] == 0
    cluster.send(f"%RETRY%{group}", b"failed")
    assert pyrocket("offsets", "lag", group, "--max", "0")[0] == 3
