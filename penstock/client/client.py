"""The client for asyncio; sync_client.py has the same calls for scripts and notebooks.

A call is repeated on connection errors, 429 and 5xx, with growing pauses, until its deadline;
every call is safe to repeat, because submissions carry an idempotency key and evaluations their id.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from penstock.client import answers
from penstock.client.connection import GatewayConnection
from penstock.client.rest_calls import (
    FINISHED_STATES,
    STREAM_SILENCE_S,
    WAIT_S,
    Call,
    failure_of,
    poll_pause,
    read_answer,
    unreachable,
)
from penstock.errors import DeadlineExceeded
from penstock.replay.contract import Evaluation, Submission

if TYPE_CHECKING:
    from penstock.trajectory import Prompt

T = TypeVar("T")


class PenstockClient(GatewayConnection):
    """Asynchronous client. Use as `async with`, or call `aclose`."""

    http_class = httpx.AsyncClient
    _http: httpx.AsyncClient

    async def __aenter__(self) -> PenstockClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def submit(self, prompts: Sequence[Prompt], idempotency_key: str | None = None) -> Submission:
        """All prompts are accepted, or none. Without a key one is made up, which covers this call's own retries."""
        return await self._send(self.address.submit(prompts, idempotency_key))

    async def get_prompt(self, prompt_id: int) -> answers.PromptRecord:
        return await self._send(self.address.get_prompt(prompt_id))

    async def get_group(self, prompt_id: int) -> answers.Group:
        return await self._send(self.address.get_group(prompt_id))

    async def get_run(self) -> answers.Run:
        return await self._send(self.address.get_run())

    async def policies(self, page_size: int = 50, page_token: str = "") -> answers.PolicyPage:
        """One page, newest first: `policies` and `next_page_token`."""
        return await self._send(self.address.policies(page_size, page_token))

    async def policy(self, version: int | None = None) -> answers.Policy:
        """The registry's record of a version; None: of the latest."""
        return await self._send(self.address.policy(version))

    async def servers(self) -> list[answers.Server]:
        return await self._send(self.address.servers())

    async def create_evaluation(self, evaluation_id: str, prompts: Sequence[Prompt]) -> Evaluation:
        return await self._send(self.address.create_evaluation(evaluation_id, prompts))

    async def get_evaluation(self, evaluation_id: str) -> Evaluation:
        return await self._send(self.address.get_evaluation(evaluation_id))

    async def prompts(
        self, state: str = "", data_source: str = "", page_size: int = 50, page_token: str = ""
    ) -> answers.PromptPage:
        """One page by id, oldest first: `prompts` and `next_page_token`."""
        return await self._send(self.address.prompts(state, data_source, page_size, page_token))

    async def cancel(self, prompt_ids: Sequence[int]) -> list[answers.PromptRecord]:
        """Take back prompts that are not yet being trained; answers what each is now."""
        return await self._send(self.address.cancel(prompt_ids))

    async def wait_for_prompt(self, prompt_id: int, timeout_s: float) -> answers.PromptRecord:
        """Return once the prompt is finished; DeadlineExceeded says where it is."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            record = await self._send(self.address.wait_prompt(prompt_id, min(left_s, WAIT_S, self.timeout_s / 2)))
            if record.state in FINISHED_STATES:
                return record
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"prompt {prompt_id} is {record.state} after {timeout_s:g} s")

    async def groups(self, page_size: int = 50, page_token: str = "") -> answers.GroupPage:
        return await self._send(self.address.groups(page_size, page_token))

    async def compare_policies(self, version: int, other: int) -> answers.PolicyComparison:
        return await self._send(self.address.compare_policies(version, other))

    async def promote_policy(self, version: int | None = None) -> answers.Policy:
        return await self._send(self.address.change_policy(version, "promote"))

    async def roll_back_policy(self, version: int) -> answers.Policy:
        """Hold every rollout server at a version, from its snapshot, until `release_policy`."""
        return await self._send(self.address.change_policy(version, "rollback"))

    async def retire_policy(self, version: int) -> answers.Policy:
        return await self._send(self.address.change_policy(version, "retire"))

    async def release_policy(self) -> answers.Policy:
        return await self._send(self.address.release_policy())

    async def pin_policy(self, pin: str, version: int) -> answers.Policy:
        return await self._send(self.address.pin_policy(pin, version))

    async def unpin_policy(self, pin: str) -> bool:
        return await self._send(self.address.unpin_policy(pin))

    async def runs(self) -> list[answers.Run]:
        """Every run of the gateway: its own first, then those that were created."""
        return await self._send(self.address.runs())

    async def create_run(self, config: Mapping[str, Any]) -> answers.Run:
        """`config` is as in a run's YAML file; a launcher starts it. The same config again changes nothing."""
        return await self._send(self.address.create_run(config))

    async def pause_run(self) -> answers.Run:
        return await self._send(self.address.change_run("pause"))

    async def resume_run(self) -> answers.Run:
        return await self._send(self.address.change_run("resume"))

    async def stop_run(self) -> answers.Run:
        return await self._send(self.address.change_run("stop"))

    async def metrics(self, page_size: int = 50, names: Sequence[str] = ()) -> list[answers.StepMetrics]:
        """Of the steps that made the newest versions, oldest first."""
        return await self._send(self.address.metrics(page_size, names))

    async def drain_server(self, server_id: str) -> answers.Server:
        return await self._send(self.address.change_server(server_id, "drain"))

    async def undrain_server(self, server_id: str) -> answers.Server:
        return await self._send(self.address.change_server(server_id, "undrain"))

    async def results(
        self, cursor: str = "", prompt_ids: Sequence[int] = (), *, with_groups: bool = False
    ) -> AsyncIterator[answers.Result]:
        """Every prompt that finishes, from `cursor` on (empty: from now; "0": from the oldest that is kept), for ever.

        A connection that breaks is made again from the last result: none is missed, none comes twice."""
        attempts = self._attempts()
        while True:
            path, query = self.address.results(cursor, prompt_ids, with_groups)
            timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
            try:
                async with self._http.stream("GET", path, params=query, timeout=timeout) as response:
                    if response.is_success:
                        async for line in response.aiter_lines():
                            if line.startswith("data: "):
                                result = json.loads(line.removeprefix("data: "))
                                if "cursor" not in result:
                                    break  # a problem, which ends the stream
                                cursor = result["cursor"]
                                attempts = self._attempts()
                                yield answers.Result.model_validate(result)
                        failure = unreachable(self.address.url, httpx.ReadError("the stream ended"))
                    else:
                        await response.aread()
                        failure = failure_of(response)
            except httpx.TransportError as error:
                failure = unreachable(self.address.url, error)
            await asyncio.sleep(attempts.pause_after(failure))

    async def wait_for_evaluation(self, evaluation_id: str, timeout_s: float) -> Evaluation:
        """Return once every prompt is scored; DeadlineExceeded says how far it came."""
        deadline = time.monotonic() + timeout_s
        while True:
            evaluation = await self.get_evaluation(evaluation_id)
            if evaluation.num_finished >= evaluation.num_prompts:
                return evaluation
            await asyncio.sleep(poll_pause(evaluation, deadline, timeout_s))

    async def _send(self, call: Call[T]) -> T:
        attempts = self._attempts()
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
