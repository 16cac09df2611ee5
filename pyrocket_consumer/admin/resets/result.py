"""The outcome of a reset and its steps, with their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.text import escape_controls


class ResetState(StrEnum):
    """The state of a reset at a member, or for a queue of a clustering group."""

    MOVED = "moved"
    ALREADY = "already"  # by the same reset or a newer one, earlier
    GONE = "gone"  # the member has left, and will find the record
    PENDING = "pending"  # it has started, and had not ended at the last status request
    UNCONFIRMED = "unconfirmed"  # the member was notified, but no effect was observed
    REFUSED = "refused"
    UNREACHED = "unreached"

    @property
    def is_done(self) -> bool:
        """Whether the reset is complete there."""
        return self in (ResetState.MOVED, ResetState.ALREADY, ResetState.GONE)


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """The outcome of the reset at one member (broadcasting), or for one queue (clustering)."""

    subject: str
    state: ResetState
    text: str = ""

    def __str__(self) -> str:
        return escape_controls(f"{self.subject}: {self.state}" + (f" ({self.text})" if self.text else ""))


@dataclass(frozen=True, slots=True)
class ResetProgress:
    """A step of a reset. `subject` is its broker, member or queue."""

    step: str
    subject: str
    text: str

    def __str__(self) -> str:
        return escape_controls(f"{self.step} {self.subject}: {self.text}")


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The result of a reset. Members know it by `id` and `epoch`."""

    id: str
    epoch: int
    outcomes: tuple[ResetOutcome, ...]
    brokers: Mapping[str, str]
    raced: tuple[MessageQueue, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether all online members have moved, and no other client reset the same queues meanwhile."""
        return not self.raced and all(outcome.state.is_done for outcome in self.outcomes)

    @property
    def heading(self) -> str:
        """The result in one line."""
        done = "verified" if self.outcomes else "recorded; no member is online to verify it"
        return f"Reset {self.id}: {done if self.verified else 'NOT verified'}"

    @property
    def unmoved(self) -> list[ResetOutcome]:
        """The outcomes of members or queues that have not moved, or did not confirm it."""
        return [outcome for outcome in self.outcomes if not outcome.state.is_done]

    def __str__(self) -> str:
        rows = [[outcome.subject, outcome.state, outcome.text] for outcome in self.outcomes]
        lines = [self.heading, *(columns(["who", "state", ""], rows) if rows else [])]
        lines += [f"  {name}: {text}" for name, text in sorted(self.brokers.items())]
        if self.raced:
            names = ", ".join(map(queue_name, self.raced))
            lines.append(f"  Another client reset {names} at the same time; its reset was later, and counts.")
        return "\n".join(map(escape_controls, lines))


def queue_name(queue: MessageQueue) -> str:
    """Return the name of a queue without its topic."""
    return f"{queue.broker_name}/{queue.queue_id}"


def columns(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the rows as lines with aligned columns."""
    texts = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    return ["  " + line.rstrip() for line in lines]
