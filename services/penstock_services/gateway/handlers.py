"""What the gateway does, whatever the protocol: a protobuf request in, a protobuf response out, else a PenstockError.

A request names the run that this gateway serves, or none. Every call has a deadline, and a Redis that does not answer
is Unavailable. Nothing is half-accepted: a request is checked whole before its one atomic call to the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from redis.exceptions import RedisError

from penstock.codec import decode_group, group_to_proto
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, InvalidInput, NotFound, Unavailable
from penstock.fleet import SERVING_STATES, Fleet, ServerRecord
from penstock.heartbeats import Heartbeats
from penstock.policies import PolicyRegistry
from penstock.redis_client import RedisClient
from penstock.replay.contract import Evaluation, QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.v1 import groups_pb2, policies_pb2, prompts_pb2, runs_pb2
from penstock_services.gateway import validation

MAX_PROMPT_ID = 2**32 - 1
"""The queue remembers trained prompts in a Redis bitmap, which ends here."""
READY_TIMEOUT_S = 2.0

_PROMPT_STATES = {
    "pending": prompts_pb2.PromptRecord.PENDING,
    "leased": prompts_pb2.PromptRecord.LEASED,
    "queued": prompts_pb2.PromptRecord.QUEUED,
    "trained": prompts_pb2.PromptRecord.TRAINED,
    "dead_lettered": prompts_pb2.PromptRecord.DEAD_LETTERED,
}
Request = TypeVar("Request")
Response = TypeVar("Response")
Method = Callable[["Handlers", Request], Awaitable[Response]]


def _bounded(method: Method[Request, Response]) -> Method[Request, Response]:
    """Give the call a deadline of two Redis commands' and put what Redis raises into the error tree."""

    @wraps(method)
    async def call(self: Handlers, request: Request) -> Response:
        deadline_s = 2 * self.config.redis.timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                return await method(self, request)
        except TimeoutError as error:
            raise DeadlineExceeded(f"Redis took longer than {deadline_s:g} s; try again") from error
        except RedisError as error:
            raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error

    return call


