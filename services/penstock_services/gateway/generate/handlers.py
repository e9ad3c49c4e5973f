"""Generate calls: choose a rollout server, pass its answer on, and record it if the call names a session."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.config.run import RunConfig
from penstock.errors import Conflict, DeadlineExceeded, InvalidInput, PenstockError, Unavailable, error_from_reason
from penstock.reward_bounds import RANGE, is_reward
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import RunControl
from penstock.v1 import generate_pb2, generate_pb2_grpc, groups_pb2
from penstock.weights.cluster_key import ClusterKey
from penstock_services.gateway import validation
from penstock_services.gateway.access import Caller
from penstock_services.gateway.generate.sessions import Sessions
from penstock_services.gateway.operations import AuditLog, bounded, operation, run_guarded

MAX_STOP_TEXTS = 4
MAX_TRIES = 3
"""How many servers are tried until one answers."""


class GenerateHandlers:
    """Keeps channels to the servers open until `close`."""

    def __init__(
        self, config: RunConfig, audit: AuditLog, fleet: Fleet, policies: PolicyRegistry, control: RunControl,
        sessions: Sessions,
    ) -> None:  # fmt: skip
        self.config = config
        self.audit = audit
        self.fleet = fleet
        self.policies = policies
        self.control = control
        self.sessions = sessions
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._running: Counter[str] = Counter()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def generate(
        self, caller: Caller, request: generate_pb2.GenerateRequest
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Choose a server and return its answer as it comes. The caller's key may be pinned to a version."""

        async def open_answer() -> AsyncIterator[generate_pb2.GenerateChunk]:
            return await bounded(self._open_answer(caller.name, request), 2 * self.config.redis.timeout_s)

        return await run_guarded(open_answer, caller, "submit", "generate", request, self.audit)

    generate.role = "submit"  # type: ignore[attr-defined]

    async def _open_answer(
        self, key_name: str, request: generate_pb2.GenerateRequest
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        _check(request)
        if request.session_id:
            await self.sessions.check_open(request.session_id)
        wanted = generate_pb2.GenerateRequest()
        wanted.CopyFrom(request)
        wanted.run = self.config.run
        version = await self._version_for(key_name, request)
        if version is not None:
            wanted.policy_version = version
        servers = await self._servers(version)
        return self._answer(wanted, servers)

    @operation("submit")
    async def reward_session(self, request: generate_pb2.RewardSessionRequest) -> generate_pb2.RewardSessionResponse:
        validation.check_name("session_id", request.session_id)
        for name, value in {"reward": request.reward, **request.reward_parts}.items():
            if not is_reward(value):
                raise InvalidInput(name, f"must be a number {RANGE}")
        ids, replayed = await self.sessions.reward(request.session_id, request.reward, request.reward_parts)
        return generate_pb2.RewardSessionResponse(prompt_ids=ids, replayed=replayed)

    async def served_versions(self) -> dict[int, list[str]]:
        """Ids of the servers that would answer, by version."""
        versions: dict[int, list[str]] = {}
        for server in await self._ready():
            versions.setdefault(server.policy_version, []).append(server.server_id)
        return versions

    async def _version_for(self, key_name: str, request: generate_pb2.GenerateRequest) -> int | None:
        """The version that the call asks for, else the one that its session or its key is pinned to, else None."""
        if request.HasField("policy_version"):
            return request.policy_version
        pins = await self.policies.pins()
        by_session = pins.get(request.session_id) if request.session_id else None
        return by_session if by_session is not None else pins.get(key_name)

    async def _servers(self, version: int | None) -> list[ServerRecord]:
        """Servers that may answer, the least busy first."""
        ready = await self._ready()
        if not ready:
            raise Unavailable("no rollout server is ready; see the run's servers")
        pins = await self.policies.pins()
        fit = [
            server
            for server in ready
            if server.policy_version == version or (version is None and server.server_id not in pins)
        ]
        if not fit and version is None:
            raise Unavailable("every rollout server that is ready is pinned to a version; unpin one, or name a version")
        if not fit:
            served = sorted({server.policy_version for server in ready})
            raise Conflict(f"no server serves version {version}, only {served}; unpin it, or roll back to it")
        return sorted(fit, key=lambda server: (self._running[server.server_id], server.running_groups))

    async def _ready(self) -> list[ServerRecord]:
        silence_ms = 1000 * self.config.replay.lease_ttl_s
        left_out = await self.control.drained() | await self.fleet.quarantined()
        return [
            server
            for server in await self.fleet.servers()
            if server.state in SERVING_STATES and server.heartbeat_age_ms <= silence_ms
            and server.server_id not in left_out
        ]  # fmt: skip

    async def _answer(
        self, request: generate_pb2.GenerateRequest, servers: list[ServerRecord]
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Chunks of the first server that answers. After its first chunk no other server is tried."""
        whole = generate_pb2.GenerateChunk()
        failure: PenstockError = Unavailable("no rollout server answers")
        for server in servers[:MAX_TRIES]:
            self._running[server.server_id] += 1
            try:
                async for chunk in self._call(server, request):
                    whole.MergeFrom(_recorded(chunk, whole))
                    if chunk.finish_reason and request.session_id:
                        whole.sampling.CopyFrom(request.sampling)
                        await self.sessions.record(request.session_id, whole)
                    yield chunk
                return
            except grpc.aio.AioRpcError as error:
                failure = _translated(error, server)
                if whole.server_id or not isinstance(failure, Unavailable):
                    raise failure from error
            finally:
                self._running[server.server_id] -= 1
        raise failure

    async def _call(
        self, server: ServerRecord, request: generate_pb2.GenerateRequest
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        if server.address not in self._channels:
            options = [("grpc.enable_http_proxy", 0)]
            self._channels[server.address] = grpc.aio.insecure_channel(server.address, options=options)
        stub: Any = generate_pb2_grpc.GenerateServiceStub(self._channels[server.address])
        metadata = await asyncio.to_thread(ClusterKey.of(self.config).metadata)
        call = stub.Generate(request, timeout=self.config.gateway.generate_timeout_s, metadata=metadata)
        try:
            async for chunk in call:
                yield chunk
        finally:
            call.cancel()


def _check(request: generate_pb2.GenerateRequest) -> None:
    if sum(map(bool, (request.messages, request.text, request.token_ids))) != 1:
        raise InvalidInput("messages", "give exactly one of messages, text and token_ids")
    for index, message in enumerate(request.messages):
        if not message.role.strip():
            raise InvalidInput(f"messages[{index}].role", "must not be empty")
    if len(request.token_ids) % 4:
        raise InvalidInput("token_ids", "must be little-endian int32, 4 bytes a token")
    if len(request.stop) > MAX_STOP_TEXTS or not all(request.stop):
        raise InvalidInput("stop", f"must be at most {MAX_STOP_TEXTS} texts, and none may be empty")
    if request.HasField("policy_version") and request.policy_version < 0:
        raise InvalidInput("policy_version", "must not be negative")
    if request.session_id:
        validation.check_name("session_id", request.session_id)
    validation.check_sampling(request.sampling)


def _recorded(chunk: generate_pb2.GenerateChunk, before: generate_pb2.GenerateChunk) -> generate_pb2.GenerateChunk:
    """A chunk to merge into `before`. Merging appends repeated fields but replaces bytes, so bytes are joined here."""
    return generate_pb2.GenerateChunk(
        token_ids=before.token_ids + chunk.token_ids,
        log_probs=before.log_probs + chunk.log_probs,
        segments=chunk.segments,
        finish_reason=chunk.finish_reason or groups_pb2.Trajectory.FINISH_REASON_UNSPECIFIED,
        prompt_token_ids=chunk.prompt_token_ids,
        server_id=chunk.server_id,
    )


def _translated(error: grpc.aio.AioRpcError, server: ServerRecord) -> PenstockError:
    """The error that the server raised, with its reason and field, or Unavailable if it did not answer."""
    details = error.details() or "no details"
    trailing = {name: str(value) for name, value in error.trailing_metadata() or ()}
    known = error_from_reason(trailing.get("reason", ""), details, trailing.get("field", ""))
    if known is not None:
        return known
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{server.server_id} did not finish in time; ask for fewer tokens")
    if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
        return Unavailable(f"{server.server_id}: {details}")
    return Unavailable(f"{server.server_id} does not answer ({details}); try again")
