"""Names as the brokers of a namespace know them."""

from pyrocket_consumer.cluster.namespace import unwrap, wrap
from tests.for_each import for_each

WRAPPED = [
    ("T", "ns%T"),
    ("%RETRY%G", "%RETRY%ns%G"),
    ("%DLQ%G", "%DLQ%ns%G"),
    ("a%b", "ns%a%b"),
]


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
