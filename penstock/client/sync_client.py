"""The client for code without an event loop: see penstock.client, which has the same calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
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


class SyncPenstockClient(GatewayConnection):
    """The same calls for code without an event loop. Use as `with`, or call `close`."""

    http_class = httpx.Client
    _http: httpx.Client

    def __enter__(self) -> SyncPenstockClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, prompts: Sequence[Prompt], idempotency_key: str | None = None) -> Submission:
        return self._send(self.address.submit(prompts, idempotency_key))

    def get_prompt(self, prompt_id: int) -> answers.PromptRecord:
        return self._send(self.address.get_prompt(prompt_id))

    def get_group(self, prompt_id: int) -> answers.Group:
        return self._send(self.address.get_group(prompt_id))

    def get_run(self) -> answers.Run:
        return self._send(self.address.get_run())

    def policies(self, page_size: int = 50, page_token: str = "") -> answers.PolicyPage:
        return self._send(self.address.policies(page_size, page_token))

    def policy(self, version: int | None = None) -> answers.Policy:
        return self._send(self.address.policy(version))

    def servers(self) -> list[answers.Server]:
        return self._send(self.address.servers())

    def create_evaluation(self, evaluation_id: str, prompts: Sequence[Prompt]) -> Evaluation:
        return self._send(self.address.create_evaluation(evaluation_id, prompts))

    def get_evaluation(self, evaluation_id: str) -> Evaluation:
        return self._send(self.address.get_evaluation(evaluation_id))

    def prompts(
        self, state: str = "", data_source: str = "", page_size: int = 50, page_token: str = ""
    ) -> answers.PromptPage:
        """One page by id, oldest first: `prompts` and `next_page_token`."""
        return self._send(self.address.prompts(state, data_source, page_size, page_token))

    def cancel(self, prompt_ids: Sequence[int]) -> list[answers.PromptRecord]:
        """Take back prompts that are not yet being trained; answers what each is now."""
        return self._send(self.address.cancel(prompt_ids))

    def wait_for_prompt(self, prompt_id: int, timeout_s: float) -> answers.PromptRecord:
        """Return once the prompt is finished; DeadlineExceeded says where it is."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            record = self._send(self.address.wait_prompt(prompt_id, min(left_s, WAIT_S, self.timeout_s / 2)))
            if record.state in FINISHED_STATES:
                return record
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"prompt {prompt_id} is {record.state} after {timeout_s:g} s")

    def groups(self, page_size: int = 50, page_token: str = "") -> answers.GroupPage:
        return self._send(self.address.groups(page_size, page_token))

    def compare_policies(self, version: int, other: int) -> answers.PolicyComparison:
        return self._send(self.address.compare_policies(version, other))

    def promote_policy(self, version: int | None = None) -> answers.Policy:
        return self._send(self.address.change_policy(version, "promote"))

    def roll_back_policy(self, version: int) -> answers.Policy:
        """Hold every rollout server at a version, from its snapshot, until `release_policy`."""
        return self._send(self.address.change_policy(version, "rollback"))

    def retire_policy(self, version: int) -> answers.Policy:
        return self._send(self.address.change_policy(version, "retire"))

    def release_policy(self) -> answers.Policy:
        return self._send(self.address.release_policy())

    def pin_policy(self, pin: str, version: int) -> answers.Policy:
        return self._send(self.address.pin_policy(pin, version))

    def unpin_policy(self, pin: str) -> bool:
        return self._send(self.address.unpin_policy(pin))

    def runs(self) -> list[answers.Run]:
        return self._send(self.address.runs())

    def create_run(self, config: Mapping[str, Any]) -> answers.Run:
        return self._send(self.address.create_run(config))

    def pause_run(self) -> answers.Run:
        return self._send(self.address.change_run("pause"))

    def resume_run(self) -> answers.Run:
        return self._send(self.address.change_run("resume"))

    def stop_run(self) -> answers.Run:
        return self._send(self.address.change_run("stop"))

    def metrics(self, page_size: int = 50, names: Sequence[str] = ()) -> list[answers.StepMetrics]:
        """Of the steps that made the newest versions, oldest first."""
        return self._send(self.address.metrics(page_size, names))

    def drain_server(self, server_id: str) -> answers.Server:
        return self._send(self.address.change_server(server_id, "drain"))

    def undrain_server(self, server_id: str) -> answers.Server:
        return self._send(self.address.change_server(server_id, "undrain"))

    def results(
        self, cursor: str = "", prompt_ids: Sequence[int] = (), *, with_groups: bool = False
    ) -> Iterator[answers.Result]:
        """Every prompt that finishes, from `cursor` on (empty: from now; "0": from the oldest that is kept), for ever.

        A connection that breaks is made again from the last result: none is missed, none comes twice."""
        attempts = self._attempts()
        while True:
            path, query = self.address.results(cursor, prompt_ids, with_groups)
            timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
            try:
                with self._http.stream("GET", path, params=query, timeout=timeout) as response:
                    if response.is_success:
                        for line in response.iter_lines():
                            if line.startswith("data: "):
                                result = json.loads(line.removeprefix("data: "))
                                if "cursor" not in result:
                                    break  # a problem, which ends the stream
                                cursor = result["cursor"]
                                attempts = self._attempts()
                                yield answers.Result.model_validate(result)
                        failure = unreachable(self.address.url, httpx.ReadError("the stream ended"))
                    else:
                        response.read()
                        failure = failure_of(response)
            except httpx.TransportError as error:
                failure = unreachable(self.address.url, error)
            time.sleep(attempts.pause_after(failure))

    def wait_for_evaluation(self, evaluation_id: str, timeout_s: float) -> Evaluation:
        deadline = time.monotonic() + timeout_s
        while True:
            evaluation = self.get_evaluation(evaluation_id)
            if evaluation.num_finished >= evaluation.num_prompts:
                return evaluation
            time.sleep(poll_pause(evaluation, deadline, timeout_s))

    def _send(self, call: Call[T]) -> T:
        attempts = self._attempts()
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
