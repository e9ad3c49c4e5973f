"""Generate calls: choose a rollout server, pass its answer on, and record it if the call names a session."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.config.run import RunConfig
from penstock.errors import (
    DeadlineExceeded,
    InvalidInput,
    PenstockError,
    Unavailable,
    error_from_reason,
)
from penstock.protocols.conversation import Conversation
from penstock.reward_bounds import RANGE, is_reward
from penstock.store.fleet import ServerRecord
from penstock.v1 import generate_pb2, generate_pb2_grpc, groups_pb2
from penstock.weights.cluster_key import ClusterKey
from penstock_services.gateway import validation
from penstock_services.gateway.access import Caller
from penstock_services.gateway.generate.server_choice import ServerChoice
from penstock_services.gateway.operations import AuditLog, bounded, operation, run_guarded
from penstock_services.gateway.sessions.recorder import SessionCall, SessionRecorder
from penstock_services.gateway.sessions.rewards import SessionRewards
from penstock_services.gateway.sessions.traffic import SessionTraffic

MAX_STOP_TEXTS = 4
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # gRPC measures the bandwidth of a connection that was idle by a ping beside the call. In a large fleet almost every
    # call meets such a connection, and answers are far too small for the result to matter.
    ("grpc.http2.bdp_probe", 0),
)


class GenerateHandlers:
    """Keeps channels to the servers open until `close`."""

    def __init__(
        self, config: RunConfig, audit: AuditLog, choice: ServerChoice, recorder: SessionRecorder,
        rewards: SessionRewards,
    ) -> None:  # fmt: skip
        self.config = config
        self.audit = audit
        self.choice = choice
        self.recorder = recorder
        self.rewards = rewards
        self.traffic = SessionTraffic()
        self._channels: dict[str, grpc.aio.Channel] = {}

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
        wanted = generate_pb2.GenerateRequest()
        wanted.CopyFrom(request)
        wanted.run = self.config.run
        session = await self.recorder.prepare(wanted) if request.session_id else None
        version, servers = await self.choice.choose(key_name, request, session.server_ids if session else ())
        if version is not None:
            wanted.policy_version = version
        return self._answer(wanted, servers, session)

    @operation("submit")
    async def reward_session(self, request: generate_pb2.RewardSessionRequest) -> generate_pb2.RewardSessionResponse:
        validation.check_name("session_id", request.session_id)
        for name, value in {"reward": request.reward, **request.reward_parts}.items():
            if not is_reward(value):
                raise InvalidInput(name, f"must be a number {RANGE}")
        if request.task_id:
            validation.check_name("task_id", request.task_id)
        closing, ids = await self.rewards.give(
            request.session_id, request.reward, request.reward_parts, request.task_id
        )
        self.recorder.forget(request.session_id)
        return generate_pb2.RewardSessionResponse(
            prompt_ids=ids, replayed=closing.state == "answered", is_waiting=closing.state == "joined"
        )

    async def _answer(
        self, request: generate_pb2.GenerateRequest, servers: list[ServerRecord], session: SessionCall | None
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Chunks of the first server that answers. After its first chunk no other server is tried.

        Some chat templates cannot render the new messages of a session without the history before them, such as a
        tool's result without its call. The server that refuses them gets the whole history as messages."""
        whole = generate_pb2.GenerateChunk()
        running = self.choice.running
        failure: PenstockError = Unavailable("no rollout server answers")
        untried = deque(servers)
        while untried:
            server = untried.popleft()
            running[server.server_id] += 1
            try:
                async for chunk in self._call(server, request):
                    whole.MergeFrom(_recorded(chunk, whole))
                    if chunk.finish_reason and session is not None:
                        await self.recorder.record(session, whole, request)
                        self.traffic.add(session, whole)
                    yield chunk
                return
            except grpc.aio.AioRpcError as error:
                failure = _translated(error, server)
                if session is not None and session.replaced and _is_of_template(failure):
                    session.begin_anew(request)
                    untried.appendleft(server)
                    continue
                if whole.server_id or not isinstance(failure, Unavailable):
                    raise failure from error
            finally:
                running[server.server_id] -= 1
        raise failure

    async def _call(
        self, server: ServerRecord, request: generate_pb2.GenerateRequest
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        if server.address not in self._channels:
            self._channels[server.address] = grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
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
        if message.fields_json:
            validation.check_fields(message.fields_json, f"messages[{index}].fields_json")
    if request.history_token_ids:
        raise InvalidInput("history_token_ids", "is set by the gateway; send the session's id and the whole history")
    if len(request.token_ids) % 4:
        raise InvalidInput("token_ids", "must be little-endian int32, 4 bytes a token")
    if len(request.stop) > MAX_STOP_TEXTS or not all(request.stop):
        raise InvalidInput("stop", f"must be at most {MAX_STOP_TEXTS} texts, and none may be empty")
    if request.HasField("policy_version") and request.policy_version < 0:
        raise InvalidInput("policy_version", "must not be negative")
    if request.session_id:
        validation.check_name("session_id", request.session_id)
    if Conversation.from_request(request).tools and not request.messages:
        raise InvalidInput("tools_json", "needs messages")
    validation.check_sampling(request.sampling)


def _recorded(chunk: generate_pb2.GenerateChunk, before: generate_pb2.GenerateChunk) -> generate_pb2.GenerateChunk:
    """A chunk to merge into `before`. Merging appends repeated fields but replaces bytes and
    texts, so these are joined here."""
    return generate_pb2.GenerateChunk(
        text=before.text + chunk.text,
        token_ids=before.token_ids + chunk.token_ids,
        log_probs=before.log_probs + chunk.log_probs,
        segments=chunk.segments,
        finish_reason=chunk.finish_reason or groups_pb2.Trajectory.FINISH_REASON_UNSPECIFIED,
        prompt_token_ids=chunk.prompt_token_ids,
        server_id=chunk.server_id,
        tool_calls=chunk.tool_calls,
        stop_text=chunk.stop_text,
    )


def _is_of_template(error: PenstockError) -> bool:
    """Whether the model's chat template cannot render the messages."""
    return type(error) is InvalidInput and error.field == "messages"


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