class Handlers:
    """Every operation of the gateway, for one run."""

    def __init__(
        self, config: RunConfig, queue: RedisReplayQueue, policies: PolicyRegistry, fleet: Fleet, heartbeats: Heartbeats
    ) -> None:
        self.config = config
        self.queue = queue
        self.policies = policies
        self.fleet = fleet
        self.heartbeats = heartbeats

    @classmethod
    def over(cls, client: RedisClient, config: RunConfig) -> Handlers:
        queue = RedisReplayQueue(client, config.run, config.replay)
        fleet, heartbeats = Fleet(client, config.run), Heartbeats(client, config.run)
        return cls(config, queue, PolicyRegistry(client, config.run), fleet, heartbeats)

    # ── prompts and groups ──

    @_bounded
    async def submit_prompts(self, request: prompts_pb2.SubmitPromptsRequest) -> prompts_pb2.SubmitPromptsResponse:
        self._check_run(request.run)
        validation.check_idempotency_key(request.idempotency_key)
        prompts = validation.checked_prompts(request.prompts, self.config.gateway.max_prompts_per_request)
        submission = await self.queue.submit(
            [prompt.SerializeToString() for prompt in prompts],
            [prompt.priority for prompt in prompts],
            request.idempotency_key,
        )
        if len(submission.prompt_ids) != len(prompts):
            raise InvalidInput(
                "idempotency_key",
                f"was used for another request, of {len(submission.prompt_ids)} prompts; choose a new key",
            )
        return prompts_pb2.SubmitPromptsResponse(prompt_ids=submission.prompt_ids, replayed=submission.replayed)

    @_bounded
    async def get_prompt(self, request: prompts_pb2.GetPromptRequest) -> prompts_pb2.PromptRecord:
        self._check_run(request.run)
        _check_prompt_id(request.prompt_id)
        status = await self.queue.get_prompt(request.prompt_id)
        record = prompts_pb2.PromptRecord(
            prompt_id=status.prompt_id, state=_PROMPT_STATES[status.state], attempt=status.attempt
        )
        if status.payload:
            record.prompt.ParseFromString(status.payload)
        return record

    @_bounded
    async def get_group(self, request: groups_pb2.GetGroupRequest) -> groups_pb2.Group:
        self._check_run(request.run)
        _check_prompt_id(request.prompt_id)
        payload = await self.queue.get_group(request.prompt_id)
        return group_to_proto(await asyncio.to_thread(decode_group, payload))

    # ── policies ──

    @_bounded
    async def list_policies(self, request: policies_pb2.ListPoliciesRequest) -> policies_pb2.ListPoliciesResponse:
        self._check_run(request.run)
        page_size = validation.checked_page_size(request.page_size)
        before = validation.decode_page_token(request.page_token)
        found = await self.policies.newest_first(before, page_size + 1)
        page = found[:page_size]
        self._add_server_ids(page, await self.fleet.servers())
        token = validation.encode_page_token(page[-1].policy_version) if len(found) > page_size else ""
        return policies_pb2.ListPoliciesResponse(policies=page, next_page_token=token)

    @_bounded
    async def get_policy(self, request: policies_pb2.GetPolicyRequest) -> policies_pb2.Policy:
        self._check_run(request.run)
        policy = await self.policies.get(request.policy_version if request.HasField("policy_version") else None)
        self._add_server_ids([policy], await self.fleet.servers())
        return policy

    # ── the run ──

    @_bounded
    async def get_run(self, request: runs_pb2.GetRunRequest) -> runs_pb2.Run:
        self._check_run(request.run)
        stat = await self.queue.stat()
        newest = await self.policies.newest_first(None, 1)
        return runs_pb2.Run(
            run=self.config.run,
            step=stat.step,
            policy_version=stat.policy_version,
            term=stat.term,
            queue=_stat_to_proto(stat),
            metrics=newest[0].metrics if newest else {},
            servers=[_server_to_proto(record) for record in await self.fleet.servers()],
        )

    @_bounded
    async def list_servers(self, request: runs_pb2.ListServersRequest) -> runs_pb2.ListServersResponse:
        self._check_run(request.run)
        servers = [_server_to_proto(record) for record in await self.fleet.servers()]
        return runs_pb2.ListServersResponse(servers=servers, generation=await self.fleet.generation())

    @_bounded
    async def create_evaluation(self, request: runs_pb2.CreateEvaluationRequest) -> runs_pb2.Evaluation:
        self._check_run(request.run)
        validation.check_evaluation_id(request.evaluation_id)
        prompts = validation.checked_prompts(
            request.prompts, self.config.gateway.max_prompts_per_request, request.evaluation_id
        )
        payloads = [prompt.SerializeToString() for prompt in prompts]
        return _evaluation_to_proto(await self.queue.create_evaluation(request.evaluation_id, payloads))

    @_bounded
    async def get_evaluation(self, request: runs_pb2.GetEvaluationRequest) -> runs_pb2.Evaluation:
        self._check_run(request.run)
        validation.check_evaluation_id(request.evaluation_id)
        return _evaluation_to_proto(await self.queue.get_evaluation(request.evaluation_id))

    async def check_ready(self) -> None:
        """Raise Unavailable unless Redis answers at once."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                ping: Any = self.queue.client.ping()
                await ping
        except (TimeoutError, RedisError) as error:
            raise Unavailable(f"Redis does not answer ({error}); check redis.url and that the server runs") from error

    # ── how ──

    def _check_run(self, run: str) -> None:
        if run not in ("", self.config.run):
            raise NotFound(f"run {run!r} is not served here; this gateway serves {self.config.run!r}")

    def _add_server_ids(self, policies: list[policies_pb2.Policy], servers: list[ServerRecord]) -> None:
        """A server serves a version while it is in a serving state and its heartbeat is no older than a lease lives."""
        silence_ms = 1000 * self.config.replay.lease_ttl_s
        serving = [s for s in servers if s.state in SERVING_STATES and s.heartbeat_age_ms <= silence_ms]
        for policy in policies:
            policy.server_ids[:] = [s.server_id for s in serving if s.policy_version == policy.policy_version]


def _check_prompt_id(prompt_id: int) -> None:
    if not 1 <= prompt_id <= MAX_PROMPT_ID:
        raise NotFound(f"prompt {prompt_id} does not exist")


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


def _server_to_proto(record: ServerRecord) -> runs_pb2.Server:
    return runs_pb2.Server(
        server_id=record.server_id,
        address=record.address,
        state=record.state,
        policy_version=record.policy_version,
        heartbeat_age_ms=record.heartbeat_age_ms,
        running_groups=record.running_groups,
        engine=record.engine,
        weights_digest=record.weights_digest,
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
