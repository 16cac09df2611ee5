"""Options are said four times: checked in a config, typed for editors, told in `help()` and in the reference. Alike."""

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
from pyrocket_consumer.producer import TransactionProducer
from tests.for_each import for_each
from tests.reference import CONSUMER, PRODUCER, Row

KINDS = [(ClientConfig, ClientOptions), (ConsumerConfig, ConsumerOptions), (ProducerConfig, ProducerOptions)]
PARAMETERS = {"name_server", "group"}  # they have a place of their own in every signature


CLIENT = [row for row in CONSUMER if set(row.names) & {field.name for field in fields(ClientConfig)}]


def names_of(rows: list[Row]) -> list[str]:
    return sorted(name for row in rows for name in row.names)


@for_each("config, options", KINDS)
def test_editors_know_each_option_with_its_type(config, options):
    hints = get_type_hints(config)
    typed = {field.name: hints[field.name] for field in fields(config) if field.name not in PARAMETERS}
    assert get_type_hints(options) == typed
    assert not options.__required_keys__


FACES = {
    ConsumerOptions: (PushConsumer, AsyncPushConsumer),
    ClientOptions: (Admin,),
    ProducerOptions: (Producer, AsyncProducer, TransactionProducer),
}


@for_each("face, options", [(face, options) for options, faces in FACES.items() for face in faces])
def test_a_face_takes_the_options_of_its_config(face, options):
    (unpacked,) = get_args(get_type_hints(face.__init__)["options"])
    assert unpacked is options


@for_each("rows, config", [(CONSUMER, ConsumerConfig), (CLIENT, ClientConfig), (CLIENT + PRODUCER, ProducerConfig)])
def test_the_reference_has_each_option_once(rows, config):
    assert names_of(rows) == sorted({field.name for field in fields(config)} - ({"group"} - set(names_of(rows))))


TOLD = {PushConsumer: CONSUMER, AsyncPushConsumer: CONSUMER, Producer: PRODUCER + CLIENT, Admin: CLIENT}


@for_each("face, rows", TOLD.items())
def test_help_tells_each_option_as_the_reference_does(face, rows):
    told = " ".join((inspect.getdoc(face.__init__) or "").split())
    missing = [text for text in (row.in_a_docstring() for row in rows) if f" {text} " not in f"{told} "]
    assert not missing, "these are not in the docstring of __init__:\n" + "\n".join(missing)


NONE_IN_WORDS = {
    "by model",
    "detected",
    "–",
    "NAMESRV_ADDR",
    "16; orderly: no limit",
    "ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR, ~/.rocketmq_offsets",
}


def default_of(text: str) -> list[object]:
    """Return the defaults a cell of the reference tells: one, or one for each name."""
    return [number(each) for each in text.split(", ")] if text not in NONE_IN_WORDS else [None]


def number(text: str) -> object:
    if text.endswith(" MiB"):
        return int(text.removesuffix(" MiB")) << 20
    return ast.literal_eval(text.replace(" ", "").replace("2³¹−1", str(2**31 - 1)))


@for_each(
    "row, config",
    [*((row, ConsumerConfig) for row in CONSUMER), *((row, ProducerConfig) for row in PRODUCER)],
    ids=lambda value: value.names[0] if isinstance(value, Row) else "",
)
def test_defaults_are_those_of_the_reference(row, config):
    defaults = {field.name: field.default for field in fields(config)} | {"group": None}
    told = default_of(row.default)
    assert [defaults[name] for name in row.names] == told * (len(row.names) // len(told))


RANGES = [
    (name, number(found[1]), number(found[2]), config)
    for rows, config in ((CONSUMER, ConsumerConfig), (PRODUCER, ProducerConfig))
    for row in rows
    if (found := re.match(r"([\d.]+)–([\d ]+|2³¹−1)(?: s)?(?:,|$)", row.allowed))
    for name in row.names
]


def make(config: type[ClientConfig], **options: object) -> ClientConfig:
    return config(name_server="127.0.0.1:9876", **({"group": "g"} if config is ConsumerConfig else {}), **options)


@for_each("name, low, high, config", RANGES)
def test_ranges_are_those_of_the_reference(name, low, high, config):
    for allowed in (low, high):
        assert getattr(make(config, **{name: allowed}), name) == allowed
    for beyond in (low * 0.9 - 0.01, low - 1, high + 1):
        with pytest.raises(ConfigError, match=name):
            make(config, **{name: beyond})


def test_ranges_were_found_in_the_reference():
    assert len(RANGES) > 15


@for_each("face, given", [(PushConsumer, ("g",)), (AsyncPushConsumer, ("g",)), (Producer, ()), (Admin, ())])
@for_each("servers", ["127.0.0.1:1;127.0.0.1:2", ["127.0.0.1:1", "127.0.0.1:2"]], ids=["text", "list"])
def test_name_servers_are_one_text_or_a_list(face, given, servers):
    assert face(*given, name_server=servers).config.name_servers == ("127.0.0.1:1", "127.0.0.1:2")


@for_each("face, given", [(PushConsumer, ("g",)), (Producer, ()), (Admin, ())])
def test_an_unknown_option_names_the_nearest(face, given):
    with pytest.raises(ConfigError, match=r"unknown option 'call_timout_s'; did you mean 'call_timeout_s'\?"):
        face(*given, name_server="127.0.0.1:1", call_timout_s=1)
