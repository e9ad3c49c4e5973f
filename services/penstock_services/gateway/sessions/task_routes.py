"""REST routes of tasks."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from pydantic import Field
from starlette.responses import JSONResponse, Response

from penstock.v1 import tasks_pb2
from penstock_services.gateway.bodies import Body, Json, to_json_text
from penstock_services.gateway.routing import Authenticated, Served, add_routes
from penstock_services.gateway.sessions.task_handlers import MAX_SESSIONS, MAX_WAIT_S

Key = Annotated[str, Header(alias="Idempotency-Key")]
RunName = Annotated[str, Query(description="The run; empty for the gateway's own.")]


class TaskBody(Body):
    task_id: str = ""
    payload: Any = None
    num_sessions: Annotated[int, Field(ge=1, le=MAX_SESSIONS)] = 1
    deadline_s: Annotated[float, Field(ge=0)] = 0.0
    data_source: str = ""


class SubmitTasksBody(Body):
    tasks: list[TaskBody]
    idempotency_key: str = ""
    run: str = ""
    """Empty: the gateway's own run."""


class LeaseTasksBody(Body):
    worker: str
    max_tasks: Annotated[int, Field(ge=1, le=MAX_SESSIONS)] = 1
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0
    run: str = ""


class HeartbeatTasksBody(Body):
    session_ids: list[str]
    run: str = ""


class ReturnTaskBody(Body):
    session_id: str
    failure: str = ""
    run: str = ""


def router() -> APIRouter:
    return add_routes(
        "tasks",
        ("POST", "/v1/tasks", submit_tasks),
        ("POST", "/v1/tasks:lease", lease_tasks),
        ("POST", "/v1/tasks:heartbeat", heartbeat_tasks),
        ("POST", "/v1/tasks:return", return_task),
        ("GET", "/v1/tasks/{task_id}", get_task),
    )


async def submit_tasks(served: Served, caller: Authenticated, body: SubmitTasksBody, key: Key = "") -> Response:
    """Submit tasks for workers: all are accepted, or none. Each wants `num_sessions` rewarded sessions."""
    run = await served.find_for(caller, body.run, lambda own: own.tasks.submit_tasks)
    tasks = [
        tasks_pb2.NewTask(
            task_id=task.task_id, payload_json=to_json_text(task.payload, f"tasks[{number}].payload"),
            num_sessions=task.num_sessions, deadline_s=task.deadline_s, data_source=task.data_source,
        )
        for number, task in enumerate(body.tasks)
    ]  # fmt: skip
    request = tasks_pb2.SubmitTasksRequest(run=run.name, tasks=tasks, idempotency_key=key or body.idempotency_key)
    answer = await run.tasks.submit_tasks(caller, request)
    return JSONResponse({"task_ids": list(answer.task_ids), "replayed": answer.replayed})


async def lease_tasks(served: Served, caller: Authenticated, body: LeaseTasksBody) -> Response:
    """Hand places of tasks to a worker, each with the id of the session to use for it."""
    run = await served.find_for(caller, body.run, lambda own: own.tasks.lease_tasks)
    request = tasks_pb2.LeaseTasksRequest(
        run=run.name, worker=body.worker, max_tasks=body.max_tasks, wait_s=body.wait_s
    )
    answer = await run.tasks.lease_tasks(caller, request)
    return JSONResponse({"tasks": [_leased_to_json(task) for task in answer.tasks]})


async def heartbeat_tasks(served: Served, caller: Authenticated, body: HeartbeatTasksBody) -> Response:
    """Renew the leases of sessions. Their generate calls do so too."""
    run = await served.find_for(caller, body.run, lambda own: own.tasks.heartbeat_tasks)
    request = tasks_pb2.HeartbeatTasksRequest(run=run.name, session_ids=body.session_ids)
    answer = await run.tasks.heartbeat_tasks(caller, request)
    return JSONResponse({"lost_session_ids": list(answer.lost_session_ids)})


async def return_task(served: Served, caller: Authenticated, body: ReturnTaskBody) -> Response:
    """Give the place of a session back, for another worker."""
    run = await served.find_for(caller, body.run, lambda own: own.tasks.return_task)
    request = tasks_pb2.ReturnTaskRequest(run=run.name, session_id=body.session_id, failure=body.failure)
    answer = await run.tasks.return_task(caller, request)
    return JSONResponse({"returned": answer.returned})


async def get_task(served: Served, caller: Authenticated, task_id: str, run: RunName = "") -> Response:
    found = await served.find_for(caller, run, lambda own: own.tasks.get_task)
    task = await found.tasks.get_task(caller, tasks_pb2.GetTaskRequest(run=found.name, task_id=task_id))
    return JSONResponse(
        {
            "task_id": task.task_id,
            "state": tasks_pb2.Task.State.Name(task.state),
            "num_sessions": task.num_sessions,
            "num_rewarded": task.num_rewarded,
            "num_failed": task.num_failed,
            "payload": json.loads(task.payload_json),
            "data_source": task.data_source,
            "session_ids": list(task.session_ids),
            "prompt_ids": list(task.prompt_ids),
            "failure": task.failure,
        }
    )


def _leased_to_json(task: tasks_pb2.LeasedTask) -> Json:
    return {
        "task_id": task.task_id,
        "session_id": task.session_id,
        "attempt": task.attempt,
        "payload": json.loads(task.payload_json),
        "lease_s": task.lease_s,
    }
