"""Clients of the gateway for bench/scale.py."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from penstock.config.run import RunConfig

SUBMISSION = {"prompts": [{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "num_samples": 8}]}
QUESTION = {"model": "scale", "prompt": "What is 17 + 25?", "max_tokens": 8}


def p99(times_s: list[float]) -> float:
    return statistics.quantiles(times_s, n=100)[98] if len(times_s) > 1 else 0.0


class GatewayClient:
    """Sends the same request again and again, and keeps how long each took."""

    def __init__(self, config: RunConfig, key: str, path: str, body: dict[str, Any], pause_s: float) -> None:
        self.url = f"http://127.0.0.1:{config.gateway.port}"
        self.key = key
        self.path = path
        self.body = body
        self.pause_s = pause_s
        self.times_s: list[float] = []

    @contextlib.asynccontextmanager
    async def running(self, at_once: int = 1) -> AsyncIterator[None]:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60) as client:
            tasks = [asyncio.create_task(self._run(client)) for _ in range(at_once)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError(f"a client of the gateway failed: {outcome}")

    async def wait_for(self, num_answers: int, timeout_s: float) -> None:
        """Wait until so many requests were answered."""
        async with asyncio.timeout(timeout_s):
            while len(self.times_s) < num_answers:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _run(self, client: httpx.AsyncClient) -> None:
        while True:
            started = time.perf_counter()
            answer = await client.post(self.path, json=self.body)
            assert answer.status_code == 200, answer.text
            self.times_s.append(time.perf_counter() - started)
            await asyncio.sleep(self.pause_s)


def submitting(config: RunConfig, key: str) -> GatewayClient:
    """Submits a prompt ten times a second."""
    return GatewayClient(config, key, "/v1/runs/-/prompts", SUBMISSION, 0.1)


def generating(config: RunConfig, key: str) -> GatewayClient:
    """Asks for a completion twenty times a second."""
    return GatewayClient(config, key, "/v1/completions", QUESTION, 0.05)
