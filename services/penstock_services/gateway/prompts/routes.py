"""REST routes of prompts, results and groups."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.errors import InvalidInput
from penstock.v1 import groups_pb2, prompts_pb2
from penstock_services.gateway.prompts import bodies, samples
from penstock_services.gateway.response_schemas import success_of
from penstock_services.gateway.routing import (
    PROBLEM,
    Authenticated,
    PageSize,
    RequestRoute,
    RunOfPath,
    add_routes,
    caller_of,
    event_stream,
    find_run,
)

PromptId = Annotated[int, Path(ge=1, lt=2**63)]
_BODY_SCHEMA = bodies.SubmitPromptsBody.model_json_schema(ref_template="#/components/schemas/{model}")
del _BODY_SCHEMA["$defs"]  # other routes take a PromptBody too, so FastAPI lists it among the components
_SUBMISSION: dict[str, Any] = {
    "parameters": [
        {"name": "run", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "default": ""}},
    ],
    "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY_SCHEMA}}},
}
_STATES = prompts_pb2.PromptRecord.State
_ORDERS = groups_pb2.ListSamplesRequest.Order
Number = Annotated[int | None, Query(ge=0, lt=2**63)]


def router() -> APIRouter:
    run = "/v1/runs/{run}"
    router = APIRouter()
    router.add_api_route(
        f"{run}/prompts", submit_prompts, methods=["POST"], tags=["prompts"], response_model=None,
        responses={200: success_of("submit_prompts"), "default": PROBLEM}, openapi_extra=_SUBMISSION,
        route_class_override=RequestRoute,
    )  # fmt: skip
    router.include_router(
        add_routes(
            "prompts",
            ("GET", f"{run}/prompts", list_prompts),
            ("POST", f"{run}/prompts:cancel", cancel_prompts),
            ("GET", f"{run}/prompts/{{prompt_id}}:wait", wait_prompt),
            ("GET", f"{run}/prompts/{{prompt_id}}", get_prompt),
            ("GET", f"{run}/results", watch_results),
            ("GET", f"{run}/groups", list_groups),
            ("GET", f"{run}/groups/{{prompt_id}}", get_group),
            ("GET", f"{run}/samples", list_samples),
        )
    )
    return router


async def submit_prompts(request: Request) -> Response:
    """Submit prompts: all are accepted, or none."""
    run, caller = await find_run(request.path_params["run"], request), await caller_of(request)
    body = bodies.SubmitPromptsBody.parse(await request.body())
    submission = body.to_proto(run.name, request.headers.get("idempotency-key", ""))
    answer = await run.prompts.submit_prompts(caller, submission)
    return Response(to_json(bodies.submission_to_json(answer)), media_type="application/json")


async def get_prompt(run: RunOfPath, caller: Authenticated, prompt_id: PromptId) -> Response:
    request = prompts_pb2.GetPromptRequest(run=run.name, prompt_id=prompt_id)
    return JSONResponse(bodies.prompt_record_to_json(await run.prompts.get_prompt(caller, request)))


async def list_prompts(
    run: RunOfPath,
    caller: Authenticated,
    page_size: PageSize = 0,
    page_token: str = "",
    state: str = "",
    data_source: str = "",
) -> Response:
    """List prompts by id, oldest first."""
    if state not in ("", *_STATES.keys()[1:]):
        raise InvalidInput("state", f"must be one of {', '.join(_STATES.keys()[1:])}")
    request = prompts_pb2.ListPromptsRequest(
        run=run.name, page_size=max(page_size, -1), page_token=page_token, data_source=data_source,
        state=state or None,
    )  # fmt: skip
    return JSONResponse(bodies.prompts_to_json(await run.prompts.list_prompts(caller, request)))


async def cancel_prompts(run: RunOfPath, caller: Authenticated, body: bodies.CancelPromptsBody) -> Response:
    """Cancel prompts whose groups the learner has not taken."""
    request = prompts_pb2.CancelPromptsRequest(run=run.name, prompt_ids=body.prompt_ids)
    return JSONResponse(bodies.cancelled_to_json(await run.prompts.cancel_prompts(caller, request)))


async def wait_prompt(run: RunOfPath, caller: Authenticated, prompt_id: PromptId, timeout_s: float = 30.0) -> Response:
    """Wait until the prompt is finished, for up to `timeout_s`, and return its record."""
    request = prompts_pb2.WaitPromptRequest(run=run.name, prompt_id=prompt_id, timeout_s=timeout_s)
    return JSONResponse(bodies.prompt_record_to_json(await run.prompts.wait_prompt(caller, request)))


async def watch_results(
    run: RunOfPath, caller: Authenticated, cursor: str = "", with_groups: bool = False,
    prompt_id: Annotated[list[Annotated[int, Query(ge=1, lt=2**63)]] | None, Query()] = None,
    last_event_id: Annotated[str, Header()] = "",
) -> Response:  # fmt: skip
    """Server-sent events, one for each prompt that finishes. The id of an event is the cursor to resume from."""
    request = prompts_pb2.WatchResultsRequest(
        run=run.name, cursor=last_event_id or cursor, prompt_ids=prompt_id or [], with_groups=with_groups
    )
    results = await run.prompts.watch_results(caller, request)
    return event_stream("result", results, bodies.result_to_json, lambda result: result.cursor, in_thread=with_groups)


async def list_groups(run: RunOfPath, caller: Authenticated, page_size: PageSize = 0, page_token: str = "") -> Response:
    request = groups_pb2.ListGroupsRequest(run=run.name, page_size=max(page_size, -1), page_token=page_token)
    return JSONResponse(bodies.groups_to_json(await run.groups.list_groups(caller, request)))


async def get_group(run: RunOfPath, caller: Authenticated, prompt_id: PromptId) -> Response:
    """Return a queued group with every token of its trajectories."""
    request = groups_pb2.GetGroupRequest(run=run.name, prompt_id=prompt_id)
    group = await run.groups.get_group(caller, request)
    return await asyncio.to_thread(lambda: JSONResponse(bodies.group_to_json(group)))  # it may have a million tokens


async def list_samples(
    run: RunOfPath, caller: Authenticated, page_size: PageSize = 0, page_token: str = "", order: str = "",
    min_step: Number = None, max_step: Number = None, min_reward: float | None = None,
    max_reward: float | None = None, prompt_id: Number = None, data_source: str = "", text: str = "",
) -> Response:  # fmt: skip
    """List trained samples as text, newest first, or by `order` (WORST or BEST). Bounds are included."""
    if order not in ("", *_ORDERS.keys()[1:]):
        raise InvalidInput("order", f"must be one of {', '.join(_ORDERS.keys()[1:])}")
    request = groups_pb2.ListSamplesRequest(
        run=run.name, page_size=max(page_size, -1), page_token=page_token, order=order or None, min_step=min_step,
        max_step=max_step, min_reward=min_reward, max_reward=max_reward, prompt_id=prompt_id, data_source=data_source,
        text=text,
    )  # fmt: skip
    found = await run.samples.list_samples(caller, request)
    return await asyncio.to_thread(lambda: JSONResponse(samples.samples_to_json(found)))
