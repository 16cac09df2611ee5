"""The broker's locks of orderly queues: acquired before a queue begins, renewed, and released after its last commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from pyrocket_consumer.cluster.gather import by_broker
from pyrocket_consumer.consumer.context.member_context import MemberContext
from pyrocket_consumer.consumer.window.process_queue import Lease, ProcessQueue
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import EventKind, MessageQueue

RENEW_EVERY_S = 20.0
LOCK_VALID_S = 30.0
"""How long a lock counts as held after its last confirmation. The broker keeps it for 60 s."""

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))  # the second: macOS


def since_boot() -> float:
    """Return the seconds since some moment, with the time that the machine slept, because the broker did not sleep."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


class QueueLocks:
    """Acquires, renews and releases the broker's locks of queues. Confined to the I/O thread."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context

    async def acquire(self, queue: MessageQueue) -> Lease | None:
        """Lock a queue at its broker. Return its lease, or None if another member has the lock."""
        context = self._context
        requested_at = context.lock_clock()  # before the broker starts its lock, so it expires here first
        granted = await context.cluster.broker(queue.broker_name).lock(context.name, [queue])
        return Lease(context.lock_clock, requested_at + LOCK_VALID_S) if queue in granted else None

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues whose last offsets are stored. If a broker cannot be reached, its locks expire in a minute."""
        await asyncio.gather(*(self._release(name, at_broker) for name, at_broker in by_broker(queues).items()))

    async def _release(self, broker_name: str, queues: list[MessageQueue]) -> None:
        context = self._context
        try:
            await context.cluster.broker(broker_name).unlock(context.name, queues)
        except RocketError as error:
            text = f"queues of {broker_name} stay locked for up to a minute: {error}"
            context.emit_throttled(EventKind.BROKER_UNREACHABLE, text)

    async def renew(
        self,
        windows: Iterable[ProcessQueue],
        on_confirmed: Callable[[ProcessQueue], None],
        on_lost: Callable[[ProcessQueue], Coroutine[Any, Any, None]],
    ) -> None:
        """Renew the locks of `windows`; call `on_confirmed` or `on_lost` for each."""
        held = {window.queue: window for window in windows}
        await asyncio.gather(
            *(
                self._renew(name, [held[queue] for queue in at_broker], on_confirmed, on_lost)
                for name, at_broker in by_broker(held).items()
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
            # listener calls stop by themselves once the last confirmation is too old
            context.emit_throttled(EventKind.BROKER_UNREACHABLE, f"locks of {broker_name} are not renewed: {error}")
            return
        for window in windows:
            if window.queue not in granted:
                # on_lost may wait for the queue's lock, so do not await it before the other locks
                context.start_in_background(partial(on_lost, window), f"losing {window.queue}")
            elif not window.dropped:
                window.lease.valid_until = requested_at + LOCK_VALID_S
                on_confirmed(window)
