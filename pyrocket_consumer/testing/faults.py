"""Scripted faults: what a node does instead of answering as it should."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import iscoroutine
from typing import Protocol, cast

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.frame import RemotingCommand, encode_command
from pyrocket_consumer.testing.connection import Connection


class Exchange(Protocol):
    """One request that a fault decides about."""

    request: RemotingCommand
    connection: Connection

    def handle(self, on_answer: Callable[[RemotingCommand], None]) -> None:
        """Have the node handle the request; `on_answer` gets what it would have sent (late, if it was held)."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after `delay_s` seconds, from the node's own loop and from any thread."""

    def answer(self, answer: RemotingCommand) -> None:
        """Send an answer as the node would."""


Fault = Callable[[Exchange], None]
"""Decides about one request. Those below are for use as they are; write others where a test needs them."""


def apply_fault(fault: Fault, exchange: Exchange) -> None:
    """Let an exchange meet its fault.

    Raises:
        ConfigError: it only made something, and did nothing: `delay` was given where `delay(1)` is the fault.
    """
    made = cast(Callable[[Exchange], object], fault)(exchange)
    if iscoroutine(made):
        made.close()
        raise ConfigError(f"{fault!r} returns a coroutine; give a function that is not async")
    if callable(made):
        raise ConfigError(f"{fault!r} makes a fault and is none itself; call it first: delay(1), Gate(), answer(2)")


def drop(exchange: Exchange) -> None:
    """The request is lost on its way: neither handled nor answered."""


def drop_answer(exchange: Exchange) -> None:
    """The request is handled, its answer is lost."""
    exchange.handle(lambda answer: None)


def close_connection(exchange: Exchange) -> None:
    """The connection ends without an answer; the request is not handled."""
    exchange.connection.close(False)


def handle_and_close(exchange: Exchange) -> None:
    """The request is handled and then the connection ends, without an answer."""
    exchange.handle(lambda answer: None)
    exchange.connection.close(False)


def reset_connection(exchange: Exchange) -> None:
    """The connection is reset (RST); the request is not handled."""
    exchange.connection.close(True)


def duplicate(exchange: Exchange) -> None:
    """The request is handled once, its answer arrives twice."""

    def twice(answer: RemotingCommand) -> None:
        exchange.answer(answer)
        exchange.answer(answer)

    exchange.handle(twice)


def delay(delay_s: float) -> Fault:
    """The request is handled at once, its answer arrives `delay_s` seconds late."""
    return lambda exchange: exchange.handle(lambda answer: exchange.later(delay_s, lambda: exchange.answer(answer)))


def delay_request(delay_s: float) -> Fault:
    """The request itself is `delay_s` seconds late: handled and answered only then."""
    return lambda exchange: exchange.later(delay_s, lambda: exchange.handle(exchange.answer))


def answer(code: int, remark: str | None = None, fields: Mapping[str, str] | None = None, body: bytes = b"") -> Fault:
    """The request is not handled; this is the answer."""
    return lambda exchange: exchange.answer(exchange.request.make_response(code, remark, dict(fields or {}), body))


def now_and_then(share: float, fault: Fault, rng: random.Random | None = None) -> Fault:
    """A `share` of the requests (0 to 1) meets `fault`, chosen by `rng`; the others are handled as if there were none.

    `broker.on(None, now_and_then(0.3, drop_answer), times=None)`: a broker of which three answers in ten are lost.
    """
    chance = (rng or random.Random(0)).random
    return lambda exchange: fault(exchange) if chance() < share else exchange.handle(exchange.answer)


def rewrite(change: Callable[[RemotingCommand], RemotingCommand]) -> Fault:
    """The request is handled; the answer is what `change` makes of it."""
    return lambda exchange: exchange.handle(lambda answer: exchange.answer(change(answer)))


def cut_after(byte_count: int) -> Fault:
    """The request is handled; only the first bytes of the answer's frame arrive, then the connection ends."""

    def apply(exchange: Exchange) -> None:
        def cut(answer: RemotingCommand) -> None:
            answer.opaque = exchange.request.opaque
            exchange.connection.write(encode_command(answer)[:byte_count])
            exchange.connection.close(False)

        exchange.handle(cut)

    return apply


def garbage(data: bytes) -> Fault:
    """These bytes arrive in place of an answer; the request is not handled, the connection stays open."""
    return lambda exchange: exchange.connection.write(data)


class Gate:
    """A fault that holds requests until the test opens it: `gate = Gate(); broker.on(code, gate, times=None)`.

    What waits is handled in order when the gate opens; from then on requests pass at once. With
    `answers=True` requests are handled as they come and only their answers wait.
    """

    def __init__(self, answers: bool = False) -> None:
        self._answers = answers
        self._condition = threading.Condition()
        self._open = False
        self._waiting: list[tuple[Exchange, Callable[[], None]]] = []

    def __call__(self, exchange: Exchange) -> None:
        if self._answers:
            exchange.handle(lambda answer: self._pass(exchange, lambda: exchange.answer(answer)))
        else:
            self._pass(exchange, lambda: exchange.handle(exchange.answer))

    def _pass(self, exchange: Exchange, action: Callable[[], None]) -> None:
        with self._condition:
            if not self._open:
                self._waiting.append((exchange, action))
                self._condition.notify_all()
                return
        action()

    def wait_held(self, count: int = 1, timeout_s: float = 30) -> list[RemotingCommand]:
        """Return the requests that wait at the gate once there are `count` of them.

        Raises:
            TimeoutError: fewer came within `timeout_s`.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: len(self._waiting) >= count, timeout_s):
                raise TimeoutError(f"{len(self._waiting)} of {count} requests reached the gate within {timeout_s:g} s")
            return [exchange.request for exchange, _ in self._waiting]

    def open(self) -> None:
        """Let everything pass, what waits first."""
        with self._condition:
            self._open = True
            waiting, self._waiting = self._waiting, []
        for exchange, action in waiting:
            exchange.later(0, action)


@dataclass(slots=True)
class _Rule:
    code: int | None
    fault: Fault
    times: int | None
    when: Callable[[RemotingCommand], bool] | None


class Faults:
    """The faults a node was told to show, in the order they were given. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []

    def add(
        self, code: int | None, fault: Fault, times: int | None, when: Callable[[RemotingCommand], bool] | None
    ) -> None:
        if code is not None and not isinstance(code, int):
            raise ConfigError(f"code={code!r} is not allowed; give a RequestCode, or None for every request")
        if not callable(fault):
            raise ConfigError(f"{fault!r} is not a fault; give one of pyrocket_consumer.testing, or a function")
        if times is not None and (type(times) is not int or times < 1):
            raise ConfigError(f"times={times!r} is not allowed; give 1 or more, or None for always")
        if when is not None and not callable(when):
            raise ConfigError(f"when={when!r} is not a condition; give a function of the request")
        with self._lock:
            self._rules.append(_Rule(code, fault, times, when))

    def clear(self, code: int | None = None) -> None:
        with self._lock:
            self._rules = [rule for rule in self._rules if code is not None and rule.code != code]

    def take(self, command: RemotingCommand) -> Fault | None:
        """Return the oldest fault that applies to `command` and count it as used."""
        if not self._rules:  # read without the lock: a rule added a moment later applies to the next request
            return None
        with self._lock:
            for rule in self._rules:
                if rule.code in (None, command.code) and (rule.when is None or rule.when(command)):
                    if rule.times is not None:
                        rule.times -= 1
                        if rule.times <= 0:
                            self._rules.remove(rule)
                    return rule.fault
        return None
