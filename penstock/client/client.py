"""The client of a gateway's REST API: `PenstockClient` for asyncio. sync_client.py has the same methods without await.

A call is retried on connection errors, 429 and 5xx until its deadline: see retries.py. Every call is safe to repeat,
because a submission carries an idempotency key and an evaluation its id. An error arrives as the class of
`penstock.errors` that the gateway raised.
"""

from __future__ import annotations

import json
import ssl
import time
import uuid
from asyncio import sleep
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx
from pydantic import TypeAdapter

from penstock.api import records
from penstock.client.address import CONFIGURED_RUN, GatewayAddress
from penstock.client.retries import Attempts, connection_failure, response_failure
from penstock.errors import DeadlineExceeded, NotFound, PenstockError

if TYPE_CHECKING:
    from penstock.trajectory import Prompt

T = TypeVar("T")
FINISHED_STATES = ("QUEUED", "TRAINED", "DEAD_LETTERED", "CANCELLED")
POLL_S = 0.5
LONG_POLL_S = 30.0
"""Longest time that one request waits in the gateway for a prompt to finish."""
STREAM_SILENCE_S = 30.0
"""A result stream that is silent for this long is broken: the gateway sends keep-alives more often."""


def needs_authorities(url: str) -> bool:
    """Whether a client of this address verifies certificates. Reading the system's authorities takes longer than a
    call, so it is not done where there is no TLS."""
    try:
        return httpx.URL(url).scheme != "http"
    except httpx.InvalidURL as error:
        raise connection_failure(url, error).error from error


