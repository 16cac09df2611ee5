"""Reset the offsets of a group: plan it, execute the plan in one of several ways, and verify the result."""

from __future__ import annotations

from pyrocket_consumer.admin.groups import check_group_exists
from pyrocket_consumer.admin.resets.broadcasting import MembersReset
from pyrocket_consumer.admin.resets.clustering import StoreReset, reset_clustering
from pyrocket_consumer.admin.resets.execution import ProgressCallback, ResetRun
from pyrocket_consumer.admin.resets.plan import ResetPlan, ResetResult
from pyrocket_consumer.admin.resets.planner import plan_reset
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.names import wrap
from pyrocket_consumer.cluster.reset_record import ResetRecord
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
    run = ResetRun(cluster, plan, report, partial, wait_s)
    if plan.store is not None:
        return await StoreReset(run, plan.store).move()
    return await (MembersReset(run).move() if plan.broadcasting else reset_clustering(run))


async def forget_reset(cluster: Cluster, group: str, topic: str) -> bool:
    """Remove the resets recorded for a group and topic on every master. Return whether there was one."""
    namespace = cluster.config.namespace
    wire_group, wire_topic = wrap(namespace, group), wrap(namespace, topic)
    route = await cluster.routes.get(wire_topic, refresh=True)
    await check_group_exists(cluster, group)
    was_recorded = False
    for data in route.queues:
        record = ResetRecord(cluster, wire_group, wire_topic, data.broker_name)
        queue_ids = range(max(data.read_queues, data.write_queues))
        # The head is None if it is invalid, and 0 if a reset ended before it was written.
        was_recorded |= await record.head() != 0 or bool(await record.read(queue_ids))
        await record.forget(queue_ids)
    return was_recorded
