"""Run simulated producers with faulty brokers: python -m tests.simulation.producing --seeds 0-99

The brokers are slow, silent or refusing, or they restart, or their queues and addresses change. Even so, no
acknowledged message may be missing, messages with a key keep their order, and each message has a result. A seed
repeats its world exactly.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ProducerConfig
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.producer.send_dispatcher import SendDispatcher
from pyrocket_consumer.producer.send_request import SendRequest
from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.protocol.message import BatchItem, decode_batch, encode_batch
from pyrocket_consumer.protocol.properties import PropertyName, encode_properties
from pyrocket_consumer.testing import EmbeddedBroker, EmbeddedCluster, EmbeddedNode, Exchange, Fault, faults
from pyrocket_consumer.testing.faults import answer, delay, delay_request, drop, drop_answer, duplicate, now_and_then
from tests.simulation.member import WorldIoThread
from tests.simulation.mistakes import PRODUCER_MISTAKES
from tests.simulation.plans import EPOCH
from tests.simulation.running import main
from tests.simulation.sent import SendLog, SentMessage, Stored, Stream, Waiter
from tests.simulation.world import START_S, World

TOPIC = "orders"

SENDS = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)

REFUSALS = (
    (ResponseCode.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while"),
    (ResponseCode.SYSTEM_BUSY, "[PCBUSY_CLEAN_QUEUE]broker busy, start flow control for a while"),
    (ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while"),
    (ResponseCode.SERVICE_NOT_AVAILABLE, "service not available now. It may be caused by the broker's disk is full"),
    (ResponseCode.NO_PERMISSION, "the broker[127.0.0.1:10911] sending message is forbidden"),
    (ResponseCode.TOPIC_NOT_EXIST, "topic[orders] not exist, apply first please!"),
    (ResponseCode.SYSTEM_ERROR, "request queueId[3] is illegal, TopicConfig [topicName=orders]"),
    (ResponseCode.INVALID_PARAMETER, "request queueId[3] is illegal, TopicConfig [topicName=orders]"),
    (ResponseCode.FLOW_CONTROL, "flow control"),
)

BREAKS = (faults.close_connection, faults.reset_connection, faults.handle_and_close)

ROUTE_CHANGES = ("restart", "shrink", "grow", "recreated", "roles")

TROUBLES = ("slow", "silent", "refusing", "late", "losing", "stammering", "breaking", "cut", "name-server", "gone")

STREAMS = (
    Stream("free"),
    Stream("free and waited for", is_waited_for=True),
    Stream("batches", batch=3),
    Stream("one-way", is_oneway=True),
    Stream("key a", sharding_key="a"),
    Stream("key b", sharding_key="b"),
    Stream("key c, waited for", sharding_key="c", is_waited_for=True),
    Stream("key d, batches", sharding_key="d", batch=3),
    Stream("queue 0 of broker-a", queue=MessageQueue(TOPIC, "broker-a", 0)),
    Stream("queue 5 of broker-a, waited for", queue=MessageQueue(TOPIC, "broker-a", 5), is_waited_for=True),
)


@dataclass(frozen=True)
class Plan:
    """The settings of a world. Times are virtual seconds. The producer has default options, except for `options`."""

    faults: tuple[str, ...]
    brokers: int = 2
    version: str = "5.5.0"
    trouble_s: float = 40.0
    fault_every_s: float = 3.0
    at_least_every_s: float = 0.0  # so that one fault is over before the next
    downtime_s: tuple[float, float] = (0.05, 6.0)  # how long a restart of a broker takes
    rate: float = 5.0  # of each stream, per second
    bursts: tuple[int, ...] = (1, 1, 1, 1, 15)
    options: Mapping[str, Any] = field(default_factory=dict)


PLANS = {
    "routes": Plan(ROUTE_CHANGES, fault_every_s=1.0, at_least_every_s=5.0, downtime_s=(0.05, 0.9)),
    "one-broker": Plan(("restart", "shrink", "grow"), brokers=1, at_least_every_s=5.0, downtime_s=(0.05, 0.9)),
    "old-broker": Plan(ROUTE_CHANGES, version="4.9.7", fault_every_s=1.0, at_least_every_s=5.0, downtime_s=(0.05, 0.9)),
    "brokers": Plan(TROUBLES),
    "all": Plan((*TROUBLES, *ROUTE_CHANGES), fault_every_s=1.5),
    "one-in-trouble": Plan((*TROUBLES, *ROUTE_CHANGES), brokers=1),
    "one-attempt": Plan((*TROUBLES, *ROUTE_CHANGES), options={"send_attempts": 1}),
    "bursts": Plan(TROUBLES, rate=0.5, bursts=(1, 100)),
}
"""Plans with only changes of the route have two more rules: all streams recover soon, and no message fails."""


class _Watched:
    """An exchange with a broker that notes stored messages. A waiting request ends with its connection."""

    def __init__(self, exchange: Exchange, note: Callable[[RemotingCommand, RemotingCommand], None]) -> None:
        self._exchange, self._note = exchange, note
        self.request, self.connection = exchange.request, exchange.connection
        self.later, self.answer = exchange.later, exchange.answer

    def handle(self, on_answer: Callable[[RemotingCommand], None]) -> None:
        if not self.connection.open:
            return  # otherwise a broker could still store the message long after its connection is closed

        def noted(answer: RemotingCommand) -> None:
            self._note(self.request, answer)
            on_answer(answer)

        self._exchange.handle(noted)


class ProducerScenario:
    """A plan with a seed: a producer, brokers with slaves, and faults."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.seed, self.plan = seed, plan
        self.world = World(seed)
        self.random = self.world.random
        self.embedded = EmbeddedCluster(
            brokers=plan.brokers,
            slaves=1,
            version=plan.version,
            auto_create_topics=False,
            loop=self.world,
            first_port=10_000,
            seed=seed,
            wall_clock=lambda: EPOCH + self.world.now,
            record_limit=1,
        )
        self.sent = SendLog()
        self._numbers = 0
        self._troubled: dict[EmbeddedNode, Fault] = {}
        self._is_over = False

    def run(self) -> SendLog:
        """Run the scenario, and return its log."""
        try:
            return self.world.run_until_complete(self._run())
        finally:
            self.world.end_all(self.embedded)

    async def _run(self) -> SendLog:
        world, sent = self.world, self.sent
        await self.embedded.open()
        self.embedded.create_topic(TOPIC, queues=8)
        for node in self.embedded.nodes:
            node.on(None, self._fault_of(node), times=None)
        producer = world.process("producer")
        await world.run_as(producer, self._begin())
        sending = [world.run_as(producer, self._send_all(stream)) for stream in STREAMS]
        await self._trouble()
        self._heal()
        await asyncio.sleep(15)  # stopped nodes continue, and the producer retries dead addresses
        sent.ended_at = world.now
        await asyncio.sleep(3)
        self._is_over = True
        await asyncio.wait(sending)
        await world.run_as(producer, self._close())
        await asyncio.sleep(1)
        sent.left = world.leftovers_of(producer)
        for work in sending:
            work.result()
        return sent

    # --- the producer

    async def _begin(self) -> None:
        config = ProducerConfig(name_server=self.embedded.name_server, **self.plan.options)
        rng = random.Random(self.random.random())
        self.cluster = Cluster(config, "10.0.0.1@1", io=WorldIoThread(self.world), rng=rng)  # type: ignore[arg-type]
        self.cluster.membership.add_producer(config.group)
        await self.cluster.start_on_loop()
        self.config = config
        self.dispatcher = SendDispatcher(self.cluster, config, config.group, lambda sending: None, rng)

    async def _close(self) -> None:
        began = self.world.now
        while any(given.ended is None for given in self.sent.given):
            if self.world.now > began + 60:
                break  # `check_everything_ended` reports the message
            await asyncio.sleep(0.1)
        self.sent.close_took_s = self.world.now - began
        self.dispatcher.abandon()
        await self.cluster.close_on_loop()

    async def _send_all(self, stream: Stream) -> None:
        while not self._is_over:
            await asyncio.sleep(self.random.expovariate(self.plan.rate))
            for _ in range(self.random.choice(self.plan.bursts)):
                ended = self._send_one(stream)
                if stream.is_waited_for:
                    await ended.wait()

    def _send_one(self, stream: Stream) -> asyncio.Event:
        """Send a message or a batch. Return an event that is set with its result."""
        messages = stream.batch or 1
        given = SentMessage(self._numbers, messages, stream, self.world.now, self.config.send_timeout_s)
        self._numbers += messages
        self.sent.given.append(given)
        ids = tuple(f"{given.number + index:032X}" for index in range(messages))
        properties = [encode_properties({PropertyName.UNIQUE_KEY: each}) for each in ids]
        body, ended = b"%d" % given.number, asyncio.Event()
        if stream.batch:
            body = encode_batch(
                BatchItem(b"%d" % (given.number + index), each, 0) for index, each in enumerate(properties)
            )
        self.dispatcher.dispatch(
            SendRequest(
                topic=TOPIC,
                shown_topic=TOPIC,
                body=body,
                properties="" if stream.batch else properties[0],
                message_ids=ids,
                sink=Waiter(given, self.world.time, ended.set),
                timeout_s=given.timeout_s,
                born_at_ms=int((EPOCH + self.world.now) * 1000),
                deadline=self.world.now + given.timeout_s,
                is_batch=bool(stream.batch),
                is_oneway=stream.is_oneway,
                queue=stream.queue,
                sharding_key=stream.sharding_key,
                is_blocking=stream.is_waited_for,
            )
        )
        return ended

    # --- the brokers

    def _fault_of(self, node: EmbeddedBroker) -> Fault:
        """Return the fault for all requests to `node`: it notes stored messages, and applies the current fault."""

        def note(request: RemotingCommand, answer: RemotingCommand) -> None:
            if answer.code != ResponseCode.SUCCESS:
                return
            bodies = [request.body]
            if request.code == RequestCode.SEND_BATCH_MESSAGE:
                bodies = [item.body for item in decode_batch(request.body)]
            queue = MessageQueue(TOPIC, node.name, int(answer.fields["queueId"]))
            first = int(answer.fields["queueOffset"])
            for index, body in enumerate(bodies):
                self.sent.stored.append((int(body), Stored(self.world.now, (queue, first + index))))

        def meet(exchange: Exchange) -> None:
            if exchange.request.code in SENDS:
                exchange = _Watched(exchange, note)
            if (fault := self._troubled.get(node)) is not None:
                fault(exchange)
            else:
                exchange.handle(exchange.answer)

        return meet

    async def _trouble(self) -> None:
        end = START_S + self.plan.trouble_s
        while self.world.now < end:
            await asyncio.sleep(self.plan.at_least_every_s + self.random.expovariate(1 / self.plan.fault_every_s))
            await self._fault(self.random.choice(self.plan.faults))

    def _changed(self, what: str) -> None:
        self.sent.changes.append((self.world.now, what))

    async def _fault(self, kind: str) -> None:
        rng, embedded = self.random, self.embedded
        broker = rng.choice(embedded.brokers)
        if kind == "restart":
            end = rng.choice((broker.kill, broker.stop))
            end(keep_route=rng.random() < 0.5)
            await asyncio.sleep(rng.uniform(*self.plan.downtime_s))
            await broker.open()
            self._changed(f"{broker.name} is back")
        elif kind == "shrink":
            # As real brokers do when a topic changes: the messages of the other queues stay there.
            embedded.create_topic(TOPIC, queues=2, brokers=self._with_topic())
            self._changed("two queues")
        elif kind == "grow":
            embedded.create_topic(TOPIC, queues=8, brokers=self._with_topic())
            self._changed("eight queues")
        elif kind == "recreated":
            elsewhere = [rng.choice(embedded.brokers).name]
            embedded.delete_topic(TOPIC)
            embedded.create_topic(TOPIC, queues=rng.choice((2, 8)), brokers=elsewhere)
            self._changed(f"created again on {elsewhere}")
        elif kind == "roles":
            embedded.switch_master(broker.name)
            self._changed(f"{broker.name} has another master")
        elif kind == "gone":
            embedded.delete_topic(TOPIC)
            await asyncio.sleep(rng.uniform(0, 2))
            embedded.create_topic(TOPIC, queues=8)
        elif kind == "cut":
            self.world.network.cut(lambda end: rng.random() < 0.7)
        elif kind == "name-server":
            node = embedded.name_server_node
            if node.running:
                node.stop_now()
                await asyncio.sleep(rng.uniform(0.1, 8))
                await node.open()
        else:
            self._disturb(rng.choice(embedded.nodes), kind, rng.uniform(0.1, 8))

    def _with_topic(self) -> list[str]:
        """Return the brokers that have the topic."""
        return [broker.name for broker in self.embedded.brokers if TOPIC in broker.core.topics]

    def _disturb(self, node: EmbeddedNode, kind: str, seconds: float) -> None:
        """Make a broker faulty for a while."""
        rng = self.random
        faults: dict[str, Callable[[], Fault]] = {
            "slow": lambda: rng.choice((delay, delay_request))(rng.choice((0.02, 0.2, 1, 2.9))),
            "silent": lambda: rng.choice((drop, drop_answer)),
            "refusing": lambda: now_and_then(rng.choice((0.1, 0.5, 1)), answer(*rng.choice(REFUSALS)), rng),
            "late": lambda: now_and_then(0.3, rng.choice((delay, delay_request))(rng.choice((2.5, 3.5, 10))), rng),
            "losing": lambda: now_and_then(0.3, rng.choice((drop, drop_answer)), rng),
            "stammering": lambda: duplicate,
            "breaking": lambda: now_and_then(0.2, rng.choice(BREAKS), rng),
        }
        fault = faults[kind]()
        self._troubled[node] = fault
        self.world.call_later(seconds, lambda: self._troubled.get(node) is fault and self._troubled.pop(node))

    def _heal(self) -> None:
        self._troubled.clear()
        self.embedded.create_topic(TOPIC, queues=8)


def check(sent: SendLog, plan: Plan) -> None:
    """Check all rules."""
    sent.check_errors_are_documented()
    sent.check_nothing_acknowledged_is_missing()
    sent.check_order()
    sent.check_everything_ended()
    sent.check_copies_are_reported(plan.options.get("send_attempts", 3))
    if set(plan.faults) <= set(ROUTE_CHANGES):
        sent.check_recovers(allowed_s=2.0)
        sent.check_only_chosen_queues_fail()
    sent.check_works_in_the_end(sent.ended_at)
    sent.check_nothing_is_left(close_s=30)


if __name__ == "__main__":
    module = "tests.simulation.producing"
    sys.exit(main(module, __doc__, PLANS, PRODUCER_MISTAKES, lambda *world: ProducerScenario(*world).run(), check))
