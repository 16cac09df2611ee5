"""The error for a wrong argument has the value and the allowed ones. It never comes from internal code."""

import pytest

from pyrocket_consumer import ConfigError, ConsumeResult, MessageQueue, PushConsumer, sql
from pyrocket_consumer.consumer import AsyncPushConsumer
from tests.consuming import consuming

NAN = float("nan")
OPTIONS = {
    "orderly": ["no", 1, None],
    "auto_commit": ["no", 0, None],
    "message_model": ["CLUSTERING", 5, None, []],
    "consume_from": ["yesterday", 5, None, NAN],
    "consume_threads": [0, True, "4", 1.0, NAN, None],
    "listener_batch_size": [0, True, "4", NAN],
    "pull_batch_size": [0, True, "4", NAN, [32], {"T": "4"}, {"T": NAN}, {5: 4}],
    "max_cached_messages": [True, {"T": True}, None],
    "max_span": [NAN, True, 65536],
    "commit_interval_s": [NAN, True, "5", 0, float("inf")],
    "max_reconsume_times": [NAN, True, -1, "16"],
    "shutdown_timeout_s": [NAN, True, None, -1],
    "allocation": ["other", 5, None, []],
    "durability": ["no", 5, None, []],
    "offset_store_dir": [5, True, b"x", []],
    "offset_store": [5, "store", object()],
    "on_event": [5, "print"],
    "name_server": [5, [5], "nowhere"],
    "namespace": [5, True],
    "instance_name": [5, "", None],
    "tls": ["yes", 1, None],
    "call_timeout_s": [NAN, True, "3", None],
}


def listen(message):
    return ConsumeResult.SUCCESS


@pytest.mark.parametrize("kind", [PushConsumer, AsyncPushConsumer])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_not_allowed_is_named(kind, name):
    for value in OPTIONS[name]:
        with pytest.raises(ConfigError, match=name):
            kind("G", **{"name_server": "127.0.0.1:9876", name: value})


def takes_none():
    pass


def takes_two(first, second):
    pass


async def awaited(*arguments):
    pass


async def async_generator(*arguments):
    yield


class Awaited:
    async def __call__(self, *arguments):
        pass


def generator(*arguments):
    yield


class Unreadable:
    __signature__ = 5  # not a signature

    def __call__(self, *arguments):
        pass


FUNCTIONS = {
    "allocation": "(group, client_id, queues, client_ids)",
    "on_event": "(event)",
    "order_by": "(message)",
}


@pytest.mark.parametrize("option", FUNCTIONS)
def test_a_function_that_can_never_work_is_refused(option):
    def make(function):
        PushConsumer("G", name_server="127.0.0.1:9876", orderly=True, **{option: function})

    for wrong in (takes_none, takes_two, lambda *arguments, key: None):
        with pytest.raises(ConfigError, match=f"{option}=.* cannot be called: .*; pass a function of ") as raised:
            make(wrong)
        assert str(raised.value).endswith(FUNCTIONS[option])
    for wrong in (awaited, Awaited()):
        with pytest.raises(ConfigError, match=f"{option}=.* is an async def; pass a plain function"):
            make(wrong)
    for wrong in (async_generator,) if option == "allocation" else (async_generator, generator):
        with pytest.raises(ConfigError, match=f"{option}=.* has a yield; pass a plain function"):
            make(wrong)
    for right in (print, lambda *arguments: None, min, Unreadable()):  # a signature that cannot be read may be right
        make(right)


def test_a_strategy_may_yield_its_queues():
    PushConsumer("G", name_server="127.0.0.1:9876", allocation=generator)


def test_auto_commit_off_needs_orderly():
    with pytest.raises(ConfigError, match="orderly"):
        PushConsumer("G", name_server="127.0.0.1:9876", auto_commit=False)


@pytest.mark.parametrize("selector", ["a\udcff", sql("region = '\udcff'")])
async def test_a_selector_that_utf_8_cannot_encode_is_refused_before_the_start(selector):
    """Text of a command line is like this, if its bytes were not UTF-8."""
    with pytest.raises(ConfigError, match=r"\\udcff.*remove it"):
        PushConsumer("G", name_server="127.0.0.1:9876").subscribe("T", listen, selector)
    with pytest.raises(ConfigError, match=r"\\udcff.*remove it"):
        await AsyncPushConsumer("G", name_server="127.0.0.1:9876").subscribe("T", listen, selector)


CALLS = {
    "subscribe": [
        ("T!", listen),
        (5, listen),
        (["T"], listen),
        ("T", 5),
        ("T", listen, 5),
        ("T", listen, ["paid"]),
        ("T", listen, True),
    ],
    "unsubscribe": [("T!",), (5,), (["T"],), (None,)],
    "pause": [("T",), (5,), ([5],), ({"T": 1},)],
    "resume": [("T",), (5,), ([5],)],
    "reset_offsets": [
        (5, "first"),
        (["T"], "first"),
        ("T", 5),
        ("T", NAN),
        ("T", "first", "T"),
        ("T", "first", [5]),
        ("T", {MessageQueue("T", "broker-a", "0"): 1}),
    ],
    "join": [(NAN,), (True,), ("3",), (-1,)],
    "close": [(NAN,), (True,), ("3",), (-1,)],
}


@pytest.fixture
def consumer(embedded):
    embedded.create_topic("T", queues=1)
    with consuming(embedded, "T", "G") as (consumer, _):
        yield consumer


@pytest.mark.parametrize("method", CALLS)
def test_a_call_that_is_not_allowed_changes_nothing(consumer, method):
    for arguments in CALLS[method]:
        with pytest.raises(ConfigError) as raised:
            getattr(consumer, method)(*arguments)
        assert len(str(raised.value)) > 20, arguments
    assert consumer.state.value == "running"
