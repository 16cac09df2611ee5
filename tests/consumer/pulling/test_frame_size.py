"""How large a frame may be, `max_frame_bytes`: what is larger fails by itself, and says what to do."""

from __future__ import annotations

import os

import pytest

from pyrocket_consumer import ConfigError, ConsumerState, ProducerConfig, ProtocolError
from pyrocket_consumer.producer import Producer
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import Events, Seen, consuming


@pytest.mark.parametrize("value", [0, 65535, 2**30 + 1, 1e6, True, "16777216", None])
def test_what_is_no_such_size_is_refused(value):
    with pytest.raises(ConfigError, match=r"max_frame_bytes=.* from 65536 to 1073741824"):
        ProducerConfig(name_server="127.0.0.1:1", max_frame_bytes=value)


def test_a_message_that_no_frame_has_room_for_is_an_error_of_its_send(embedded, caplog):
    embedded.create_topic("t")
    with Producer(name_server=embedded.name_server, max_frame_bytes=64 * 1024) as producer:
        producer.send("t", b"small")
        with pytest.raises(ProtocolError, match=r"frame of \d+ bytes; at most max_frame_bytes=65536 are sent"):
            producer.send("t", os.urandom(65536))
        assert producer.send("t", b"small").queue.topic == "t"
    assert "surprise" not in caplog.text


def test_an_answer_larger_than_frames_may_be_is_told_with_the_option_and_other_queues_go_on():
    events, seen = Events(), Seen()
    with EmbeddedCluster(brokers=2) as cluster:
        cluster.create_topic("t", 1)
        first, second = (broker.name for broker in cluster.brokers)
        cluster.send("t", lambda number: os.urandom(100_000), broker_name=first)
        cluster.send("t", lambda number: b"m%d" % number, count=3, broker_name=second)
        with consuming(cluster, "t", "g", seen, max_frame_bytes=64 * 1024, on_event=events) as (consumer, _):
            seen.wait_for(3)
            told = events.wait_for("answer-refused")
            assert "max_frame_bytes=65536" in str(told)
            assert consumer.state is ConsumerState.RUNNING
        with consuming(cluster, "t", "g", seen):
            seen.wait_for(4)
