"""What users give us to call, and what its answer means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pyrocket_consumer.config import check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import safe_repr


class ConsumeResult(Enum):
    """What a listener may return. Returning nothing is SUCCESS; raising is RETRY.

    COMMIT and ROLLBACK are for orderly consumers with `auto_commit=False`: what was consumed since the last COMMIT is
    committed, or comes again.
    """

    SUCCESS = "success"
    RETRY = "retry"
    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Retry:
    """Ask for messages again, later.

    `messages`: which of the batch failed; empty means all of it. `delay_level`: 0 lets the broker choose (10 s first,
    longer each time), 1 to 18 is that level of the broker's table (1 s … 2 h), below 0 gives the message up (%DLQ%).
    """

    messages: Sequence[Message] = ()
    delay_level: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.delay_level, bool) or not isinstance(self.delay_level, int) or self.delay_level > 18:
            raise ConfigError(
                f"delay_level={safe_repr(self.delay_level)} is not allowed; use -1 (give up), 0, or 1 to 18"
            )
        object.__setattr__(self, "messages", tuple(self.messages))


@dataclass(frozen=True, slots=True)
class Suspend:
    """Ask an orderly consumer to call again with the same messages after `for_s` seconds (0.01 to 30).

    The queue waits meanwhile; other queues go on.
    """

    for_s: float = 1.0

    def __post_init__(self) -> None:
        check_range("for_s", self.for_s, 0.01, 30)


@dataclass(frozen=True, slots=True)
class ConsumeContext:
    """What a listener's second parameter receives.

    `attempt` is 1 for the first delivery of the (first) message; `deadline` is the `time.monotonic()` at which
    the call counts as stuck and its messages are sent back.
    """

    queue: MessageQueue
    attempt: int
    deadline: float


ListenerResult = ConsumeResult | Retry | Suspend | None
"""What a listener may return."""

_Returned = ListenerResult | Coroutine[Any, Any, ListenerResult]

MessageListener = (
    Callable[[Message], _Returned]
    | Callable[[Message, ConsumeContext], _Returned]
    | Callable[[list[Message]], _Returned]
    | Callable[[list[Message], ConsumeContext], _Returned]
)
"""What `subscribe` takes: a function, plain or `async def`, of a message, or of a list of messages when
`listener_batch_size` is above 1. A second parameter, if it needs one, receives the `ConsumeContext`."""

FailedMessage = tuple[Message, int]
"""A message to be consumed again, and the delay level asked for."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A user's callable, looked at once: what it takes, and whether it is to be awaited."""

    call: Callable[..., Any]
    batch_size: int
    is_async: bool
    wants_context: bool

    @classmethod
    def of(cls, function: object, batch_size: int = 1) -> Listener:
        """Look at `function`.

        Raises:
            ConfigError: it cannot be called with a message (or a list of them), or with a context besides.
        """
        if isinstance(function, type) or not callable(function):
            raise ConfigError(
                f"the listener must be a function of one message, not {safe_repr(function)}; "
                "for example: def handle(message): ..."
            )
        takes = _positional_parameters(function)
        if takes is not None and not takes[0] <= 2 <= max(takes[1], 2):
            raise ConfigError(
                f"the listener {_name(function)} needs {takes[0]} arguments; it gets a message and, "
                "if it has a second parameter, a ConsumeContext"
            )
        if takes is not None and takes[1] < 1:
            raise ConfigError(f"the listener {_name(function)} takes no argument; it must take the message")
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )
        return cls(function, batch_size, is_async, takes is not None and takes[1] >= 2 and takes[2])


def _positional_parameters(function: Callable[..., Any]) -> tuple[int, int, bool] | None:
    """Return how many positional arguments are needed, how many are taken at most, and whether the second is meant."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-ins tell nothing of themselves
        return None
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = sum(each.default is each.empty for each in positional)
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return needed, max(len(positional), 1), len(positional) >= 2
    # a second parameter with a default (def handle(message, seen=seen)) is the user's own, not a context
    return needed, len(positional), needed >= 2 or (len(positional) >= 2 and positional[1].name == "context")


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def find_failed(result: object, messages: Sequence[Message]) -> tuple[list[FailedMessage], bool]:
    """Return which of `messages` are to come again after the listener returned `result`, and whether it is known."""
    if result is None or result is ConsumeResult.SUCCESS:
        return [], True
    if _is_instance(result, Retry):
        assert isinstance(result, Retry)
        ours = {_identity(message): message for message in messages}
        chosen = dict.fromkeys(map(_identity, result.messages or messages))
        if not chosen.keys() <= ours.keys():  # it asks for something again, and we cannot tell for what: for all then
            return [(message, result.delay_level) for message in messages], False
        return [(ours[place], result.delay_level) for place in chosen], True
    return [(message, 0) for message in messages], result is ConsumeResult.RETRY or _is_instance(result, Suspend)


def _is_instance(result: object, kind: type) -> bool:
    """Tell whether a listener returned a `kind`. Nothing of its own is asked, as `isinstance` does: it may raise."""
    return issubclass(type(result), kind)


def _identity(message: object) -> object:
    """Return what tells a message from others: a detached copy of it names it as well."""
    return (message.queue, message.queue_offset) if isinstance(message, Message) else id(message)


SUSPEND_S = 1.0
"""How long a queue waits after its listener failed, unless it says otherwise."""


def find_failed_tail(result: object, messages: Sequence[Message]) -> tuple[list[Message], float, bool]:
    """Return, for an orderly listener: which messages come again first, after how long, and whether that is known.

    What comes again begins with the first message that failed, and goes on to the end: the order is kept.
    """
    if _is_instance(result, Suspend):
        assert isinstance(result, Suspend)
        return list(messages), result.for_s, True
    failed, known = find_failed(result, messages)
    again = {id(message) for message, _ in failed}
    first = next((place for place, message in enumerate(messages) if id(message) in again), len(messages))
    return list(messages[first:]), SUSPEND_S if again else 0.0, known
