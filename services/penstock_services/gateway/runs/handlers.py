"""Runs: how they are created, their state and history, their servers, evaluations and dead letters."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.errors import ConfigError, Conflict, NotFound
from penstock.replay.contract import Evaluation, QueueStat
from penstock.replay.inspection import DeadLetter, QueueInspector
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.created_runs import ENDING, WAITS, CreatedRun, CreatedState
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import Orders, RunControl
from penstock.v1 import runs_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import Operating, operation

_LETTER = r"[0-9]{1,19}-[0-9]{1,19}"
_CREATED_STATES: dict[CreatedState, runs_pb2.Run.State] = {
    "CREATED": runs_pb2.Run.CREATED,
    "STOPPING": runs_pb2.Run.STOPPED,
    "STOPPED": runs_pb2.Run.STOPPED,
    "FINISHED": runs_pb2.Run.FINISHED,
    "FAILED": runs_pb2.Run.FAILED,
}


class RunHandlers:
    def __init__(
        self, config: RunConfig, operating: Operating, queue: RedisReplayQueue, policies: PolicyRegistry, fleet: Fleet,
        control: RunControl,
    ) -> None:  # fmt: skip
        self.config = config
        self.operating = operating
        self.queue = queue
        self.policies = policies
        self.fleet = fleet
        self.control = control
        self.created = operating.served.created
        self.inspector = QueueInspector(queue.client, config.run, config.replay)

    @operation("admin")
    async def create_run(self, request: runs_pb2.CreateRunRequest) -> runs_pb2.Run:
        config = validation.checked_config(request.config_json)
        if config.run == self.operating.served.config.run:
            raise Conflict(f"run {config.run!r} is the gateway's own; choose another name")
        created = await self.created.create(config)
        handlers = await self.operating.served.find(created.run)
        return await handlers.runs._run()

    @operation("read")
    async def get_run(self, request: runs_pb2.GetRunRequest) -> runs_pb2.Run:
        del request
        return await self._run()

    @operation("read")
    async def list_runs(self, request: runs_pb2.ListRunsRequest) -> runs_pb2.ListRunsResponse:
        del request
        served = self.operating.served
        runs = [await self._run()]
        for created in await self.created.list():
            if created.run != self.config.run:
                try:
                    runs.append(await (await served.find(created.run)).runs._run())
                except ConfigError as error:  # of another version of Penstock
                    runs.append(runs_pb2.Run(run=created.run, state=runs_pb2.Run.FAILED, detail=str(error)))
        return runs_pb2.ListRunsResponse(runs=runs)

    @operation("admin")
    async def pause_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.control.pause()
        return await self._run()

    @operation("admin")
    async def resume_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        created = await self.created.get(self.config.run)
        if created is not None and created.state == "STOPPING":
            raise Conflict(f"run {created.run!r} is about to stop; resume it once it is stopped")
        await self.control.resume()
        if created is not None and created.state in ("STOPPED", "FAILED"):
            # It goes back to where its checkpoints are.
            await self.created.move(created, "CREATED", detail=WAITS)
        return await self._run()

    @operation("admin")
    async def stop_run(self, request: runs_pb2.ChangeRunRequest) -> runs_pb2.Run:
        del request
        await self.control.stop()
        while (created := await self.created.get(self.config.run)) and created.state in ("CREATED", "STARTED"):
            is_up = created.state == "STARTED"
            await self.created.move(created, "STOPPING" if is_up else "STOPPED", detail=ENDING if is_up else "")
        return await self._run()

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

    # ── servers ──

    @operation("read")
    async def list_servers(self, request: runs_pb2.ListServersRequest) -> runs_pb2.ListServersResponse:
        del request
        return runs_pb2.ListServersResponse(servers=await self._servers(), generation=await self.fleet.generation())

    @operation("admin")
    async def drain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        await self._server(request.server_id)
        await self.control.drain(request.server_id)
        return await self._server(request.server_id)

    @operation("admin")
    async def undrain_server(self, request: runs_pb2.ChangeServerRequest) -> runs_pb2.Server:
        await self._server(request.server_id)
        await self.control.undrain(request.server_id)
        return await self._server(request.server_id)

    # ── evaluations ──

    @operation("submit")
    async def create_evaluation(self, request: runs_pb2.CreateEvaluationRequest) -> runs_pb2.Evaluation:
        validation.check_name("evaluation_id", request.evaluation_id)
        prompts = validation.checked_prompts(
            request.prompts, self.config.gateway.max_prompts_per_request, request.evaluation_id
        )
        payloads = [prompt.SerializeToString() for prompt in prompts]
        return _evaluation_to_proto(await self.queue.create_evaluation(request.evaluation_id, payloads))

    @operation("read")
    async def get_evaluation(self, request: runs_pb2.GetEvaluationRequest) -> runs_pb2.Evaluation:
        validation.check_name("evaluation_id", request.evaluation_id)
        return _evaluation_to_proto(await self.queue.get_evaluation(request.evaluation_id))

    # ── dead letters ──

    @operation("read")
    async def list_dead_letters(self, request: runs_pb2.ListDeadLettersRequest) -> runs_pb2.ListDeadLettersResponse:
        page_size = validation.checked_page_size(request.page_size)
        before = validation.decode_page_token("dead", request.page_token, _LETTER)
        found: list[DeadLetter] = []
        async for letter in self.inspector.dead_letters(request.kind, newest_first=True):
            if before is None or _position(letter.stream_id) < _position(before):
                found.append(letter)
            if len(found) > page_size:
                break
        page = found[:page_size]
        token = validation.encode_page_token("dead", page[-1].stream_id) if len(found) > page_size else ""
        letters = [
            runs_pb2.DeadLetter(
                letter_id=letter.stream_id, prompt_id=letter.prompt_id, reason=letter.reason,
                buried_at_ms=letter.time_ms, prompt_bytes=letter.prompt_bytes, group_bytes=letter.group_bytes,
            )
            for letter in page
        ]  # fmt: skip
        return runs_pb2.ListDeadLettersResponse(dead_letters=letters, next_page_token=token)

    @operation("admin")
    async def requeue_dead_letter(
        self, request: runs_pb2.RequeueDeadLetterRequest
    ) -> runs_pb2.RequeueDeadLetterResponse:
        return runs_pb2.RequeueDeadLetterResponse(prompt_id=await self.inspector.requeue(request.letter_id))

    # ── how ──

    async def _run(self) -> runs_pb2.Run:
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
            servers=await self._servers(),
            state=_state(orders, created),
            held_version=orders.held_version,
            launcher_id=created.launcher_id if created else "",
            detail=created.detail if created else "",
        )

    async def _servers(self) -> list[runs_pb2.Server]:
        drained = await self.control.drained()
        return [_server_to_proto(record, record.server_id in drained) for record in await self.fleet.servers()]

    async def _server(self, server_id: str) -> runs_pb2.Server:
        for server in await self._servers():
            if server.server_id == server_id:
                return server
        raise NotFound(f"there is no rollout server {server_id!r}; list the servers")


def _state(orders: Orders, created: CreatedRun | None) -> runs_pb2.Run.State:
    """Of a created run, what its launcher says; while it is up, and of any other, what it was told."""
    if created is not None and created.state != "STARTED":
        return _CREATED_STATES[created.state]
    if orders.is_stopped:
        return runs_pb2.Run.STOPPED
    return runs_pb2.Run.PAUSED if orders.is_paused else runs_pb2.Run.RUNNING


def _position(stream_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence)


def _stat_to_proto(stat: QueueStat) -> runs_pb2.QueueStat:
    return runs_pb2.QueueStat(
        pending_prompts=stat.pending,
        admitted=stat.admitted,
        in_flight=stat.in_flight,
        queued=stat.queued,
        delivered=stat.delivered,
        queued_bytes=stat.queued_bytes,
        trained=stat.trained,
        expired=stat.expired,
        dead_lettered=stat.dead_lettered,
        conservation_error=stat.conservation_error,
        redelivered=stat.redelivered,
        reclaimed=stat.reclaimed,
        discarded=stat.discarded,
        admission_limit=stat.admission_limit,
        admission_room=stat.admission_room,
        inserted=stat.inserted,
    )


def _server_to_proto(record: ServerRecord, is_drained: bool) -> runs_pb2.Server:
    return runs_pb2.Server(
        server_id=record.server_id,
        address=record.address,
        state=record.state,
        policy_version=record.policy_version,
        heartbeat_age_ms=record.heartbeat_age_ms,
        running_groups=record.running_groups,
        engine=record.engine,
        weights_digest=record.weights_digest,
        is_drained=is_drained,
    )


def _evaluation_to_proto(evaluation: Evaluation) -> runs_pb2.Evaluation:
    return runs_pb2.Evaluation(
        evaluation_id=evaluation.evaluation_id,
        num_prompts=evaluation.num_prompts,
        num_finished=evaluation.num_finished,
        score=evaluation.score,
        policy_version_min=evaluation.policy_version_min,
        policy_version_max=evaluation.policy_version_max,
        num_samples=evaluation.num_samples,
        pass_at=evaluation.pass_at,
    )
