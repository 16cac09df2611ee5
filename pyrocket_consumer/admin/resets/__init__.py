"""Reset the offsets of a group: plan it, execute the plan in one of several ways, and verify the result."""

from __future__ import annotations

from pyrocket_consumer.admin.resets.broadcasting import BroadcastingReset, forget_reset
from pyrocket_consumer.admin.resets.execution import ClusteringReset, ProgressCallback, StoreReset
from pyrocket_consumer.admin.resets.plan import ResetPlan, ResetResult
from pyrocket_consumer.admin.resets.planner import plan_reset
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.errors import RocketError

__all__ = ["execute_plan", "forget_reset", "plan_reset"]


async def execute_plan(
    cluster: Cluster, plan: ResetPlan, report: ProgressCallback, partial: bool, wait_s: float
) -> ResetResult:
    """Execute a plan."""
    problems = [broker for broker in plan.brokers if broker.problem]
    if problems and not partial:
        raise RocketError(
            f"{problems[0]}; no offset was moved. Its queues cannot be reset now. Try again later, or reset the others "
            "with partial=True (in the shell --partial)"
        )
    way = StoreReset if plan.store is not None else BroadcastingReset if plan.broadcasting else ClusteringReset
    return await way(cluster, plan, report, partial, wait_s).move()
