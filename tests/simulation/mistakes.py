"""Mistakes that clients make, planted on purpose. The simulation must find each of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy.util import await_only

from pyrocket_consumer.consumer.assignment.assignments import Assignments
from pyrocket_consumer.consumer.assignment.held_queue import HeldQueue
from pyrocket_consumer.consumer.commits.broker import BrokerCommits
from pyrocket_consumer.consumer.commits.commits import CommitRecord
from pyrocket_consumer.consumer.context.tasks import Tasks
from pyrocket_consumer.consumer.dispatch.lanes import Lane, Lanes
from pyrocket_consumer.consumer.dispatch.ordered import LaneChunk, OrderedService
from pyrocket_consumer.consumer.dispatch.workers import Workers, pop_all
from pyrocket_consumer.consumer.member import ConsumerState, GroupMember
from pyrocket_consumer.consumer.window.process_queue import ProcessQueue
from pyrocket_consumer.errors import Fenced
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.offsets.database.statements import Statement, Statements
from pyrocket_consumer.producer import send_dispatcher
from pyrocket_consumer.producer.send_dispatcher import SendDispatcher
from pyrocket_consumer.producer.send_request import SendRequest
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.frame import RemotingCommand

MISTAKES: dict[str, Callable[[], None]] = {}
PRODUCER_MISTAKES: dict[str, Callable[[], None]] = {}


def replace(owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replace a method by `wrong`, which gets the right method as its first argument."""
    right = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: wrong(right, *arguments, **options))


def mistake(owner: Any = None, name: str = "", of: dict[str, Callable[[], None]] = MISTAKES) -> Any:
    """Register a mistake: a wrong method, or without an owner a function that plants the mistake."""

    def keep(wrong: Callable[..., Any]) -> Callable[..., Any]:
        of[wrong.__name__.replace("_", "-")] = wrong if owner is None else lambda: replace(owner, name, wrong)
        return wrong

    return keep


@mistake()
def late_ack():
    """An acknowledgement after a reset is stored anyway."""
    queues: WeakKeyDictionary[ProcessQueue, HeldQueue] = WeakKeyDictionary()

    def open_window(right, self, held, *rest):
        window, pulls = right(self, held, *rest)
        queues[window] = held
        return window, pulls

    def ack(right, self, messages, elapsed_s=0.0, units=0):
        finished = list(messages)
        if self.fenced and finished:
            commit = queues[self].commit
            commit.window, commit.offset = None, max(message.queue_offset for message in finished) + 1
        right(self, finished, elapsed_s, units)

    replace(Assignments, "_open", open_window)
    replace(ProcessQueue, "ack", ack)


@mistake()
def commit_on_no_new_message():
    """A pull response without messages moves the offset although messages are in flight."""
    moved: WeakKeyDictionary[ProcessQueue, int] = WeakKeyDictionary()

    def put(right, self, messages, next_offset, size):
        if not messages and not self.dropped:
            moved[self] = next_offset
        return right(self, messages, next_offset, size)

    replace(ProcessQueue, "put", put)
    replace(ProcessQueue, "commit_offset", lambda right, self: max(right(self), moved.get(self, 0)))


@mistake(BrokerCommits, "release")
async def drop_without_persist(right, self, record):
    """A member gives up a queue without storing its last offset."""
    self.forget(record)


@mistake(HeldQueue, "_store")
async def correction_without_store(right, self, target):
    """A member follows a correction before it stores the new offset."""
    self._parts.commits.forget(self.commit)
    return True


@mistake(BrokerCommits, "release")
async def unlock_before_commit(right, self, record):
    """An orderly queue is unlocked before its last offset is stored."""
    await self._cluster.broker(record.queue.broker_name).unlock(self._group, [record.queue])
    await right(self, record)


@mistake(HeldQueue, "_store_start")
async def start_not_stored(right, self, offset):
    """The start offset of a queue is not stored before its first pull, nor later unless it moves."""
    self.commit.persisted = offset


@mistake(Tasks, "finish")
async def cancelled_move(right, self, work, what):
    """A caller that stops waiting for a step cancels it in the middle."""
    return await work


@mistake(Workers, "report_finished")
def chunk_that_keeps_a_failure(right, self, chunk):
    """A failed message is sent back only after the worker has finished its whole chunk."""
    chunk.window.ack(pop_all(chunk.done))


@mistake()
def commit_after_the_grace():
    """A member stores a queue that it gives up only after the running listener calls, or their grace time, end."""
    waiting: set[CommitRecord] = set()

    async def end_late(end, self, why):
        waiting.add(self.commit)
        await end(self, why)

    async def end_of_grace(grace, self):
        await grace(self)
        waiting.discard(self.commit)

    async def persist_late(persist, self, records, **options):
        return await persist(self, [record for record in records if record not in waiting], **options)

    replace(HeldQueue, "_end", end_late)
    replace(HeldQueue, "_wait_for_calls", end_of_grace)
    replace(BrokerCommits, "persist", persist_late)


@mistake(GroupMember, "unexpected_error")
def failed_member_stays(right, self, what, error):
    """A failed member consumes nothing, and still sends heartbeats."""
    self.state, self.failure = ConsumerState.FAILED, error
    self.assignments.stop_pulling()
    self.on_ended()


# --- offsets in a database


def mistaken_steps(steps: Callable[..., None]) -> Callable[..., None]:
    """Register a mistake: the store consumes in these steps, and not in one transaction."""

    def consume_once(right, self, claim, messages, call, attempt, **_):
        def listen(*arguments):
            attempt.step = "listener"
            call(*arguments)
            attempt.step = "bookkeeping"

        steps(self, claim, messages, listen)
        return ()

    consume_once.__name__ = steps.__name__
    mistake(DatabaseOffsets, "_consume_once")(consume_once)
    return steps


