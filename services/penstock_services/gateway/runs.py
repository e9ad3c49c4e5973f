"""A run: its state and metrics, pause, resume and stop; its servers, evaluations and dead letters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from penstock.api import records
from penstock.api.conversion import message_of
from penstock.config.run import RunConfig
from penstock.diagnosis import Finding
from penstock.diagnosis.facts import RunStores
from penstock.diagnosis.progress import learning_finding, speed_finding
from penstock.errors import NotFound
from penstock.replay.inspection import DeadLetter, QueueInspector
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.results import entry_order
from penstock.store.fleet import Fleet, Quarantine, ServerRecord
from penstock.store.run_control import OpenBreaker, RunControl
from penstock.v1 import runs_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import RUN, AuditLog, operation

_LETTER_ID = r"[0-9]{1,19}-[0-9]{1,19}"


class ListMetrics(records.Record):
    page_size: records.Int32 = 0
    names: tuple[str, ...] = Field(default=(), alias="name")


class CreateEvaluation(records.Record):
    evaluation_id: str
    prompts: tuple[records.SubmittedPrompt, ...]


class ListDeadLetters(records.Page):
    kind: str = ""


class RunHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, stores: RunStores) -> None:
        self.config = config
        self.audit = audit
        self.stores = stores

    @operation("GET", RUN, "RunService.GetRun", scope="read", answer=records.Run)
    async def get_run(self, request: runs_pb2.GetRunRequest) -> runs_pb2.Run:
        del request
        return await self.describe()

    @operation("GET", "/v1/runs", "RunService.ListRuns", scope="read", answer=records.RunList)
    async def list_runs(self, request: runs_pb2.ListRunsRequest) -> runs_pb2.ListRunsResponse:
        del request
        return runs_pb2.ListRunsResponse(runs=[await self.describe()])

    @operation("POST", f"{RUN}:pause", "RunService.PauseRun", scope="admin", answer=records.Run)
    async def pause_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        """Pause the run: no prompt is leased until it is resumed."""
        del request
        await self.stores.control.pause()
        return await self.describe()

    @operation("POST", f"{RUN}:resume", "RunService.ResumeRun", scope="admin", answer=records.Run)
    async def resume_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.stores.control.resume()
        return await self.describe()

    @operation("POST", f"{RUN}:stop", "RunService.StopRun", scope="admin", answer=records.Run)
    async def stop_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        """Pause the run. The learner finishes its step, writes a checkpoint and ends."""
        del request
        await self.stores.control.stop()
        return await self.describe()

    @operation(
        "GET", f"{RUN}/metrics", "RunService.ListMetrics", scope="read", answer=records.MetricsList, takes=ListMetrics
    )
    async def list_metrics(self, request: runs_pb2.ListMetricsRequest) -> runs_pb2.ListMetricsResponse:
        """List the metrics of the steps that made the newest versions, oldest first."""
        newest = await self.stores.policies.newest_first(None, validation.checked_page_size(request.page_size))
        names = frozenset(request.names)
        steps = [
            message_of(
                runs_pb2.StepMetrics,
                policy,
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
            queue=message_of(runs_pb2.QueueStat, stat),
            metrics=next((policy.metrics for policy in facts.policies if policy.metrics), {}),
            servers=servers_to_proto(facts.servers, facts.drained, facts.breakers, facts.quarantines),
            state=facts.state,
            held_version=facts.orders.held_version,
            detail=facts.state_detail,
            notices=[message_of(runs_pb2.Notice, notice) for notice in facts.notices],
            learning=learning.line,
            speed=speed.line,
            learning_verdict=_finding_to_proto(learning),
            speed_verdict=_finding_to_proto(speed),
            parts=[
                runs_pb2.Part(component=component, phases=[message_of(runs_pb2.Phase, phase) for phase in phases])
                for component, phases in facts.phases.items()
            ],
            num_trained=stat.num_trained(self.config.replay.groups_per_step),
        )


def _finding_to_proto(finding: Finding) -> runs_pb2.Verdict:
    return message_of(runs_pb2.Verdict, finding, level=finding.level.upper())


class ServerHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, fleet: Fleet, control: RunControl) -> None:
        self.config = config
        self.audit = audit
        self.fleet = fleet
        self.control = control

    @operation("GET", f"{RUN}/servers", "RunService.ListServers", scope="read", answer=records.ServerList)
    async def list_servers(self, request: runs_pb2.ListServersRequest) -> runs_pb2.ListServersResponse:
        del request
        return runs_pb2.ListServersResponse(servers=await list_servers(self.fleet, self.control))

    @operation(
        "POST", f"{RUN}/servers/{{server_id}}:drain", "RunService.DrainServer", scope="admin", answer=records.Server
    )
    async def drain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        """Drain a server: it finishes its leased prompts and leases no more."""
        await self._server(request.server_id)
        await self.control.drain(request.server_id)
        return await self._server(request.server_id)

    @operation(
        "POST", f"{RUN}/servers/{{server_id}}:undrain", "RunService.UndrainServer", scope="admin", answer=records.Server
    )
    async def undrain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        await self._server(request.server_id)
        await self.control.undrain(request.server_id)
        return await self._server(request.server_id)

    async def _server(self, server_id: str) -> runs_pb2.Server:
        for server in await list_servers(self.fleet, self.control):
            if server.server_id == server_id:
                return server
        raise NotFound(f"there is no rollout server {server_id!r}; list the servers")


async def list_servers(fleet: Fleet, control: RunControl) -> list[runs_pb2.Server]:
    drained = await control.drained()
    breakers = {breaker.server_id: breaker for breaker in await control.open_breakers()}
    quarantines = await control.quarantines()
    return servers_to_proto(await fleet.servers(), drained, breakers, quarantines)


def servers_to_proto(
    servers: Sequence[ServerRecord], drained: Collection[str], breakers: Mapping[str, OpenBreaker],
    quarantines: Mapping[str, Quarantine],
) -> list[runs_pb2.Server]:  # fmt: skip
    return [
        _server_to_proto(
            record, record.server_id in drained, breakers.get(record.server_id), quarantines.get(record.server_id)
        )
        for record in servers
    ]


def _server_to_proto(
    record: ServerRecord, is_drained: bool, breaker: OpenBreaker | None, quarantine: Quarantine | None
) -> runs_pb2.Server:
    return message_of(
        runs_pb2.Server,
        record,
        is_drained=is_drained,
        breaker_reason=breaker.reason if breaker else "",
        breaker_failures=breaker.num_failures if breaker else 0,
        is_quarantined=quarantine is not None,
        logprob_mismatch_nats=quarantine.mismatch_nats if quarantine else 0.0,
        logprob_limit_nats=quarantine.limit_nats if quarantine else 0.0,
        num_reloads=quarantine.num_reloads if quarantine else 0,
    )


class EvaluationHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, queue: RedisReplayQueue) -> None:
        self.config = config
        self.audit = audit
        self.queue = queue

    @operation(
        "POST",
        f"{RUN}/evaluations",
        "RunService.CreateEvaluation",
        scope="submit",
        answer=records.Evaluation,
        takes=CreateEvaluation,
    )
    async def create_evaluation(self, request: runs_pb2.CreateEvaluationRequest) -> runs_pb2.Evaluation:
        validation.check_name("evaluation_id", request.evaluation_id)
        prompts = validation.checked_prompts(
            request.prompts, self.config.gateway.max_prompts_per_request, request.evaluation_id
        )
        payloads = [prompt.SerializeToString() for prompt in prompts]
        return message_of(runs_pb2.Evaluation, await self.queue.create_evaluation(request.evaluation_id, payloads))

    @operation(
        "GET",
        f"{RUN}/evaluations/{{evaluation_id}}",
        "RunService.GetEvaluation",
        scope="read",
        answer=records.Evaluation,
    )
    async def get_evaluation(self, request: runs_pb2.GetEvaluationRequest) -> runs_pb2.Evaluation:
        validation.check_name("evaluation_id", request.evaluation_id)
        return message_of(runs_pb2.Evaluation, await self.queue.get_evaluation(request.evaluation_id))


class DeadLetterHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, queue: RedisReplayQueue) -> None:
        self.config = config
        self.audit = audit
        self.inspector = QueueInspector(queue.client, config.run, config.replay)

    @operation(
        "GET",
        f"{RUN}/dead-letters",
        "RunService.ListDeadLetters",
        scope="read",
        answer=records.DeadLetterPage,
        takes=ListDeadLetters,
    )
    async def list_dead_letters(self, request: runs_pb2.ListDeadLettersRequest) -> runs_pb2.ListDeadLettersResponse:
        """List dead letters, newest first."""
        page_size = validation.checked_page_size(request.page_size)
        before = validation.decode_page_token("dead", request.page_token, _LETTER_ID)
        found: list[DeadLetter] = []
        async for letter in self.inspector.dead_letters(request.kind, newest_first=True):
            if before is None or entry_order(letter.stream_id) < entry_order(before):
                found.append(letter)
            if len(found) > page_size:
                break
        page = found[:page_size]
        token = validation.encode_page_token("dead", page[-1].stream_id) if len(found) > page_size else ""
        letters = [
            message_of(runs_pb2.DeadLetter, letter, letter_id=letter.stream_id, buried_at_ms=letter.time_ms)
            for letter in page
        ]
        reasons = await self.inspector.queue.dead_letter_reasons()
        return runs_pb2.ListDeadLettersResponse(dead_letters=letters, next_page_token=token, reasons=reasons)

    @operation(
        "POST",
        f"{RUN}/dead-letters/{{letter_id}}:requeue",
        "RunService.RequeueDeadLetter",
        scope="admin",
        answer=records.RequeuedPrompt,
    )
    async def requeue_dead_letter(
        self, request: runs_pb2.RequeueDeadLetterRequest
    ) -> runs_pb2.RequeueDeadLetterResponse:
        """Submit the letter's prompt under a new id and delete the letter."""
        return runs_pb2.RequeueDeadLetterResponse(prompt_id=await self.inspector.requeue(request.letter_id))
