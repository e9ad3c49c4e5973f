"""schemathesis over the OpenAPI document: the gateway answers as documented, and never with a server error."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from penstock.api_keys import read_own_key
from penstock.config.run import RunConfig
from penstock_services.gateway.server import serve
from support.gateways import run_config

RUN = "fuzz"
"""A separate run, because other tests leave payloads in theirs that are not prompts."""
ENDLESS = r"/results$|:watch$|:wait$|^/metrics$"
"""Operations that end only when the client ends them: streams and waits."""


@pytest.fixture(scope="module")
def gateway(redis_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A gateway in a thread of its own, because schemathesis has no event loop: its URL, and the headers with its
    key."""
    config = run_config(redis_process.url, tmp_path_factory.mktemp("fuzz")).model_copy(update={"run": RUN})
    started, addresses, stops = threading.Event(), [], []

    async def run(config: RunConfig) -> None:
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))

        def ready(*address: Any) -> None:
            addresses.append(address)
            started.set()

        await serve(config, ready, stop)

    thread = threading.Thread(target=lambda: asyncio.run(run(config)))
    thread.start()
    assert started.wait(20)
    yield f"http://{addresses[0][0]}:{addresses[0][1]}", {"Authorization": f"Bearer {read_own_key(config.folder)}"}
    loop, stop = stops[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)


@pytest.fixture(scope="module")
def api(gateway: tuple[str, dict[str, str]]) -> Any:
    url, headers = gateway
    api = schemathesis.openapi.from_url(f"{url}/v1/openapi.json", headers=headers).exclude(path_regex=ENDLESS)
    api.config.update(headers=headers)
    return api


def call(case: Any) -> None:
    if "run" in (case.path_parameters or {}):
        case.path_parameters["run"] = RUN
    case.call_and_validate(checks=[not_a_server_error, response_schema_conformance], timeout=20)


def send_some(cases: Any, bounds: settings) -> None:
    @bounds
    @given(case=cases)
    def send_one(case: Any) -> None:
        call(case)

    with contextlib.suppress(Unsatisfiable):  # of an operation that takes any text there is nothing wrong to send
        send_one()


def send(api: Any, mode: GenerationMode, max_examples: int, every: int = 1) -> int:
    """Send examples of every operation, or of every second, third … one. Returns the number of operations."""
    bounds = settings(
        max_examples=max_examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    operations = [found.ok() for found in api.get_all_operations()]
    for operation in operations[::every]:
        if mode is GenerationMode.POSITIVE or operation.body or operation.query or operation.path_parameters:
            send_some(operation.as_strategy(generation_mode=mode), bounds)
    return len(operations)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
def test_nothing_that_is_sent_is_a_server_error(api: Any, mode: GenerationMode) -> None:
    """To make up wrong requests takes long, so here only some operations get them."""
    assert send(api, mode, max_examples=1, every=4 if mode is GenerationMode.NEGATIVE else 1) > 35


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
def test_no_request_of_a_long_fuzz_is_a_server_error(api: Any, mode: GenerationMode) -> None:
    assert send(api, mode, max_examples=60) > 35


def test_the_document_names_every_operation(api: Any) -> None:
    names = {operation["operationId"] for methods in api.raw_schema["paths"].values() for operation in methods.values()}
    assert {"submit_prompts", "watch_results", "roll_back_policy", "complete_chat", "reward_session"} <= names
