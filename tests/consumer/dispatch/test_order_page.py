"""The examples of docs/order.md run as they stand."""

from __future__ import annotations

import json
import re

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.pages import DOCS, blocks, run_python

pytestmark = pytest.mark.live

PAGE = DOCS / "order.md"
SHARDING, FUNCTION, WATCHING = blocks(PAGE, "python")


@pytest.fixture
def cluster():
    with EmbeddedCluster() as cluster:
        cluster.create_topic("orders", queues=4)
        for number in range(60):
            customer = number % 5
            body = json.dumps({"customer": customer, "number": number}).encode()
            properties = {"__SHARDINGKEY": f"customer-{customer}"}
            cluster.send("orders", body, properties=properties, queue_id=customer % 4)
        yield cluster


def numbers_of(printed, customer):
    """Return the orders of a customer as they were printed: lines of several threads may be entangled."""
    return [int(number) for number in re.findall(rf'"customer": {customer}, "number": (\d+)', printed)]


@pytest.mark.parametrize("block", [SHARDING, FUNCTION])
def test_orders_of_a_customer_come_in_order(cluster, tmp_path, block):
    printed = run_python(block, cluster, tmp_path)
    found = [numbers_of(printed, customer) for customer in range(5)]
    assert any(found)
    assert all(numbers == sorted(set(numbers)) for numbers in found)


def test_a_key_that_fails_is_named(cluster, tmp_path):
    quiet = "import logging; logging.disable()\n"
    first, *_ = run_python(quiet + WATCHING, cluster, tmp_path).splitlines()
    assert first == "listener-failed orders/broker-a/3 0 'customer-3'"
