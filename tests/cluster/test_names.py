"""Client ids, and the names of topics and groups within a namespace."""

import os
import re

from pyrocket_consumer.cluster.names import choose_ip, local_ip, make_client_id, unwrap, wrap
from pyrocket_consumer.config import ClientConfig
from tests.for_each import for_each


def config(**options):
    return ClientConfig(name_server="127.0.0.1:9876", client_ip="10.0.0.9", **options)


def test_each_clustering_client_has_an_id_of_its_own():
    first, second = make_client_id(config()), make_client_id(config())
    assert first != second
    assert re.fullmatch(rf"10\.0\.0\.9@{os.getpid()}#\d+", first)


@for_each(
    "options, broadcasting, client_id",
    [
        ({}, True, "10.0.0.9@DEFAULT"),  # the same after a restart
        ({"instance_name": "worker-3"}, True, "10.0.0.9@worker-3"),
        ({"instance_name": "worker-3"}, False, "10.0.0.9@worker-3"),
        ({"instance_name": "i", "unit_name": "unit-1"}, False, "10.0.0.9@i@unit-1"),
    ],
)
def test_an_id_of_a_broadcaster_or_with_names_stays(options, broadcasting, client_id):
    assert make_client_id(config(**options), broadcasting) == client_id


@for_each(
    "addresses, chosen",
    [
        (["127.0.0.1", "10.1.2.3"], "10.1.2.3"),
        (["192.168.1.2", "10.1.2.3"], "10.1.2.3"),
        (["192.168.1.2", "192.168.7.7"], "192.168.7.7"),
        (["2001:db8::5", "127.0.1.1"], "[2001:db8::5]"),
        (["fe80::1%eth0", "::1"], "127.0.0.1"),
        (["169.254.7.7"], "127.0.0.1"),
        ([], "127.0.0.1"),
    ],
)
def test_the_address_is_chosen_as_java_does(addresses, chosen):
    assert choose_ip(addresses) == chosen
    assert local_ip() == local_ip() != ""


# --- namespaces


@for_each("name, wrapped", [("T", "ns%T"), ("%RETRY%G", "%RETRY%ns%G"), ("%DLQ%G", "%DLQ%ns%G"), ("a%b", "ns%a%b")])
def test_a_name_gets_the_namespace_in_front_and_loses_it_again(name, wrapped):
    assert wrap("ns", name) == wrapped
    assert unwrap("ns", wrapped) == name


@for_each("name", ["ns%T", "%RETRY%ns%G", "TBW102", "RMQ_SYS_TRACE_TOPIC", "rmq_sys_wheel", "CID_RMQ_SYS_X"])
def test_wrapped_names_and_the_systems_own_are_unchanged(name):
    assert wrap("ns", name) == name


@for_each("namespace", [None, ""])
def test_without_a_namespace_nothing_changes(namespace):
    assert wrap(namespace, "T") == unwrap(namespace, "T") == "T"
    assert unwrap(namespace, "other%T") == unwrap("ns", "other%T") == "other%T"
    assert unwrap("ns", "%RETRY%other%G") == "%RETRY%other%G"
