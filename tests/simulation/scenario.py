"""Scenarios: several members of a group, brokers, and what goes wrong, on one deterministic loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.consumer.commit import BrokerCommits, Commits, StoreCommits
from pyrocket_consumer.consumer.consume import AsyncWorkers
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.member import ConsumerState, GroupMember
from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.testing import EmbeddedCluster
from pyrocket_consumer.wire.message import Message
from pyrocket_consumer.wire.subscription import parse_subscription
from tests.offsets.disks import MemoryDisk
from tests.simulation.history import Consumed, History, Reset
from tests.simulation.world import START_S, Process, Transport, World, kill

TOPIC, GROUP = "orders", "app"
EPOCH = 1_700_000_000.0


@dataclass(frozen=True)
class Plan:
    """What a scenario is made of; times in simulated seconds."""

    members: int = 2
    brokers: int = 1
    queues: int = 4
    trouble_s: float = 70.0
    calm_s: float = 90.0
    rate: float = 5.0
    faults: tuple[str, ...] = (
        "crash", "restart", "cut", "part", "broker", "name-server", "slow", "reset", "pause", "join",
    )
    fault_every_s: float = 8.0
    failing: float = 0.02
    slow: float = 0.02
    slowest_s: float = 12.0
    orderly: bool = False
    broadcasting: bool = False
    version: str = "5.5.0"


class _Io:
    """Stands for the I/O thread: the world's loop is everybody's."""

    def __init__(self, world: World) -> None:
        self.loop = world
        self.is_current = True

    def run(self, coroutine: Any, timeout_s: float | None) -> Any:
        coroutine.close()
        raise AssertionError("nothing may block in a simulated world")


class Member:
    """One consumer process: started, closed, killed, started again."""

    def __init__(self, name: str, world: World, history: History, name_server: str, plan: Plan) -> None:
        self.name, self.plan = name, plan
        self.member: GroupMember | None = None
        self.process: Process | None = None
        self.disk = MemoryDisk()
        self._world, self._history, self._name_server = world, history, name_server
        self._lives = 0

    @property
    def running(self) -> bool:
        return self.member is not None and self.member.state is ConsumerState.RUNNING

    def start(self) -> None:
        """Begin a new life, unless there is one."""
        if self.process is not None and not self.process.dead:
            return
        self._lives += 1
        self.process = self._world.process(f"{self.name}.{self._lives}")
        self._world.run_as(self.process, self._live(f"10.0.0.{self.name}@{self._lives}"))

    async def _live(self, client_id: str) -> None:
        config = ConsumerConfig(
            group=GROUP, name_server=self._name_server, consume_from="first", orderly=self.plan.orderly,
            consume_threads=4, consume_timeout_s=60, shutdown_timeout_s=10, max_reconsume_times=1000,
            message_model="broadcasting" if self.plan.broadcasting else "clustering",
        )
        while True:
            try:
                await self._begin(config, client_id)
                return
            except RocketError:  # whoever starts it, starts it again
                await asyncio.sleep(1)

    async def _begin(self, config: ConsumerConfig, client_id: str) -> None:
        rng = random.Random(self._world.random.random())
        self._cluster = cluster = Cluster(config, client_id, io=_Io(self._world), rng=rng)  # type: ignore[arg-type]
        commits: Commits = BrokerCommits(cluster, GROUP)
        if self.plan.broadcasting:
            store = LocalFileOffsetStore("/store", disk=self.disk, clock=self._world.time)
            store.load()
            commits = StoreCommits(store, memory_first=True)
        member: GroupMember | None = None
        try:
            await cluster.start_on_loop()
            member = GroupMember(
                config, cluster, commits, self._workers, rng, wall_clock=lambda: EPOCH + self._world.now
            )
            await member.subscribe(parse_subscription(TOPIC, "*"), Listener.of(self._handle))
            await member.start()
        except RocketError:
            if member is not None:
                await member.close(0)
            else:
                await commits.close()
            await cluster.close_on_loop()
            raise
        self.member = member

    def _workers(self, is_async: bool, member: GroupMember) -> AsyncWorkers:
        return AsyncWorkers(member.config.consume_threads, member, member.config.consume_timeout_s, self._world)

    async def _handle(self, message: Message) -> None:
        world, chance = self._world, self._world.random.random()
        begun = world.now
        slow = chance < self.plan.slow
        await asyncio.sleep(world.random.uniform(1, self.plan.slowest_s) if slow else world.random.uniform(0, 0.05))
        success = world.random.random() >= self.plan.failing
        place = (message.queue, message.queue_offset)
        self._history.consumed.append(Consumed(world.now, begun, self.name, message.body, place, success))
        if not success:
            raise ValueError("this one failed")

    def kill(self, power: bool = False) -> None:
        """Die as with kill -9, or with the machine."""
        if self.process is not None:
            kill(self._world, self.process)
        self.member = None
        self.disk = self.disk.after_power_loss(self._world.random) if power else self.disk.after_kill()

    async def close(self) -> None:
        """Close in order."""
        member, self.member = self.member, None
        if member is not None:
            await self._world.run_as(self.process, self._close(member))
            if self.process is not None:
                self._world.end(self.process)

    async def _close(self, member: GroupMember) -> None:
        await member.close(member.config.shutdown_timeout_s)
        await self._cluster.close_on_loop()

    def reset(self, target: Callable[[], float]) -> None:
        """Move one of our queues to somewhere behind."""
        member = self.member
        if member is None or not self.running:
            return
        held = sorted(member.assignments.held(TOPIC))
        if held:
            queue = held[int(target() * len(held))]
            offset = int(target() * ((member.commits.current(queue) or 0) + 1))
            self._world.run_as(self.process, self._reset(member, queue, offset))

    def pause(self, seconds: float) -> None:
        """Pull nothing for a while."""
        assert self.member is not None
        self._world.run_as(self.process, self._pause(self.member, seconds))

    async def _pause(self, member: GroupMember, seconds: float) -> None:
        member.pause(None)
        await asyncio.sleep(seconds)
        member.resume(None)

    async def _reset(self, member: GroupMember, queue: Any, offset: int) -> None:
        for moved, to in (await member.reset(TOPIC, {queue: offset})).items():
            self._history.resets.append(Reset(self._world.now, self.name, moved, to))


class Scenario:
    """A plan on a seed."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.seed, self.plan = seed, plan
        self.world = World(seed)
        self.random = self.world.random
        self.cluster = EmbeddedCluster(
            brokers=plan.brokers, version=plan.version, loop=self.world, first_port=10_000, seed=seed,
            wall_clock=lambda: EPOCH + self.world.now, record_limit=1_000_000, delay_scale=0.1,
        )
        self.members: list[Member] = []
        self._sent = 0
        self._sending = True

    def run(self) -> History:
        """Live through it; returns what happened."""
        try:
            return self.world.run_until_complete(self._run())
        finally:
            self.world.run_until_complete(self._end())
            self.world.close()

    async def _run(self) -> History:
        await self.cluster.open()
        self.cluster.create_topic(TOPIC, queues=self.plan.queues)
        self.history = history = History(self.cluster, GROUP, TOPIC)
        self._note_addresses()
        for number in range(self.plan.members):
            self.members.append(Member(str(number), self.world, history, self.cluster.name_server, self.plan))
            self.members[-1].start()
        sending = self.world.create_task(self._send())
        await self._trouble()
        self._heal()
        sending.cancel()
        await asyncio.sleep(self.plan.calm_s)
        for member in self.members:
            await member.close()
        return history

    def _note_addresses(self) -> None:
        """Remember whose connections are whose."""
        made = self.world.network.connect

        async def connect(factory: Any, address: tuple[str, int]) -> tuple[Transport, Any]:
            near, protocol = await made(factory, address)
            if near.process is not None:
                host, port = near.get_extra_info("sockname")
                self.history.addresses[f"{host}:{port}"] = near.process.name.split(".")[0]
            return near, protocol

        self.world.network.connect = connect  # type: ignore[method-assign]

    async def _send(self) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(self.plan.rate))
            for _ in range(self.random.choice((1, 1, 1, 5))):
                running = [broker for broker in self.cluster.brokers if broker.running]
                if running and self._sending:
                    name = self.random.choice(running).name
                    self.cluster.send(TOPIC, b"m%d" % self._sent, broker_name=name)
                    self._sent += 1

    async def _trouble(self) -> None:
        end = START_S + self.plan.trouble_s
        while self.world.now < end:
            await asyncio.sleep(self.random.expovariate(1 / self.plan.fault_every_s))
            if self.plan.faults:
                await self._fault(self.random.choice(self.plan.faults))

    async def _fault(self, kind: str) -> None:
        world, rng = self.world, self.random
        member = rng.choice(self.members)
        if kind == "crash":
            member.kill()
            world.call_later(rng.uniform(0.1, 20), member.start)
        elif kind == "power":
            member.kill(power=True)
            world.call_later(rng.uniform(0.1, 20), member.start)
        elif kind == "restart" and member.running:
            await member.close()
            world.call_later(rng.uniform(0.1, 10), member.start)
        elif kind == "cut":
            world.network.cut(lambda end: end.process is member.process)
        elif kind == "part":
            self.history.disturbed_at.append(world.now)
            world.network.part(
                lambda end: end.process is member.process or end.peer.process is member.process, rng.uniform(0.5, 40)
            )
        elif kind == "broker":
            broker = rng.choice(self.cluster.brokers)
            if broker.running:
                self.history.disturbed_at.append(world.now)
                broker.kill(lose_commits=True)
                await asyncio.sleep(rng.uniform(0.1, 15))
                await broker.open()
        elif kind == "name-server":
            node = self.cluster.name_server_node
            if node.running:
                node.stop_now()
                await asyncio.sleep(rng.uniform(0.1, 30))
                await node.open()
        elif kind == "slow":
            world.network.slowest_s = rng.choice((0.001, 0.01, 0.3))
        elif kind == "reset" and not world.network.parted and self._each_queue_has_one_owner():
            member.reset(rng.random)
        elif kind == "misplace":
            await self._misplace()
        elif kind == "pause" and member.running:
            member.pause(rng.uniform(0.1, 10))
        elif kind == "join" and len(self.members) < self.plan.members + 2:
            fresh = Member(str(len(self.members)), world, self.history, self.cluster.name_server, self.plan)
            self.members.append(fresh)
            fresh.start()

    async def _misplace(self) -> None:
        """While nobody runs, the group's offsets get beyond the queues' ends: brokers will correct them."""
        self._sending = False
        await asyncio.sleep(30)  # what is slow is done, what failed has come again
        for member in self.members:
            await member.close()
        for broker in self.cluster.brokers:
            for number in range(self.plan.queues):
                end = broker.max_offset(TOPIC, number)
                if broker.committed(GROUP, TOPIC).get(number) == end:
                    broker.commit(GROUP, TOPIC, {number: end + 100})
                    queue = MessageQueue(TOPIC, broker.name, number)
                    self.history.corrections.append((self.world.now, queue, end))
        for member in self.members:
            member.start()
        await asyncio.sleep(10)
        self._sending = True

    def _each_queue_has_one_owner(self) -> bool:
        held = [queue for each in self.members if each.member for queue in each.member.assignments.held(TOPIC)]
        return len(held) == len(set(held))

    def _heal(self) -> None:
        self.world.network.slowest_s = 0.002

    async def _end(self) -> None:
        """Have everything end; a task of the dead cannot, so it is taken apart."""
        self.cluster.shut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)
        self.world.take_apart()
        if self.world.surprises:
            raise AssertionError(f"seed {self.seed}: {self.world.surprises[0]}")


def check(history: History, plan: Plan) -> None:
    """Look for broken rules."""
    if plan.broadcasting:
        history.check_every_member_consumed_everything()
        return
    history.check_nothing_is_passed_over()
    history.check_resets_are_kept()
    if plan.orderly:
        history.check_unlocked_only_after_the_last_commit()
    if set(plan.faults) <= {"join", "restart"}:
        history.check_queues_move_without_repeats(allowed_s=3.5)
    history.check_corrections_are_stored_first()
    history.check_everything_was_consumed()
