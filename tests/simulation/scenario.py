"""Scenarios: several members of a group, brokers and faults, on one deterministic loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pyrocket_consumer.errors import RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import EmbeddedCluster, EmbeddedNode, Fault
from pyrocket_consumer.testing.faults import answer, delay, delay_request, drop, drop_answer, duplicate, now_and_then
from tests.simulation.history import History
from tests.simulation.ledger import Ledger
from tests.simulation.member import GROUP, TOPIC, Member
from tests.simulation.plans import CALLS, EPOCH, NODES, Plan
from tests.simulation.world import START_S, Transport, World

REFUSALS = (
    ResponseCode.SYSTEM_ERROR,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.FLOW_CONTROL,
)


class Scenario:
    """A plan with a seed."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.seed, self.plan = seed, plan
        self.world = World(seed)
        self.random = self.world.random
        self.cluster = EmbeddedCluster(
            brokers=plan.brokers,
            version=plan.version,
            loop=self.world,
            first_port=10_000,
            seed=seed,
            wall_clock=lambda: EPOCH + self.world.now,
            record_limit=1_000_000,
            delay_scale=0.1,
            side_by_side_s=plan.side_by_side_s,
        )
        self.queues = plan.queues if isinstance(plan.queues, int) else self.random.choice(plan.queues)
        self.members: list[Member] = []
        self.ledger = Ledger(self.world) if plan.exactly_once else None
        self._sent = 0
        self._sending = True

    def run(self) -> History:
        """Run the scenario, and return its history."""
        random.seed(self.seed)  # for the pauses between attempts of a transaction
        try:
            return self.world.run_until_complete(self._run())
        finally:
            self.world.end_all(self.cluster)
            if self.ledger is not None:
                self.ledger.close()

    async def _run(self) -> History:
        await self.cluster.open()
        self.cluster.create_topic(TOPIC, queues=self.queues)
        self.history = history = History(self.cluster, GROUP, TOPIC)
        history.begins_at_the_end = self.plan.options.get("consume_from", "last") == "last"
        self._note_addresses()
        for number in range(self.plan.members):
            self._add(str(number))
        if self.ledger is not None:
            self.ledger.lost_answers = self.plan.lost_answers
        sending = self.world.create_task(self._send())
        await self._trouble()
        self._heal()
        sending.cancel()
        for member in self.members:
            member.is_calm = True
        await asyncio.sleep(self.plan.calm_s)
        history.settled_at = self.world.now
        for member in self.members:
            await member.close()
        if self.ledger is not None:
            history.ledger_rows, history.stored, history.busy = (
                self.ledger.rows(),
                self.ledger.offsets(),
                self.ledger.busy,
            )
        return history

    def _add(self, name: str) -> None:
        self.members.append(Member(name, self.world, self.history, self.cluster, self.plan, self.ledger))
        self.members[-1].start()

    def _note_addresses(self) -> None:
        """Note which member each connection belongs to."""
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
            for _ in range(self.random.choice(self.plan.bursts)):
                running = [broker for broker in self.cluster.brokers if broker.running]
                if running and self._sending:
                    name = self.random.choice(running).name
                    keys = self.plan.keys
                    sharding = {"__SHARDINGKEY": f"k{self.random.randrange(keys)}"} if keys else {}
                    self.cluster.send(TOPIC, b"m%d" % self._sent, broker_name=name, properties=sharding)
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
        if kind in ("crash", "power"):
            member.kill(power=kind == "power")
            world.call_later(rng.uniform(0.1, 20), member.start)
        elif kind == "restart" and member.running:
            await member.close()
            world.call_later(rng.uniform(0.1, 10), member.start)
        elif kind == "cut":
            world.network.cut(lambda end: end.process is member.process)
        elif kind == "part":
            self.history.disturbed_at.append(world.now)
            world.network.partition(lambda end: member.process in (end.process, end.peer.process), rng.uniform(0.5, 40))
        elif kind == "broker":
            broker = rng.choice(self.cluster.brokers)
            if broker.running:
                self.history.disturbed_at.append(world.now)
                broker.kill(lose_commits=self.plan.forgetting)
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
        elif kind == "reset" and not world.network.is_partitioned and self._each_queue_has_one_owner():
            member.reset(rng.random)
        elif kind == "misplace":
            await self._misplace()
        elif kind == "freeze" and member.process is not None:
            member.process.frozen_until = world.now + rng.uniform(1, 150)
        elif kind == "store-reset" and self.ledger is not None:
            self._reset_in_store(self.ledger)
        elif kind == "pause" and member.running:
            member.pause(rng.uniform(0.1, 10))
        elif kind == "join" and len(self.members) < self.plan.members + 2:
            self._add(str(len(self.members)))
        elif kind == "fail" and member.running and sum(each.running for each in self.members) > 1:
            member.fail()
        elif kind in NODES:
            self._disturb(kind, rng.uniform(1, 40))
        elif kind in CALLS:
            self._call(kind, member)

    def _reset_in_store(self, ledger: Ledger) -> None:
        """Reset the group in its database, as an operator does."""
        offsets = ledger.offsets()
        if offsets and (queue := self.random.choice(sorted(offsets))).topic == TOPIC:
            target = self.random.randrange(offsets[queue] + 1)
            with suppress(RocketError):
                ledger.store().reset(GROUP, {queue: target}, int(self.world.now))

    def _disturb(self, kind: str, seconds: float) -> None:
        """Make a node faulty for a while."""
        rng = self.random
        node: EmbeddedNode = rng.choice([*self.cluster.brokers, self.cluster.name_server_node])
        faults: dict[str, Callable[[], Fault]] = {
            "slow-node": lambda: rng.choice((delay, delay_request))(rng.choice((0.05, 0.5, 2, 4))),
            "silent-node": lambda: rng.choice((drop, drop_answer)),
            "refusing-node": lambda: now_and_then(
                rng.choice((0.1, 0.5, 1)), answer(rng.choice(REFUSALS), "not now"), rng
            ),
            "late-node": lambda: now_and_then(0.3, delay(rng.choice((2.5, 3.5, 10))), rng),
            "stammering-node": lambda: duplicate,
            "no-route": lambda: answer(ResponseCode.TOPIC_NOT_EXIST, "no route"),
        }
        fault, code = faults[kind](), None
        if kind == "no-route":
            node, code = self.cluster.name_server_node, RequestCode.GET_ROUTEINFO_BY_TOPIC
        self.history.disturbed_at.append(self.world.now)
        node.on(code, fault, times=None)
        self.world.call_later(seconds, node.clear_faults)

    def _call(self, kind: str, member: Member) -> None:
        """Let a member's program make a call, and perhaps stop waiting for it."""
        rng = self.random
        if kind == "cancelled-start":
            member.kill()
            member.start(cancelled_at=rng.randrange(200))
        elif not member.running:
            return
        elif kind == "cancelled-close":
            member.cancel_close(member.step_soon(), rng.uniform(0, 40))
        elif kind == "cancelled-reset":
            if not self.world.network.is_partitioned and self._each_queue_has_one_owner():
                member.reset(rng.random, cancelled_at=member.step_soon())
        elif kind == "unsubscribe":
            member.unsubscribe(rng.uniform(0, 5), rng.choice((None, member.step_soon())))

    async def _misplace(self) -> None:
        """While no member runs, move the group's offsets beyond the ends of queues. Brokers will correct them."""
        self._sending = False
        await asyncio.sleep(30)  # slow calls end, and failed messages are redelivered
        for member in self.members:
            await member.close()
        for broker in self.cluster.brokers:
            for number in range(self.queues):
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
        if self.ledger is not None:
            self.ledger.lost_answers = 0.0
        for node in (*self.cluster.nodes, *self.cluster.name_server_nodes):
            node.clear_faults()


def check(history: History, plan: Plan) -> None:
    """Check all rules that apply to the plan."""
    history.check_group_is_empty()
    history.check_nothing_is_left()
    if set(plan.faults) <= {"join", "restart", "reset", "fail", "slow-node"}:
        history.check_starts_and_closes_end(start_s=15, close_s=10)
    if plan.exactly_once:
        history.check_ledger()
        return
    if plan.broadcasting:
        history.check_every_member_consumed_everything()
        return
    history.check_no_message_is_skipped()
    history.check_resets_are_kept()
    if plan.orderly:
        history.check_unlocked_only_after_the_last_commit()
    if plan.keys:
        history.check_keys_are_in_order()
    if set(plan.faults) <= {"join", "restart"} and not plan.failing:
        history.check_queues_move_without_repeats(allowed_s=3.5 if plan.slow else 0.5)
    if set(plan.faults) <= {"join", "restart", "pause", "fail"}:
        history.check_former_owners_lower_no_commit()
    if not plan.faults and not plan.orderly:
        history.check_failures_go_back_soon(allowed_s=10)
    history.check_corrections_are_stored_first()
    history.check_everything_was_consumed()
