"""A run itself: its state, the metrics of its steps, and pause, resume and stop."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.errors import Conflict
from penstock.replay.contract import QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.created_runs import ENDING, WAITS, CreatedRun, CreatedRuns, CreatedState
from penstock.store.fleet import Fleet
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import Orders, RunControl
from penstock.v1 import runs_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation
from penstock_services.gateway.runs.servers import list_servers

_CREATED_STATES: dict[CreatedState, runs_pb2.Run.State] = {
    "CREATED": runs_pb2.Run.CREATED,
    "STOPPING": runs_pb2.Run.STOPPED,
    "STOPPED": runs_pb2.Run.STOPPED,
    "FINISHED": runs_pb2.Run.FINISHED,
    "FAILED": runs_pb2.Run.FAILED,
}


class RunHandlers:
    def __init__(
        self, config: RunConfig, audit: AuditLog, queue: RedisReplayQueue, policies: PolicyRegistry, fleet: Fleet,
        control: RunControl, created: CreatedRuns,
    ) -> None:  # fmt: skip
        self.config = config
        self.audit = audit
        self.queue = queue
        self.policies = policies
        self.fleet = fleet
        self.control = control
        self.created = created

    @operation("read")
    async def get_run(self, request: runs_pb2.GetRunRequest) -> runs_pb2.Run:
        del request
        return await self.describe()

    @operation("admin")
    async def pause_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.control.pause()
        return await self.describe()

    @operation("admin")
    async def resume_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        created = await self.created.get(self.config.run)
        if created is not None and created.state == "STOPPING":
            raise Conflict(f"run {created.run!r} is about to stop; resume it once it is stopped")
        await self.control.resume()
        if created is not None and created.state in ("STOPPED", "FAILED"):
            # The same launcher takes it again, because its checkpoints are there.
            await self.created.move(created, "CREATED", detail=WAITS)
        return await self.describe()

    @operation("admin")
    async def stop_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.control.stop()
        while (created := await self.created.get(self.config.run)) and created.state in ("CREATED", "STARTED"):
            is_up = created.state == "STARTED"
            await self.created.move(created, "STOPPING" if is_up else "STOPPED", detail=ENDING if is_up else "")
        return await self.describe()

    @operation("read")
    async def list_metrics(self, request: runs_pb2.ListMetricsRequest) -> runs_pb2.ListMetricsResponse:
        newest = await self.policies.newest_first(None, validation.checked_page_size(request.page_size))
        names = frozenset(request.names)
        steps = [
            runs_pb2.StepMetrics(
                step=policy.step,
                policy_version=policy.policy_version,
                published_at_ms=policy.published_at_ms,
                metrics={name: value for name, value in policy.metrics.items() if not names or name in names},
            )
            for policy in reversed(newest)
        ]
        return runs_pb2.ListMetricsResponse(steps=steps)

    async def describe(self) -> runs_pb2.Run:
        stat, orders = await self.queue.stat(), await self.control.orders()
        created = await self.created.get(self.config.run)
        newest = await self.policies.newest_first(None, 1)
        return runs_pb2.Run(
            run=self.config.run,
            step=stat.step,
            policy_version=stat.policy_version,
            term=stat.term,
            queue=_stat_to_proto(stat),
            metrics=newest[0].metrics if newest else {},
            servers=await list_servers(self.fleet, self.control),
            state=_state(orders, created),
            held_version=orders.held_version,
            launcher_id=created.launcher_id if created else "",
            detail=created.detail if created else "",
        )


def _state(orders: Orders, created: CreatedRun | None) -> runs_pb2.Run.State:
    """The state that the launcher reports for a created run that is not up, else the one that operators have set."""
    if created is not None and created.state != "STARTED":
        return _CREATED_STATES[created.state]
    if orders.is_stopped:
        return runs_pb2.Run.STOPPED
    return runs_pb2.Run.PAUSED if orders.is_paused else runs_pb2.Run.RUNNING


def _stat_to_proto(stat: QueueStat) -> runs_pb2.QueueStat:
    """The fields have the same names on both sides."""
    return runs_pb2.QueueStat(**{name: getattr(stat, name) for name in runs_pb2.QueueStat.DESCRIPTOR.fields_by_name})
