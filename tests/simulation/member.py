"""A process with a consumer in a simulated world, and its program."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.commits.broker import BrokerCommits
from pyrocket_consumer.consumer.commits.commits import Commits
from pyrocket_consumer.consumer.commits.database import DatabaseCommits
from pyrocket_consumer.consumer.commits.store import StoreCommits
from pyrocket_consumer.consumer.dispatch.retry import ListenerReports
from pyrocket_consumer.consumer.dispatch.workers import AsyncWorkers
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.member import ConsumerState, GroupMember
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.protocol.subscription import parse_subscription
from pyrocket_consumer.testing import EmbeddedCluster
from pyrocket_consumer.transport.io_thread import SerialExecutor
from tests.offsets.local.disks import MemoryDisk
from tests.simulation.history import Consumed, History, Reset, TimedCall
from tests.simulation.ledger import Ledger, effect_of
from tests.simulation.plans import EPOCH, Plan
from tests.simulation.world import CURRENT, Process, World, kill

TOPIC, GROUP = "orders", "app"

SOON = 30
"""The number of steps of a process within which most calls finish."""


class WorldIoThread:
    """Replaces the I/O thread, because all processes share the world's loop."""

    def __init__(self, world: World) -> None:
        self.loop = world
        self.is_current = True

    def run(self, coroutine: Any, timeout_s: float | None) -> Any:
        coroutine.close()
        raise AssertionError("nothing may block in a simulated world")


