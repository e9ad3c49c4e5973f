"""REST routes of generation, compatible with OpenAI's clients, and of sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.errors import InvalidInput, ModelNotFound, NotFound
from penstock.protocols.answers import (
    CLIENT_CLOSED_REQUEST,
    Exchange,
    collect,
    collect_unless_left,
    open_events,
    renamed,
    version_fields,
)
from penstock.protocols.anthropic import CountBody, MessagesBody, MessagesExchange
from penstock.protocols.bodies import SamplingBody
from penstock.protocols.chat import ChatBody, ChatExchange
from penstock.protocols.completions import CompletionBody, CompletionExchange
from penstock.protocols.responses import ResponsesBody, ResponsesExchange
from penstock.v1 import generate_pb2
from penstock_services.gateway.access import Caller
from penstock_services.gateway.bodies import Json
from penstock_services.gateway.routing import Authenticated, Served, add_routes
from penstock_services.gateway.served_run import ServedRun
from penstock_services.gateway.served_runs import ServedRuns
from penstock_services.gateway.sessions.bodies import RewardBody

Session = Annotated[str, Header(alias="X-Penstock-Session")]


def router() -> APIRouter:
    return add_routes(
        "generate",
        ("POST", "/v1/chat/completions", complete_chat),
        ("POST", "/v1/completions", complete),
        ("POST", "/v1/responses", create_response),
        ("POST", "/v1/messages/count_tokens", count_tokens),
        ("POST", "/v1/messages", create_message),
        ("GET", "/v1/models", list_models),
        ("GET", "/v1/models/{model}", get_model),
        ("POST", "/v1/sessions/{session_id}/reward", reward_session),
    )


async def complete_chat(
    request: Request, served: Served, caller: Authenticated, body: ChatBody, session_id: Session = ""
) -> Response:
    """OpenAI's chat completions, answered by the rollout servers. The header X-Penstock-Session records the call."""
    run = await _run_of(served, body)
    return await _answer(request, run, caller, ChatExchange(body, run.texts.tokens, session_id), stream=body.stream)


async def complete(
    request: Request, served: Served, caller: Authenticated, body: CompletionBody, session_id: Session = ""
) -> Response:
    """OpenAI's completions, answered by the rollout servers."""
    run = await _run_of(served, body)
    return await _answer(
        request, run, caller, CompletionExchange(body, run.texts.tokens, session_id), stream=body.stream
    )


async def create_response(
    request: Request, served: Served, caller: Authenticated, body: ResponsesBody, session_id: Session = ""
) -> Response:
    """OpenAI's Responses, answered by the rollout servers. Nothing is stored."""
    run = await _run_of(served, body)
    return await _answer(
        request, run, caller, ResponsesExchange(body, run.texts.tokens, session_id), stream=body.stream
    )


async def create_message(
    request: Request, served: Served, caller: Authenticated, body: MessagesBody, session_id: Session = ""
) -> Response:
    """Anthropic's Messages, answered by the rollout servers."""
    run = await _run_of(served, body)
    return await _answer(request, run, caller, MessagesExchange(body, session_id), stream=body.stream)


async def count_tokens(served: Served, caller: Authenticated, body: CountBody) -> Response:
    """How many tokens the model's chat template makes of a request to /v1/messages."""
    run = await _run_of(served, body)
    [choice] = await collect([await run.generation.generate(caller, body.request())])
    return JSONResponse({"input_tokens": choice.num_prompt_tokens})


async def list_models(served: Served, caller: Authenticated) -> Response:
    """List the models: each run that is up, which any of its servers answers, and each version that is served now."""
    caller.check("read", "list_models")
    return JSONResponse({"object": "list", "data": await _models(served)})


async def get_model(served: Served, caller: Authenticated, model: str) -> Response:
    """One model of the list."""
    caller.check("read", "get_model")
    models = {described["id"]: described for described in await _models(served)}
    if model not in models:
        raise ModelNotFound(f"there is no model {model!r}; the models are {', '.join(models)}")
    return JSONResponse(models[model])


async def _models(served: ServedRuns) -> list[Json]:
    own = served.config.run
    versions = await (await served.find(own)).generation.choice.served_versions()
    models: list[Json] = [{"id": own, "policy_version": max(versions, default=None), "server_ids": []}]
    models += [
        {"id": f"{own}@{version}", "policy_version": version, "server_ids": server_ids}
        for version, server_ids in sorted(versions.items())
    ]
    return [model | {"object": "model", "created": 0, "owned_by": "penstock"} for model in models]


async def reward_session(served: Served, caller: Authenticated, session_id: str, body: RewardBody) -> Response:
    """Turn the session's recorded calls into training data with this reward."""
    run = await served.find(body.run)
    request = generate_pb2.RewardSessionRequest(
        run=run.name,
        session_id=session_id,
        reward=body.reward,
        reward_parts=body.reward_parts,
        task_id=body.task_id,
    )
    answer = await run.generation.reward_session(caller, request)
    return JSONResponse(
        {"prompt_ids": list(answer.prompt_ids), "replayed": answer.replayed, "is_waiting": answer.is_waiting}
    )


async def _run_of(served: ServedRuns, body: SamplingBody) -> ServedRun:
    """The run that the request names as its model."""
    try:
        return await served.find(body.run)
    except NotFound as error:
        own = served.config.run
        raise ModelNotFound(f"the model must be {own} or {own}@VERSION, not {body.model!r}") from error


async def _answer(
    request: Request, run: ServedRun, caller: Caller, exchange: Exchange, *, stream: bool | None
) -> Response:
    try:
        streams = [await run.generation.generate(caller, wanted) for wanted in exchange.requests()]
        if stream:
            events = await open_events(exchange, streams)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        choices = await collect_unless_left(streams, request.receive)
    except InvalidInput as error:
        raise renamed(error, exchange) from error
    if choices is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    newest = version_fields(choices)["policy_version"]
    return JSONResponse(exchange.whole(choices), headers={"X-Penstock-Policy-Version": str(newest)})
