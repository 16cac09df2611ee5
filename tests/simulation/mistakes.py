"""Mistakes that clients make, put in on purpose: the simulation must find each. They exist for nothing else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from sqlalchemy.util import await_only

from pyrocket_consumer.consumer.assignments import Assignments
from pyrocket_consumer.consumer.by_key import KeyedService, KeyLine, KeyTurn, QueueLines
from pyrocket_consumer.consumer.commit import BrokerCommits
from pyrocket_consumer.consumer.consume import Chunk, _Runner, pop_all
from pyrocket_consumer.consumer.listener import Listener
from pyrocket_consumer.consumer.member import ConsumerState, GroupMember
from pyrocket_consumer.consumer.process_queue import ProcessQueue, QueueState
from pyrocket_consumer.consumer.tasks import Tasks
from pyrocket_consumer.errors import Fenced
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets import DatabaseOffsets
from pyrocket_consumer.offsets.claim import Claim
from pyrocket_consumer.offsets.database_statements import Statement, Statements
from pyrocket_consumer.producer import sender
from pyrocket_consumer.producer.sender import Sender
from pyrocket_consumer.producer.sending import Sending
from pyrocket_consumer.wire.codes import ResponseCode
from pyrocket_consumer.wire.frame import RemotingCommand
from pyrocket_consumer.wire.message import Message


def late_ack() -> None:
    """An acknowledgement that comes after a reset is stored all the same."""
    right = ProcessQueue.ack

    def ack(self: ProcessQueue, messages: Iterable[Message], elapsed_s: float = 0.0, units: int = 0) -> None:
        finished = list(messages)
        if self.state is QueueState.FENCED and finished:
            self._update_offset(self.queue, max(message.queue_offset for message in finished) + 1)
        right(self, finished, elapsed_s, units)

    ProcessQueue.ack = ack  # type: ignore[method-assign]


def commit_on_no_new_message() -> None:
    """An answer without messages moves the offset although messages are in flight."""
    right = ProcessQueue.put

    def put(self: ProcessQueue, messages: Sequence[Message], next_offset: int, size: int) -> bool:
        if not messages and self.state is QueueState.PULLING:
            self._update_offset(self.queue, next_offset)
        return right(self, messages, next_offset, size)

    ProcessQueue.put = put  # type: ignore[method-assign]


def drop_without_persist() -> None:
    """A queue that is given up is forgotten without its last offset being stored."""

    async def release(self: BrokerCommits, queue: MessageQueue) -> None:
        self.forget(queue)

    BrokerCommits.release = release  # type: ignore[method-assign]


def correction_without_store() -> None:
    """A correction is followed, but the new offset is not stored first."""

    async def store(self: Assignments, queue: MessageQueue, target: int, *rest: Any, **more: Any) -> None:
        self._commits.forget(queue)

    Assignments._store = store  # type: ignore[method-assign]


def unlock_before_commit() -> None:
    """An orderly queue is unlocked before its last offset is stored."""
    right = BrokerCommits.release

    async def release(self: BrokerCommits, queue: MessageQueue) -> None:
        await self._cluster.broker(queue.broker_name).unlock(self._group, [queue])
        await right(self, queue)

    BrokerCommits.release = release  # type: ignore[method-assign]


def start_not_stored() -> None:
    """Where a queue begins is stored nowhere before its first message is pulled."""

    async def store_start(self: Assignments, queue: MessageQueue, offset: int) -> None:
        pass

    Assignments._store_start = store_start  # type: ignore[method-assign]


def cancelled_move() -> None:
    """Whoever stops waiting for a step ends it in the middle."""

    async def finish(self: Tasks, work: Coroutine[Any, Any, Any], what: str) -> Any:
        return await work

    Tasks.finish = finish  # type: ignore[method-assign]


def chunk_that_keeps_a_failure() -> None:
    """A failed message is handed over only when the worker is through with its chunk, whatever else is in that."""

    def hand_over(self: _Runner, chunk: Chunk) -> None:
        chunk.window.ack(pop_all(chunk.done))

    _Runner.hand_over = hand_over  # type: ignore[method-assign]


def commit_after_the_grace() -> None:
    """A queue that is given up is stored only when its running listener calls have ended, or had their time."""
    waiting: set[tuple[Any, MessageQueue]] = set()
    end, grace, persist = Assignments._end, Assignments._grace, BrokerCommits.persist

    async def end_late(self: Assignments, queue: MessageQueue, why: str) -> None:
        waiting.add((self._commits, queue))
        await end(self, queue, why)

    async def end_of_grace(self: Assignments, window: ProcessQueue) -> None:
        await grace(self, window)
        waiting.discard((self._commits, window.queue))

    async def persist_late(self: BrokerCommits, queues: Iterable[MessageQueue], **options: Any) -> Any:
        return await persist(self, [queue for queue in queues if (self, queue) not in waiting], **options)

    Assignments._end, Assignments._grace = end_late, end_of_grace  # type: ignore[method-assign]
    BrokerCommits.persist = persist_late  # type: ignore[method-assign]


def failed_member_stays() -> None:
    """A member that has failed consumes nothing, and goes on telling brokers that it is there."""

    def surprised(self: GroupMember, what: str, error: BaseException) -> None:
        self.state, self.failure = ConsumerState.FAILED, error
        self.assignments.stop_pulling()
        self.on_ended()

    GroupMember._surprised = surprised  # type: ignore[method-assign]


# --- of offsets in a database


def _consuming_by(steps: Callable[[DatabaseOffsets, Claim, list[Message], Callable[..., Any]], None]) -> None:
    def consume_once(
        self: DatabaseOffsets, claim: Claim, messages: list[Message], call: Callable[..., Any], attempt: Any, **_: Any
    ) -> tuple[()]:
        def listen(*arguments: Any) -> None:
            attempt.step = "listener"
            call(*arguments)
            attempt.step = "bookkeeping"

        steps(self, claim, messages, listen)
        return ()

    DatabaseOffsets._consume_once = consume_once  # type: ignore[method-assign]


def _advance(store: DatabaseOffsets, claim: Claim, messages: list[Message]) -> None:
    with store._database.transaction() as scope:
        if not store._advance(scope.execute, claim, messages):
            raise Fenced(str(claim.queue))


def _effect(store: DatabaseOffsets, messages: list[Message], call: Callable[..., Any]) -> None:
    with store._database.transaction() as scope:
        call(messages, *scope.arguments)
    await_only(asyncio.sleep(0.05))


def commit_before_the_effect() -> None:
    """The offset is committed, and then the effect."""

    def steps(store: DatabaseOffsets, claim: Claim, messages: list[Message], call: Callable[..., Any]) -> None:
        _advance(store, claim, messages)
        _effect(store, messages, call)

    _consuming_by(steps)


def commit_after_the_listener() -> None:
    """The effect is committed, and then the offset: at least once, as everybody has it."""

    def steps(store: DatabaseOffsets, claim: Claim, messages: list[Message], call: Callable[..., Any]) -> None:
        _effect(store, messages, call)
        _advance(store, claim, messages)

    _consuming_by(steps)


def known_elsewhere() -> None:
    """What was consumed is noted, but not in the transaction of its effect."""
    known: set[tuple[str, MessageQueue, int]] = set()

    def steps(store: DatabaseOffsets, claim: Claim, messages: list[Message], call: Callable[..., Any]) -> None:
        places = {(store.address, message.queue, message.queue_offset): message for message in messages}
        if fresh := [message for place, message in places.items() if place not in known]:
            _effect(store, fresh, call)
        known.update(places)
        _advance(store, claim, messages)

    _consuming_by(steps)


def advance_first() -> None:
    """The offset advances before the listener is called: a member that stands still holds the row."""

    def steps(store: DatabaseOffsets, claim: Claim, messages: list[Message], call: Callable[..., Any]) -> None:
        with store._database.transaction() as scope:
            if not store._advance(scope.execute, claim, messages):
                raise Fenced(str(claim.queue))
            call(messages, *scope.arguments)

    _consuming_by(steps)


def _with_statement(name: str, old: str, new: str, without: str = "") -> None:
    right = Statements.__init__

    def init(self: Statements, *arguments: Any, **options: Any) -> None:
        right(self, *arguments, **options)
        statement: Statement = getattr(self, name)
        assert old in statement.text and statement._order is not None, statement.text
        order = [each for each in statement._order if each != without]
        setattr(self, name, Statement(statement.text.replace(old, new), order))

    Statements.__init__ = init  # type: ignore[method-assign]


def advance_without_the_epoch() -> None:
    """Whoever has messages of a queue advances it."""
    _with_statement("advance", " AND pyrocket_offsets.epoch = ?", "", "epoch")


def claim_without_a_new_epoch() -> None:
    """Who takes a queue over has the epoch of who had it before."""
    _with_statement("claim", "(pyrocket_offsets.epoch + 1)", "pyrocket_offsets.epoch")


def reset_that_leaves_the_epoch() -> None:
    """Calls that run while a queue is moved go on as if it had not been."""
    _with_statement("move", "(pyrocket_offsets.epoch + 1)", "pyrocket_offsets.epoch")
    _with_statement("reset", "(pyrocket_offsets.epoch + 1)", "pyrocket_offsets.epoch")


def claim_that_moves_along() -> None:
    """What runs for a queue while it is moved goes by the new claim."""
    right = DatabaseOffsets.move

    def move(self: DatabaseOffsets, claim: Claim, *arguments: Any) -> Claim:
        fresh = right(self, claim, *arguments)
        claim.epoch, claim.reset_epoch, claim.stored, claim.last = fresh.epoch, fresh.reset_epoch, fresh.stored, None
        return claim

    DatabaseOffsets.move = move  # type: ignore[method-assign]


# --- of order by key


def two_workers_on_one_key() -> None:
    """A message of a key that a worker has is handed to another one."""
    right = QueueLines.add

    def add(self: QueueLines, line: KeyLine, listener: Listener, message: Message) -> None:
        if isinstance(line.holder, KeyTurn):
            line.holder = None
        right(self, line, listener, message)

    QueueLines.add = add  # type: ignore[method-assign]


def retry_behind_the_next() -> None:
    """A message that failed comes again behind what waits of its key."""

    def put_back(self: KeyLine, listener: Listener, messages: Iterable[Message]) -> None:
        self.waiting.extend((listener, message) for message in messages)

    KeyLine.put_back = put_back  # type: ignore[method-assign]


def rest_of_a_key_goes_on() -> None:
    """What a worker has in hand of a key goes on although a message of it has failed."""
    right = KeyTurn.judge

    def judge(self: KeyTurn, unit: Any, result: object) -> tuple[bool, bool]:
        todo, self.chunk.todo = self.chunk.todo, deque()
        try:
            return right(self, unit, result)
        finally:
            self.chunk.todo = todo

    def resume(self: KeyedService, lines: QueueLines, line: KeyLine) -> None:
        if line in lines.paused:  # two failures of one key are two pauses
            resume_right(self, lines, line)

    resume_right = KeyedService._resume
    KeyTurn.judge, KeyedService._resume = judge, resume  # type: ignore[method-assign]


def unlock_while_a_key_runs() -> None:
    """A queue is handed over without a look at the calls that run."""
    KeyedService.running = lambda self, window=None: 0  # type: ignore[method-assign]


MISTAKES: dict[str, Callable[[], None]] = {
    mistake.__name__.replace("_", "-"): mistake
    for mistake in (
        late_ack, commit_on_no_new_message, drop_without_persist, correction_without_store, unlock_before_commit,
        start_not_stored, cancelled_move, chunk_that_keeps_a_failure, commit_after_the_grace, failed_member_stays,
        commit_before_the_effect, commit_after_the_listener, known_elsewhere, advance_first,
        advance_without_the_epoch, claim_without_a_new_epoch, reset_that_leaves_the_epoch, claim_that_moves_along,
        two_workers_on_one_key, retry_behind_the_next, rest_of_a_key_goes_on, unlock_while_a_key_runs,
    )
}  # fmt: skip


# --- of producers


def attempts_not_told() -> None:
    """A message that was sent twice looks as if it had been sent once."""
    right = Sending.results

    def results(self: Sending, queue: MessageQueue, answer: RemotingCommand) -> Any:
        self.handed = 1
        return right(self, queue, answer)

    Sending.results = results  # type: ignore[method-assign]


def key_ignored() -> None:
    """Messages with a key go where there is room."""
    right = Sender.begin

    def begin(self: Sender, sending: Sending) -> None:
        sending.sharding_key = None
        right(self, sending)

    Sender.begin = begin  # type: ignore[method-assign]


def old_route_kept() -> None:
    """What says that a queue is not here any more has no route asked for."""
    sender.asks_for_route = lambda error: False


def told_before_it_is_stored() -> None:
    """A message that was refused as "busy" is taken for stored."""
    right = Sender._answered

    def answered(self: Sender, sending: Sending, queue: MessageQueue, *rest: Any) -> None:
        if isinstance(answer := rest[-1], RemotingCommand) and answer.code == ResponseCode.SYSTEM_BUSY:
            answer.code = ResponseCode.SUCCESS
            answer.fields.update(queueId=str(queue.queue_id), queueOffset="0", msgId="0" * 32)
        right(self, sending, queue, *rest)

    Sender._answered = answered  # type: ignore[method-assign]


PRODUCER_MISTAKES: dict[str, Callable[[], None]] = {
    "attempts-not-told": attempts_not_told,
    "key-ignored": key_ignored,
    "old-route-kept": old_route_kept,
    "told-before-it-is-stored": told_before_it_is_stored,
}
