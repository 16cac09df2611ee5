"""Listeners, which users write, and the results that they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from pyrocket_consumer.config import check_range
from pyrocket_consumer.config.checks import has_kind
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue, Subscription
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import safe_repr


class ConsumeResult(Enum):
    """The results that a listener may return. None counts as SUCCESS, and an exception counts as RETRY.

    COMMIT and ROLLBACK are for orderly consumers with `auto_commit=False`. COMMIT commits the messages consumed since
    the last COMMIT, and ROLLBACK has them redelivered.
    """

    SUCCESS = "success"
    RETRY = "retry"
    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Retry:
    """Request that messages are redelivered later.

    `messages` contains the failed messages of the batch; empty means all of them. With `delay_level=0` the broker
    chooses the delay: 10 s first, then longer each time. 1 to 18 is a level of the broker's table (1 s … 2 h). A
    negative level gives the message up (%DLQ%).
    """

    messages: Sequence[Message] = ()
    delay_level: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.delay_level, bool) or not isinstance(self.delay_level, int) or self.delay_level > 18:
            raise ConfigError(
                f"delay_level={safe_repr(self.delay_level)} is not allowed; use -1 (give up), 0, or 1 to 18"
            )
        if not isinstance(self.messages, Iterable):
            raise ConfigError(
                f"messages={safe_repr(self.messages)} is not allowed; give a list of messages, or omit it for all"
            )
        object.__setattr__(self, "messages", tuple(self.messages))


@dataclass(frozen=True, slots=True)
class Suspend:
    """Request that an orderly consumer calls again with the same messages after `for_s` seconds (0.01 to 30).

    The queue waits meanwhile. Other queues continue.
    """

    for_s: float = 1.0

    def __post_init__(self) -> None:
        check_range("for_s", self.for_s, 0.01, 30)


@dataclass(frozen=True, slots=True)
class ConsumeContext:
    """The value of a listener's second parameter.

    `attempt` is 1 for the first delivery of the message, or of the first one in a list. `deadline` is a time of
    `time.monotonic()`. After it the call counts as stuck, and its messages are sent back.
    """

    queue: MessageQueue
    attempt: int
    deadline: float


ListenerResult = ConsumeResult | Retry | Suspend | None
"""The values that a listener may return."""

_Returned = ListenerResult | Coroutine[Any, Any, ListenerResult]

MessageListener = (
    Callable[[Message], _Returned]
    | Callable[[Message, ConsumeContext], _Returned]
    | Callable[[list[Message]], _Returned]
    | Callable[[list[Message], ConsumeContext], _Returned]
)
"""A function, plain or `async def`, that `subscribe` accepts. It takes one message, or a list of messages if
`listener_batch_size` is above 1. A required second parameter, or one named `context`, receives the `ConsumeContext`."""

FailedMessage = tuple[Message, int]
"""A message to be consumed again, and its delay level."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A user's callable and its properties: which arguments it takes, and whether its result must be awaited."""

    call: Callable[..., Any]
    batch_size: int
    is_async: bool
    wants_context: bool

    @classmethod
    def of(cls, function: object, batch_size: int = 1) -> Listener:
        """Inspect the signature of `function`.

        Raises:
            ConfigError: `function` cannot be called with a message (or a list of them), with or without a context. Or
                a call would not run it, because it is a generator.
        """
        if isinstance(function, type) or not callable(function):
            raise ConfigError(
                f"the listener must be a function of one message, not {safe_repr(function)}; "
                "for example: def handle(message): ..."
            )
        if has_kind(function, inspect.isgeneratorfunction) or has_kind(function, inspect.isasyncgenfunction):
            raise ConfigError(
                f"the listener {_name(function)} has a yield, so a call would not run it; use a function without yield"
            )
        parameters = _parameters(function)
        takes = None if parameters is None else _positional_parameters(parameters)
        if keywords := [
            each.name for each in parameters or () if each.kind is each.KEYWORD_ONLY and each.default is each.empty
        ]:
            raise ConfigError(
                f"the listener {_name(function)} needs the keyword argument {keywords[0]!r}, which it does not get; "
                "give it a default"
            )
        if takes is not None and not takes[0] <= 2 <= max(takes[1], 2):
            raise ConfigError(
                f"the listener {_name(function)} needs {takes[0]} arguments; it gets a message and, "
                "if it has a second parameter, a ConsumeContext"
            )
        if takes is not None and takes[1] < 1:
            raise ConfigError(f"the listener {_name(function)} takes no argument; it must take the message")
        is_async = has_kind(function, inspect.iscoroutinefunction)
        return cls(function, batch_size, is_async, takes is not None and takes[1] >= 2 and takes[2])


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-ins have no signature
        return None


