"""Clients are neither pickled nor copied, and show in a repr what they are connected to."""

from __future__ import annotations

import copy
import gc
import pickle
import time

import pytest

from pyrocket_consumer import Admin, AsyncProducer, AsyncPushConsumer, Producer, PushConsumer
from pyrocket_consumer.compat.rocketmq import client as compat
from pyrocket_consumer.producer import TransactionProducer
from tests.for_each import for_each

OPTIONS = {"name_server": ["127.0.0.1:9876", "10.0.0.1:9876"], "access_key": "reader-1", "secret_key": "do-not-show"}
SERVERS = "name_server='127.0.0.1:9876;10.0.0.1:9876'"
REPRS = [
    (Producer("app", **OPTIONS), f"Producer(group='app', state='created', {SERVERS})"),
    (
        TransactionProducer("app", check=print, **OPTIONS),
        f"TransactionProducer(group='app', state='created', {SERVERS})",
    ),
    (AsyncProducer("app", **OPTIONS), f"AsyncProducer(group='app', state='created', {SERVERS})"),
    (Admin(**OPTIONS), f"Admin(state='created', {SERVERS})"),
    (PushConsumer("app", **OPTIONS), "PushConsumer(group='app', state='created')"),
    (AsyncPushConsumer("app", **OPTIONS), "AsyncPushConsumer(group='app', state='created')"),
    (compat.Producer("app"), "<Producer group='app' not running>"),
    (compat.PushConsumer("app"), "<PushConsumer group='app' not running>"),
]


@for_each("client, expected", REPRS)
def test_a_repr_has_the_group_and_the_state(client, expected):
    assert repr(client) == expected


@for_each("make_copy", [pickle.dumps, copy.copy, copy.deepcopy])
@for_each("client", [client for client, _ in REPRS])
def test_a_client_is_neither_pickled_nor_copied(client, make_copy):
    with pytest.raises(TypeError, match=f"{type(client).__name__} cannot be pickled or copied, .*; create another one"):
        make_copy(client)


def test_an_attempt_to_copy_leaves_a_producer_connected(embedded):
    embedded.create_topic("orders")
    with Producer(name_server=embedded.name_server) as producer, Admin(name_server=embedded.name_server) as admin:
        for client in (producer, admin):
            assert "state='running'" in repr(client)
            with pytest.raises(TypeError):
                copy.copy(client)
        gc.collect()
        time.sleep(1)
        assert producer.send("orders", b"x").attempts == 1
        assert "orders" in admin.topics()
    assert "state='closed'" in repr(producer)
    assert "state='closed'" in repr(admin)
