"""What servers ask of a client: who may ask, how much at once, and who handles it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode, request_name
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.connection import Connection

log = logger("cluster")

RequestHandler = Callable[[RemotingCommand, str], "Awaitable[RemotingCommand | None] | None"]
"""Handles a request of a broker (second argument: its address) and returns the answer, None for none.

A plain function is called at once: for notices, of which many may come. A coroutine function runs as a task. What it
does not do it raises as a RocketError, and the broker is answered with its text.
"""

OnRefused = Callable[[int, str, str], None]
"""Told of a request that was not obeyed: its code, the address it came from, and why."""

MOST_AT_ONCE = 64
"""How many requests with one code a broker may have under way here. Its threads wait for 16 answers at most."""

MOST_BYTES = 16 * 1024 * 1024
"""How much a broker's requests that are under way here may hold; one alone may be as large as any request."""

_MOST_LOGGED = 100


@dataclass(slots=True)
class _UnderWay:
    """What is being handled of one broker's requests."""

    body_bytes: int = 0
    by_code: dict[int, int] = field(default_factory=dict)


class ServerRequests:
    """Takes what servers ask, and has it handled if they may. Confined to the I/O thread.

    What is not obeyed is told; and answered, unless it is one-way or nothing is read of the answers.
    """

    def __init__(self, is_broker: Callable[[str], bool]) -> None:
        """`is_broker` tells whether an address is that of a broker whose topics or queues are in use."""
        self._is_broker = is_broker
        self._handlers: dict[int, RequestHandler] = {}
        self._hooks: list[OnRefused] = []
        self._under_way: dict[str, _UnderWay] = {}  # by address
        self._logged: set[tuple[int, str]] = set()

    def on_request(self, code: RequestCode, handler: RequestHandler) -> None:
        """Have brokers' requests with `code` handled by `handler`."""
        self._handlers[code] = handler

    def on_refused(self, hook: OnRefused) -> None:
        """Have `hook` told of every request that is not obeyed. Without any the first of each kind is logged."""
        self._hooks.append(hook)

    def take(self, command: RemotingCommand, connection: Connection) -> Awaitable[RemotingCommand | None] | None:
        """Judge a request. Returns what leads to its answer, None when there is nothing left to do."""
        code, address = command.code, connection.address
        under_way = self._under_way.setdefault(address, _UnderWay())
        if (refusal := self._refusal(command, connection, under_way)) is not None:
            connection.answer(command, refusal)
            return None
        handler = self._handlers.get(code)
        if handler is None:
            remark = f" request type {code} not supported"
            connection.answer(command, command.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark))
            return None
        try:
            handling = handler(command, address)
        except Exception as error:
            connection.answer(command, self._failed(command, address, error))
            return None
        if handling is None:
            return None
        under_way.body_bytes += len(command.body)
        under_way.by_code[code] = under_way.by_code.get(code, 0) + 1
        return self._handled(handling, command, address, under_way)

    def _refusal(
        self, command: RemotingCommand, connection: Connection, under_way: _UnderWay
    ) -> RemotingCommand | None:
        answer_code = ResponseCode.SYSTEM_BUSY
        if not self._is_broker(connection.address):
            answer_code, why = ResponseCode.SYSTEM_ERROR, "only brokers of the topics in use may ask"
        elif command.left_out:
            answer_code, why = ResponseCode.SYSTEM_ERROR, f"{command.left_out} bytes are too many"
        elif under_way.by_code.get(command.code, 0) >= MOST_AT_ONCE:
            why = f"{MOST_AT_ONCE} of them are under way"
        elif under_way.body_bytes and under_way.body_bytes + len(command.body) > MOST_BYTES:
            why = f"requests under way hold {under_way.body_bytes} bytes"
        elif connection.is_unread and not command.is_oneway:
            why = "it does not read the answers"
        else:
            return None
        self._tell(command.code, connection.address, why)
        return command.answer(answer_code, f"{request_name(command.code)} is not obeyed: {why}")

    async def _handled(
        self,
        handling: Awaitable[RemotingCommand | None],
        command: RemotingCommand,
        address: str,
        under_way: _UnderWay,
    ) -> RemotingCommand | None:
        try:
            return await handling
        except Exception as error:
            return self._failed(command, address, error)
        finally:
            under_way.body_bytes -= len(command.body)
            under_way.by_code[command.code] -= 1

    def _failed(self, command: RemotingCommand, address: str, error: Exception) -> RemotingCommand:
        if isinstance(error, RocketError):
            self._tell(command.code, address, str(error))
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        if self._is_first(command.code, type(error).__name__):
            log.error("request=%s broker=%s failed", request_name(command.code), address, exc_info=error)
        return command.answer(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")

    def _tell(self, code: int, address: str, why: str) -> None:
        for hook in self._hooks:
            hook(code, address, why)
        if not self._hooks and self._is_first(code, address):
            log.warning("request=%s from=%s not obeyed: %s", request_name(code), address, why)

    def _is_first(self, code: int, of: str) -> bool:
        if (code, of) in self._logged or len(self._logged) >= _MOST_LOGGED:
            return False
        self._logged.add((code, of))
        return True
