"""Events of a consumer: counting, limiting and passing them to `on_event` in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from pyrocket_consumer.errors import MOST_OF_A_REMARK, ProtocolError
from pyrocket_consumer.model import ConsumerEvent, EventKind, MessageQueue
from pyrocket_consumer.protocol.message import Message
from pyrocket_consumer.text import escape_controls, logger, safe_repr, truncate
from pyrocket_consumer.transport.backoff import Backoff

log = logger("consumer")


MAX_WAITING = 10_000
"""The largest number of events that wait for a slow `on_event`."""


LIMITED_KINDS = frozenset(
    {
        EventKind.OFFSET_CORRECTED,
        EventKind.OFFSET_RESET,
        EventKind.RANGE_SKIPPED,
        EventKind.OFFSET_WENT_BACK,
        EventKind.REQUEST_REFUSED,
        EventKind.ANSWER_REFUSED,
        EventKind.RECORD_IGNORED,
        EventKind.BROKER_UNREACHABLE,
        EventKind.COMMIT_FAILED,
        EventKind.LOCK_LOST,
        EventKind.QUEUE_FENCED,
        EventKind.STORE_UNREACHABLE,
    }
)
"""Kinds that a server can cause without limit. Each of the others concerns a message or an action of the user."""

LIMITED_IN_LOG = frozenset(
    {
        EventKind.LISTENER_FAILED,
        EventKind.MESSAGE_SENT_BACK,
        EventKind.MESSAGE_GIVEN_UP,
        EventKind.MESSAGE_TOO_LARGE,
        EventKind.SEND_BACK_FAILED,
    }
)
"""Kinds with one event for each message. `on_event` gets all of them, and the log gets some."""

EVENT_BURST = 20
"""The number of events of one kind and queue without a limit. Later ones are emitted at growing intervals."""

LONGEST_INTERVAL_S = 60.0
INTERVALS = Backoff(1.0, LONGEST_INTERVAL_S, free=EVENT_BURST - 1)
MAX_KNOWN_SERIES = 4096


@dataclass(slots=True)
class _Series:
    """Events of one kind, for one queue."""

    emitted: int = 0
    suppressed: int = 0
    last_at: float = 0.0
    quiet_until: float = 0.0


class EventLimiter:
    """Limits floods of events: it admits the first ones of a kind and queue, then one in each growing interval."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[EventKind, MessageQueue | None], _Series] = {}
        self._lock = threading.Lock()

    def admit(self, kind: EventKind, queue: MessageQueue | None) -> int | None:
        """Return the number of events suppressed before this one, or None if this one is suppressed."""
        if kind not in LIMITED_KINDS and kind not in LIMITED_IN_LOG:
            return 0
        now = self._clock()
        with self._lock:
            series = self._known.pop((kind, queue), None)
            if series is None or now - series.last_at > LONGEST_INTERVAL_S and now > series.quiet_until:
                series = _Series(suppressed=series.suppressed if series else 0)
            self._known[kind, queue] = series  # the newest entry is the last, so the first one is the oldest
            if len(self._known) > MAX_KNOWN_SERIES:
                del self._known[next(iter(self._known))]
            series.last_at = now
            if now < series.quiet_until:
                series.suppressed += 1
                return None
            series.emitted += 1
            series.quiet_until = now + INTERVALS.pause_s(series.emitted)
            suppressed, series.suppressed = series.suppressed, 0
            return suppressed


class Events:
    """Counts events and calls `on_event` for each on a separate thread, so a slow `on_event` delays nothing.

    Any thread may emit. The thread is a daemon, so an `on_event` that never returns does not keep the process alive.
    """

    def __init__(self, on_event: Callable[[ConsumerEvent], None] | None, group: str = "") -> None:
        self.counts: dict[str, int] = {}
        self._on_event = on_event
        self._group = group
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[ConsumerEvent | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unsent = 0
        self._raised = False
        self._closed = False

    def count(self, kind: EventKind) -> None:
        """Count an event without emitting it."""
        with self._lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def emit(self, event: ConsumerEvent) -> None:
        """Count an event and pass it to `on_event`."""
        with self._lock:
            self.counts[event.kind] = self.counts.get(event.kind, 0) + 1
            if self._on_event is None or self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pyrocket-events", daemon=True)
                self._thread.start()
            if self._waiting.qsize() < MAX_WAITING:
                self._waiting.put(event)
            else:
                self._unsent += 1

    def close(self) -> None:
        """Pass the events emitted so far to `on_event`, and end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)

    def _run(self) -> None:
        assert self._on_event is not None
        while (event := self._waiting.get()) is not None:
            self._call(event)
            if self._unsent and self._waiting.qsize() < MAX_WAITING // 2:
                with self._lock:
                    unsent, self._unsent = self._unsent, 0
                text = (
                    f"{unsent} events were not passed on because on_event takes too long; each was counted and logged"
                )
                self._call(ConsumerEvent(EventKind.EVENTS_LEFT_OUT, text, None, {"count": unsent}))

    def _call(self, event: ConsumerEvent) -> None:
        assert self._on_event is not None
        try:
            self._on_event(event)
        except BaseException as error:
            trace = None if self._raised else error  # one traceback shows the cause; more of them only fill the log
            self._raised = True
            log.error("group=%s on_event raised %s for %s", self._group, safe_repr(error), event, exc_info=trace)


def describe_error(error: BaseException) -> str:
    """Return an exception of user code as one line for tools. The str of some exceptions raises."""
    try:
        return escape_controls(truncate(f"{type(error).__name__}: {error}", MOST_OF_A_REMARK))
    except BaseException:  # also SystemExit, because code of users must not end the thread that formats it
        return escape_controls(f"{truncate(type(error).__name__, MOST_OF_A_REMARK)}, whose str raises")


def describe_key(message: Message) -> str | None:
    """Return the key of a message as text; None without `order_by`, and before `order_by` was called."""
    lane = getattr(message, "_key_lane", None)
    return None if lane is None else lane.text


def key_facts(message: Message) -> dict[str, object]:
    """Return the facts about the key of a message for an event; empty without `order_by`."""
    key = describe_key(message)
    return {} if key is None else {"key": key}


def describe_id(message: Message) -> str:
    """Return the id of a message as text. The id of a damaged record cannot be read."""
    try:
        return message.message_id
    except ProtocolError:
        return f"at offset {message.queue_offset}, whose record is damaged"
