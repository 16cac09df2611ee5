"""Admin calls without permission, without a broker, or without a response."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest

from pyrocket_consumer import (
    BrokerError,
    ClientClosed,
    ConfigError,
    ConnectError,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
)
from pyrocket_consumer.admin import Admin
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer, drop
from tests.interruptions import exit_code, fork_child, name_servers_held, signal_once_held
from tests.producer.programs import in_a_thread
from tests.speed import cpu_at_most


@pytest.mark.parametrize(
    "names",
    [["ab" * 30_000 + str(each) for each in range(30)], ["ab" * 58 + f"{each:04}" for each in range(10_000)]],
    ids=["long", "many"],
)
def test_an_error_names_some_of_many_groups(embedded, admin, names):
    body = json.dumps({"subscriptionGroupTable": {name: {"groupName": name} for name in names}}).encode()
    embedded.broker("broker-a").on(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, answer(0, body=body), times=None)
    with cpu_at_most(3), pytest.raises(ConfigError, match="no broker knows group '(ab)+'") as raised:
        admin.lag("ab" * 60)
    assert len(str(raised.value)) < 4000


def test_an_error_names_some_of_many_brokers(embedded, admin):
    brokers = {
        f"broker-{each}": {"brokerName": f"broker-{each}", "cluster": "c", "brokerAddrs": {}} for each in range(5000)
    }
    body = json.dumps({"brokerAddrTable": brokers, "clusterAddrTable": {"c": list(brokers)}}).encode()
    embedded.name_server_node.on(RequestCode.GET_BROKER_CLUSTER_INFO, answer(0, body=body), times=None)
    for call in (lambda: admin.create_topic("T", brokers=["another"]), admin.groups):
        with pytest.raises((ConfigError, ConnectError), match="4980 more") as raised:
            call()
        assert len(str(raised.value)) < 4000


@pytest.mark.parametrize(("low", "high"), [(5, 2), (-1, 2), (0, 2**63 - 1)])
def test_an_invalid_offset_range_is_an_error(embedded, admin, low, high):
    embedded.create_topic("T", queues=1)
    queue = '{"brokerName":"broker-a","queueId":0,"topic":"T"}'
    body = f'{{"offsetTable":{{{queue}:{{"minOffset":{low},"maxOffset":{high},"lastUpdateTimestamp":5}}}}}}'.encode()
    embedded.broker("broker-a").on(RequestCode.GET_TOPIC_STATS_INFO, answer(0, body=body))
    with pytest.raises(ProtocolError, match=f"an invalid range of .*: {low} to {high}"):
        admin.topic_offsets("T")


@pytest.mark.cluster(brokers=2)
def test_a_refusal_names_the_brokers_that_succeeded(embedded, admin):
    embedded.broker("broker-b").on(RequestCode.UPDATE_AND_CREATE_TOPIC, answer(1, "disk full"))
    with pytest.raises(BrokerError, match="disk full") as raised:
        admin.create_topic("orders", queues=1)
    assert raised.value.__notes__ == ["done at broker-a; it is safe to repeat"]
    admin.create_topic("orders", queues=1)
    assert len(admin.topic_offsets("orders")) == 2


def test_a_silent_broker_is_reported_in_time(embedded):
    embedded.broker("broker-a").on(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, drop, times=None)
    with Admin(name_server=embedded.name_server, call_timeout_s=1) as admin:
        started = time.monotonic()
        with pytest.raises(RequestTimeout, match=embedded.broker("broker-a").address):
            admin.create_group("app")
        assert time.monotonic() - started < 20


def test_a_call_has_one_deadline(embedded):
    embedded.broker("broker-a").on(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, drop, times=None)
    with (
        Admin(name_server=embedded.name_server, timeout_s=1.5, call_timeout_s=15) as admin,
        pytest.raises(RequestTimeout, match=r"1\.5 s"),
    ):
        admin.create_group("app")


@pytest.mark.cluster(brokers=2)
def test_a_broker_without_a_master_is_named(embedded, admin):
    embedded.broker("broker-b").kill()
    admin.create_topic("orders", queues=1)  # the name server has forgotten it
    with pytest.raises(ConfigError, match="there is no broker 'broker-b'"):
        admin.create_topic("orders", brokers=["broker-b"])


def test_a_cluster_without_brokers_is_an_error(embedded, admin):
    embedded.broker("broker-a").kill()
    with pytest.raises(ConnectError, match="no master"):
        admin.create_topic("orders")


def test_an_unreachable_name_server_is_an_error(embedded, admin):
    embedded.stop_name_server()
    with pytest.raises(ConnectError, match=embedded.name_server):
        admin.topics()
    embedded.start_name_server()
    assert admin.topics() == []


@pytest.mark.cluster(name_servers=2)
def test_a_topic_is_created_when_every_name_server_shows_it(embedded, admin):
    for act, topics in ((partial(admin.create_topic, queues=1), ["orders"]), (admin.delete_topic, [])):
        act("orders")
        for name_server in embedded.name_server_nodes:
            with Admin(name_server=name_server.address) as other:
                assert other.topics() == topics


@pytest.mark.cluster(account=("key", "secret"))
def test_a_wrong_key_is_an_error(embedded):
    def admin_with(secret):
        return Admin(name_server=embedded.name_server, access_key="key", secret_key=secret)

    with admin_with("wrong") as admin, pytest.raises(PermissionDenied):
        admin.create_topic("orders")
    with admin_with("secret") as admin:
        admin.create_topic("orders", queues=1)
        assert admin.topics() == ["orders"]


def test_a_namespace_has_its_own_topics_and_groups(embedded, admin):
    with Admin(name_server=embedded.name_server, namespace="shop") as shop:
        shop.create_topic("orders", queues=1)
        shop.create_group("app")
        assert (shop.topics(), shop.groups()) == (["orders"], ["app"])
        assert (admin.topics(), admin.groups()) == (["shop%orders"], ["shop%app"])
        admin.create_topic("other", queues=1)
        assert shop.topics() == ["orders"]
        assert [queue.topic for queue in shop.topic_offsets("orders")] == ["orders"]
        shop.delete_topic("orders")
        shop.delete_group("app")
    assert (admin.topics(), admin.groups()) == (["other"], [])


def test_threads_share_an_admin_that_starts_by_itself(embedded):
    admin = Admin(name_server=embedded.name_server)
    with ExitStack() as threads:
        for number in range(6):
            threads.enter_context(in_a_thread(admin.create_topic, f"t{number}", 1))
    assert admin.topics() == [f"t{number}" for number in range(6)]
    admin.close()
    admin.close()
    with pytest.raises(ClientClosed, match="make a new one"):
        admin.topics()


def test_an_admin_that_could_not_start_can_try_again(embedded):
    embedded.stop_name_server()
    admin = Admin(name_server=embedded.name_server)
    with pytest.raises(ConnectError):
        admin.start()
    embedded.start_name_server()
    assert admin.topics() == []
    admin.close()


def test_an_unclosed_admin_warns_and_leaves_nothing(embedded):
    with pytest.warns(ResourceWarning, match=r"unclosed Admin\(.*call close\(\)"):
        Admin(name_server=embedded.name_server).topics()
    embedded.wait_until(lambda: not any(node.connections for node in (*embedded.nodes, *embedded.name_server_nodes)))


@pytest.mark.live
@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no such signals")
@pytest.mark.parametrize("in_the_handler", ["close", "call"])
def test_a_signal_handler_may_use_an_admin_that_starts(embedded, in_the_handler):
    admin, seen = Admin(name_server=embedded.name_server, call_timeout_s=20), []
    closes = in_the_handler == "close"
    with name_servers_held(embedded) as gate:

        def handle():
            if closes:
                admin.close()
            else:
                gate.open()
                seen.append(admin.topics())

        with signal_once_held(gate, handle), pytest.raises(ClientClosed) if closes else nullcontext():
            seen.append(admin.topics())
    assert seen == ([] if closes else [[], []])
    admin.close()
    embedded.wait_until(lambda: not [each for each in threading.enumerate() if each.name == "pyrocket-io"])


@pytest.mark.live
@pytest.mark.timeout(90)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_start_can_close_and_call(embedded):
    admin = Admin(name_server=embedded.name_server, call_timeout_s=60)
    with name_servers_held(embedded) as gate, in_a_thread(admin.start):
        gate.wait_held(1)
        children = [fork_child(admin.close), fork_child(admin.topics)]
        gate.open()
    assert [exit_code(child) for child in children] == [0, 0]
    assert admin.topics() == []
    admin.close()
