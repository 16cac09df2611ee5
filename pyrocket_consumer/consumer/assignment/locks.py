"""The broker's locks of orderly queues: taken before a queue begins, renewed, given back after its last commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import EventKind, MessageQueue

RENEW_EVERY_S = 20.0
LOCK_VALID_S = 30.0
"""How long we believe in a lock since its last confirmation; the broker keeps it for 60 s."""

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))  # the second: macOS


def since_boot() -> float:
    """Return the seconds since some moment, those in which the machine slept among them: the broker did not sleep."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


class QueueLocks:
    """Which queues the brokers have locked for us, and until when we believe it. Confined to the I/O thread."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context

    async def acquire(self, queue: MessageQueue) -> float | None:
        """Lock a queue; return until when it is ours (`MemberContext.lock_clock`), None if another member has it."""
        context = self._context
        requested_at = context.lock_clock()  # the broker counts from when it answers: we never believe longer than it
        granted = await context.cluster.broker(queue.broker_name).lock(context.name, [queue])
        return requested_at + LOCK_VALID_S if queue in granted else None

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues, after their last offsets are stored. A broker that cannot be told forgets in a minute."""
        await asyncio.gather(*(self._release(name, ours) for name, ours in _by_broker(queues).items()))

    async def _release(self, broker_name: str, queues: list[MessageQueue]) -> None:
        context = self._context
        try:
            await context.cluster.broker(broker_name).unlock(context.name, queues)
        except RocketError as error:
            text = f"queues of {broker_name} stay locked for up to a minute: {error}"
            context.emit_throttled(EventKind.BROKER_UNREACHABLE, text)

    async def renew_all(
        self,
        windows: Callable[[], Mapping[MessageQueue, ProcessQueue]],
        on_confirmed: Callable[[ProcessQueue], None],
        on_lost: Callable[[ProcessQueue], Coroutine[Any, Any, None]],
    ) -> None:
        """Renew the locks of all `windows` until cancelled, and tell of each what came of it."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            held = windows()
            await asyncio.gather(
                *(
                    self._renew(name, [held[queue] for queue in ours], on_confirmed, on_lost)
                    for name, ours in _by_broker(held).items()
                )
            )

    async def _renew(
        self,
        broker_name: str,
        windows: list[ProcessQueue],
        on_confirmed: Callable[[ProcessQueue], None],
        on_lost: Callable[[ProcessQueue], Coroutine[Any, Any, None]],
    ) -> None:
        context = self._context
        requested_at = context.lock_clock()
        try:
            granted = await context.cluster.broker(broker_name).lock(context.name, [window.queue for window in windows])
        except RocketError as error:
            # listener calls stop by themselves when the last confirmation is too old
            context.emit_throttled(EventKind.BROKER_UNREACHABLE, f"locks of {broker_name} are not renewed: {error}")
            return
        for window in windows:
            if window.queue not in granted:
                # it may wait for its turn; other locks may not
                context.start_in_background(partial(on_lost, window), f"losing {window.queue}")
            elif not window.dropped:
                window.locked_until = requested_at + LOCK_VALID_S
                on_confirmed(window)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.broker_name, []).append(queue)
    return found
