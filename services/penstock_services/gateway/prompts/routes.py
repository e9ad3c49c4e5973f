"""REST routes of prompts, results and groups."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.errors import InvalidInput
from penstock.v1 import groups_pb2, prompts_pb2
from penstock_services.gateway.gate import SUBMIT_PATH
from penstock_services.gateway.prompts import bodies
from penstock_services.gateway.prompts.handlers import PromptHandlers
from penstock_services.gateway.routing import PROBLEM, PageSize, add_routes, event_stream, run_name

PromptId = Annotated[int, Path(ge=1, lt=2**63)]
_SUBMISSION: dict[str, Any] = {
    "parameters": [
        {"name": "run", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "default": ""}},
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["prompts"],
                    "additionalProperties": False,
                    "properties": {
                        "prompts": {"type": "array", "items": {"$ref": "#/components/schemas/PromptBody"}},
                        "idempotency_key": {"type": "string", "default": ""},
                    },
                }
            }
        },
    },
}
_STATES = prompts_pb2.PromptRecord.State


class PromptRoutes:
    def __init__(self, handlers: PromptHandlers) -> None:
        self.handlers = handlers

    def router(self) -> APIRouter:
        run = "/v1/runs/{run}"
        router = add_routes(
            "prompts",
            ("GET", f"{run}/prompts", self.list_prompts),
            ("POST", f"{run}/prompts:cancel", self.cancel_prompts),
            ("GET", f"{run}/prompts/{{prompt_id}}:wait", self.wait_prompt),
            ("GET", f"{run}/prompts/{{prompt_id}}", self.get_prompt),
            ("GET", f"{run}/results", self.watch_results),
            ("GET", f"{run}/groups", self.list_groups),
            ("GET", f"{run}/groups/{{prompt_id}}", self.get_group),
        )
        router.add_api_route(
            SUBMIT_PATH, self.submit_prompts, methods=["POST"], response_model=None, openapi_extra=_SUBMISSION,
            responses={"default": PROBLEM},
        )  # fmt: skip
        return router

    async def submit_prompts(self, request: Request) -> Response:
        """Submit prompts: all are accepted, or none."""
        key = request.headers.get("idempotency-key", "")
        content = await self.submit(request.path_params["run"], await request.body(), key)
        return Response(content, media_type="application/json")

    async def submit(self, run: str, content: bytes, idempotency_key: str) -> bytes:
        """What the gate answers a submission with; as a route it is there for the schema."""
        request = bodies.SubmitPromptsBody.parse(content).to_proto(run_name(run), idempotency_key)
        return to_json(bodies.submission_to_json(await self.handlers.submit_prompts(request)))

    async def get_prompt(self, run: str, prompt_id: PromptId) -> Response:
        request = prompts_pb2.GetPromptRequest(run=run_name(run), prompt_id=prompt_id)
        return JSONResponse(bodies.prompt_record_to_json(await self.handlers.get_prompt(request)))

    async def list_prompts(
        self, run: str, page_size: PageSize = 0, page_token: str = "", state: str = "", data_source: str = ""
    ) -> Response:
        """Prompts by id, oldest first."""
        if state not in ("", *_STATES.keys()[1:]):
            raise InvalidInput("state", f"must be one of {', '.join(_STATES.keys()[1:])}")
        request = prompts_pb2.ListPromptsRequest(
            run=run_name(run), page_size=max(page_size, -1), page_token=page_token, data_source=data_source,
            state=state or None,
        )  # fmt: skip
        return JSONResponse(bodies.prompts_to_json(await self.handlers.list_prompts(request)))

    async def cancel_prompts(self, run: str, body: bodies.CancelPromptsBody) -> Response:
        """Take back prompts that are not yet being trained."""
        request = prompts_pb2.CancelPromptsRequest(run=run_name(run), prompt_ids=body.prompt_ids)
        return JSONResponse(bodies.cancelled_to_json(await self.handlers.cancel_prompts(request)))

    async def wait_prompt(self, run: str, prompt_id: PromptId, timeout_s: float = 30.0) -> Response:
        """Answers once the prompt is finished, or after `timeout_s`."""
        request = prompts_pb2.WaitPromptRequest(run=run_name(run), prompt_id=prompt_id, timeout_s=timeout_s)
        return JSONResponse(bodies.prompt_record_to_json(await self.handlers.wait_prompt(request)))

    async def watch_results(
        self, run: str, cursor: str = "", with_groups: bool = False,
        prompt_id: Annotated[list[Annotated[int, Query(ge=1, lt=2**63)]] | None, Query()] = None,
        last_event_id: Annotated[str, Header()] = "",
    ) -> Response:  # fmt: skip
        """Server-sent events, one for each prompt that finishes; an event's id is the cursor to go on from."""
        request = prompts_pb2.WatchResultsRequest(
            run=run_name(run), cursor=last_event_id or cursor, prompt_ids=prompt_id or [], with_groups=with_groups
        )
        results = await self.handlers.watch_results(request)
        return event_stream("result", results, bodies.result_to_json, lambda result: result.cursor)

    async def list_groups(self, run: str, page_size: PageSize = 0, page_token: str = "") -> Response:
        request = groups_pb2.ListGroupsRequest(run=run_name(run), page_size=max(page_size, -1), page_token=page_token)
        return JSONResponse(bodies.groups_to_json(await self.handlers.list_groups(request)))

    async def get_group(self, run: str, prompt_id: PromptId) -> Response:
        """A group that waits for the learner, with every token of its trajectories."""
        request = groups_pb2.GetGroupRequest(run=run_name(run), prompt_id=prompt_id)
        return JSONResponse(bodies.group_to_json(await self.handlers.get_group(request)))