def _advance(store, claim, messages, then=lambda scope: None):
    with store._database.transaction() as scope:
        if not store._advance(scope.execute, claim, messages):
            raise Fenced(str(claim.queue))
        then(scope)


def _effect(store, messages, call):
    with store._database.transaction() as scope:
        call(messages, *scope.arguments)
    await_only(asyncio.sleep(0.05))


@mistaken_steps
def commit_before_the_effect(store, claim, messages, call):
    """The offset is committed before the effect."""
    _advance(store, claim, messages)
    _effect(store, messages, call)


@mistaken_steps
def commit_after_the_listener(store, claim, messages, call):
    """The effect is committed before the offset: at least once, as in other clients."""
    _effect(store, messages, call)
    _advance(store, claim, messages)


KNOWN: set[tuple[str, MessageQueue, int]] = set()


@mistaken_steps
def known_elsewhere(store, claim, messages, call):
    """Consumed messages are noted outside of the transaction of their effect."""
    places = {(store.address, message.queue, message.queue_offset): message for message in messages}
    if fresh := [message for place, message in places.items() if place not in KNOWN]:
        _effect(store, fresh, call)
    KNOWN.update(places)
    _advance(store, claim, messages)


@mistaken_steps
def advance_first(store, claim, messages, call):
    """The offset advances before the listener runs, so a frozen member keeps the row locked."""
    _advance(store, claim, messages, lambda scope: call(messages, *scope.arguments))


def _with_statement(name: str, old: str, new: str, without: str = "") -> None:
    def init(right, self, *arguments, **options):
        right(self, *arguments, **options)
        statement: Statement = getattr(self, name)
        assert old in statement.text and statement._order is not None, statement.text
        order = [each for each in statement._order if each != without]
        setattr(self, name, Statement(statement.text.replace(old, new), order))

    replace(Statements, "__init__", init)


@mistake()
def advance_without_the_epoch():
    """A former owner of a queue can advance it, also from an offset before its own."""
    _with_statement("advance", " AND pyrocket_offsets.epoch = ?", "", "epoch")
    _with_statement("advance", " AND pyrocket_offsets.next_offset >= ?", "", "known")


@mistake()
def claim_without_a_new_epoch():
    """A new owner of a queue has the epoch of the former one."""
    _with_statement("claim", "(pyrocket_offsets.epoch + 1)", "pyrocket_offsets.epoch")


@mistake()
def reset_that_leaves_the_epoch():
    """Calls that run during a reset can still commit."""
    _with_statement("move", "(pyrocket_offsets.epoch + 1)", "pyrocket_offsets.epoch")
    _with_statement("reset", "(pyrocket_offsets.epoch + 1)", "pyrocket_offsets.epoch")


@mistake(DatabaseOffsets, "move")
def claim_that_moves_along(right, self, claim, *arguments):
    """Calls that run while a queue is moved use the new claim."""
    fresh = right(self, claim, *arguments)
    claim.epoch, claim.reset_epoch, claim.stored, claim.last = fresh.epoch, fresh.reset_epoch, fresh.stored, None
    return claim


# --- order by key


@mistake(Lanes, "add")
def two_workers_on_one_key(right, self, lane, listener, message):
    """Two workers get messages of one key at the same time."""
    if isinstance(lane.holder, LaneChunk):
        lane.holder = None
    right(self, lane, listener, message)


@mistake(Lane, "insert")
def retry_behind_the_next(right, self, entries):
    """A failed message is retried after the waiting messages of its key."""
    self.waiting.extend(entries)


@mistake()
def rest_of_a_key_continues():
    """A worker continues with its other messages of a key although one has failed."""

    def apply_result(right, self, unit, result):
        todo, self.todo = self.todo, deque()
        try:
            return right(self, unit, result)
        finally:
            self.todo = todo

    def resume(right, self, lanes, lane):
        if lane in lanes.paused:  # two failures of one key are two pauses
            right(self, lanes, lane)

    replace(LaneChunk, "apply_result", apply_result)
    replace(OrderedService, "_resume", resume)


@mistake(OrderedService, "running")
def unlock_while_a_key_runs(right, self, window=None):
    """A queue is handed over without waiting for running calls."""
    return 0


# --- producers


@mistake(SendRequest, "results", of=PRODUCER_MISTAKES)
def attempts_not_reported(right, self, queue, answer):
    """A message sent twice reports one attempt."""
    self.possible_stores = 1
    return right(self, queue, answer)


@mistake(SendDispatcher, "dispatch", of=PRODUCER_MISTAKES)
def key_ignored(right, self, request):
    """Messages with a key are sent to any queue."""
    request.sharding_key = None
    right(self, request)


@mistake(send_dispatcher, "is_route_stale", of=PRODUCER_MISTAKES)
def old_route_kept(right, error):
    """An error about a missing queue does not make the producer fetch the route."""
    return False


@mistake(SendDispatcher, "_handle_response", of=PRODUCER_MISTAKES)
def acknowledged_before_it_is_stored(right, self, sending, queue, *rest):
    """A message refused as "busy" counts as stored."""
    if isinstance(answer := rest[-1], RemotingCommand) and answer.code == ResponseCode.SYSTEM_BUSY:
        answer.code = ResponseCode.SUCCESS
        answer.fields.update(queueId=str(queue.queue_id), queueOffset="0", msgId="0" * 32)
    right(self, sending, queue, *rest)
