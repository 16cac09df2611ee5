"""Each option is written once, in pyrocket_consumer/config. Keywords, docstrings and the reference are made from it."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from pyrocket_consumer import Admin, AsyncProducer, AsyncPushConsumer, ConfigError, Producer, PushConsumer
from pyrocket_consumer.config import (
    ClientConfig,
    ClientOptions,
    ConsumerConfig,
    ConsumerOptions,
    ProducerConfig,
    ProducerOptions,
)
from pyrocket_consumer.config.options import option_of
from pyrocket_consumer.producer import TransactionProducer
from tests import options
from tests.for_each import for_each

KINDS = [(ClientConfig, ClientOptions), (ConsumerConfig, ConsumerOptions), (ProducerConfig, ProducerOptions)]


def test_the_texts_made_from_the_options_are_up_to_date():
    differing = [file.name for file, text in options.made().items() if file.read_text() != text]
    assert not differing, "run: python -m tests.options --write"


@for_each("config, keywords", KINDS)
def test_editors_know_each_option_with_its_type(config, keywords):
    hints = get_type_hints(config)
    typed = {
        field.name: hints[field.name] for field in fields(config) if field.name not in options.PARAMETERS | {"group"}
    }
    assert get_type_hints(keywords) == typed
    assert not keywords.__required_keys__


FACES = {
    ConsumerOptions: (PushConsumer, AsyncPushConsumer),
    ClientOptions: (Admin,),
    ProducerOptions: (Producer, AsyncProducer, TransactionProducer),
}


@for_each("face, keywords", [(face, keywords) for keywords, faces in FACES.items() for face in faces])
def test_each_public_class_takes_the_options_of_its_config(face, keywords):
    (unpacked,) = get_args(get_type_hints(face.__init__)["options"])
    assert unpacked is keywords


@for_each(
    "face, config",
    [
        (PushConsumer, ConsumerConfig),
        (AsyncPushConsumer, ConsumerConfig),
        (Producer, ProducerConfig),
        (Admin, ClientConfig),
    ],
)
def test_help_shows_each_option(face, config):
    shown = " ".join((inspect.getdoc(face.__init__) or "").split())
    missing = [each.name for each in fields(config) if options.in_docstring(each) not in shown and each.name != "group"]
    assert not missing


def number(text: str) -> object:
    power = re.fullmatch(r"2([⁰¹²³⁴⁵⁶⁷⁸⁹]+)(−1)?", text)
    if power:
        return 2 ** int(power[1].translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))) - bool(power[2])
    return ast.literal_eval(text.replace(" ", ""))


RANGES = [
    (field.name, number(found[1]), number(found[2]), config)
    for config in (ConsumerConfig, ProducerConfig)
    for field in fields(config)
    if (found := re.match(r"([\d.]+)–([\d ]*[\d⁰¹²³⁴⁵⁶⁷⁸⁹]+(?:−1)?)(?: s)?(?:,|$)", option_of(field).allowed))
]


def make(config: type[ClientConfig], **given: object) -> ClientConfig:
    return config(name_server="127.0.0.1:9876", **({"group": "g"} if config is ConsumerConfig else {}), **given)


@for_each("name, low, high, config", RANGES)
def test_the_documented_ranges_are_those_that_are_checked(name, low, high, config):
    for allowed in (low, high):
        assert getattr(make(config, **{name: allowed}), name) == allowed
    for beyond in (low * 0.9 - 0.01, low - 1, high + 1):
        with pytest.raises(ConfigError, match=name):
            make(config, **{name: beyond})


def test_ranges_were_found():
    assert len(RANGES) > 25


@for_each("face, given", [(PushConsumer, ("g",)), (AsyncPushConsumer, ("g",)), (Producer, ()), (Admin, ())])
@for_each("servers", ["127.0.0.1:1;127.0.0.1:2", ["127.0.0.1:1", "127.0.0.1:2"]], ids=["text", "list"])
def test_name_servers_are_one_text_or_a_list(face, given, servers):
    assert face(*given, name_server=servers).config.name_servers == ("127.0.0.1:1", "127.0.0.1:2")


@for_each("face, given", [(PushConsumer, ("g",)), (Producer, ()), (Admin, ())])
def test_an_unknown_option_names_the_nearest(face, given):
    with pytest.raises(ConfigError, match=r"unknown option 'call_timout_s'; did you mean 'call_timeout_s'\?"):
        face(*given, name_server="127.0.0.1:1", call_timout_s=1)
