"""Client ids, and the names of topics and groups within a namespace."""

import os
import re

from pyrocket_consumer.cluster.client_id import choose_ip, local_ip, make_client_id
from pyrocket_consumer.cluster.namespace import unwrap, wrap
from pyrocket_consumer.config import ClientConfig
from tests.for_each import for_each


def config(**options):
    return ClientConfig(name_server="127.0.0.1:9876", client_ip="10.0.0.9", **options)


def test_each_clustering_client_has_an_id_of_its_own():
    first, second = make_client_id(config()), make_client_id(config())
    assert first != second
    assert re.fullmatch(rf"10\.0\.0\.9@{os.getpid()}#\d+", first)


def test_a_broadcasting_consumer_has_the_same_id_after_a_restart():
    assert make_client_id(config(), broadcasting=True) == "10.0.0.9@DEFAULT"


@for_each("broadcasting", [True, False])
def test_an_instance_name_is_kept(broadcasting):
    assert make_client_id(config(instance_name="worker-3"), broadcasting) == "10.0.0.9@worker-3"


def test_a_unit_name_comes_last():
    assert make_client_id(config(instance_name="i", unit_name="unit-1")) == "10.0.0.9@i@unit-1"


@for_each(
    "addresses, chosen",
    [
        (["127.0.0.1", "10.1.2.3"], "10.1.2.3"), (["192.168.1.2", "10.1.2.3"], "10.1.2.3"),
        (["192.168.1.2", "192.168.7.7"], "192.168.7.7"), (["2001:db8::5", "127.0.1.1"], "[2001:db8::5]"),
        (["fe80::1%eth0", "::1"], "127.0.0.1"), (["169.254.7.7"], "127.0.0.1"), ([], "127.0.0.1"),
    ],
)
def test_the_address_is_chosen_as_java_does(addresses, chosen):
    assert choose_ip(addresses) == chosen


def test_this_machine_has_an_address_and_keeps_it():
    assert local_ip() == local_ip() != ""


# --- namespaces


WRAPPED = [("T", "ns%T"), ("%RETRY%G", "%RETRY%ns%G"), ("%DLQ%G", "%DLQ%ns%G"), ("a%b", "ns%a%b")]


@for_each("name, wrapped", WRAPPED)
def test_a_name_gets_the_namespace_in_front_and_loses_it_again(name, wrapped):
    assert wrap("ns", name) == wrapped
    assert unwrap("ns", wrapped) == name


@for_each("name", ["ns%T", "%RETRY%ns%G", "TBW102", "RMQ_SYS_TRACE_TOPIC", "rmq_sys_wheel", "CID_RMQ_SYS_X"])
def test_wrapped_names_and_the_systems_own_are_unchanged(name):
    assert wrap("ns", name) == name


@for_each("namespace", [None, ""])
def test_without_a_namespace_nothing_changes(namespace):
    assert wrap(namespace, "T") == unwrap(namespace, "T") == "T"
    assert unwrap(namespace, "other%T") == "other%T"


def test_names_of_another_namespace_are_left_alone():
    assert unwrap("ns", "other%T") == "other%T"
    assert unwrap("ns", "%RETRY%other%G") == "%RETRY%other%G"
