"""Scripted faults, which replace a node's usual handling of a request."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import iscoroutine
from typing import TYPE_CHECKING, cast

from pyrocket_consumer.config import check_int, check_range
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.frame import RemotingCommand, encode_command
from pyrocket_consumer.testing.config import LONGEST_S
from pyrocket_consumer.testing.node import Connection

if TYPE_CHECKING:
    from pyrocket_consumer.testing.server import Server


class Exchange:
    """One request that a fault handles."""

    def __init__(self, server: Server, connection: Connection, request: RemotingCommand) -> None:
        self.request = request
        self.connection = connection
        self._server = server

    def handle(self, on_answer: Callable[[RemotingCommand], None]) -> None:
        """Let the node handle the request. `on_answer` gets its response (later, if the node holds the request)."""
        if not self.request.is_oneway:
            self.connection.diverted[self.request.opaque] = on_answer
        self._server.handle(self.connection, self.request)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` on the node's loop after `delay_s` seconds. May be called from any thread."""
        loop = self._server.clock.loop
        if delay_s <= 0:
            loop.call_soon_threadsafe(action)
        else:
            loop.call_soon_threadsafe(loop.call_later, delay_s, action)

    def answer(self, answer: RemotingCommand) -> None:
        """Send a response as the node would."""
        self.connection.respond(self.request, answer)


Fault = Callable[[Exchange], None]
"""Handles one request. Use the functions below, or write another one if a test needs it."""


def apply_fault(fault: Fault, exchange: Exchange) -> None:
    """Call a fault with an exchange.

    Raises:
        ConfigError: the function returned a fault or a coroutine, for example `delay` in place of `delay(1)`.
    """
    made = cast(Callable[[Exchange], object], fault)(exchange)
    if iscoroutine(made):
        made.close()
        raise ConfigError(f"{fault!r} returns a coroutine; give a function that is not async")
    if callable(made):
        raise ConfigError(f"{fault!r} returns a fault; call it first: delay(1), Gate(), answer(2)")


def drop(exchange: Exchange) -> None:
    """Lose the request: the node neither handles it nor responds."""


def drop_answer(exchange: Exchange) -> None:
    """Handle the request and lose its response."""
    exchange.handle(lambda answer: None)


def close_connection(exchange: Exchange) -> None:
    """Close the connection without a response, and do not handle the request."""
    exchange.connection.close(False)


def handle_and_close(exchange: Exchange) -> None:
    """Handle the request, then close the connection without a response."""
    exchange.handle(lambda answer: None)
    exchange.connection.close(False)


def reset_connection(exchange: Exchange) -> None:
    """Reset the connection (RST), and do not handle the request."""
    exchange.connection.close(True)


def duplicate(exchange: Exchange) -> None:
    """Handle the request once, and send its response twice."""

    def twice(answer: RemotingCommand) -> None:
        exchange.answer(answer)
        exchange.answer(answer)

    exchange.handle(twice)


def delay(delay_s: float) -> Fault:
    """Handle the request immediately, and send its response `delay_s` seconds late."""
    return lambda exchange: exchange.handle(lambda answer: exchange.later(delay_s, lambda: exchange.answer(answer)))


def delay_request(delay_s: float) -> Fault:
    """Delay the request itself: handle it and respond after `delay_s` seconds."""
    return lambda exchange: exchange.later(delay_s, lambda: exchange.handle(exchange.answer))


def answer(code: int, remark: str | None = None, fields: Mapping[str, str] | None = None, body: bytes = b"") -> Fault:
    """Send this response, and do not handle the request."""
    return lambda exchange: exchange.answer(exchange.request.make_response(code, remark, dict(fields or {}), body))


def now_and_then(share: float, fault: Fault, rng: random.Random | None = None) -> Fault:
    """Apply `fault` to a `share` of the requests (0 to 1), chosen by `rng`. Handle the others as usual.

    `broker.on(None, now_and_then(0.3, drop_answer), times=None)` makes a broker that loses three responses in ten.
    """
    chance = (rng or random.Random(0)).random
    return lambda exchange: fault(exchange) if chance() < share else exchange.handle(exchange.answer)


def rewrite(change: Callable[[RemotingCommand], RemotingCommand]) -> Fault:
    """Handle the request, and send the response that `change` returns for the original one."""
    return lambda exchange: exchange.handle(lambda answer: exchange.answer(change(answer)))


def cut_after(byte_count: int) -> Fault:
    """Handle the request, send only the first bytes of the response's frame, then close the connection."""

    def apply(exchange: Exchange) -> None:
        def cut(answer: RemotingCommand) -> None:
            answer.opaque = exchange.request.opaque
            exchange.connection.write(encode_command(answer)[:byte_count])
            exchange.connection.close(False)

        exchange.handle(cut)

    return apply


def garbage(data: bytes) -> Fault:
    """Send these bytes in place of a response. Do not handle the request, and keep the connection open."""
    return lambda exchange: exchange.connection.write(data)


class Gate:
    """A fault that holds requests until the test opens it: `gate = Gate(); broker.on(code, gate, times=None)`.

    When the gate opens, the node handles the held requests in order; later requests pass immediately. With
    `answers=True`, the node handles requests as they arrive, and the gate holds their responses.
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
        """Wait until the gate holds `count` requests, and return them.

        Raises:
            TimeoutError: fewer arrived within `timeout_s`.
            ConfigError: a number is out of range.
        """
        check_int("count", count, 0, 2**31 - 1)
        check_range("timeout_s", timeout_s, 0, LONGEST_S)
        with self._condition:
            if not self._condition.wait_for(lambda: len(self._waiting) >= count, timeout_s):
                raise TimeoutError(f"{len(self._waiting)} of {count} requests reached the gate within {timeout_s:g} s")
            return [exchange.request for exchange, _ in self._waiting]

    def open(self) -> None:
        """Let all requests pass, the held ones first."""
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
    """The faults of a node, in the order in which they were added. Thread-safe."""

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
        """Return the oldest fault that applies to `command`, and count one use of it."""
        if not self._rules:  # read without the lock, because a rule added later applies to the next request
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
