"""The HTTP endpoint of a process: its probes, its metrics, and what a fork does to it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from penstock import process_endpoint as endpoints
from penstock.errors import Unavailable
from penstock.machine import port_is_free
from penstock.process_endpoint import ProcessEndpoint, Readiness, process_endpoint

HOST = "127.0.0.1"


def ask(endpoint: ProcessEndpoint, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{endpoint.port}{path}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


async def test_each_state_of_a_process() -> None:
    with process_endpoint(CollectorRegistry(), HOST, 0) as endpoint:
        endpoint.readiness = lambda: Readiness("loading", "loads the model")
        assert await asyncio.to_thread(ask, endpoint, "/healthz") == (200, {"status": "alive"})
        assert await asyncio.to_thread(ask, endpoint, "/startupz") == (
            503,
            {"status": "starting", "detail": "loads the model"},
        )
        assert await asyncio.to_thread(ask, endpoint, "/readyz") == (
            503,
            {"state": "loading", "detail": "loads the model"},
        )
        for state, status in (("stale", 503), ("ready", 200), ("draining", 503), ("loading", 503)):
            endpoint.readiness = lambda state=state: Readiness(state)
            assert await asyncio.to_thread(ask, endpoint, "/readyz") == (status, {"state": state, "detail": ""})
            assert await asyncio.to_thread(ask, endpoint, "/startupz") == (200, {"status": "started"})
        assert (await asyncio.to_thread(ask, endpoint, "/other"))[0] == 404


async def test_a_loop_that_stands_still_is_not_alive_once_the_process_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "MAX_STALL_S", 0.3)
    monkeypatch.setattr(endpoints, "TICK_S", 0.05)
    with process_endpoint(CollectorRegistry(), HOST, 0) as endpoint:
        time.sleep(0.4)  # noqa: ASYNC251
        assert ask(endpoint, "/healthz")[0] == 200  # this call blocks the loop, which may happen while it loads
        endpoint.readiness = lambda: Readiness("ready")
        status, answer = ask(endpoint, "/healthz")
        assert (status, answer["status"]) == (503, "stuck")
        async with asyncio.timeout(60):  # a busy machine may let the loop stand again before the answer
            while await asyncio.to_thread(ask, endpoint, "/healthz") != (200, {"status": "alive"}):
                await asyncio.sleep(0.01)


async def test_metrics_are_scraped_and_the_port_is_free_afterwards() -> None:
    registry = CollectorRegistry()
    Gauge("of_a_test", "Text.", registry=registry).set(3)
    with process_endpoint(registry, HOST, 0) as endpoint:
        url = f"http://{HOST}:{endpoint.port}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=60) as answer:
            assert b"of_a_test 3.0" in answer.read()
    assert port_is_free(HOST, endpoint.port)


async def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = rf"^port {port} on {HOST} cannot be opened \(Address already in use\); set metrics_port to a free"
        with pytest.raises(Unavailable, match=expected):
            ProcessEndpoint(CollectorRegistry()).listen(HOST, port)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads; that is what is tested
async def test_a_forked_child_holds_neither_the_port_nor_a_lock() -> None:
    registry = CollectorRegistry()
    Gauge("of_a_test", "Text.", registry=registry)
    with process_endpoint(registry, HOST, 0) as endpoint:
        scrapes = asyncio.gather(*(asyncio.to_thread(ask, endpoint, "/readyz") for _ in range(20)))
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            is_free = not endpoint._rendering.locked() and endpoint._server.socket.fileno() == -1  # type: ignore[union-attr]
            os.write(writes, b"free" if is_free else b"held")
            os._exit(0)
        os.waitpid(child, 0)  # noqa: ASYNC222
        assert os.read(reads, 4) == b"free"
        os.close(reads)
        os.close(writes)
        assert {status for status, _ in await scrapes} == {503}