class Member:
    """One consumer process, which can be started, closed, killed, and started again."""

    def __init__(
        self,
        name: str,
        world: World,
        history: History,
        cluster: EmbeddedCluster,
        plan: Plan,
        ledger: Ledger | None = None,
    ) -> None:
        self.name, self.plan = name, plan
        self.member: GroupMember | None = None
        self.process: Process | None = None
        self.disk = MemoryDisk()
        self._world, self._history, self._embedded = world, history, cluster
        self._lives = 0
        self.is_calm = False  # its listeners make no calls
        self._ledger = ledger
        self.store = ledger.store() if ledger is not None else None
        self.config = ConsumerConfig(
            group=GROUP,
            name_server=cluster.name_server,
            orderly=plan.orderly,
            offset_store=self.store,
            message_model="broadcasting" if plan.broadcasting else "clustering",
            **plan.options,
        )

    @property
    def running(self) -> bool:
        return self.member is not None and self.member.state is ConsumerState.RUNNING

    # --- starting

    def start(self, cancelled_at: int | None = None) -> None:
        """Start a process, unless one runs. At step `cancelled_at` its program stops waiting for the start."""
        if self.process is not None and not self.process.dead:
            return
        self._lives += 1
        self.process = self._world.process(f"{self.name}.{self._lives}")
        self._run(self._live(f"10.0.0.{self.name}@{self._lives}", cancelled_at))

    def _run(self, work: Coroutine[Any, Any, Any], cancelled_at: int | None = None) -> asyncio.Task[Any]:
        """Run `work` in the program, which stops waiting for it just before step `cancelled_at`."""
        task = self._world.run_as(self.process, work)
        if cancelled_at is not None:
            self.process.before(cancelled_at, task.cancel)
        return task

    def step_soon(self) -> int:
        """Return one of the next SOON steps."""
        return self.process.steps + self._world.random.randrange(SOON)

    async def _live(self, client_id: str, cancelled_at: int | None) -> None:
        while True:
            attempt = self._run(self.begin(client_id), cancelled_at)
            await asyncio.wait([attempt])
            cancelled_at = None
            error = None if attempt.cancelled() else attempt.exception()
            if error is not None and not isinstance(error, RocketError):
                raise error
            if error is None and not attempt.cancelled():
                return
            await asyncio.sleep(1)  # the program tries again

    async def begin(self, client_id: str) -> None:
        """Start, as PushConsumer does."""
        world = self._world
        rng = random.Random(world.random.random())
        self.cluster = cluster = Cluster(self.config, client_id, io=WorldIoThread(world), rng=rng)  # type: ignore[arg-type]
        commits: Commits = BrokerCommits(cluster, GROUP)
        if self.plan.broadcasting:
            store = LocalFileOffsetStore("/store", disk=self.disk, clock=world.time)
            store.load()
            commits = StoreCommits(store, memory_first=True)
        if self.store is not None:
            commits = DatabaseCommits(self.store, SerialExecutor("none"), cluster, GROUP)
        member: GroupMember | None = None
        begun = world.now
        try:
            await cluster.start_on_loop()
            member = GroupMember(self.config, cluster, commits, self._workers, rng, lambda: EPOCH + world.now)
            await member.subscribe(parse_subscription(TOPIC, "*"), self._listener())
            await member.start()
        except (RocketError, asyncio.CancelledError) as error:
            if isinstance(error, RocketError):
                self._history.starts.append(TimedCall(self.name, begun, world.now, error))
            if member is not None:
                await member.close(0)
            else:
                await commits.close()
            await cluster.close_on_loop()
            raise
        self.member = member
        self._history.starts.append(TimedCall(self.name, begun, world.now))
        for queue in member.assignments.held(TOPIC):
            end = self._embedded.broker(queue.broker_name).max_offset(TOPIC, queue.queue_id)
            self._history.ends_at_start.setdefault(queue, end)

    def _workers(self, is_async: bool, reports: ListenerReports) -> AsyncWorkers:
        return AsyncWorkers(self.config.consume_threads, reports, self.config.consume_timeout_s, self._world)

    def _listener(self) -> Listener:
        if self.store is None:
            return Listener.of(self._handle)
        return Listener.of(self.store.exactly_once(self._record_effect), self.config.listener_batch_size)

    def kill(self, power: bool = False) -> None:
        """Die as by kill -9, or by a power failure."""
        if self.process is not None:
            if self._ledger is not None:
                self._ledger.disconnect(self.process)
            kill(self._world, self.process)
        self.member = None
        self.disk = self.disk.after_power_loss(self._world.random) if power else self.disk.after_kill()

    async def close(self) -> None:
        """Close the consumer and end the process."""
        member, self.member = self.member, None
        if member is not None:
            process = self.process
            await self._run(self._close(member))
            if process is not None:
                await asyncio.sleep(1)
                left = (each for each in self._world.leftovers_of(process) if not each.startswith("Member."))
                self._history.left += [(self._world.now, self.name, each) for each in left]
                self._world.end(process)

    async def _close(self, member: GroupMember) -> None:
        timeout_s, begun = self.config.shutdown_timeout_s, self._world.now
        await member.close(timeout_s)
        self._history.closes.append(TimedCall(self.name, begun + timeout_s, self._world.now))
        await self.cluster.close_on_loop()

    def cancel_close(self, cancelled_at: int, ends_after_s: float) -> None:
        """Close, and stop waiting at step `cancelled_at`. The process ends later, and is started again."""
        member, self.member = self.member, None
        if member is None:
            return
        process = self.process
        self._run(self._close(member), cancelled_at)

        def end() -> None:
            if self.process is process:
                self.kill()
                self._world.call_outside(5, self.start)

        self._world.call_outside(ends_after_s, end)

    def fail(self) -> None:
        """Let an internal task of the consumer fail. Its program does not notice."""

        async def surprise() -> None:
            raise RuntimeError("put in on purpose")

        self._run(self._spawn(surprise()))

    async def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.cluster.spawn(work, "what fails on purpose")

    # --- calls of its program

    def reset(self, chance: Callable[[], float], cancelled_at: int | None = None) -> None:
        """Reset one held queue to an earlier offset."""
        member = self.member
        if member is None or not self.running:
            return
        held = sorted(member.assignments.held(TOPIC))
        if held:
            queue = held[int(chance() * len(held))]
            offset = int(chance() * ((member.assignments.queue(queue).commit.current() or 0) + 1))
            self._run(self._reset(member, queue, offset), cancelled_at)

    async def _reset(self, member: GroupMember, queue: MessageQueue, offset: int) -> None:
        history = self._history
        history.resets.append(Reset(self._world.now, self.name, queue, None))
        try:
            moved = await member.resets.move_held({queue: offset}, "requested by this program")
        except RocketError:
            return  # the reset may still happen
        history.resets += [Reset(self._world.now, self.name, each, to) for each, to in moved.items()]

    def pause(self, seconds: float) -> None:
        """Pause pulling for a while."""
        self._run(self._pause(self.member, seconds))

    async def _pause(self, member: GroupMember, seconds: float) -> None:
        member.assignments.pause(None)
        await asyncio.sleep(seconds)
        member.assignments.resume(None)

    def unsubscribe(self, seconds: float, cancelled_at: int | None = None) -> None:
        """Unsubscribe from the topic for a while."""
        self._run(self._unsubscribe(self.member, seconds, cancelled_at))

    async def _unsubscribe(self, member: GroupMember, seconds: float, cancelled_at: int | None) -> None:
        await asyncio.wait([self._run(member.unsubscribe(TOPIC, wait=True), cancelled_at)])
        await asyncio.sleep(seconds)
        if member.state is ConsumerState.RUNNING:
            await member.subscribe(parse_subscription(TOPIC, "*"), self._listener())

    # --- its listener

    async def _record_effect(self, messages: list[Message], session: Any) -> None:
        """Take some time, then record an effect for each message."""
        rng, plan = self._world.random, self.plan
        await asyncio.sleep(rng.uniform(0, plan.slowest_s if rng.random() < plan.slow else plan.quickest_s))
        for message in messages:
            session.execute(*effect_of(message.queue, message.queue_offset, self.cluster.client_id))
        if rng.random() < plan.failing:
            raise ValueError("this one failed")

    async def _handle(self, message: Message) -> None:
        world, plan, rng = self._world, self.plan, self._world.random
        begun, is_slow = world.now, rng.random() < plan.slow
        if is_slow or plan.quickest_s:
            await asyncio.sleep(rng.uniform(1, plan.slowest_s) if is_slow else rng.uniform(0, plan.quickest_s))
        success = rng.random() >= plan.failing
        if plan.calling and rng.random() < plan.calling:
            success = await self._call_from_inside(message) and success
        position = (message.queue, message.queue_offset)
        self._history.consumed.append(Consumed(world.now, begun, self.name, message.body, position, success))
        if not success:
            raise ValueError("this one failed")

    async def _call_from_inside(self, message: Message) -> bool:
        """Make a call to the own consumer, as listeners may. Return whether the message is consumed anyway."""
        world, member, rng = self._world, self.member, self._world.random
        kind = rng.choice(("pause", "reset", "close", "cancel"))
        process = CURRENT.get()
        running = member is not None and member.state is ConsumerState.RUNNING
        if self.is_calm or not running or process is None or process.dead:
            return True
        if kind == "pause":
            self.pause(rng.uniform(0, 3))
        elif kind == "reset" and message.queue.topic == TOPIC and message.queue in member.assignments.held(TOPIC):
            # a higher target would skip messages of concurrent calls
            edge = member.assignments.queue(message.queue).commit.current() or 0
            await self._reset(member, message.queue, max(0, edge - rng.randrange(3)))
        elif kind == "close":
            world.run_as(None, self.close())  # outside of the process, which ends during the call
            world.call_outside(rng.uniform(15, 40), self.start)
        elif kind == "cancel":
            asyncio.current_task().cancel()
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                position = (message.queue, message.queue_offset)
                self._history.consumed.append(Consumed(world.now, world.now, self.name, message.body, position, False))
                raise
        return True
