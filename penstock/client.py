"""Talks to a gateway over REST: PenstockClient for asyncio, SyncPenstockClient for scripts and notebooks.

Both send the same calls. A call is repeated on connection errors, 429 and 5xx, with growing pauses, until its deadline;
every call is safe to repeat, because submissions carry an idempotency key and evaluations their id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from penstock.errors import DeadlineExceeded
from penstock.replay.contract import Evaluation, Submission
from penstock.rest_calls import (
    CONFIGURED_RUN,
    Attempts,
    Call,
    GatewayAddress,
    Json,
    failure_of,
    read_answer,
    unreachable,
)

if TYPE_CHECKING:
    from penstock.trajectory import Prompt

T = TypeVar("T")
POLL_S = 0.5


class PenstockClient:
    """Asynchronous client. Use as `async with`, or call `aclose`.

    `deadline_s` bounds one call with all its repetitions, `timeout_s` one attempt."""

    def __init__(
        self,
        url: str,
        *,
        run: str = CONFIGURED_RUN,
        api_key: str = "",
        timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = GatewayAddress(url, run, api_key)
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self._http = httpx.AsyncClient(base_url=url, headers=self.address.headers, transport=transport, trust_env=False)

    @classmethod
    def from_run_dir(cls, folder: Path | str, api_key: str = "", **options: Any) -> PenstockClient:
        address = GatewayAddress.from_run_dir(folder, api_key)
        return cls(address.url, run=address.run, api_key=api_key, **options)

    async def __aenter__(self) -> PenstockClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def submit(self, prompts: Sequence[Prompt], idempotency_key: str | None = None) -> Submission:
        """All prompts are accepted, or none. Without a key one is made up, which covers this call's own retries."""
        return await self._send(self.address.submit(prompts, idempotency_key))

    async def get_prompt(self, prompt_id: int) -> Json:
        return await self._send(self.address.get_prompt(prompt_id))

    async def get_group(self, prompt_id: int) -> Json:
        return await self._send(self.address.get_group(prompt_id))

    async def get_run(self) -> Json:
        return await self._send(self.address.get_run())

    async def policies(self, page_size: int = 50, page_token: str = "") -> Json:
        """One page, newest first: `policies` and `next_page_token`."""
        return await self._send(self.address.policies(page_size, page_token))

    async def policy(self, version: int | None = None) -> Json:
        """The registry's record of a version; None: of the latest."""
        return await self._send(self.address.policy(version))

    async def servers(self) -> list[Json]:
        return await self._send(self.address.servers())

    async def create_evaluation(self, evaluation_id: str, prompts: Sequence[Prompt]) -> Evaluation:
        return await self._send(self.address.create_evaluation(evaluation_id, prompts))

    async def get_evaluation(self, evaluation_id: str) -> Evaluation:
        return await self._send(self.address.get_evaluation(evaluation_id))

    async def wait_for_evaluation(self, evaluation_id: str, timeout_s: float) -> Evaluation:
        """Return once every prompt is scored; DeadlineExceeded says how far it came."""
        deadline = time.monotonic() + timeout_s
        while True:
            evaluation = await self.get_evaluation(evaluation_id)
            if evaluation.num_finished >= evaluation.num_prompts:
                return evaluation
            await asyncio.sleep(_poll_pause(evaluation, deadline, timeout_s))

    async def _send(self, call: Call[T]) -> T:
        attempts = Attempts(self.timeout_s, self.deadline_s)
        while True:
            try:
                response = await self._http.request(
                    call.method, call.path, json=call.body, params=call.query, timeout=attempts.timeout_s
                )
            except (httpx.TransportError, httpx.InvalidURL) as error:
                failure = unreachable(self.address.url, error)
            else:
                if response.is_success:
                    return read_answer(call, response)
                failure = failure_of(response)
            await asyncio.sleep(attempts.pause_after(failure))


class SyncPenstockClient:
    """The same calls for code without an event loop. Use as `with`, or call `close`."""

    def __init__(
        self,
        url: str,
        *,
        run: str = CONFIGURED_RUN,
        api_key: str = "",
        timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.address = GatewayAddress(url, run, api_key)
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self._http = httpx.Client(base_url=url, headers=self.address.headers, transport=transport, trust_env=False)

    @classmethod
    def from_run_dir(cls, folder: Path | str, api_key: str = "", **options: Any) -> SyncPenstockClient:
        address = GatewayAddress.from_run_dir(folder, api_key)
        return cls(address.url, run=address.run, api_key=api_key, **options)

    def __enter__(self) -> SyncPenstockClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, prompts: Sequence[Prompt], idempotency_key: str | None = None) -> Submission:
        return self._send(self.address.submit(prompts, idempotency_key))

    def get_prompt(self, prompt_id: int) -> Json:
        return self._send(self.address.get_prompt(prompt_id))

    def get_group(self, prompt_id: int) -> Json:
        return self._send(self.address.get_group(prompt_id))

    def get_run(self) -> Json:
        return self._send(self.address.get_run())

    def policies(self, page_size: int = 50, page_token: str = "") -> Json:
        return self._send(self.address.policies(page_size, page_token))

    def policy(self, version: int | None = None) -> Json:
        return self._send(self.address.policy(version))

    def servers(self) -> list[Json]:
        return self._send(self.address.servers())

    def create_evaluation(self, evaluation_id: str, prompts: Sequence[Prompt]) -> Evaluation:
        return self._send(self.address.create_evaluation(evaluation_id, prompts))

    def get_evaluation(self, evaluation_id: str) -> Evaluation:
        return self._send(self.address.get_evaluation(evaluation_id))

    def wait_for_evaluation(self, evaluation_id: str, timeout_s: float) -> Evaluation:
        deadline = time.monotonic() + timeout_s
        while True:
            evaluation = self.get_evaluation(evaluation_id)
            if evaluation.num_finished >= evaluation.num_prompts:
                return evaluation
            time.sleep(_poll_pause(evaluation, deadline, timeout_s))

    def _send(self, call: Call[T]) -> T:
        attempts = Attempts(self.timeout_s, self.deadline_s)
        while True:
            try:
                response = self._http.request(
                    call.method, call.path, json=call.body, params=call.query, timeout=attempts.timeout_s
                )
            except (httpx.TransportError, httpx.InvalidURL) as error:
                failure = unreachable(self.address.url, error)
            else:
                if response.is_success:
                    return read_answer(call, response)
                failure = failure_of(response)
            time.sleep(attempts.pause_after(failure))


def _poll_pause(evaluation: Evaluation, deadline: float, timeout_s: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineExceeded(
            f"evaluation {evaluation.evaluation_id!r} has {evaluation.num_finished} of {evaluation.num_prompts} "
            f"prompts after {timeout_s:g} s; are rollout servers up?"
        )
    return min(POLL_S, remaining_s)
