"""A broker that hears and answers nothing, while a consumer of its ends."""

from __future__ import annotations

from pyrocket_consumer.testing import drop
from tests.consumer.orders import TOPIC
from tests.consuming import Seen


def test_a_silent_broker_is_no_reason_why_offsets_on_our_own_disk_are_not_closed(orders, broker, tmp_path):
    """The next consumer of the process has the same store: its lock was given back."""
    options = {"message_model": "broadcasting", "offset_store_dir": tmp_path, "call_timeout_s": 4.0}

    def consumer(seen):
        made = orders.consumer(consume_from="first", **options)
        made.subscribe(TOPIC, seen)
        return made

    orders.send(b"first")
    seen = Seen()
    first = consumer(seen).start()
    seen.wait_for(1)
    broker.on(None, drop, times=None)
    first.close(0)
    broker.clear_faults()
    orders.send(b"second")
    again = Seen()
    with consumer(again) as second:
        assert second.client_id == first.client_id
        again.wait_for(1)
    assert again.bodies == [b"second"]
