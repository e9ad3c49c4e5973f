"""REST routes that show sessions."""

from __future__ import annotations

import asyncio
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from penstock.codec import FINISH_FROM_PROTO, sampling_from_proto
from penstock.v1 import sessions_pb2
from penstock_services.gateway.bodies import Json, finite
from penstock_services.gateway.prompts.bodies import sampling_to_json
from penstock_services.gateway.routing import Authenticated, PageSize, Served, add_routes
from penstock_services.gateway.sessions.session_handlers import MAX_TOKENS
from penstock_services.gateway.sessions.task_routes import RunName

FromCall = Annotated[
    int, Query(ge=0, lt=2**31, description="Number of the first call whose tokens are wanted.")
]  # fmt: skip
MaxTokens = Annotated[int, Query(ge=0, le=MAX_TOKENS, description="Tokens of all calls together; 0 for 20,000.")]


def router() -> APIRouter:
    return add_routes(
        "sessions",
        ("GET", "/v1/sessions", list_sessions),
        ("GET", "/v1/sessions/{session_id}", get_session),
    )


async def list_sessions(
    served: Served, caller: Authenticated, run: RunName = "", page_size: PageSize = 0, page_token: str = ""
) -> Response:
    """List the sessions whose calls are kept, the one with the newest call first."""
    found = await served.find_for(caller, run, lambda own: own.sessions.list_sessions)
    request = sessions_pb2.ListSessionsRequest(run=found.name, page_size=page_size, page_token=page_token)
    answer = await found.sessions.list_sessions(caller, request)
    sessions = [_summary_to_json(summary) for summary in answer.sessions]
    return JSONResponse({"sessions": sessions, "next_page_token": answer.next_page_token})


async def get_session(
    served: Served, caller: Authenticated, session_id: str, run: RunName = "", from_call: FromCall = 0,
    max_tokens: MaxTokens = 0,
) -> Response:  # fmt: skip
    """A session as a tree of its calls. All calls are described; their tokens end at `max_tokens`."""
    found = await served.find_for(caller, run, lambda own: own.sessions.get_session)
    request = sessions_pb2.GetSessionRequest(
        run=found.name, session_id=session_id, from_call=from_call, max_tokens=max_tokens
    )
    session = await found.sessions.get_session(caller, request)
    return await asyncio.to_thread(lambda: JSONResponse(_session_to_json(session)))


def _session_to_json(session: sessions_pb2.Session) -> Json:
    return _summary_to_json(session.summary) | {
        "calls": [_node_to_json(node) for node in session.calls],
        "paths": [
            {
                "calls": list(path.calls),
                "trained_calls": list(path.trained_calls),
                "num_trained_tokens": path.num_trained_tokens,
                "reward": path.reward if path.HasField("reward") else None,
            }
            for path in session.paths
        ],
    }


def _summary_to_json(summary: sessions_pb2.SessionSummary) -> Json:
    return {
        "session_id": summary.session_id,
        "state": sessions_pb2.SessionSummary.State.Name(summary.state),
        "reward": summary.reward if summary.HasField("reward") else None,
        "reward_parts": finite(dict(summary.reward_parts)),
        "task_id": summary.task_id,
        "num_calls": summary.num_calls,
        "num_bytes": summary.num_bytes,
        "prompt_ids": list(summary.prompt_ids),
    }


def _node_to_json(node: sessions_pb2.SessionNode) -> Json:
    return {
        "number": node.number,
        "parent": node.parent if node.parent >= 0 else None,
        "server_id": node.server_id,
        "finish_reason": FINISH_FROM_PROTO.get(node.finish_reason, "stop"),
        "sampling": sampling_to_json(sampling_from_proto(node.sampling)),
        "finished_at_ms": node.finished_at_ms,
        "num_prompt_tokens": node.num_prompt_tokens,
        "num_inserted": node.num_inserted,
        "num_sampled": node.num_sampled,
        "inserted_token_ids": np.frombuffer(node.inserted_token_ids, dtype="<i4").tolist(),
        "inserted_tokens": list(node.inserted_tokens),
        "token_ids": np.frombuffer(node.token_ids, dtype="<i4").tolist(),
        "tokens": list(node.tokens),
        "log_probs": np.frombuffer(node.log_probs, dtype="<f4").tolist(),
        "policy_versions": np.frombuffer(node.policy_versions, dtype="<i8").tolist(),
    }
