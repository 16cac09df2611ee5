"""The list that a listener gets is its own: what it does to it changes nothing of what was consumed."""

from __future__ import annotations

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import consuming

CHANGES = {
    "emptied": lambda messages: messages.clear(),
    "cut": lambda messages: messages.__delitem__(slice(1, None)),
    "turned round": lambda messages: messages.reverse(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize(
    "options", [{}, {"orderly": True}, {"orderly": True, "order_by": "sharding_key"}], ids=["any", "queue", "key"]
)
def test_a_list_that_a_listener_changes_is_consumed_all_the_same(options, is_async, change):
    seen = []

    def consume(messages):
        seen.extend(message.queue_offset for message in messages)
        change(messages)

    async def consume_async(messages):
        consume(messages)

    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=1)
        cluster.send("orders", b"-", count=20)
        listener = consume_async if is_async else consume
        with consuming(cluster, "orders", "billing", listener, listener_batch_size=8, **options):
            cluster.wait_until(lambda: cluster.committed("billing", "orders") == {0: 20})
    assert sorted(seen) == list(range(20))
