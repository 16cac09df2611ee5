"""SQL92 selectors: brokers select by properties, and a bad expression is refused at the start."""

from __future__ import annotations

import pytest

from pyrocket_consumer import BrokerError, sql
from tests.consuming import consuming


@pytest.mark.differs("sql92")
def test_messages_are_selected_by_their_properties(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=2)
    for number in range(10):
        properties = {"price": str(number), "region": "eu" if number % 2 else "us"}
        real_cluster.send(topic, b"m%d" % number, properties=properties)
    with consuming(real_cluster, topic, names.group(), selector=sql("price > 4 AND region = 'eu'")) as (_, seen):
        seen.wait_for(3)
    assert sorted(seen.bodies) == [b"m5", b"m7", b"m9"]


def test_a_bad_expression_is_refused(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=1)
    with pytest.raises(BrokerError), consuming(real_cluster, topic, names.group(), selector=sql("price >")):
        pass
