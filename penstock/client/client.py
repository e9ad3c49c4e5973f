"""The client of a gateway's REST API.

There are two: `PenstockClient` for asyncio in client.py, and `SyncPenstockClient` for scripts and notebooks in
sync_client.py, which make_sync_client.py generates from the first.

A call is retried on connection errors, 429 and 5xx until its deadline: see retries.py. Every call is safe to repeat,
because a submission carries an idempotency key and an evaluation its id. An error arrives as the class of
`penstock.errors` that the gateway raised.
"""

from __future__ import annotations

import json
import time
import uuid
from asyncio import sleep
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from penstock.api.records import (
    Evaluation,
    Group,
    GroupPage,
    LeasedTask,
    Policy,
    PolicyComparison,
    PolicyPage,
    PromptPage,
    PromptRecord,
    Result,
    RewardedSession,
    Run,
    SamplePage,
    Server,
    Session,
    SessionPage,
    StepMetrics,
    Submission,
    Task,
)
from penstock.client.gateway_connection import GatewayConnection, prompt_body, read_response
from penstock.client.retries import connection_failure, response_failure
from penstock.errors import DeadlineExceeded, NotFound

if TYPE_CHECKING:
    from penstock.trajectory import Prompt

T = TypeVar("T")
FINISHED_STATES = ("QUEUED", "TRAINED", "DEAD_LETTERED", "CANCELLED")
EVALUATION_POLL_S = 0.5
POLICY_POLL_S = 0.5
LONG_POLL_S = 30.0
"""Longest time that one request waits in the gateway for a prompt to finish."""
STREAM_SILENCE_S = 30.0
"""A result stream that is silent for this long is broken: the gateway sends keep-alives more often."""


