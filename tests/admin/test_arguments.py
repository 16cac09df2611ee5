"""A wrong argument raises an error with the value and the allowed values, before any request."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from pyrocket_consumer import ConfigError, MessageQueue, RocketError
from pyrocket_consumer.admin import Admin
from pyrocket_consumer.config import ClientConfig
from tests.admin.conftest import administered
from tests.for_each import for_each
from tests.producer.programs import in_a_thread, within
from tests.resets import fill, queue

NAN = float("nan")
NO_NAMES = ["", 5, None, b"T", ["T"], {"T": 1}, True, "a b", "ö"]
NO_BOOLS = ["no", 0, 1, None, NAN, []]
NO_COUNTS = [0, -1, 1.0, "4", True, NAN, None, [4], 10_001]
NO_LISTS_OF_NAMES = [5, True, [5], [None], [""], "", b"broker-a", [["broker-a"]], NAN]
NO_SECONDS = [NAN, float("inf"), -1, "3", True, None, 121]
NO_QUEUES = [5, "T", [5], ["T"], {"T": 1}, True, [MessageQueue("T", "broker-a", "0")], [MessageQueue("T", 1, 0)]]
NO_PLACES = [
    5,
    None,
    "yesterday",
    datetime(2026, 1, 1),
    NAN,
    {},
    ["earliest"],
    {"T": 1},
    {queue("T", 0): NAN},
    {queue("T", 0): True},
    {queue("T", 0): "1"},
    {MessageQueue("T", "broker-a", "0"): 1},
]

METHODS = {
    "create_topic": (
        ["T"],
        {
            "name": NO_NAMES,
            "queues": NO_COUNTS,
            "perm": ["x", 6, None, ["rw"]],
            "order": NO_BOOLS,
            "attributes": [5, "a=b", ["a"], {"a": 1}, {1: "a"}, {"a,b": "c"}],
            "brokers": [*NO_LISTS_OF_NAMES, [], "nowhere"],
            "cluster": [5, "", True, ["DefaultCluster"], "nowhere"],
        },
    ),
    "delete_topic": (["T"], {"name": NO_NAMES}),
    "topics": ([], {"include_system": NO_BOOLS}),
    "topic_offsets": (["T"], {"topic": NO_NAMES}),
    "create_group": (
        ["G"],
        {
            "name": [*NO_NAMES, "DEFAULT_CONSUMER"],
            "consume_enable": NO_BOOLS,
            "consume_message_orderly": ["no", 1],
            "retry_queue_nums": [-1, "1", NAN, True, 1.5],
            "retry_max_times": [-1, NAN, "3", True, None, 2**31],
            "group_name": ["H"],
            "consume_timeout_minute": [-1, NAN, True, "5"],
            "no_such": [1],
        },
    ),
    "delete_group": (["G"], {"name": NO_NAMES, "remove_offsets": NO_BOOLS, "remove_dead_letters": NO_BOOLS}),
    "groups": ([], {"include_system": NO_BOOLS}),
    "lag": (["G"], {"group": NO_NAMES, "brokers": [*NO_LISTS_OF_NAMES, None]}),
    "offsets": (["G", "T"], {"group": NO_NAMES, "topic": NO_NAMES, "brokers": [*NO_LISTS_OF_NAMES, None]}),
    "plan_reset": (
        ["G", "T", "earliest"],
        {
            "group": NO_NAMES,
            "topic": NO_NAMES,
            "to": NO_PLACES,
            "queues": NO_QUEUES,
            "model": ["", 5, True, [], "CLUSTERING"],
            "member": ["", 5, True, ["m"]],
            "wait_s": NO_SECONDS,
        },
    ),
    "forget_reset": (["G", "T"], {"group": NO_NAMES, "topic": NO_NAMES}),
}
PLACES = {"name": 0, "group": 0}
TABLE = [(method, name, values) for method, (_, wrong) in METHODS.items() for name, values in wrong.items()]


@pytest.fixture
def embedded(embedded):
    fill(embedded, "T", 4, queues=2)
    embedded.broker("broker-a").create_group("G")
    embedded.broker("broker-a").commit("G", "T", {0: 1, 1: 1})
    return embedded


@for_each("method, name, values", TABLE, ids=[f"{method}-{name}" for method, name, _ in TABLE])
def test_a_wrong_argument_is_named_and_nothing_is_sent(embedded, admin, method, name, values):
    before = len(embedded.broker("broker-a").requests())
    for value in values:
        with pytest.raises(ConfigError) as raised:
            called(admin, method, name, value)
        assert len(str(raised.value)) > 20, value
    assert len(embedded.broker("broker-a").requests()) == before


def called(admin, method, name, value):
    """Call a method with right arguments except one."""
    right, _ = METHODS[method]
    place = PLACES.get(name, 1 if name == "topic" and len(right) > 1 else 0 if name == "topic" else 2)
    arguments, options = list(right), {}
    if name in ("name", "group", "topic", "to"):
        arguments[place] = value
    else:
        options[name] = value
    getattr(admin, method)(*arguments, **options)


@for_each(
    "call, reason",
    [
        (lambda admin: admin.create_topic(""), "topic is empty"),
        (lambda admin: admin.create_topic("a.b"), "not allowed"),
        (lambda admin: admin.create_topic("a", queues=0), "queues=0"),
        (lambda admin: admin.create_topic("a", queues="4"), "queues='4'"),
        (lambda admin: admin.create_topic("a", perm=6), "perm=6 is not allowed; choose one of 'rw'"),
        (lambda admin: admin.create_topic("a", attributes={"a": "b,c"}), "without"),
        (lambda admin: admin.delete_topic(None), "must be text"),
        (lambda admin: admin.create_group("a b"), "not allowed"),
        (lambda admin: admin.create_group("a", retries=3), "unknown setting 'retries'.*retry_max_times"),
        (lambda admin: admin.delete_group("DEFAULT_CONSUMER"), "reserved"),
        (lambda admin: admin.plan_reset("G", "T", "begin"), "to='begin' is not allowed; use 'first' or 'earliest'"),
        (lambda admin: admin.plan_reset("G", "T", datetime(2026, 1, 1)), "no time zone"),
        (lambda admin: admin.plan_reset("G", "T", datetime(1960, 1, 1, tzinfo=UTC)), "before 1970"),
        (lambda admin: admin.plan_reset("G", "T", {}), "names no queue"),
        (
            lambda admin: admin.plan_reset("G", "T", {queue("T", 0): -1}),
            "offset -1 of T/broker-a/0 is not allowed; it must be a whole number from 0",
        ),
        (lambda admin: admin.plan_reset("G", "T", {queue("T", 0): True}), "offset True"),
        (
            lambda admin: admin.plan_reset("G", "T", {queue("T", 7): 1}),
            "no queue broker-a/7; its queues: broker-a/0, broker-a/1",
        ),
        (lambda admin: admin.plan_reset("G", "T", {queue("U", 0): 1}), "not a queue of topic T"),
        (lambda admin: admin.plan_reset("G", "T", "earliest", []), "no queue of topic T is selected"),
        (lambda admin: admin.plan_reset("a b", "T", "earliest"), "not allowed"),
        (lambda admin: admin.plan_reset("nobody", "T", "earliest"), "no broker knows group 'nobody'.*known: .*G"),
    ],
)
def test_a_wrong_argument_is_reported_and_nothing_is_done(embedded, admin, call, reason):
    def what_is_there():
        return admin.topics(include_system=True), admin.groups(include_system=True), embedded.committed("G", "T")

    before = what_is_there()
    with pytest.raises(ConfigError, match=reason):
        call(admin)
    assert what_is_there() == before


@pytest.mark.live
@for_each("method, name, values", TABLE, ids=[f"{method}-{name}" for method, name, _ in TABLE])
def test_a_wrong_argument_is_reported_before_connecting(method, name, values):
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # a connection would wait for a response that never arrives
        nobody.settimeout(0)
        admin = Admin(name_server=f"127.0.0.1:{nobody.getsockname()[1]}")
        for value in (each for each in values if each != "nowhere"):
            with pytest.raises(ConfigError):
                called(admin, method, name, value)
        with pytest.raises(BlockingIOError):
            nobody.accept()


@for_each(
    "wrong", [{"partial": "no"}, {"unsubscribed": 1}, {"wait_s": NAN}, {"wait_s": True}, {"progress": 5}], ids=str
)
def test_a_plan_is_not_executed_with_wrong_arguments(admin, wrong):
    plan = admin.plan_reset("G", "T", "earliest", model="clustering")
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))!r} is not"):
        plan.execute(**wrong)
    assert {row.committed for row in admin.offsets("G", "T").rows} == {1}


@for_each(
    "options, reason",
    [
        *(
            (options, next(iter(options)))
            for options in (
                {"name_server": 5},
                {"name_server": [5]},
                {"config": 5},
                {"timeout_s": NAN},
                {"timeout_s": True},
                {"namespace": 5},
                {"client_ip": 5},
                {"tls": "yes"},
                {"access_key": 5, "secret_key": "s"},
                {"unit_name": True},
            )
        ),
        ({"call_timeout": 3}, "did you mean 'call_timeout_s'"),
        ({"timeout_s": 0}, "timeout_s=0"),
        (
            {"name_server": "127.0.0.1:1", "config": ClientConfig(name_server="127.0.0.1:1")},
            "put 'name_server' into it",
        ),
    ],
)
def test_an_admin_refuses_wrong_options(options, reason):
    given = {} if "config" in options else {"name_server": "127.0.0.1:9876"}
    with pytest.raises(ConfigError, match=reason):
        Admin(**{**given, **options})


def test_concurrent_changes_of_a_topic_report_the_actual_queues():
    with administered() as (_, admin):
        together, outcomes = threading.Barrier(4), {}

        def create(queues):
            together.wait()
            with within(5):
                try:
                    outcomes[queues] = admin.create_topic("T", queues=queues)
                except RocketError as error:
                    outcomes[queues] = str(error)

        with ExitStack() as threads:
            for queues in (2, 3, 4, 5):
                threads.enter_context(in_a_thread(create, queues))
        assert outcomes.keys() == {2, 3, 4, 5}
        assert outcomes[len(admin.topic_offsets("T"))] is None, outcomes
        for queues, error in outcomes.items():
            expected = f"queues at broker-a now, not {queues}, because another client changed it"
            assert error is None or expected in error, error
