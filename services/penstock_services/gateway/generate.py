"""Generation for clients of any protocol: chooses a rollout server, passes its answer on, records calls of sessions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.api.records import Record
from penstock.errors import (
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    PenstockError,
    Unavailable,
    error_from_reason,
)
from penstock.internal_calls import ClusterKey, InternalChannels
from penstock.protocols import answers
from penstock.protocols.anthropic import CountBody, MessagesBody, MessagesExchange
from penstock.protocols.bodies import SamplingBody
from penstock.protocols.chat import ChatBody, ChatExchange, CompletionBody, CompletionExchange
from penstock.protocols.conversation import Conversation, Json
from penstock.protocols.responses import ResponsesBody, ResponsesExchange
from penstock.samples import TokenText
from penstock.store.fleet import ServerRecord
from penstock.store.keys import check_name
from penstock.v1 import generate_pb2, generate_pb2_grpc
from penstock_services.gateway import checks
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import Handlers, bounded, http_operation, operation, while_valid
from penstock_services.gateway.rest import HttpRequest
from penstock_services.gateway.server_choice import ServerChoice
from penstock_services.gateway.sessions.recorder import SessionCall, SessionRecorder, SessionTraffic

SESSION = ("x-penstock-session", "session_id")
"""The header that names the session of a call."""
MAX_STOP_TEXTS = 4
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # gRPC measures the bandwidth of an idle connection by a ping alongside the call. In a large fleet almost every call
    # meets such a connection, and answers are far too small for the result to matter.
    ("grpc.http2.bdp_probe", 0),
)


class Usage(Record):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Sampled(Record):
    """What the answers of all protocols have beyond their own fields: the policy versions that made them."""

    id: str
    model: str
    policy_version: int
    policy_versions: list[int]


class Completion(Sampled):
    """OpenAI's completion. `stream: true` answers server-sent events instead."""

    object: str
    created: int
    choices: list[Json]
    usage: Usage


class ResponsesAnswer(Sampled):
    """OpenAI's response. `stream: true` answers server-sent events instead."""

    object: str
    created_at: int
    status: str
    output: list[Json]
    usage: Json


class MessagesAnswer(Sampled):
    """Anthropic's message. `stream: true` answers server-sent events instead."""

    type: str
    role: str
    content: list[Json]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, int]


class TokenCount(Record):
    input_tokens: int


class Model(Record):
    id: str
    object: str
    created: int
    owned_by: str
    policy_version: int | None
    server_ids: tuple[str, ...]


class ModelList(Record):
    object: str
    data: tuple[Model, ...]


