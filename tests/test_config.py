"""Options: accepted values, their forms, and refused values."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import partial
from ssl import create_default_context

import pytest

from pyrocket_consumer import Admin, AsyncProducer, AsyncPushConsumer, ConfigError, Producer, PushConsumer
from pyrocket_consumer.config import ClientConfig, ConsumerConfig, ProducerConfig
from pyrocket_consumer.offsets.local.store import adopt_store
from pyrocket_consumer.producer import TransactionProducer
from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each

NAME_SERVER = {"name_server": "127.0.0.1:9876"}
WORDS = {"first": "first", "earliest": "first", "last": "last", "latest": "last"}


@for_each("given, means", [*WORDS.items(), ("2026-11-21T08:00:00Z", datetime(2026, 11, 21, 8, tzinfo=UTC))])
def test_both_names_of_consume_from_give_one_value(given, means):
    assert ConsumerConfig(group="G", **NAME_SERVER, consume_from=given).consume_from == means


def allowed(value):
    return ClientConfig(**NAME_SERVER, allowed_addresses=value).allowed_addresses


@for_each(
    "given, means",
    [
        (None, None),
        ("broker-a", ("broker-a",)),
        ("10.0.0.5", ("10.0.0.5/32",)),
        (["10.0.0.0/8", "broker-a:10911"], ("10.0.0.0/8", "broker-a:10911")),
        (["[::1]:10911", "::1"], ("[::1]:10911", "::1/128")),
        ((each for each in ["a", " b "]), ("a", "b")),
    ],
)
def test_allowed_addresses_are_hosts_addresses_and_networks(given, means):
    assert allowed(given) == means
    assert allowed(means) == means


@for_each(
    "given, expected",
    [
        ([], "leave it out to allow any"),
        ("", "must be a name"),
        (5, "must be a name"),
        (["a", 5], "must be a name"),
        ("10.0.0.1/8", "has host bits set"),
        ("10.0.0.300", "give a host"),
        ("10.0.0.*", "give a host"),
        ("broker-a:99999", "port from 1 to 65535"),
        ("a, b", "give a host"),
        ("a\nb", "give a host"),
    ],
)
def test_an_invalid_allowed_address_is_refused(given, expected):
    with pytest.raises(ConfigError, match="allowed_addresses") as raised:
        allowed(given)
    assert expected in str(raised.value)


ACCOUNT = {"access_key": "reader-1", "secret_key": "do-not-show-2", "security_token": "do-not-show-3"}


def assert_hidden(*shown):
    for text in map(repr, shown):
        assert "do-not-show" not in text and "reader-1" not in text, text


def test_an_account_shows_in_no_repr():
    configs = [kind(**NAME_SERVER, **ACCOUNT) for kind in (ClientConfig, ProducerConfig)]
    configs.append(ConsumerConfig(group="g", **NAME_SERVER, **ACCOUNT))
    clients = [
        Admin(config=configs[0]),
        Producer(**NAME_SERVER, **ACCOUNT),
        PushConsumer("g", **NAME_SERVER, **ACCOUNT),
    ]
    for config in configs:
        assert_hidden(config, asdict(config), vars(config), config.secret_key, [config.access_key])
        assert str(config.secret_key) == "do-not-show-2"
    assert_hidden(*clients, *map(vars, clients))


def test_a_config_with_an_account_is_not_pickled():
    config = ConsumerConfig(group="g", **NAME_SERVER, **ACCOUNT)
    with pytest.raises(ConfigError, match="is not pickled") as raised:
        pickle.dumps(config)
    assert_hidden(str(raised.value))
    without = replace(config, access_key=None, secret_key=None, security_token=None)
    there = pickle.loads(pickle.dumps(without))
    assert there == without
    account = {name: str(getattr(config, name)) for name in ACCOUNT}
    assert b"do-not-show-2" in pickle.dumps(account), "who asks for it gets it"
    assert replace(there, **account) == config


def test_a_config_is_copied_and_changed_with_its_account():
    expected = []
    config = ConsumerConfig(group="g", on_event=expected.append, tls=create_default_context(), **NAME_SERVER, **ACCOUNT)
    for other in (copy.copy(config), copy.deepcopy(config), replace(config, consume_threads=3)):
        assert (other.access_key, other.secret_key, other.tls) == ("reader-1", "do-not-show-2", config.tls)
        assert other.on_event.__self__ is expected, "events go where they went"
    plain = ClientConfig(**NAME_SERVER, **ACCOUNT)
    assert ClientConfig.from_options(asdict(plain)) == plain


@for_each("name", ACCOUNT)
@for_each(
    "value, expected",
    [
        (5, "is of type int; it must be a text"),
        (b"do-not-show", "is of type bytes"),
        ("", "is empty"),
        ("do-not-show\n", "printable ASCII"),
        (" do-not-show", "blanks around"),
        ("do-not-show\x00", "printable ASCII"),
        ("do-not-show-ключ", "printable ASCII"),
    ],
)
def test_each_part_of_an_account_is_a_text_of_printable_ascii(name, value, expected):
    with pytest.raises(ConfigError, match=name) as raised:
        ClientConfig(**NAME_SERVER, **{**ACCOUNT, name: value})
    assert expected in str(raised.value)
    assert_hidden(str(raised.value))


def test_a_token_without_an_account_is_refused():
    with pytest.raises(ConfigError, match="security_token goes with access_key and secret_key"):
        ClientConfig(**NAME_SERVER, security_token="t")


@for_each("word", ["no", "false", "", 0, 1, None])
def test_a_text_is_not_a_boolean(word, tmp_path):
    options = {
        partial(ProducerConfig, **NAME_SERVER): ("auto_create_topic", "accept_degraded"),
        partial(ConsumerConfig, group="g", **NAME_SERVER): ("orderly", "auto_commit", "server_messages"),
        EmbeddedCluster: ("auto_create_topics", "auto_create_groups"),
        partial(ClientConfig, **NAME_SERVER): ("tls",),
        partial(adopt_store, tmp_path / "a", tmp_path / "b"): ("replace",),
    }
    for taker, names in options.items():
        for name in names:
            with pytest.raises(ConfigError, match=name):
                taker(**{name: word})


def test_an_embedded_cluster_takes_a_context_and_an_account():
    with pytest.raises(ConfigError, match="tls='no' is not allowed"):
        EmbeddedCluster(tls="no")
    for account in ((5, "x"), ("a", ""), "ab", ("a", "b\n"), ("a", "b", "c")):
        with pytest.raises(ConfigError, match="account"):
            EmbeddedCluster(account=account)


TOLD = {
    **{name: f"{name}=.*1 to 255 printable" for name in ("client_ip", "instance_name", "unit_name")},
    "offset_store_dir": "offset_store_dir=.* must be the path of a directory",
    "consume_from": "consume_from='begin' is not allowed; use 'first' or 'earliest'",
}
NO_NAMES = ["", "\x1b[31m", "a\nb", "\0", "x" * 256, b"x", 5]
WRONG = {
    "client_ip": NO_NAMES,
    "instance_name": NO_NAMES,
    "unit_name": NO_NAMES,
    "namespace": ["", "\x1b[31m", "a b", "x" * 128, 5],
    "offset_store_dir": ["", "a\0b", 5],
    "consume_from": ["begin"],
    "group": ["", "bad group", "g" * 121, "DEFAULT_CONSUMER"],
    "message_model": ["both"],
    "access_key": ["only"],
}


@for_each("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_with_the_allowed_ones(name, value):
    with pytest.raises(ConfigError, match=TOLD.get(name, name)):
        ConsumerConfig(**{"group": "g", **NAME_SERVER, name: value})


@for_each("topic", ["bad topic", "", "t" * 128])
def test_a_wrong_topic_is_refused_before_the_start(topic):
    with pytest.raises(ConfigError):
        PushConsumer("g", **NAME_SERVER).subscribe(topic, print)


def transactions(group="DEFAULT_PRODUCER", **options):
    return TransactionProducer(group, check=print, **options)


def one_config(client):
    kind = {Admin: ClientConfig, PushConsumer: ConsumerConfig, AsyncPushConsumer: ConsumerConfig}
    return kind.get(client, ProducerConfig)(**NAME_SERVER, **({} if client is Admin else {"group": "g"}))


IN_GROUPS = [Producer, AsyncProducer, transactions, PushConsumer, AsyncPushConsumer]


@for_each("client", IN_GROUPS)
def test_a_group_other_than_that_of_the_config_is_refused(client):
    config = one_config(client)
    assert client(config=config).config is client("g", config=config).config is config
    with pytest.raises(ConfigError, match="group='payments' is not allowed with config=, whose group is 'g'"):
        client("payments", config=config)


@for_each("client", [*IN_GROUPS, Admin])
def test_a_config_excludes_single_options(client):
    config = one_config(client)
    for option in (NAME_SERVER, {"call_timeout_s": 1}):
        with pytest.raises(ConfigError, match=f"config= is the whole configuration; put '{min(option)}' into it"):
            client(config=config, **option)


@for_each("client", [*IN_GROUPS, Admin])
def test_a_config_of_another_kind_is_refused(client):
    kind = type(one_config(client))
    other = ProducerConfig if kind is ConsumerConfig else partial(ConsumerConfig, group="g")
    for config in (5, ACCOUNT, *([] if client is Admin else [other(**NAME_SERVER), ClientConfig(**NAME_SERVER)])):
        with pytest.raises(ConfigError, match=f"^config=.* is not allowed; it must be a {kind.__name__}") as raised:
            client(config=config)
        assert_hidden(str(raised.value))


def error_of(name, value):
    try:
        ConsumerConfig(**{"group": "g", **NAME_SERVER, name: value})
    except ConfigError as error:
        return str(error)
    return ""


@for_each("value", [10**5000, "x" * 10**6, {"t": 10**5000}], ids=["number", "text", "by topic"])
@for_each("name", [field.name for field in fields(ConsumerConfig)])
def test_a_wrong_value_of_any_length_is_a_short_error(name, value):
    assert len(error_of(name, value)) < 1000
    assert error_of("consume_threads", value), "none of these is a number of threads"
