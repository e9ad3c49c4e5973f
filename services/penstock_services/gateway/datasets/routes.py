"""REST routes of datasets."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.errors import InvalidInput
from penstock.v1 import datasets_pb2
from penstock_services.gateway.bodies import Body, Int32, plain_fields
from penstock_services.gateway.datasets.handlers import DatasetHandlers
from penstock_services.gateway.prompts.bodies import SamplingBody
from penstock_services.gateway.routing import add_routes, run_name

_FORMATS = {"application/x-ndjson": "jsonl", "application/vnd.apache.parquet": "parquet"}


class SubmitDatasetBody(Body):
    num_samples: Int32 = 8
    sampling: SamplingBody = SamplingBody()


class DatasetRoutes:
    def __init__(self, handlers: DatasetHandlers) -> None:
        self.handlers = handlers

    def router(self) -> APIRouter:
        dataset = "/v1/runs/{run}/datasets/{name}"
        return add_routes(
            "datasets",
            ("POST", f"{dataset}:submit", self.submit_dataset),
            ("PUT", dataset, self.upload_dataset),
            ("GET", dataset, self.get_dataset),
        )

    async def upload_dataset(self, run: str, name: str, request: Request) -> Response:
        """Keep a file of prompts; the Content-Type says what it is: application/x-ndjson, or
        application/vnd.apache.parquet."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind not in _FORMATS:
            raise InvalidInput("content-type", f"must be one of {', '.join(_FORMATS)}, not {kind!r}")
        upload = datasets_pb2.UploadDatasetRequest(
            run=run_name(run), name=name, format=_FORMATS[kind], content=await request.body()
        )
        return JSONResponse(plain_fields(await self.handlers.upload_dataset(upload)))

    async def get_dataset(self, run: str, name: str) -> Response:
        request = datasets_pb2.GetDatasetRequest(run=run_name(run), name=name)
        return JSONResponse(plain_fields(await self.handlers.get_dataset(request)))

    async def submit_dataset(self, run: str, name: str, body: SubmitDatasetBody) -> Response:
        """Submit every prompt of the dataset, once."""
        request = datasets_pb2.SubmitDatasetRequest(run=run_name(run), name=name, num_samples=body.num_samples)
        body.sampling.fill(request.sampling)
        return JSONResponse(plain_fields(await self.handlers.submit_dataset(request)))
