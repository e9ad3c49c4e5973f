"""REST routes of datasets."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.errors import InvalidInput
from penstock.v1 import datasets_pb2
from penstock_services.gateway.bodies import Body, Int32, plain_fields
from penstock_services.gateway.middleware import DATASET_TYPES
from penstock_services.gateway.prompts.bodies import SamplingBody
from penstock_services.gateway.routing import Authenticated, RunOfPath, add_routes


class SubmitDatasetBody(Body):
    num_samples: Int32 = 8
    sampling: SamplingBody = SamplingBody()


def router() -> APIRouter:
    dataset = "/v1/runs/{run}/datasets/{name}"
    return add_routes(
        "datasets",
        ("POST", f"{dataset}:submit", submit_dataset),
        ("PUT", dataset, upload_dataset),
        ("GET", dataset, get_dataset),
    )


async def upload_dataset(run: RunOfPath, caller: Authenticated, name: str, request: Request) -> Response:
    """Store a file of prompts. Its Content-Type is application/x-ndjson or application/vnd.apache.parquet."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind not in DATASET_TYPES:
        raise InvalidInput("content-type", f"must be one of {', '.join(DATASET_TYPES)}, not {kind!r}")
    upload = datasets_pb2.UploadDatasetRequest(
        run=run.name, name=name, format=DATASET_TYPES[kind], content=await request.body()
    )
    return JSONResponse(plain_fields(await run.datasets.upload_dataset(caller, upload)))


async def get_dataset(run: RunOfPath, caller: Authenticated, name: str) -> Response:
    request = datasets_pb2.GetDatasetRequest(run=run.name, name=name)
    return JSONResponse(plain_fields(await run.datasets.get_dataset(caller, request)))


async def submit_dataset(run: RunOfPath, caller: Authenticated, name: str, body: SubmitDatasetBody) -> Response:
    """Submit every prompt of the dataset once, however often this is called."""
    request = datasets_pb2.SubmitDatasetRequest(run=run.name, name=name, num_samples=body.num_samples)
    body.sampling.fill(request.sampling)
    return JSONResponse(plain_fields(await run.datasets.submit_dataset(caller, request)))