def _positional_parameters(parameters: list[inspect.Parameter]) -> tuple[int, int, bool]:
    """Return the required and the largest number of positional arguments, and whether the second one is the context."""
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = sum(each.default is each.empty for each in positional)
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return needed, max(len(positional), 1), len(positional) >= 2
    # a second parameter with a default (def handle(message, seen=seen)) is the user's own, not a context
    return needed, len(positional), needed >= 2 or (len(positional) >= 2 and positional[1].name == "context")


def _name(function: object) -> str:
    return getattr(function, "__qualname__", safe_repr(function))


def find_failed(result: object, messages: Sequence[Message]) -> tuple[list[FailedMessage], bool]:
    """Return the messages that failed according to the listener's `result`, and whether the result is a known one."""
    if result is None or result is ConsumeResult.SUCCESS:
        return [], True
    if _is_instance(result, Retry):
        assert isinstance(result, Retry)
        by_identity = {_identity(message): message for message in messages}
        chosen = dict.fromkeys(map(_identity, result.messages or messages))
        if (
            not chosen.keys() <= by_identity.keys()
        ):  # it names other messages, so all messages of the call count as failed
            return [(message, result.delay_level) for message in messages], False
        return [(by_identity[each], result.delay_level) for each in chosen], True
    return [(message, 0) for message in messages], result is ConsumeResult.RETRY or _is_instance(result, Suspend)


def _is_instance(result: object, kind: type) -> bool:
    """Return whether `result` is a `kind`. Unlike `isinstance` this runs no code of the result, which may raise."""
    return issubclass(type(result), kind)


def _identity(message: object) -> object:
    """Return a value that identifies a message. A detached copy of the message has the same one."""
    return (message.queue, message.queue_offset) if isinstance(message, Message) else id(message)


SUSPEND_S = 1.0
"""How long a queue waits after its listener failed, unless it returned a `Suspend`."""


def find_failed_tail(result: object, messages: Sequence[Message]) -> tuple[list[Message], float, bool]:
    """Return, for an ordered listener, the messages to repeat, the pause in seconds, and whether the result is known.

    These are the first failed message and all after it, so that the order is kept.
    """
    if _is_instance(result, Suspend):
        assert isinstance(result, Suspend)
        return list(messages), result.for_s, True
    failed, known = find_failed(result, messages)
    again = {id(message) for message, _ in failed}
    first = next((index for index, message in enumerate(messages) if id(message) in again), len(messages))
    return list(messages[first:]), SUSPEND_S if again else 0.0, known


@dataclass(slots=True)
class Topic:
    """A subscribed topic."""

    subscription: Subscription
    listener: Listener


class Subscriptions(dict[str, Topic]):
    """The subscription and listener of each topic, including the retry topic of the group.

    Each change has a newer version. Only the I/O thread makes changes. Any thread reads.
    """

    def __init__(self, own_retry_topic: str | None, now_ms: Callable[[], int]) -> None:
        """Begin without a topic. A broadcasting group has no retry topic."""
        super().__init__()
        self._own_retry_topic = own_retry_topic
        self._now_ms = now_ms

    def all(self) -> list[Subscription]:
        """Return every subscription."""
        return [topic.subscription for topic in self.values()]

    def newer(self, subscription: Subscription) -> Subscription:
        """Return `subscription` with a version that is newer than the present one of its topic."""
        before = self.get(subscription.topic)
        version = max(self._now_ms(), (before.subscription.version if before is not None else 0) + 1)
        return replace(subscription, version=version)

    def add(self, subscription: Subscription, listener: Listener) -> None:
        """Subscribe to a topic. This replaces an earlier subscription of it."""
        self[subscription.topic] = Topic(subscription, listener)
        own = self._own_retry_topic
        if own is not None and own not in self:
            self[own] = Topic(Subscription(own, version=subscription.version), listener)

    def renew(self, topics: Iterable[str]) -> None:
        """Give the subscriptions of `topics` a newer version, because the set of held queues changes."""
        for topic in topics:
            found = self.get(topic)
            if found is not None:
                found.subscription = self.newer(found.subscription)
