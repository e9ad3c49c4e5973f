"""A run: its state and metrics, pause, resume and stop; its servers, evaluations and dead letters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from penstock.api import records
from penstock.api.conversion import message_of
from penstock.diagnosis.facts import RunFacts, RunStores, made_by_steps
from penstock.diagnosis.progress import learning_finding, speed_finding
from penstock.errors import InvalidInput, NotFound
from penstock.replay.inspection import QueueInspector, StoredDeadLetter
from penstock.replay.queue_types import VALIDATION, kind_of
from penstock.replay.results import entry_order
from penstock.store.keys import check_name
from penstock.store.notices import QUOTING_KINDS
from penstock.v1 import runs_pb2
from penstock_services.gateway import checks
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import RUN, Handlers, operation, shown_reason
from penstock_services.gateway.prompts import checked_prompts, digest_of

_LETTER_ID = r"[0-9]{1,19}-[0-9]{1,19}"


class ListMetrics(records.Record):
    page_size: records.Int32 = 0
    names: tuple[str, ...] = Field(default=(), alias="name")


class CreateEvaluation(records.Record):
    evaluation_id: str
    prompts: tuple[records.SubmittedPrompt, ...]


class ListDeadLetters(records.Page):
    kind: str = ""


@dataclass
class RunHandlers(Handlers):
    stores: RunStores

    @operation("GET", RUN, "read", records.Run)
    async def get_run(self, caller: Caller, _: runs_pb2.GetRunRequest) -> runs_pb2.Run:
        facts = await self.stores.read(self.config)
        learning, speed, stat = learning_finding(facts), speed_finding(facts), facts.stat
        return message_of(
            runs_pb2.Run,
            stat,
            run=self.config.run,
            queue=message_of(runs_pb2.QueueStat, stat),
            metrics=next((policy.metrics for policy in facts.policies if policy.metrics), {}),
            servers=_servers(facts),
            state=facts.state,
            held_version=facts.orders.held_version,
            detail=facts.state_detail,
            notices=[
                message_of(runs_pb2.Notice, notice)
                for notice in facts.notices
                if caller.owner.sees_all or notice.kind not in QUOTING_KINDS
            ],
            learning=learning.line,
            speed=speed.line,
            learning_finding=message_of(runs_pb2.Finding, learning),
            speed_finding=message_of(runs_pb2.Finding, speed),
            parts=[
                runs_pb2.Part(component=component, phases=[message_of(runs_pb2.Phase, phase) for phase in phases])
                for component, phases in facts.phases.items()
            ],
            num_trained=stat.num_trained(self.config.replay.groups_per_step),
        )

    @operation("GET", "/v1/runs", "read", records.RunList)
    async def list_runs(self, caller: Caller, _: runs_pb2.ListRunsRequest) -> runs_pb2.ListRunsResponse:
        return runs_pb2.ListRunsResponse(runs=[await self.get_run(caller, runs_pb2.GetRunRequest())])

    @operation("POST", f"{RUN}:pause", "admin", records.Run)
    async def pause_run(self, caller: Caller, _: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        """Pause the run: no prompt is leased until it is resumed."""
        await self.stores.control.pause()
        return await self.get_run(caller, runs_pb2.GetRunRequest())

    @operation("POST", f"{RUN}:resume", "admin", records.Run)
    async def resume_run(self, caller: Caller, _: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        await self.stores.control.resume()
        return await self.get_run(caller, runs_pb2.GetRunRequest())

    @operation("POST", f"{RUN}:stop", "admin", records.Run)
    async def stop_run(self, caller: Caller, _: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        """Pause the run. The learner finishes its step, writes a checkpoint and ends."""
        await self.stores.control.stop()
        return await self.get_run(caller, runs_pb2.GetRunRequest())

    @operation("GET", "metrics", "read", records.MetricsList, takes=ListMetrics)
    async def list_metrics(self, request: runs_pb2.ListMetricsRequest) -> runs_pb2.ListMetricsResponse:
        """List the metrics of the steps that made the newest versions, oldest first."""
        newest = await self.stores.policies.newest_first(None, checks.page_size(request.page_size))
        history = await self.stores.queue.evaluation_history()
        scores = [(*name.rpartition("-")[::2], score) for name, score in history.items()]
        names = frozenset(request.names)
        answer = runs_pb2.ListMetricsResponse()
        for policy in made_by_steps(newest):
            metrics = {name: value for name, value in policy.metrics.items() if not names or name in names}
            answer.steps.append(message_of(runs_pb2.StepMetrics, policy, metrics=metrics))
        for benchmark, number, score in sorted(scores, key=lambda found: (found[0], int(found[1]))):
            answer.scores.add(benchmark=benchmark, number=int(number), score=score)
        return answer

    @operation("GET", "servers", "read", records.ServerList)
    async def list_servers(self, _: runs_pb2.ListServersRequest) -> runs_pb2.ListServersResponse:
        return runs_pb2.ListServersResponse(servers=_servers(await self.stores.read(self.config)))

    @operation("POST", "servers/{server_id}:drain", "admin", records.Server)
    async def drain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        """Drain a server: it finishes its leased prompts and leases no more."""
        await self._server(request.server_id)
        await self.stores.control.drain(request.server_id)
        return await self._server(request.server_id)

    @operation("POST", "servers/{server_id}:undrain", "admin", records.Server)
    async def undrain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        await self._server(request.server_id)
        await self.stores.control.undrain(request.server_id)
        return await self._server(request.server_id)

    async def _server(self, server_id: str) -> runs_pb2.Server:
        for server in (await self.list_servers(runs_pb2.ListServersRequest())).servers:
            if server.server_id == server_id:
                return server
        raise NotFound(f"there is no rollout server {server_id!r}; list the servers")

    @operation("POST", "evaluations", "submit", records.Evaluation, takes=CreateEvaluation)
    async def create_evaluation(self, caller: Caller, request: runs_pb2.CreateEvaluationRequest) -> runs_pb2.Evaluation:
        check_name("evaluation_id", request.evaluation_id)
        if request.evaluation_id.startswith(VALIDATION) and not caller.owner.sees_all:
            raise InvalidInput("evaluation_id", f"begins with {VALIDATION}, as the run's own; choose another id")
        prompts = checked_prompts(request.prompts, self.config.gateway.max_prompts_per_request, request.evaluation_id)
        digest = digest_of(prompts)
        for prompt in prompts:
            prompt.owner = caller.owner.name
        payloads = [prompt.SerializeToString() for prompt in prompts]
        await self.stores.queue.create_evaluation(request.evaluation_id, payloads, caller.owner, digest)
        return await self.get_evaluation(caller, runs_pb2.GetEvaluationRequest(evaluation_id=request.evaluation_id))

    @operation("GET", "evaluations/{evaluation_id}", "read", records.Evaluation)
    async def get_evaluation(self, caller: Caller, request: runs_pb2.GetEvaluationRequest) -> runs_pb2.Evaluation:
        check_name("evaluation_id", request.evaluation_id)
        score = self.config.dataset.validation.score
        found = await self.stores.queue.get_evaluation(request.evaluation_id, caller.owner, score)
        return message_of(runs_pb2.Evaluation, found)

    @property
    def _inspector(self) -> QueueInspector:
        return QueueInspector(self.stores.queue.client, self.config.run, self.config.replay)

    @operation("GET", "dead-letters", "read", records.DeadLetterPage, takes=ListDeadLetters)
    async def list_dead_letters(
        self, caller: Caller, request: runs_pb2.ListDeadLettersRequest
    ) -> runs_pb2.ListDeadLettersResponse:
        """List dead letters, newest first."""
        page_size = checks.page_size(request.page_size)
        before = checks.page_position("dead", request.page_token, _LETTER_ID)
        found: list[StoredDeadLetter] = []
        async for letter in self._inspector.dead_letters(request.kind, newest_first=True):
            if before is None or entry_order(letter.stream_id) < entry_order(before):
                found.append(replace(letter, reason=shown_reason(letter.reason, caller.owner)))
            if len(found) > page_size:
                break
        page, token = checks.cut_page("dead", found, page_size, lambda letter: letter.stream_id)
        letters = [
            message_of(runs_pb2.DeadLetter, letter, letter_id=letter.stream_id, dead_lettered_at_ms=letter.time_ms)
            for letter in page
        ]
        reasons = await self.stores.queue.dead_letter_reasons()
        return runs_pb2.ListDeadLettersResponse(dead_letters=letters, next_page_token=token, reasons=reasons)

    @operation("POST", "dead-letters/{letter_id}:requeue", "admin", records.RequeuedPrompt)
    async def requeue_dead_letter(
        self, request: runs_pb2.RequeueDeadLetterRequest
    ) -> runs_pb2.RequeueDeadLetterResponse:
        """Submit the letter's prompt under a new id and delete the letter."""
        return runs_pb2.RequeueDeadLetterResponse(prompt_id=await self._inspector.requeue(request.letter_id))


def _servers(facts: RunFacts) -> list[runs_pb2.Server]:
    described = []
    for record in facts.servers:
        marks: dict[str, Any] = {"is_drained": record.server_id in facts.drained}
        if breaker := facts.breakers.get(record.server_id):
            marks |= {"breaker_reason": kind_of(breaker.reason), "breaker_failures": breaker.num_failures}
        if found := facts.quarantines.get(record.server_id):
            marks |= {"is_quarantined": True, "num_reloads": found.num_reloads}
            marks |= {"logprob_mismatch_nats": found.mismatch_nats, "logprob_limit_nats": found.limit_nats}
        described.append(message_of(runs_pb2.Server, record, **marks))
    return described