@dataclass
class GenerateHandlers(Handlers):
    """Keeps channels to the servers open until `close`."""

    choice: ServerChoice
    recorder: SessionRecorder
    texts: TokenText

    def __post_init__(self) -> None:
        self.traffic = SessionTraffic()
        self._channels = InternalChannels(self.config.tls, CHANNEL_OPTIONS)

    async def close(self) -> None:
        await self._channels.close()

    @operation("", "", "submit", Completion)
    async def generate(
        self, caller: Caller, request: generate_pb2.GenerateRequest
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Choose a server and return its answer as it comes. The caller's key may be pinned to a version."""
        return await self._open_answer(caller, request)

    @http_operation("POST", "/v1/chat/completions", "submit", Completion, takes=ChatBody, header=SESSION)
    async def complete_chat(self, http: HttpRequest, body: ChatBody) -> Response:
        """OpenAI's chat completions, answered by the rollout servers. X-Penstock-Session records the call."""
        return await self._respond(http, ChatExchange(body, self.texts.tokens))

    @http_operation("POST", "/v1/completions", "submit", Completion, takes=CompletionBody, header=SESSION)
    async def complete(self, http: HttpRequest, body: CompletionBody) -> Response:
        """OpenAI's completions, answered by the rollout servers."""
        return await self._respond(http, CompletionExchange(body, self.texts.tokens))

    @http_operation("POST", "/v1/responses", "submit", ResponsesAnswer, takes=ResponsesBody, header=SESSION)
    async def create_response(self, http: HttpRequest, body: ResponsesBody) -> Response:
        """OpenAI's Responses, answered by the rollout servers. Nothing is stored."""
        return await self._respond(http, ResponsesExchange(body, self.texts.tokens))

    @http_operation("POST", "/v1/messages", "submit", MessagesAnswer, takes=MessagesBody, header=SESSION)
    async def create_message(self, http: HttpRequest, body: MessagesBody) -> Response:
        """Anthropic's Messages, answered by the rollout servers."""
        return await self._respond(http, MessagesExchange(body, self.texts.tokens))

    @http_operation("POST", "/v1/messages/count_tokens", "submit", TokenCount, takes=CountBody)
    async def count_tokens(self, http: HttpRequest, body: CountBody) -> Response:
        """How many tokens the model's chat template makes of a request to /v1/messages."""
        self._check_model(body)
        [choice] = await answers.collect([await self._open_guarded(http, body.request())])
        return JSONResponse({"input_tokens": choice.num_prompt_tokens})

    @http_operation("GET", "/v1/models", "read", ModelList)
    async def list_models(self, _: HttpRequest) -> Response:
        """List the models: the run, which any of its servers answers, and each version that is served now."""
        return JSONResponse({"object": "list", "data": await self._models()})

    @http_operation("GET", "/v1/models/{model}", "read", Model)
    async def get_model(self, http: HttpRequest) -> Response:
        """One model of the list."""
        models, wanted = {described["id"]: described for described in await self._models()}, http.params["model"]
        if wanted not in models:
            raise ModelNotFound(f"there is no model {wanted!r}; the models are {', '.join(models)}")
        return JSONResponse(models[wanted])

    async def _models(self) -> list[Json]:
        own, versions = self.config.run, await self.choice.served_versions()
        models: list[Json] = [{"id": own, "policy_version": max(versions, default=None), "server_ids": []}]
        models += [
            {"id": f"{own}@{version}", "policy_version": version, "server_ids": server_ids}
            for version, server_ids in sorted(versions.items())
        ]
        return [model | {"object": "model", "created": 0, "owned_by": "penstock"} for model in models]

    def _check_model(self, body: SamplingBody) -> None:
        own = self.config.run
        if body.model.partition("@")[0] != own:
            raise ModelNotFound(f"the model must be {own} or {own}@VERSION, not {body.model!r}")

    async def _respond(self, http: HttpRequest, exchange: answers.Exchange) -> Response:
        body = exchange.body
        self._check_model(body)
        try:
            requests = body.requests(http.headers.get(SESSION[0], ""))
            streams = [await self._open_guarded(http, wanted) for wanted in requests]
            if body.stream:
                events = await answers.open_events(exchange, streams)
                return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
            choices = await answers.collect_unless_left(streams, http.receive)
        except InvalidInput as error:
            raise answers.renamed(error, exchange) from error
        if choices is None:
            return Response(status_code=answers.CLIENT_CLOSED_REQUEST)
        newest = answers.version_fields(choices)["policy_version"]
        return JSONResponse(exchange.whole(choices), headers={"X-Penstock-Policy-Version": str(newest)})

    async def _open_guarded(
        self, http: HttpRequest, request: generate_pb2.GenerateRequest
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """An answer for the caller of an HTTP request, which ends if its key is removed."""
        assert http.caller is not None
        opening = self._open_answer(http.caller, request)
        return while_valid(await bounded(opening, self.deadline_s), http.caller, http.operation)

    async def _open_answer(
        self, caller: Caller, request: generate_pb2.GenerateRequest
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        _check(request)
        wanted = generate_pb2.GenerateRequest()
        wanted.CopyFrom(request)
        wanted.run = self.config.run
        session = await self.recorder.prepare(wanted, caller.owner) if request.session_id else None
        version, servers = await self.choice.choose(caller.name, request, session.server_ids if session else ())
        if version is not None:
            wanted.policy_version = version
        return self._answer(wanted, servers, session)

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
                    _extend(whole, chunk)
                    if chunk.finish_reason and session is not None:
                        await self.recorder.record(session, whole, request)
                        self.traffic.add(session, whole)
                    yield chunk
                return
            except grpc.aio.AioRpcError as error:
                failure = _translated(error, server)
                is_of_template = type(failure) is InvalidInput and failure.field == "messages"
                if session is not None and session.replaced and is_of_template:
                    session.begin_again(request)
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
        stub: Any = generate_pb2_grpc.GenerateServiceStub(self._channels.to(server.address))
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
    checks.messages(request.messages)
    if request.history_token_ids:
        raise InvalidInput("history_token_ids", "is set by the gateway; send the session's id and the whole history")
    checks.token_ids(request.token_ids)
    if len(request.stop) > MAX_STOP_TEXTS or not all(request.stop):
        raise InvalidInput("stop", f"must be at most {MAX_STOP_TEXTS} texts, and none may be empty")
    if request.HasField("policy_version") and request.policy_version < 0:
        raise InvalidInput("policy_version", "must not be negative")
    if request.session_id:
        check_name("session_id", request.session_id)
    if Conversation.from_request(request).tools and not request.messages:
        raise InvalidInput("tools_json", "needs messages")
    checks.sampling(request.sampling)


def _extend(whole: generate_pb2.GenerateChunk, chunk: generate_pb2.GenerateChunk) -> None:
    """Add a chunk. Merging appends repeated fields but replaces bytes and texts, so these are joined here."""
    joined = {name: getattr(whole, name) + getattr(chunk, name) for name in ("text", "token_ids", "log_probs")}
    whole.MergeFrom(chunk)
    for name, value in joined.items():
        setattr(whole, name, value)


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
