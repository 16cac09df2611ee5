"""Administration: topics, groups, offset ranges of queues, lag, and resets."""

from pyrocket_consumer.admin.admin import Admin
from pyrocket_consumer.admin.lag import GroupLag, QueueLag
from pyrocket_consumer.admin.resets.plan import ResetOutcome, ResetPlan, ResetProgress, ResetResult, ResetState
from pyrocket_consumer.admin.topics import OffsetRange

__all__ = [
    "Admin",
    "GroupLag",
    "OffsetRange",
    "QueueLag",
    "ResetOutcome",
    "ResetPlan",
    "ResetProgress",
    "ResetResult",
    "ResetState",
]
