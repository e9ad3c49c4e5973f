"""REST routes of generation, compatible with OpenAI's clients, and of sessions."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.errors import InvalidInput, NotFound, PenstockError
from penstock.token_text import TokenText
from penstock.v1 import generate_pb2
from penstock_services.gateway.access import Caller
from penstock_services.gateway.bodies import Json
from penstock_services.gateway.generate import openai_bodies as bodies
from penstock_services.gateway.problems import problem_fields
from penstock_services.gateway.routing import Authenticated, Served, add_routes
from penstock_services.gateway.served_run import ServedRun
from penstock_services.gateway.served_runs import ServedRuns

Chunks = AsyncIterator[generate_pb2.GenerateChunk]
Session = Annotated[str, Header(alias="X-Penstock-Session")]


def router() -> APIRouter:
    return add_routes(
        "generate",
        ("POST", "/v1/chat/completions", complete_chat),
        ("POST", "/v1/completions", complete),
        ("GET", "/v1/models", list_models),
        ("POST", "/v1/sessions/{session_id}/reward", reward_session),
    )


async def complete_chat(
    served: Served, caller: Authenticated, body: bodies.ChatBody, session_id: Session = ""
) -> Response:
    """OpenAI's chat completions, answered by the rollout servers. The header X-Penstock-Session records the call."""
    run = await _run_of(served, body)
    return await _answer(run, caller, body, session_id, ChatForm(bool(body.logprobs), run.texts))


async def complete(
    served: Served, caller: Authenticated, body: bodies.CompletionBody, session_id: Session = ""
) -> Response:
    """OpenAI's completions, answered by the rollout servers."""
    run = await _run_of(served, body)
    return await _answer(run, caller, body, session_id, TextForm(body.logprobs is not None, run.texts))


async def list_models(served: Served, caller: Authenticated) -> Response:
    """List the models: each run that is up, which any of its servers answers, and each version that is served now."""
    caller.check("read", "list_models")
    own = served.config.run
    started = [created.run for created in await served.created.list() if created.state == "STARTED"]
    models: list[Json] = []
    for name in (own, *(run for run in started if run != own)):
        versions = await (await served.find(name)).generation.served_versions()
        models.append({"id": name, "policy_version": max(versions, default=None), "server_ids": []})
        models += [
            {"id": f"{name}@{version}", "policy_version": version, "server_ids": server_ids}
            for version, server_ids in sorted(versions.items())
        ]
    described = [model | {"object": "model", "created": 0, "owned_by": "penstock"} for model in models]
    return JSONResponse({"object": "list", "data": described})


async def reward_session(served: Served, caller: Authenticated, session_id: str, body: bodies.RewardBody) -> Response:
    """Turn the session's recorded calls into training data with this reward."""
    run = await served.find(body.run)
    request = generate_pb2.RewardSessionRequest(
        run=run.name, session_id=session_id, reward=body.reward, reward_parts=body.reward_parts
    )
    answer = await run.generation.reward_session(caller, request)
    return JSONResponse({"prompt_ids": list(answer.prompt_ids), "replayed": answer.replayed})


async def _run_of(served: ServedRuns, body: bodies.OpenAIBody) -> ServedRun:
    """The run that the request names as its model."""
    try:
        return await served.find(body.run)
    except NotFound as error:
        own = served.config.run
        wanted = f"must be {own} or {own}@VERSION, or another run that is served here, not {body.model!r}"
        raise InvalidInput("model", wanted) from error


async def _answer(run: ServedRun, caller: Caller, body: bodies.OpenAIBody, session_id: str, form: ChatForm) -> Response:
    requests = [body.to_proto(index, session_id) for index in range(body.n or 1)]
    streams = [await run.generation.generate(caller, request) for request in requests]
    answer_id = f"{form.id_prefix}-{uuid.uuid4().hex}"
    choices = [bodies.Choice(index) for index in range(len(streams))]
    if body.stream:
        events = _events(body, streams, choices, form, answer_id)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    await asyncio.gather(*(_collect(stream, choice) for stream, choice in zip(streams, choices, strict=True)))
    answer = bodies.envelope(form.kind, answer_id, body.model, choices)
    answer |= {"choices": [form.whole(choice) for choice in choices], "usage": bodies.usage_of(choices)}
    return JSONResponse(answer, headers={"X-Penstock-Policy-Version": str(answer["policy_version"])})


class ChatForm:
    """The form of a choice of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, with_log_probs: bool, texts: TokenText) -> None:
        self.with_log_probs = with_log_probs
        self.texts = texts

    def whole(self, choice: bodies.Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._choice(choice, 0) | {"message": message}

    def part(self, choice: bodies.Choice, text: str, start: int) -> Json:
        delta = {"content": text} | ({"role": "assistant"} if start == 0 else {})
        return self._choice(choice, start) | {"delta": delta}

    def _choice(self, choice: bodies.Choice, start: int) -> Json:
        return {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._log_probs(choice, start) if self.with_log_probs else None,
        }

    def _log_probs(self, choice: bodies.Choice, start: int) -> Json:
        return bodies.log_probs_of(choice, start, self.texts.tokens(choice.token_ids[start:]))


class TextForm(ChatForm):
    """The form of a choice of /v1/completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def whole(self, choice: bodies.Choice) -> Json:
        return self._choice(choice, 0) | {"text": choice.text}

    def part(self, choice: bodies.Choice, text: str, start: int) -> Json:
        return self._choice(choice, start) | {"text": text}

    def _log_probs(self, choice: bodies.Choice, start: int) -> Json:
        tokens = self.texts.tokens(choice.token_ids[start:])
        return {"tokens": tokens, "token_logprobs": choice.log_probs[start:], "top_logprobs": None, "text_offset": []}


async def _collect(stream: Chunks, choice: bodies.Choice) -> None:
    async with aclosing(cast(Any, stream)) as chunks:
        async for chunk in chunks:
            choice.add(chunk)


async def _events(
    body: bodies.OpenAIBody, streams: list[Chunks], choices: list[bodies.Choice], form: ChatForm, answer_id: str
) -> AsyncIterator[str]:
    """Server-sent events in OpenAI's form, one choice after the other."""
    try:
        for stream, choice in zip(streams, choices, strict=True):
            async with aclosing(cast(Any, stream)) as chunks:
                async for chunk in chunks:
                    start = len(choice.token_ids)
                    choice.add(chunk)
                    event = bodies.envelope(form.chunk_kind, answer_id, body.model, [choice])
                    yield _event(event | {"choices": [form.part(choice, chunk.text, start)]})
        if body.includes_usage:
            event = bodies.envelope(form.chunk_kind, answer_id, body.model, choices)
            yield _event(event | {"choices": [], "usage": bodies.usage_of(choices)})
    except PenstockError as error:
        yield _event({"error": problem_fields(error) | {"message": str(error)}})
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    return f"data: {json.dumps(content)}\n\n"