class PenstockClient(GatewayConnection):
    """Calls a gateway. Use it as a context manager, or close it yourself."""

    http_class = httpx.AsyncClient
    _http: httpx.AsyncClient

    async def __aenter__(self) -> PenstockClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def submit(
        self, prompts: Sequence[Prompt], idempotency_key: str | None = None, prompt_keys: Sequence[str] = ()
    ) -> Submission:
        """Submit prompts: all are accepted, or none.

        Repeating a call with the same `idempotency_key` returns the first call's ids and submits nothing. Without a
        key, a random one protects this call's own retries only. `prompt_keys` has a key for each prompt instead: a
        prompt whose key was used before is not submitted again, whichever prompts it comes with."""
        body: dict[str, Any] = {"prompts": [prompt_body(p) for p in prompts]}
        if prompt_keys:
            body["prompt_keys"] = list(prompt_keys)
        else:
            body["idempotency_key"] = idempotency_key or uuid.uuid4().hex
        return await self._call("POST", self.address.path("prompts"), Submission, body=body)

    async def prompts(
        self, state: str = "", data_source: str = "", page_size: int = 50, page_token: str = ""
    ) -> PromptPage:
        """Return one page of prompts by id, oldest first."""
        query = {"state": state, "data_source": data_source, "page_size": page_size, "page_token": page_token}
        return await self._call("GET", self.address.path("prompts"), PromptPage, query=query)

    async def get_prompt(self, prompt_id: int) -> PromptRecord:
        return await self._call("GET", self.address.path("prompts", prompt_id), PromptRecord)

    async def cancel(self, prompt_ids: Sequence[int]) -> list[PromptRecord]:
        """Cancel the prompts that are not being trained yet; return the state of each."""
        path, body = self.address.path("prompts", verb="cancel"), {"prompt_ids": list(prompt_ids)}
        return await self._call("POST", path, list[PromptRecord], part="prompts", body=body)

    async def wait_for_prompt(self, prompt_id: int, timeout_s: float) -> PromptRecord:
        """Return when the prompt is finished. Raises DeadlineExceeded, with the prompt's state, after `timeout_s`."""
        path, deadline = self.address.path("prompts", prompt_id, verb="wait"), time.monotonic() + timeout_s
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), LONG_POLL_S, self.timeout_s / 2)
            record = await self._call("GET", path, PromptRecord, query={"timeout_s": wait_s})
            if record.state in FINISHED_STATES:
                return record
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"prompt {prompt_id} is {record.state} after {timeout_s:g} s")

    async def results(
        self, cursor: str = "", prompt_ids: Sequence[int] = (), *, with_groups: bool = False
    ) -> AsyncIterator[Result]:
        """Yield every prompt that finishes, without end.

        `cursor` is where to start: empty for now, "0" for the oldest result that is kept, or the cursor of a result to
        continue after it. A broken connection is opened again after the last result, so that none is lost or
        repeated."""
        attempts = self._attempts()
        timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
        while True:
            query: dict[str, Any] = {"cursor": cursor, "with_groups": with_groups, "prompt_id": list(prompt_ids)}
            failure = connection_failure(self.address.url, httpx.ReadError("the stream ended"))
            try:
                async with self._http.stream(
                    "GET", self.address.path("results"), params=query, timeout=timeout
                ) as response:
                    if not response.is_success:
                        await response.aread()
                        failure = response_failure(response)
                    else:
                        async for line in response.aiter_lines():
                            if not line.startswith("data: "):
                                continue
                            event = json.loads(line.removeprefix("data: "))
                            if "cursor" not in event:
                                break  # a problem document, which ends the stream
                            cursor = event["cursor"]
                            attempts = self._attempts()
                            yield Result.model_validate(event)
            except httpx.TransportError as error:
                failure = connection_failure(self.address.url, error)
            await sleep(attempts.pause_after(failure))

    async def groups(self, page_size: int = 50, page_token: str = "") -> GroupPage:
        """Return one page of the groups that wait in the queue."""
        query = {"page_size": page_size, "page_token": page_token}
        return await self._call("GET", self.address.path("groups"), GroupPage, query=query)

    async def get_group(self, prompt_id: int) -> Group:
        return await self._call("GET", self.address.path("groups", prompt_id), Group)

    async def samples(
        self, order: str = "", page_size: int = 50, page_token: str = "", **filters: str | float
    ) -> SamplePage:
        """Return one page of trained samples as text, newest first, or those with `order` WORST or BEST.

        Filters are `min_step`, `max_step`, `min_reward`, `max_reward`, `prompt_id`, `data_source` and `text`."""
        query = {"order": order, "page_size": page_size, "page_token": page_token, **filters}
        return await self._call("GET", self.address.path("samples"), SamplePage, query=query)

    async def create_evaluation(self, evaluation_id: str, prompts: Sequence[Prompt]) -> Evaluation:
        """Submit prompts that are scored and never trained on. The same id and prompts again change nothing."""
        body = {"evaluation_id": evaluation_id, "prompts": [prompt_body(p) for p in prompts]}
        return await self._call("POST", self.address.path("evaluations"), Evaluation, body=body)

    async def get_evaluation(self, evaluation_id: str) -> Evaluation:
        return await self._call("GET", self.address.path("evaluations", evaluation_id), Evaluation)

    async def wait_for_evaluation(self, evaluation_id: str, timeout_s: float) -> Evaluation:
        """Return when every prompt is scored. Raises DeadlineExceeded, with the number scored, after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            evaluation = await self.get_evaluation(evaluation_id)
            if evaluation.num_finished >= evaluation.num_prompts:
                return evaluation
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(
                    f"evaluation {evaluation_id!r} has {evaluation.num_finished} of {evaluation.num_prompts} "
                    f"prompts after {timeout_s:g} s; are rollout servers up?"
                )
            await sleep(min(EVALUATION_POLL_S, remaining_s))

    async def policies(self, page_size: int = 50, page_token: str = "") -> PolicyPage:
        """Return one page of policy versions, newest first."""
        query = {"page_size": page_size, "page_token": page_token}
        return await self._call("GET", self.address.path("policies"), PolicyPage, query=query)

    async def policy(self, version: int | None = None) -> Policy:
        """Return the registry's record of a version, or of the latest one."""
        return await self._call("GET", self.address.path("policies", _policy_name(version)), Policy)

    async def wait_for_policy(self, timeout_s: float, version: int = 0) -> Policy:
        """Return the latest policy once its version is at least `version`. A run that has just been started has none.

        Raises DeadlineExceeded after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                latest = await self.policy()
                if latest.policy_version >= version:
                    return latest
                state = f"version {latest.policy_version} is the latest"
            except NotFound:
                state = "the run has no policy"
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(f"{state} after {timeout_s:g} s; `penstock status` says what the run waits for")
            await sleep(min(POLICY_POLL_S, remaining_s))

    async def compare_policies(self, version: int, other: int) -> PolicyComparison:
        query = {"policy_version": version, "other_version": other}
        return await self._call("GET", self.address.path("policies", verb="compare"), PolicyComparison, query=query)

    async def promote_policy(self, version: int | None = None) -> Policy:
        """Mark a version, or the latest one, as meant for use."""
        return await self._change_policy(version, "promote")

    async def roll_back_policy(self, version: int) -> Policy:
        """Hold every rollout server at a version, loaded from its snapshot, until `release_policy`."""
        return await self._change_policy(version, "rollback")

    async def submit_tasks(
        self, payloads: Sequence[Any], num_sessions: int = 1, *, task_ids: Sequence[str] = (), deadline_s: float = 0.0,
        data_source: str = "", idempotency_key: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Submit a task for each payload, which can be any JSON value; return their ids. All are accepted, or none.

        A task becomes one group of `num_sessions` rewarded sessions, or `deadline_s` after its first lease of those
        that it has then. Repeating a call with the same `idempotency_key` or the same `task_ids` submits nothing."""
        fields = {"num_sessions": num_sessions, "deadline_s": deadline_s, "data_source": data_source}
        tasks = [{"payload": payload, **fields} for payload in payloads]
        for task, task_id in zip(tasks, task_ids, strict=False):
            task["task_id"] = task_id
        body = {"tasks": tasks, "idempotency_key": idempotency_key or uuid.uuid4().hex, "run": self.address.run}
        return await self._call("POST", "/v1/tasks", list[str], part="task_ids", body=body)

    async def get_task(self, task_id: str) -> Task:
        return await self._call("GET", f"/v1/tasks/{task_id}", Task, query={"run": self.address.run})

    async def lease_tasks(self, worker: str, max_tasks: int = 1, wait_s: float = 0.0) -> list[LeasedTask]:
        """Get places of tasks to work on, each with the id of its session. Waits up to `wait_s` for one, at most 30."""
        body = {"worker": worker, "max_tasks": max_tasks, "wait_s": wait_s, "run": self.address.run}
        return await self._call("POST", "/v1/tasks:lease", list[LeasedTask], part="tasks", body=body)

    async def heartbeat_tasks(self, session_ids: Sequence[str]) -> list[str]:
        """Renew the leases of sessions; return those that are lost. Generate calls of a session renew its lease too."""
        body = {"session_ids": list(session_ids), "run": self.address.run}
        return await self._call("POST", "/v1/tasks:heartbeat", list[str], part="lost_session_ids", body=body)

    async def return_task(self, session_id: str, failure: str = "") -> bool:
        """Give a place back for another worker; return whether the session held its lease."""
        body = {"session_id": session_id, "failure": failure, "run": self.address.run}
        return await self._call("POST", "/v1/tasks:return", bool, part="returned", body=body)

    async def sessions(self, page_size: int = 0, page_token: str = "") -> SessionPage:
        """Sessions whose calls are kept, the one with the newest call first."""
        query = {"run": self.address.run, "page_size": page_size, "page_token": page_token}
        return await self._call("GET", "/v1/sessions", SessionPage, query=query)

    async def get_session(self, session_id: str, from_call: int = 0, max_tokens: int = 0) -> Session:
        """A session as a tree. All calls are described; those from `from_call` on have tokens, up to `max_tokens`
        together (0: 20,000)."""
        query = {"run": self.address.run, "from_call": from_call, "max_tokens": max_tokens}
        return await self._call("GET", f"/v1/sessions/{session_id}", Session, query=query)

    async def reward_session(
        self, session_id: str, reward: float, reward_parts: Mapping[str, float] | None = None, task_id: str = ""
    ) -> RewardedSession:
        """Turn the recorded calls of a session into training data. Repeating it changes nothing. `task_id` is the task
        of a session that was not leased with one."""
        body = {
            "reward": reward, "reward_parts": dict(reward_parts or {}), "task_id": task_id, "run": self.address.run,
        }  # fmt: skip
        return await self._call("POST", f"/v1/sessions/{session_id}/reward", RewardedSession, body=body)

    async def release_policy(self) -> Policy:
        """End a roll back: the servers follow the newest version again."""
        return await self._call("POST", self.address.path("policies", verb="release"), Policy)

    async def retire_policy(self, version: int) -> Policy:
        """Mark a version as never to be used again."""
        return await self._change_policy(version, "retire")

    async def pin_policy(self, pin: str, version: int) -> Policy:
        """Serve the key, session, evaluation or rollout server named `pin` with this version only."""
        return await self._call("PUT", self.address.path("pins", pin), Policy, body={"policy_version": version})

    async def unpin_policy(self, pin: str) -> bool:
        """Remove a pin; return whether it existed."""
        return await self._call("DELETE", self.address.path("pins", pin), bool, part="was_pinned")

    async def runs(self) -> list[Run]:
        """Return the runs that the gateway serves: its own."""
        return await self._call("GET", "/v1/runs", list[Run], part="runs")

    async def get_run(self) -> Run:
        return await self._call("GET", self.address.path(), Run)

    async def pause_run(self) -> Run:
        """Stop leasing prompts to rollout servers."""
        return await self._call("POST", self.address.path(verb="pause"), Run)

    async def resume_run(self) -> Run:
        """Lease prompts again."""
        return await self._call("POST", self.address.path(verb="resume"), Run)

    async def stop_run(self) -> Run:
        """End the learner after its current step, with a checkpoint."""
        return await self._call("POST", self.address.path(verb="stop"), Run)

    async def metrics(self, page_size: int = 50, names: Sequence[str] = ()) -> list[StepMetrics]:
        """Return the metrics of the newest steps, oldest first; all of them, or those in `names`."""
        query = {"page_size": page_size, "name": list(names)}
        return await self._call("GET", self.address.path("metrics"), list[StepMetrics], part="steps", query=query)

    async def servers(self) -> list[Server]:
        return await self._call("GET", self.address.path("servers"), list[Server], part="servers")

    async def drain_server(self, server_id: str) -> Server:
        """Let a rollout server finish its groups and lease no others."""
        return await self._call("POST", self.address.path("servers", server_id, verb="drain"), Server)

    async def undrain_server(self, server_id: str) -> Server:
        return await self._call("POST", self.address.path("servers", server_id, verb="undrain"), Server)

    async def _change_policy(self, version: int | None, verb: str) -> Policy:
        return await self._call("POST", self.address.path("policies", _policy_name(version), verb=verb), Policy)

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        part: str = "",
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> T:
        """Send a request until it succeeds; return its response, or that `part` of it, as `kind`."""
        attempts = self._attempts()
        while True:
            try:
                response = await self._http.request(method, path, json=body, params=query, timeout=attempts.timeout_s)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                failure = connection_failure(self.address.url, error)
            else:
                if response.is_success:
                    return read_response(response, kind, part)
                failure = response_failure(response)
            await sleep(attempts.pause_after(failure))


def _policy_name(version: int | None) -> str | int:
    return "latest" if version is None else version