class PenstockClient:
    """Calls a gateway about one run. Use it as a context manager, or close it yourself.

    `timeout_s` bounds one attempt of a call, and `deadline_s` the call with all its retries. `tls` holds the
    authorities to trust and the client certificate to show; without it, the system's authorities are trusted.
    `transport` replaces httpx's transport, for example by `httpx.MockTransport` in a test."""

    def __init__(
        self, url: str, *, run: str = CONFIGURED_RUN, api_key: str = "", timeout_s: float = 30.0,
        deadline_s: float = 60.0, tls: ssl.SSLContext | None = None, transport: Any = None,
    ) -> None:  # fmt: skip
        self.address = GatewayAddress(url, run, api_key)
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self._http = httpx.AsyncClient(
            base_url=url, headers=self.address.headers, transport=transport, verify=tls or needs_authorities(url),
            trust_env=False,
        )  # fmt: skip

    @classmethod
    def from_run_dir(cls, folder: Path | str, api_key: str = "", **options: Any) -> Self:
        """Connect to the gateway of a run on this machine, for example `runs/demo-1`. A gateway without configured keys
        needs no `api_key` here: the one in its run's folder is used."""
        return cls(**asdict(GatewayAddress.from_run_dir(folder, api_key)), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def submit(
        self, prompts: Sequence[Prompt], idempotency_key: str | None = None, prompt_keys: Sequence[str] = ()
    ) -> records.Submission:
        """Submit prompts: all are accepted, or none.

        Repeating a call with the same `idempotency_key` returns the first call's ids and submits nothing. Without a
        key, a random one protects this call's own retries only. `prompt_keys` has a key for each prompt instead: a
        prompt whose key was used before is not submitted again, whichever prompts it comes with."""
        keys: dict[str, Any] = {"idempotency_key": idempotency_key or uuid.uuid4().hex}
        if prompt_keys:
            keys = {"prompt_keys": list(prompt_keys)}
        return await self._call(
            records.Submission, "POST", "prompts", prompts=[prompt_body(p) for p in prompts], **keys
        )

    async def prompts(
        self, state: str = "", data_source: str = "", page_size: int = 50, page_token: str = ""
    ) -> records.PromptPage:
        """Return one page of prompts by id, oldest first."""
        wanted: dict[str, Any] = {"state": state, "data_source": data_source}
        return await self._call(
            records.PromptPage, "GET", "prompts", page_size=page_size, page_token=page_token, **wanted
        )

    async def get_prompt(self, prompt_id: int) -> records.PromptRecord:
        return await self._call(records.PromptRecord, "GET", "prompts", prompt_id)

    async def cancel(self, prompt_ids: Sequence[int]) -> list[records.PromptRecord]:
        """Cancel the prompts that are not being trained yet; return the state of each."""
        ids = list(prompt_ids)
        return await self._call(
            list[records.PromptRecord], "POST", "prompts", verb="cancel", part="prompts", prompt_ids=ids
        )

    async def wait_for_prompt(self, prompt_id: int, timeout_s: float) -> records.PromptRecord:
        """Return when the prompt is finished. Raises DeadlineExceeded, with the prompt's state, after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), LONG_POLL_S, self.timeout_s / 2)
            record = await self._call(records.PromptRecord, "GET", "prompts", prompt_id, verb="wait", timeout_s=wait_s)
            if record.state in FINISHED_STATES:
                return record
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"prompt {prompt_id} is {record.state} after {timeout_s:g} s")

    async def results(
        self, cursor: str = "", prompt_ids: Sequence[int] = (), *, with_groups: bool = False
    ) -> AsyncIterator[records.Result]:
        """Yield every prompt that finishes, without end.

        `cursor` is where to start: empty for now, "0" for the oldest result that is kept, or the cursor of a result to
        continue after it. A broken connection is opened again after the last result, so that none is lost or
        repeated."""
        attempts = Attempts(self.timeout_s, self.deadline_s)
        timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
        while True:
            query: dict[str, Any] = {"cursor": cursor, "with_groups": with_groups, "prompt_id": list(prompt_ids)}
            failure = connection_failure(self.address.url, httpx.ReadError("the stream ended"))
            try:
                path = self.address.path("results")
                async with self._http.stream("GET", path, params=query, timeout=timeout) as response:
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
                            attempts = Attempts(self.timeout_s, self.deadline_s)
                            yield records.Result.model_validate(event)
            except httpx.TransportError as error:
                failure = connection_failure(self.address.url, error)
            await self._sleep(attempts.pause_after(failure))

    async def groups(self, page_size: int = 50, page_token: str = "") -> records.GroupPage:
        """Return one page of the groups that wait in the queue."""
        return await self._call(records.GroupPage, "GET", "groups", page_size=page_size, page_token=page_token)

    async def get_group(self, prompt_id: int) -> records.Group:
        return await self._call(records.Group, "GET", "groups", prompt_id)

    async def samples(
        self, /, order: str = "", page_size: int = 50, page_token: str = "", **filters: str | float
    ) -> records.SamplePage:
        """Return one page of trained samples as text, newest first, or by reward with `order` WORST or BEST. Those of
        validations with `validation=True`.

        Filters are `min_step`, `max_step`, `min_reward`, `max_reward`, `prompt_id`, `data_source` and `text`."""
        wanted: dict[str, Any] = {"order": order, "page_size": page_size, "page_token": page_token} | filters
        return await self._call(records.SamplePage, "GET", "samples", **wanted)

    async def create_evaluation(self, evaluation_id: str, prompts: Sequence[Prompt]) -> records.Evaluation:
        """Submit prompts that are scored and never trained on. The same id and prompts again change nothing."""
        body: dict[str, Any] = {"evaluation_id": evaluation_id, "prompts": [prompt_body(p) for p in prompts]}
        return await self._call(records.Evaluation, "POST", "evaluations", **body)

    async def get_evaluation(self, evaluation_id: str) -> records.Evaluation:
        return await self._call(records.Evaluation, "GET", "evaluations", evaluation_id)

    async def wait_for_evaluation(self, evaluation_id: str, timeout_s: float) -> records.Evaluation:
        """Return when every prompt is scored. Raises DeadlineExceeded, with the number scored, after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            evaluation = await self.get_evaluation(evaluation_id)
            if evaluation.num_finished >= evaluation.num_prompts:
                return evaluation
            scored = f"{evaluation.num_finished} of {evaluation.num_prompts} prompts after {timeout_s:g} s"
            await self._pause_until(deadline, f"evaluation {evaluation_id!r} has {scored}; are rollout servers up?")

    async def policies(self, page_size: int = 50, page_token: str = "") -> records.PolicyPage:
        """Return one page of policy versions, newest first."""
        return await self._call(records.PolicyPage, "GET", "policies", page_size=page_size, page_token=page_token)

    async def policy(self, version: int | None = None) -> records.Policy:
        """Return the registry's record of a version, or of the latest one."""
        return await self._call(records.Policy, "GET", "policies", "latest" if version is None else version)

    async def wait_for_policy(self, timeout_s: float, version: int = 0) -> records.Policy:
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
            failure = f"{state} after {timeout_s:g} s; `penstock status` says what the run waits for"
            await self._pause_until(deadline, failure)

    async def compare_policies(self, version: int, other: int) -> records.PolicyComparison:
        versions: dict[str, Any] = {"policy_version": version, "other_version": other}
        return await self._call(records.PolicyComparison, "GET", "policies", verb="compare", **versions)

    async def promote_policy(self, version: int | None = None) -> records.Policy:
        """Mark a version, or the latest one, as meant for use."""
        return await self._call(
            records.Policy, "POST", "policies", "latest" if version is None else version, verb="promote"
        )

    async def rewind_policy(self, version: int) -> records.Policy:
        """Hold every rollout server at a version, loaded from its snapshot, until `release_policy`."""
        return await self._call(records.Policy, "POST", "policies", version, verb="rewind")

    async def release_policy(self) -> records.Policy:
        """End a rewind: the servers follow the newest version again."""
        return await self._call(records.Policy, "POST", "policies", verb="release")

    async def retire_policy(self, version: int) -> records.Policy:
        """Mark a version as never to be used again."""
        return await self._call(records.Policy, "POST", "policies", version, verb="retire")

    async def pin_policy(self, pin: str, version: int) -> records.Policy:
        """Serve the key, session, evaluation or rollout server named `pin` with this version only."""
        return await self._call(records.Policy, "PUT", "pins", pin, policy_version=version)

    async def unpin_policy(self, pin: str) -> bool:
        """Remove a pin; return whether it existed."""
        return await self._call(bool, "DELETE", "pins", pin, part="was_pinned")

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
        key = idempotency_key or uuid.uuid4().hex
        return await self._call(list[str], "POST", "tasks", part="task_ids", tasks=tasks, idempotency_key=key)

    async def get_task(self, task_id: str) -> records.Task:
        return await self._call(records.Task, "GET", "tasks", task_id)

    async def lease_tasks(self, worker: str, max_tasks: int = 1, wait_s: float = 0.0) -> list[records.LeasedTask]:
        """Get places of tasks to work on, each with the id of its session. Waits up to `wait_s` for one, at most 30."""
        body: dict[str, Any] = {"worker": worker, "max_tasks": max_tasks, "wait_s": wait_s}
        return await self._call(list[records.LeasedTask], "POST", "tasks", verb="lease", part="tasks", **body)

    async def heartbeat_tasks(self, session_ids: Sequence[str]) -> list[str]:
        """Renew the leases of sessions; return the lost ones. Generate calls of a session renew its lease too."""
        body: dict[str, Any] = {"session_ids": list(session_ids)}
        return await self._call(list[str], "POST", "tasks", verb="heartbeat", part="lost_session_ids", **body)

    async def return_task(self, session_id: str, failure: str = "") -> bool:
        """Give a place back for another worker; return whether the session held its lease."""
        body: dict[str, Any] = {"session_id": session_id, "failure": failure}
        return await self._call(bool, "POST", "tasks", verb="return", part="returned", **body)

    async def sessions(self, page_size: int = 0, page_token: str = "") -> records.SessionPage:
        """Sessions whose calls are kept, the one with the newest call first."""
        return await self._call(records.SessionPage, "GET", "sessions", page_size=page_size, page_token=page_token)

    async def get_session(self, session_id: str, from_call: int = 0, max_tokens: int = 0) -> records.Session:
        """A session as a tree of calls. Calls from `from_call` on have tokens, up to `max_tokens` (0: 20,000)."""
        return await self._call(
            records.Session, "GET", "sessions", session_id, from_call=from_call, max_tokens=max_tokens
        )

    async def reward_session(
        self, session_id: str, reward: float, reward_parts: Mapping[str, float] | None = None, task_id: str = ""
    ) -> records.RewardedSession:
        """Turn the recorded calls of a session into training data. Repeating it changes nothing. `task_id` is the task
        of a session that was not leased with one."""
        body: dict[str, Any] = {"reward": reward, "reward_parts": dict(reward_parts or {}), "task_id": task_id}
        return await self._call(records.RewardedSession, "POST", "sessions", session_id, "reward", **body)

    async def runs(self) -> list[records.Run]:
        """Return the runs that the gateway serves: its own."""
        return await self._call(list[records.Run], "GET", "runs", part="runs")

    async def get_run(self) -> records.Run:
        return await self._call(records.Run, "GET")

    async def pause_run(self) -> records.Run:
        """Stop leasing prompts to rollout servers."""
        return await self._call(records.Run, "POST", verb="pause")

    async def resume_run(self) -> records.Run:
        """Lease prompts again."""
        return await self._call(records.Run, "POST", verb="resume")

    async def stop_run(self) -> records.Run:
        """End the learner after its current step, with a checkpoint."""
        return await self._call(records.Run, "POST", verb="stop")

    async def metrics(self, page_size: int = 50, names: Sequence[str] = ()) -> list[records.StepMetrics]:
        """Return the metrics of the newest steps, oldest first; all metrics, or the ones in `names`."""
        query: dict[str, Any] = {"page_size": page_size, "name": list(names)}
        return await self._call(list[records.StepMetrics], "GET", "metrics", part="steps", **query)

    async def servers(self) -> list[records.Server]:
        return await self._call(list[records.Server], "GET", "servers", part="servers")

    async def drain_server(self, server_id: str) -> records.Server:
        """Let a rollout server finish its groups and lease no others."""
        return await self._call(records.Server, "POST", "servers", server_id, verb="drain")

    async def undrain_server(self, server_id: str) -> records.Server:
        return await self._call(records.Server, "POST", "servers", server_id, verb="undrain")

    async def _call(
        self, kind: type[T], method: str, *place: str | int, verb: str = "", part: str = "", **fields: Any
    ) -> T:
        """Send a request, with `fields` as query or body, until it succeeds; return that `part` of it as `kind`."""
        path = self.address.path(*place, verb=verb)
        if place and place[0] in ("tasks", "sessions"):
            fields["run"] = self.address.run
        options: dict[str, Any] = {"json" if method in ("POST", "PUT") else "params": fields or None}
        attempts = Attempts(self.timeout_s, self.deadline_s)
        while True:
            try:
                response = await self._http.request(method, path, timeout=attempts.timeout_s, **options)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                failure = connection_failure(self.address.url, error)
            else:
                if response.is_success:
                    return _read_response(response, kind, part)
                failure = response_failure(response)
            await self._sleep(attempts.pause_after(failure))

    async def _pause_until(self, deadline: float, failure: str) -> None:
        """Pause before the next read, or raise DeadlineExceeded."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(failure)
        await self._sleep(min(POLL_S, remaining_s))

    async def _sleep(self, pause_s: float) -> None:
        await sleep(pause_s)


def _read_response(response: httpx.Response, kind: type[T], part: str) -> T:
    """Return the body as `kind`, or the field of it that is named `part`."""
    try:
        body = response.json()
        return TypeAdapter(kind).validate_python(body[part] if part else body)
    except (ValueError, KeyError, TypeError) as error:
        raise PenstockError(f"{response.url} did not answer as a gateway does ({error}); check the URL") from error


def prompt_body(prompt: Prompt) -> dict[str, Any]:
    """A prompt as the REST interface takes it. Optional sampling parameters are sent only where they are not the
    default, so that older gateways take prompts without them."""
    sampling = asdict(prompt.sampling) | {"stop": list(prompt.sampling.stop)}
    required = ("temperature", "top_p", "max_tokens", "seed")
    body: dict[str, Any] = {
        "sampling": {name: value for name, value in sampling.items() if value or name in required},
        "num_samples": prompt.num_samples,
        "agent_name": prompt.agent_name,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "priority": prompt.priority,
    }
    if prompt.messages:
        body["messages"] = prompt.chat
    if prompt.token_ids:
        body["token_ids"] = list(prompt.token_ids)
    return body
