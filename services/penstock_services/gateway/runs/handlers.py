"""A run itself: its state, the metrics of its steps, and pause, resume and stop."""

from __future__ import annotations

from dataclasses import asdict

from penstock.config.run import RunConfig
from penstock.replay.queue_types import QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.run_state import (
    RunFacts,
    has_learner,
    has_servers,
    is_learner_starting,
    num_trained,
    run_state,
    state_detail,
)
from penstock.store.fleet import Fleet
from penstock.store.heartbeats import Heartbeats
from penstock.store.notices import Notices
from penstock.store.phases import Phases
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import RunControl
from penstock.v1 import runs_pb2
from penstock.verdicts import LOOKED_BACK_VERSIONS, Situation, Verdict, learning_verdict, speed_verdict, steps_of
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation
from penstock_services.gateway.runs.servers import list_servers


class RunHandlers:
    def __init__(
        self, config: RunConfig, audit: AuditLog, queue: RedisReplayQueue, policies: PolicyRegistry, fleet: Fleet,
        control: RunControl, notices: Notices, heartbeats: Heartbeats,
        phases: Phases,
    ) -> None:  # fmt: skip
        self.config = config
        self.audit = audit
        self.queue = queue
        self.policies = policies
        self.fleet = fleet
        self.control = control
        self.notices = notices
        self.heartbeats = heartbeats
        self.phases = phases

    @operation("read")
    async def get_run(self, request: runs_pb2.GetRunRequest) -> runs_pb2.Run:
        del request
        return await self.describe()

    @operation("read")
    async def list_runs(self, request: runs_pb2.ListRunsRequest) -> runs_pb2.ListRunsResponse:
        del request
        return runs_pb2.ListRunsResponse(runs=[await self.describe()])

    @operation("admin")
    async def pause_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.control.pause()
        return await self.describe()

    @operation("admin")
    async def resume_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.control.resume()
        return await self.describe()

    @operation("admin")
    async def stop_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.control.stop()
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
        return runs_pb2.ListMetricsResponse(steps=steps, scores=await self._scores())

    async def _scores(self) -> list[runs_pb2.Score]:
        """Scores of finished evaluations, by benchmark and number."""
        history = await self.queue.evaluation_history()
        scores = [
            runs_pb2.Score(benchmark=benchmark, number=int(number), score=score)
            for (benchmark, _, number), score in ((name.rpartition("-"), score) for name, score in history.items())
        ]
        return sorted(scores, key=lambda score: (score.benchmark, score.number))

    async def describe(self) -> runs_pb2.Run:
        stat, orders = await self.queue.stat(), await self.control.orders()
        newest = await self.policies.newest_first(None, LOOKED_BACK_VERSIONS)
        steps = steps_of(newest)
        servers, breakers = await self.fleet.servers(), await self.control.open_breakers()
        is_alive = has_learner(await self.heartbeats.ages_s(), self.config.replay.lease_ttl_s)
        facts = RunFacts(
            step=stat.step,
            num_steps=self.config.learner.num_steps,
            finished_step=stat.finished_step,
            term=stat.term,
            orders=orders,
            has_learner=is_alive,
            has_servers=has_servers(servers),
            is_learner_starting=await is_learner_starting(self.phases, is_alive),
        )
        situation = Situation(steps, run_state(facts), stat, servers, len(breakers)).within(self.config)
        learning, speed = learning_verdict(situation), speed_verdict(situation)
        reason = await self.control.pause_reason() if orders.is_paused else ""
        return runs_pb2.Run(
            run=self.config.run,
            step=stat.step,
            policy_version=stat.policy_version,
            term=stat.term,
            queue=_stat_to_proto(stat),
            metrics=next((policy.metrics for policy in newest if policy.metrics), {}),
            servers=await list_servers(self.fleet, self.control),
            state=run_state(facts),
            held_version=orders.held_version,
            detail=state_detail(facts, reason),
            notices=[runs_pb2.Notice(**asdict(notice)) for notice in await self.notices.newest_first()],
            learning=learning.line,
            speed=speed.line,
            learning_verdict=_verdict_to_proto(learning),
            speed_verdict=_verdict_to_proto(speed),
            parts=[
                runs_pb2.Part(component=component, phases=[runs_pb2.Phase(**asdict(phase)) for phase in phases])
                for component, phases in (await self.phases.by_component()).items()
            ],
            num_trained=num_trained(stat, self.config.replay.groups_per_step),
        )


def _verdict_to_proto(verdict: Verdict) -> runs_pb2.Verdict:
    return runs_pb2.Verdict(code=verdict.code, level=verdict.level.upper(), text=verdict.text, advice=verdict.advice)


def _stat_to_proto(stat: QueueStat) -> runs_pb2.QueueStat:
    """The fields have the same names on both sides."""
    return runs_pb2.QueueStat(**{name: getattr(stat, name) for name in runs_pb2.QueueStat.DESCRIPTOR.fields_by_name})
