"""The lifecycle of a consumer: it opens everything at the start, and closes all of it at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FrameType
from weakref import WeakKeyDictionary

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.assignment.locks import since_boot
from pyrocket_consumer.consumer.commits.broker import BrokerCommits
from pyrocket_consumer.consumer.commits.commits import Commits, consume_exception, wait_for_all
from pyrocket_consumer.consumer.commits.database import DatabaseCommits
from pyrocket_consumer.consumer.commits.store import StoreCommits
from pyrocket_consumer.consumer.dispatch.concurrent import WorkersFor
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.member import ConsumerState, GroupMember
from pyrocket_consumer.errors import ClientClosed, ConfigError, OffsetStoreError
from pyrocket_consumer.model import ConsumerEvent, Subscription
from pyrocket_consumer.offsets import DatabaseOffsets, OffsetStore
from pyrocket_consumer.offsets.base import Transferable
from pyrocket_consumer.text import logger
from pyrocket_consumer.transport.io_thread import IoCall, IoThread, Latch, SerialExecutor

log = logger("consumer")

CLOSE_MARGIN_S = 10.0
"""How much longer than its timeout a close may take, for the last requests to brokers."""

START_TIMEOUT_S = 60.0
"""The timeout of a start, plus that of name servers. The start may wait until another process closes the store."""

OWNER_CLOSE_S = 30.0
"""How long a start waits while another process, which it replaces, closes the store."""

OWNER_CHECK_EVERY_S = 0.1

STORE_CLOSE_TIMEOUT_S = 5.0
"""How long a failed start waits for its store to close."""

DATABASE_TIMEOUT_S = 30.0
"""How long a start waits for the database."""


class ConsumerLifecycle:
    """Opens and closes everything that one consumer uses, with two tasks on its I/O thread.

    Callers wait for these tasks, and may stop waiting. A start that fails, or that no caller waits for, ends like a
    running consumer.
    """

    def __init__(self, config: ConsumerConfig, workers_for: WorkersFor) -> None:
        self.config = config
        self.ended = Latch()
        """Set when the consumer has failed or is closed; `join` waits for it."""
        self.stored = Latch()
        """Set when the offsets at the start of the shutdown are stored, as far as possible."""
        self.closed = Latch()
        """Set when no thread and no connection is left; `close` waits for it."""
        self.cluster: Cluster | None = None
        self.member: GroupMember | None = None
        self._workers_for = workers_for
        self._pid: int | None = None
        self._io: IoThread | None = None
        self._store: OffsetStore | DatabaseOffsets | None = None
        self._store_is_open = False  # on the store's thread
        self._store_thread = SerialExecutor("pyrocket-store")
        self._early_events: list[ConsumerEvent] = []
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._is_failure_taken = False

    @property
    def state(self) -> ConsumerState:
        if self.member is not None and self.member.state is not ConsumerState.CREATED:
            return self.member.state
        return ConsumerState.CLOSED if self.is_ending else ConsumerState.CREATED

    @property
    def is_ending(self) -> bool:
        """Whether the shutdown has begun, or is complete."""
        return self._ending is not None or self.closed.is_set()

    @property
    def has_begun(self) -> bool:
        """Whether the consumer was started, or was closed without a start."""
        return self._io is not None or self.closed.is_set()

    @property
    def is_forked(self) -> bool:
        """Whether the process that this one was forked from started the consumer."""
        return self._pid is not None and self._pid != os.getpid()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._io is not None
        return self._io.loop

    @property
    def start_timeout_s(self) -> float:
        """How long `start` may take, with the time for every silent name server."""
        config = self.config
        return START_TIMEOUT_S + len(config.name_servers) * (config.connect_timeout_s + config.call_timeout_s)

    # --- the start

    def start(self, subscriptions: Mapping[str, tuple[Subscription, Listener]]) -> IoCall[None]:
        """Begin to open everything. The call has the result, or the error.

        `subscriptions` are by topic. The start reads them when it has created the member.
        """
        self._pid = os.getpid()
        io = self._io = IoThread(on_end=self._on_io_ended)
        starting = io.begin(self._start(subscriptions))
        io.start()  # only now, so that a close meanwhile has a task to cancel
        return starting

    async def _start(self, subscriptions: Mapping[str, tuple[Subscription, Listener]]) -> None:
        self._starting = asyncio.current_task()
        if self.is_ending:
            raise ClientClosed("the consumer was closed while it started")
        config, loop = self.config, asyncio.get_running_loop()
        if config.namespace:
            config = replace(config, group=wrap(config.namespace, config.group))
        client_id = make_client_id(config, config.broadcasting)
        store = config.offset_store
        if store is not None and not isinstance(store, OffsetStore | DatabaseOffsets):
            raise ConfigError(f"offset_store={store!r} lacks methods of OffsetStore; see pyrocket_consumer.offsets")
        if store is not None:
            await self._open(store)
        elif config.broadcasting:
            from pyrocket_consumer.offsets import LocalFileOffsetStore  # other consumers do not need these modules

            store = file_store = LocalFileOffsetStore.for_group(replace(config, on_event=self._emit), client_id)
            await self._open(file_store)
            client_id = file_store.client_id
        cluster = self.cluster = Cluster(config, client_id, io=self._io)
        loop.set_exception_handler(cluster.handle_loop_exception)
        await cluster.start_on_loop()
        commits: Commits
        if store is None:
            commits = BrokerCommits(cluster, config.group)
        elif isinstance(store, DatabaseOffsets):
            commits = DatabaseCommits(store, self._store_thread, cluster, config.group)
        else:
            commits = StoreCommits(store, self._store_thread, memory_first=config.broadcasting)
        member = GroupMember(config, cluster, commits, self._workers_for, lock_clock=since_boot)
        member.on_ended, member.on_stored = self._on_member_ended, self.stored.set
        self.member = member
        for event in self._early_events:
            member.context.events.emit(event)
        for topic in list(subscriptions):
            if (found := subscriptions.get(topic)) is not None:  # another thread may change them meanwhile
                await member.subscribe(*found)
        await member.start()

    async def _open(self, store: OffsetStore | DatabaseOffsets) -> None:
        self._store = store
        owner_deadline, is_logged = self.loop.time() + OWNER_CLOSE_S, False
        while True:
            waits_for_owner = self.loop.time() < owner_deadline
            opening = self.loop.run_in_executor(self._store_thread, self._open_store, store, waits_for_owner)
            if isinstance(store, DatabaseOffsets):
                await self._wait_for_database(opening, store)
            if await opening:
                return
            if not is_logged:
                is_logged = True
                log.info("group=%s waits for the process that is closing its offset store", self.config.group)
            await asyncio.sleep(OWNER_CHECK_EVERY_S)

    async def _wait_for_database(self, opening: asyncio.Future[bool], store: DatabaseOffsets) -> None:
        """Wait until a database is open.

        Raises:
            OffsetStoreError: the database did not respond; if it opens later, it is closed again.
        """
        opening.add_done_callback(consume_exception)
        await wait_for_all([opening], self.loop.time() + DATABASE_TIMEOUT_S)
        if not opening.done():
            raise OffsetStoreError(
                f"{store!r} has not responded within {DATABASE_TIMEOUT_S:g} s; check its address, and that it is up. "
                "A timeout of its driver, such as connect_timeout, ends the attempt sooner"
            )

    def _open_store(self, store: OffsetStore | DatabaseOffsets, waits_for_owner: bool) -> bool:
        """Load the store. With `waits_for_owner`, return False if another process is about to release it."""
        if waits_for_owner and isinstance(store, Transferable):
            self._store_is_open = store.try_load()
        else:
            store.load()
            self._store_is_open = True
        return self._store_is_open

    def _emit(self, event: ConsumerEvent) -> None:
        """Emit an event of the store; keep it until the member exists."""
        if self.member is None:
            self._early_events.append(event)
        else:
            self.member.context.events.emit(event)

    # --- the end

    def close(self, timeout_s: float) -> None:
        """Begin the shutdown, or shorten the timeout of a running one, without waiting for it. Any thread."""
        if self._io is None:
            self._on_io_ended()
        elif not self._io.prevent_start():
            self._io.call_soon(partial(self._start_ending, timeout_s))

    @property
    def needs_caller(self) -> bool:
        """Whether the shutdown must wait for the caller, because it is a listener call or the I/O thread."""
        if self._io is not None and self._io.is_current:
            return True
        return self.member is not None and self.member.service.is_own_call()

    def abandon(self) -> None:
        """Stop the I/O thread, because the shutdown has exceeded its timeout."""
        log.error("group=%s was not closed in time", self.config.group)
        if self._io is not None:
            self._io.stop()

    def take_failure(self) -> bool:
        """Return whether the member has failed, to the first caller only."""
        failed = self.member is not None and self.member.failure is not None
        is_first, self._is_failure_taken = not self._is_failure_taken, True
        return failed and is_first

    def take_error(self) -> BaseException | None:
        """Return the error of the shutdown, to the first caller only."""
        error, self._error = self._error, None
        return error

    def _on_member_ended(self) -> None:
        self.ended.set()
        if self.member is not None and self.member.failure is not None:
            self._start_ending(self.config.shutdown_timeout_s)

    def _start_ending(self, timeout_s: float) -> None:
        if self._ending is None:
            self._ending = self.loop.create_task(self._end(timeout_s), name="pyrocket ending")
        elif self.member is not None:
            self.member.begin_close(timeout_s)

    async def _end(self, timeout_s: float) -> None:
        try:
            starting = self._starting
            if starting is not None and not starting.done():
                starting.cancel()
                await asyncio.wait([starting], timeout=STORE_CLOSE_TIMEOUT_S)
            if self._store is not None:
                self._store_thread.submit(self._announce_closing, timeout_s + CLOSE_MARGIN_S)
            if self.member is not None:
                await self.member.close(timeout_s)
            elif self._store is not None:
                closing = self.loop.run_in_executor(self._store_thread, self._close_store, self._store)
                closing.add_done_callback(consume_exception)
                await wait_for_all([closing], self.loop.time() + STORE_CLOSE_TIMEOUT_S)
                if closing.done():
                    closing.result()
                else:  # the store's thread closes it after its present call
                    log.warning(
                        "group=%s %r has not closed within %g s", self.config.group, self._store, STORE_CLOSE_TIMEOUT_S
                    )
        except Exception as error:
            self._error = error
        finally:
            if self.cluster is not None:
                await self.cluster.close_on_loop()
            self._store_thread.shutdown(wait=False)
            assert self._io is not None
            self._io.stop()

    def _announce_closing(self, within_s: float) -> None:
        store = self._store
        if self._store_is_open and isinstance(store, Transferable):
            store.closes_within(within_s)

    def _close_store(self, store: OffsetStore | DatabaseOffsets) -> None:
        if self._store_is_open:
            store.close()

    def _on_io_ended(self) -> None:
        """Set all latches: as the last step of the I/O thread, or when it never started."""
        for latch in (self.stored, self.ended, self.closed):
            latch.set()


# --- SIGTERM in a program that joins consumers


class Terminated(SystemExit):
    """Raised in the main thread after SIGTERM, so that it cleans up as it does after Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def terminate() -> None:
    """Raise Terminated in the main thread."""
    raise Terminated


def terminate_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise Terminated out of an asyncio loop, between two of its callbacks."""
    try:
        loop.call_soon_threadsafe(terminate)
    except RuntimeError:  # it has ended
        terminate()


_watching: WeakKeyDictionary[object, Callable[[], None]] = WeakKeyDictionary()
_pid = 0


def watch_sigterm(consumer: object, notify: Callable[[], None]) -> None:
    """Call `notify` in the main thread on SIGTERM, until `unwatch_sigterm`. A later call replaces `notify`.

    Only the main thread can do this, and only if the program has no SIGTERM handler of its own.
    """
    global _pid
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_sigterm):
        _pid = os.getpid()
        _watching[consumer] = notify
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch_sigterm(consumer: object) -> None:
    """Forget `consumer`, because it is closed. Without a consumer, SIGTERM ends the process at once, as usual."""
    _watching.pop(consumer, None)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and not _watching and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if not _watching or os.getpid() != _pid:  # the last consumer was closed on another thread, or in a forked parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    for notify in list(_watching.values()):
        notify()
