"""REST routes of runs, their servers, evaluations and dead letters."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from penstock.v1 import runs_pb2
from penstock_services.gateway.routing import PageSize, add_routes, run_name
from penstock_services.gateway.runs import bodies
from penstock_services.gateway.runs.handlers import RunHandlers


class RunRoutes:
    def __init__(self, handlers: RunHandlers) -> None:
        self.handlers = handlers

    def router(self) -> APIRouter:
        run = "/v1/runs/{run}"
        return add_routes(
            "runs",
            ("GET", "/v1/runs", self.list_runs),
            ("POST", "/v1/runs", self.create_run),
            ("POST", f"{run}:pause", self.pause_run),
            ("POST", f"{run}:resume", self.resume_run),
            ("POST", f"{run}:stop", self.stop_run),
            ("GET", run, self.get_run),
            ("GET", f"{run}/metrics", self.list_metrics),
            ("GET", f"{run}/servers", self.list_servers),
            ("POST", f"{run}/servers/{{server_id}}:drain", self.drain_server),
            ("POST", f"{run}/servers/{{server_id}}:undrain", self.undrain_server),
            ("POST", f"{run}/evaluations", self.create_evaluation),
            ("GET", f"{run}/evaluations/{{evaluation_id}}", self.get_evaluation),
            ("GET", f"{run}/dead-letters", self.list_dead_letters),
            ("POST", f"{run}/dead-letters/{{letter_id}}:requeue", self.requeue_dead_letter),
        )

    async def get_run(self, run: str) -> Response:
        return JSONResponse(bodies.run_to_json(await self.handlers.get_run(runs_pb2.GetRunRequest(run=run_name(run)))))

    async def create_run(self, body: bodies.CreateRunBody) -> Response:
        """A launcher starts the run. The same config again changes nothing; another one of the same name conflicts."""
        return JSONResponse(bodies.run_to_json(await self.handlers.create_run(body.to_proto())))

    async def list_runs(self) -> Response:
        return JSONResponse(bodies.runs_to_json(await self.handlers.list_runs(runs_pb2.ListRunsRequest())))

    async def pause_run(self, run: str) -> Response:
        """No prompt is leased until the run is resumed."""
        request = runs_pb2.ChangeRunRequest(run=run_name(run))
        return JSONResponse(bodies.run_to_json(await self.handlers.pause_run(request)))

    async def resume_run(self, run: str) -> Response:
        request = runs_pb2.ChangeRunRequest(run=run_name(run))
        return JSONResponse(bodies.run_to_json(await self.handlers.resume_run(request)))

    async def stop_run(self, run: str) -> Response:
        """Pause, and end the learner after its step, with a checkpoint."""
        request = runs_pb2.ChangeRunRequest(run=run_name(run))
        return JSONResponse(bodies.run_to_json(await self.handlers.stop_run(request)))

    async def list_metrics(
        self, run: str, page_size: PageSize = 0, name: Annotated[list[str] | None, Query()] = None
    ) -> Response:
        """Metrics of the steps that made the newest versions, oldest first."""
        request = runs_pb2.ListMetricsRequest(run=run_name(run), page_size=max(page_size, -1), names=name or [])
        return JSONResponse(bodies.metrics_to_json(await self.handlers.list_metrics(request)))

    async def list_servers(self, run: str) -> Response:
        request = runs_pb2.ListServersRequest(run=run_name(run))
        return JSONResponse(bodies.servers_to_json(await self.handlers.list_servers(request)))

    async def drain_server(self, run: str, server_id: str) -> Response:
        """The server finishes what it works on and leases nothing more."""
        request = runs_pb2.ChangeServerRequest(run=run_name(run), server_id=server_id)
        return JSONResponse(bodies.server_to_json(await self.handlers.drain_server(request)))

    async def undrain_server(self, run: str, server_id: str) -> Response:
        request = runs_pb2.ChangeServerRequest(run=run_name(run), server_id=server_id)
        return JSONResponse(bodies.server_to_json(await self.handlers.undrain_server(request)))

    async def create_evaluation(self, run: str, body: bodies.CreateEvaluationBody) -> Response:
        evaluation = await self.handlers.create_evaluation(body.to_proto(run_name(run)))
        return JSONResponse(bodies.evaluation_to_json(evaluation))

    async def get_evaluation(self, run: str, evaluation_id: str) -> Response:
        request = runs_pb2.GetEvaluationRequest(run=run_name(run), evaluation_id=evaluation_id)
        return JSONResponse(bodies.evaluation_to_json(await self.handlers.get_evaluation(request)))

    async def list_dead_letters(
        self, run: str, page_size: PageSize = 0, page_token: str = "", kind: str = ""
    ) -> Response:
        """Newest first."""
        request = runs_pb2.ListDeadLettersRequest(
            run=run_name(run), page_size=max(page_size, -1), page_token=page_token, kind=kind
        )
        return JSONResponse(bodies.dead_letters_to_json(await self.handlers.list_dead_letters(request)))

    async def requeue_dead_letter(self, run: str, letter_id: str) -> Response:
        """Submit the letter's prompt under a new id and delete the letter."""
        request = runs_pb2.RequeueDeadLetterRequest(run=run_name(run), letter_id=letter_id)
        return JSONResponse({"prompt_id": (await self.handlers.requeue_dead_letter(request)).prompt_id})
