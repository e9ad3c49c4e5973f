"""REST routes of runs, their servers, evaluations and dead letters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from penstock.v1 import runs_pb2
from penstock_services.gateway.routing import Authenticated, PageSize, RunOfPath, Served, add_routes
from penstock_services.gateway.runs import bodies


def router() -> APIRouter:
    run = "/v1/runs/{run}"
    return add_routes(
        "runs",
        ("GET", "/v1/runs", list_runs),
        ("POST", f"{run}:pause", pause_run),
        ("POST", f"{run}:resume", resume_run),
        ("POST", f"{run}:stop", stop_run),
        ("GET", run, get_run),
        ("GET", f"{run}/metrics", list_metrics),
        ("GET", f"{run}/servers", list_servers),
        ("POST", f"{run}/servers/{{server_id}}:drain", drain_server),
        ("POST", f"{run}/servers/{{server_id}}:undrain", undrain_server),
        ("POST", f"{run}/evaluations", create_evaluation),
        ("GET", f"{run}/evaluations/{{evaluation_id}}", get_evaluation),
        ("GET", f"{run}/dead-letters", list_dead_letters),
        ("POST", f"{run}/dead-letters/{{letter_id}}:requeue", requeue_dead_letter),
    )


async def get_run(run: RunOfPath, caller: Authenticated) -> Response:
    request = runs_pb2.GetRunRequest(run=run.name)
    return JSONResponse(bodies.run_to_json(await run.lifecycle.get_run(caller, request)))


async def list_runs(served: Served, caller: Authenticated) -> Response:
    run = await served.find("")
    return JSONResponse(bodies.runs_to_json(await run.lifecycle.list_runs(caller, runs_pb2.ListRunsRequest())))


async def pause_run(run: RunOfPath, caller: Authenticated) -> Response:
    """Pause the run: no prompt is leased until it is resumed."""
    request = runs_pb2.ChangeRunRequest(run=run.name)
    return JSONResponse(bodies.run_to_json(await run.lifecycle.pause_run(caller, request)))


async def resume_run(run: RunOfPath, caller: Authenticated) -> Response:
    request = runs_pb2.ChangeRunRequest(run=run.name)
    return JSONResponse(bodies.run_to_json(await run.lifecycle.resume_run(caller, request)))


async def stop_run(run: RunOfPath, caller: Authenticated) -> Response:
    """Pause the run. The learner finishes its step, writes a checkpoint and ends."""
    request = runs_pb2.ChangeRunRequest(run=run.name)
    return JSONResponse(bodies.run_to_json(await run.lifecycle.stop_run(caller, request)))


async def list_metrics(
    run: RunOfPath, caller: Authenticated, page_size: PageSize = 0, name: Annotated[list[str] | None, Query()] = None
) -> Response:
    """List the metrics of the steps that made the newest versions, oldest first."""
    request = runs_pb2.ListMetricsRequest(run=run.name, page_size=max(page_size, -1), names=name or [])
    return JSONResponse(bodies.metrics_to_json(await run.lifecycle.list_metrics(caller, request)))


async def list_servers(run: RunOfPath, caller: Authenticated) -> Response:
    request = runs_pb2.ListServersRequest(run=run.name)
    return JSONResponse(bodies.servers_to_json(await run.servers.list_servers(caller, request)))


async def drain_server(run: RunOfPath, caller: Authenticated, server_id: str) -> Response:
    """Drain a server: it finishes its leased prompts and leases no more."""
    request = runs_pb2.ChangeServerRequest(run=run.name, server_id=server_id)
    return JSONResponse(bodies.server_to_json(await run.servers.drain_server(caller, request)))


async def undrain_server(run: RunOfPath, caller: Authenticated, server_id: str) -> Response:
    request = runs_pb2.ChangeServerRequest(run=run.name, server_id=server_id)
    return JSONResponse(bodies.server_to_json(await run.servers.undrain_server(caller, request)))


async def create_evaluation(run: RunOfPath, caller: Authenticated, body: bodies.CreateEvaluationBody) -> Response:
    evaluation = await run.evaluations.create_evaluation(caller, body.to_proto(run.name))
    return JSONResponse(bodies.evaluation_to_json(evaluation))


async def get_evaluation(run: RunOfPath, caller: Authenticated, evaluation_id: str) -> Response:
    request = runs_pb2.GetEvaluationRequest(run=run.name, evaluation_id=evaluation_id)
    return JSONResponse(bodies.evaluation_to_json(await run.evaluations.get_evaluation(caller, request)))


async def list_dead_letters(
    run: RunOfPath, caller: Authenticated, page_size: PageSize = 0, page_token: str = "", kind: str = ""
) -> Response:
    """List dead letters, newest first."""
    request = runs_pb2.ListDeadLettersRequest(
        run=run.name, page_size=max(page_size, -1), page_token=page_token, kind=kind
    )
    return JSONResponse(bodies.dead_letters_to_json(await run.dead_letters.list_dead_letters(caller, request)))


async def requeue_dead_letter(run: RunOfPath, caller: Authenticated, letter_id: str) -> Response:
    """Submit the letter's prompt under a new id and delete the letter."""
    request = runs_pb2.RequeueDeadLetterRequest(run=run.name, letter_id=letter_id)
    return JSONResponse({"prompt_id": (await run.dead_letters.requeue_dead_letter(caller, request)).prompt_id})
