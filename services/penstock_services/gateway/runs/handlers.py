"""A run itself: its state, the metrics of its steps, and pause, resume and stop."""

from __future__ import annotations

from dataclasses import asdict

from penstock.config.run import RunConfig
from penstock.diagnosis import Finding
from penstock.diagnosis.facts import RunStores
from penstock.diagnosis.progress import learning_finding, speed_finding
from penstock.replay.queue_types import QueueStat
from penstock.v1 import runs_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation
from penstock_services.gateway.runs.servers import servers_to_proto


class RunHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, stores: RunStores) -> None:
        self.config = config
        self.audit = audit
        self.stores = stores

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
        await self.stores.control.pause()
        return await self.describe()

    @operation("admin")
    async def resume_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.stores.control.resume()
        return await self.describe()

    @operation("admin")
    async def stop_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.stores.control.stop()
        return await self.describe()

    @operation("read")
    async def list_metrics(self, request: runs_pb2.ListMetricsRequest) -> runs_pb2.ListMetricsResponse:
        newest = await self.stores.policies.newest_first(None, validation.checked_page_size(request.page_size))
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
        history = await self.stores.queue.evaluation_history()
        scores = [
            runs_pb2.Score(benchmark=benchmark, number=int(number), score=score)
            for (benchmark, _, number), score in ((name.rpartition("-"), score) for name, score in history.items())
        ]
        return sorted(scores, key=lambda score: (score.benchmark, score.number))

    async def describe(self) -> runs_pb2.Run:
        facts = await self.stores.read(self.config)
        learning, speed, stat = learning_finding(facts), speed_finding(facts), facts.stat
        return runs_pb2.Run(
            run=self.config.run,
            step=stat.step,
            policy_version=stat.policy_version,
            term=stat.term,
            queue=_stat_to_proto(stat),
            metrics=next((policy.metrics for policy in facts.policies if policy.metrics), {}),
            servers=servers_to_proto(facts.servers, facts.drained, facts.breakers, facts.quarantines),
            state=facts.state,
            held_version=facts.orders.held_version,
            detail=facts.state_detail,
            notices=[runs_pb2.Notice(**asdict(notice)) for notice in facts.notices],
            learning=learning.line,
            speed=speed.line,
            learning_verdict=_finding_to_proto(learning),
            speed_verdict=_finding_to_proto(speed),
            parts=[
                runs_pb2.Part(component=component, phases=[runs_pb2.Phase(**asdict(phase)) for phase in phases])
                for component, phases in facts.phases.items()
            ],
            num_trained=stat.num_trained(self.config.replay.groups_per_step),
        )


def _finding_to_proto(finding: Finding) -> runs_pb2.Verdict:
    return runs_pb2.Verdict(code=finding.code, level=finding.level.upper(), text=finding.text, advice=finding.advice)


def _stat_to_proto(stat: QueueStat) -> runs_pb2.QueueStat:
    """The fields have the same names on both sides."""
    return runs_pb2.QueueStat(**{name: getattr(stat, name) for name in runs_pb2.QueueStat.DESCRIPTOR.fields_by_name})
