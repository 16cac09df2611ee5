"""What listeners may be, and what they may return."""

from __future__ import annotations

import functools

import pytest

from pyrocket_consumer.consumer.listener import ConsumeResult, Listener, Retry, failed_messages
from pyrocket_consumer.errors import ConfigError


def plain(message):
    pass


def with_context(message, context):
    pass


def with_default(message, seen=()):
    pass


async def awaited(message):
    pass


class Callable:
    def __call__(self, message):
        pass


class AsyncCallable:
    async def __call__(self, message, context):
        pass


@pytest.mark.parametrize(
    ("function", "is_async", "wants_context"),
    [
        (plain, False, False),
        (with_context, False, True),
        (with_default, False, False),
        (awaited, True, False),
        (Callable(), False, False),
        (AsyncCallable(), True, True),
        (lambda message: None, False, False),
        (functools.partial(with_context, context=None), False, False),
        (print, False, False),
        ([].append, False, False),
    ],
)
def test_what_is_told_of_a_listener(function, is_async, wants_context):
    listener = Listener.of(function)
    assert (listener.is_async, listener.wants_context) == (is_async, wants_context)


@pytest.mark.parametrize("wrong", [None, "handle", 5, Callable, lambda: None, lambda a, b, c: None])
def test_a_wrong_listener_is_refused_with_a_remedy(wrong):
    with pytest.raises(ConfigError, match="listener"):
        Listener.of(wrong)


class Plain:
    """Stands for a message: only its identity matters here."""


def test_results():
    batch = [Plain(), Plain(), Plain()]
    assert failed_messages(None, batch) == ([], True)
    assert failed_messages(ConsumeResult.SUCCESS, batch) == ([], True)
    assert failed_messages(ConsumeResult.RETRY, batch) == ([(each, 0) for each in batch], True)
    assert failed_messages(Retry(delay_level=3), batch) == ([(each, 3) for each in batch], True)
    assert failed_messages(Retry(batch[1:]), batch) == ([(each, 0) for each in batch[1:]], True)
    every = [(message, 0) for message in batch]
    assert failed_messages(Retry([Plain()]), batch) == (every, False), "asked for again, and not known what: all"
    assert failed_messages(Retry(["an id"]), batch) == (every, False)
    assert failed_messages(Retry([batch[0], Plain()]), batch) == (every, False)
    assert failed_messages("ok", batch) == ([(each, 0) for each in batch], False)
    assert failed_messages(True, batch) == ([(each, 0) for each in batch], False)


@pytest.mark.parametrize("level", [19, "3", 1.5, True])
def test_a_wrong_delay_level_is_refused(level):
    with pytest.raises(ConfigError, match="delay_level"):
        Retry(delay_level=level)
