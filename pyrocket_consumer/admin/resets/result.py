"""What became of a reset, and the steps on the way there: values, and how they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.text import escape_controls


class ResetState(StrEnum):
    """What has become of a reset at a member, or for a queue of a clustering group."""

    MOVED = "moved"
    ALREADY = "already"  # it was there before, by the same reset or a newer one
    GONE = "gone"  # the member has left; what is recorded waits for it
    PENDING = "pending"  # it has begun, and was not done when we stopped asking
    UNCONFIRMED = "unconfirmed"  # told, but nothing was seen of it
    REFUSED = "refused"
    UNREACHED = "unreached"

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do."""
        return self in (ResetState.MOVED, ResetState.ALREADY, ResetState.GONE)


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """What has become of the reset at one member (broadcasting), or for one queue (clustering)."""

    subject: str
    state: ResetState
    text: str = ""

    def __str__(self) -> str:
        return escape_controls(f"{self.subject}: {self.state}" + (f" ({self.text})" if self.text else ""))


@dataclass(frozen=True, slots=True)
class ResetProgress:
    """A step of a reset. `subject` is the broker, member or queue it is about."""

    step: str
    subject: str
    text: str

    def __str__(self) -> str:
        return escape_controls(f"{self.step} {self.subject}: {self.text}")


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What has become of a reset. `id` and `epoch` are what members know it by."""

    id: str
    epoch: int
    outcomes: tuple[ResetOutcome, ...]
    brokers: Mapping[str, str]
    raced: tuple[MessageQueue, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether everybody who is online has moved, and nobody else reset the same queues meanwhile."""
        return not self.raced and all(outcome.state.is_done for outcome in self.outcomes)

    @property
    def heading(self) -> str:
        """What has become of it, in a line."""
        done = "verified" if self.outcomes else "recorded; nobody is online to verify it"
        return f"Reset {self.id}: {done if self.verified else 'NOT verified'}"

    @property
    def unmoved(self) -> list[ResetOutcome]:
        """Return who has not moved, or did not confirm it."""
        return [outcome for outcome in self.outcomes if not outcome.state.is_done]

    def __str__(self) -> str:
        rows = [[outcome.subject, outcome.state, outcome.text] for outcome in self.outcomes]
        lines = [self.heading, *(columns(["who", "state", ""], rows) if rows else [])]
        lines += [f"  {name}: {text}" for name, text in sorted(self.brokers.items())]
        if self.raced:
            names = ", ".join(map(queue_name, self.raced))
            lines.append(f"  Somebody else has reset {names} at the same time; theirs was later, and counts.")
        return "\n".join(map(escape_controls, lines))


def queue_name(queue: MessageQueue) -> str:
    """Return a queue's name without its topic."""
    return f"{queue.broker_name}/{queue.queue_id}"


def columns(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return lines in which the cells of a column stand below each other."""
    texts = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    return ["  " + line.rstrip() for line in lines]
