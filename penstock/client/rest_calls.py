"""The calls of the REST interface, apart from sending: what to request, how to read the answer, when to repeat.

Shared by the asynchronous and the synchronous client; does no I/O but reading `gateway.json`.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from penstock.client import answers
from penstock.errors import (
    ERRORS_BY_REASON,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    PenstockError,
    Unavailable,
)
from penstock.replay.contract import Evaluation, Submission

if TYPE_CHECKING:
    from penstock.trajectory import Prompt

Json = dict[str, Any]
T = TypeVar("T")
A = TypeVar("A", bound=answers.Answer)

CONFIGURED_RUN = "-"
"""Names whichever run the gateway serves."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
POLL_S = 0.5
WAIT_S = 30.0
STREAM_SILENCE_S = 30.0
"""The gateway says something more often than this, even when nothing happens."""
FINISHED_STATES = ("QUEUED", "TRAINED", "DEAD_LETTERED", "CANCELLED")


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and how its answer is read."""

    method: str
    path: str
    parse: Callable[[Any], T]
    body: Json | None = None
    query: dict[str, str] | None = None


@dataclass(frozen=True)
class GatewayAddress:
    """Where a gateway is and what to send it. Builds every call; sends none."""

    url: str
    run: str = CONFIGURED_RUN
    api_key: str = ""

    @classmethod
    def from_run_dir(cls, folder: Path | str, api_key: str = "") -> GatewayAddress:
        """The gateway that wrote `gateway.json` into the run's folder. The folder has the run's name."""
        path = Path(folder) / "gateway.json"
        try:
            fields = json.loads(path.read_text())
            host, port, scheme = fields["host"], fields["rest_port"], fields.get("scheme", "http")
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist; is the run up? Otherwise give --run-dir or --url") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); restart the gateway") from error
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (a name for it, no listener)
        return cls(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", path.resolve().parent.name, api_key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def submit(self, prompts: Sequence[Prompt], idempotency_key: str | None) -> Call[Submission]:
        body = {"prompts": [prompt_to_json(p) for p in prompts], "idempotency_key": idempotency_key or uuid.uuid4().hex}
        return Call("POST", self._path("prompts"), _parse_submission, body)

    def get_prompt(self, prompt_id: int) -> Call[answers.PromptRecord]:
        return Call("GET", self._path("prompts", prompt_id), answers.PromptRecord.model_validate)

    def prompts(self, state: str, data_source: str, page_size: int, page_token: str) -> Call[answers.PromptPage]:
        query = {"state": state, "data_source": data_source, "page_size": str(page_size), "page_token": page_token}
        return Call("GET", self._path("prompts"), answers.PromptPage.model_validate, query=query)

    def cancel(self, prompt_ids: Sequence[int]) -> Call[list[answers.PromptRecord]]:
        body = {"prompt_ids": list(prompt_ids)}
        return Call("POST", self._path("prompts") + ":cancel", each(answers.PromptRecord, "prompts"), body)

    def wait_prompt(self, prompt_id: int, timeout_s: float) -> Call[answers.PromptRecord]:
        query = {"timeout_s": str(timeout_s)}
        return Call("GET", self._path("prompts", prompt_id) + ":wait", answers.PromptRecord.model_validate, query=query)

    def results(self, cursor: str, prompt_ids: Sequence[int], with_groups: bool) -> tuple[str, dict[str, Any]]:
        """Path and query of the stream of results."""
        return self._path("results"), {"cursor": cursor, "with_groups": with_groups, "prompt_id": list(prompt_ids)}

    def groups(self, page_size: int, page_token: str) -> Call[answers.GroupPage]:
        query = {"page_size": str(page_size), "page_token": page_token}
        return Call("GET", self._path("groups"), answers.GroupPage.model_validate, query=query)

    def get_group(self, prompt_id: int) -> Call[answers.Group]:
        return Call("GET", self._path("groups", prompt_id), answers.Group.model_validate)

    def get_run(self) -> Call[answers.Run]:
        return Call("GET", self._path(), answers.Run.model_validate)

    def policies(self, page_size: int, page_token: str) -> Call[answers.PolicyPage]:
        query = {"page_size": str(page_size), "page_token": page_token}
        return Call("GET", self._path("policies"), answers.PolicyPage.model_validate, query=query)

    def policy(self, version: int | None) -> Call[answers.Policy]:
        return Call(
            "GET", self._path("policies", "latest" if version is None else version), answers.Policy.model_validate
        )

    def compare_policies(self, version: int, other: int) -> Call[answers.PolicyComparison]:
        query = {"policy_version": str(version), "other_version": str(other)}
        return Call("GET", self._path("policies") + ":compare", answers.PolicyComparison.model_validate, query=query)

    def change_policy(self, version: int | None, verb: str) -> Call[answers.Policy]:
        """`verb` is promote, rollback or retire."""
        return Call(
            "POST",
            self._path("policies", "latest" if version is None else version) + f":{verb}",
            answers.Policy.model_validate,
        )

    def release_policy(self) -> Call[answers.Policy]:
        return Call("POST", self._path("policies") + ":release", answers.Policy.model_validate)

    def pin_policy(self, pin: str, version: int) -> Call[answers.Policy]:
        return Call("PUT", self._path("pins", pin), answers.Policy.model_validate, {"policy_version": version})

    def unpin_policy(self, pin: str) -> Call[bool]:
        return Call("DELETE", self._path("pins", pin), lambda answer: bool(answer["was_pinned"]))

    def runs(self) -> Call[list[answers.Run]]:
        return Call("GET", "/v1/runs", each(answers.Run, "runs"))

    def create_run(self, config: Mapping[str, Any]) -> Call[answers.Run]:
        return Call("POST", "/v1/runs", answers.Run.model_validate, {"config": dict(config)})

    def change_run(self, verb: str) -> Call[answers.Run]:
        """`verb` is pause, resume or stop."""
        return Call("POST", f"{self._path()}:{verb}", answers.Run.model_validate)

    def metrics(self, page_size: int, names: Sequence[str]) -> Call[list[answers.StepMetrics]]:
        query: Any = {"page_size": str(page_size), "name": list(names)}
        return Call("GET", self._path("metrics"), each(answers.StepMetrics, "steps"), query=query)

    def change_server(self, server_id: str, verb: str) -> Call[answers.Server]:
        """`verb` is drain or undrain."""
        return Call("POST", self._path("servers", server_id) + f":{verb}", answers.Server.model_validate)

    def servers(self) -> Call[list[answers.Server]]:
        return Call("GET", self._path("servers"), each(answers.Server, "servers"))

    def create_evaluation(self, evaluation_id: str, prompts: Sequence[Prompt]) -> Call[Evaluation]:
        body = {"evaluation_id": evaluation_id, "prompts": [prompt_to_json(p) for p in prompts]}
        return Call("POST", self._path("evaluations"), _parse_evaluation, body)

    def get_evaluation(self, evaluation_id: str) -> Call[Evaluation]:
        return Call("GET", self._path("evaluations", evaluation_id), _parse_evaluation)

    def _path(self, *parts: str | int) -> str:
        return "/".join(["/v1/runs", *(quote(str(part), safe="") for part in (self.run, *parts))])


@dataclass(frozen=True)
class Failure:
    error: PenstockError
    is_transient: bool


class Attempts:
    """How often and how long one call is tried. Pauses double, with jitter; the deadline bounds everything."""

    def __init__(self, timeout_s: float, deadline_s: float) -> None:
        self._attempt_timeout_s = timeout_s
        self._deadline = time.monotonic() + deadline_s
        self._pause_s = FIRST_PAUSE_S

    @property
    def timeout_s(self) -> float:
        """Of the next attempt."""
        return max(0.001, min(self._attempt_timeout_s, self._deadline - time.monotonic()))

    def pause_after(self, failure: Failure) -> float:
        """How long to wait before trying again; raises the failure when that is of no use or no time is left."""
        pause_s = random.uniform(0.5, 1.0) * self._pause_s  # noqa: S311
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if not failure.is_transient or time.monotonic() + pause_s >= self._deadline:
            raise failure.error
        return pause_s


def prompt_to_json(prompt: Prompt) -> Json:
    """A prompt as the REST interface takes it."""
    body: Json = {
        "sampling": {
            "temperature": prompt.sampling.temperature,
            "top_p": prompt.sampling.top_p,
            "max_tokens": prompt.sampling.max_tokens,
            "seed": prompt.sampling.seed,
        },
        "num_samples": prompt.num_samples,
        "agent_name": prompt.agent_name,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "priority": prompt.priority,
    }
    if prompt.messages:
        body["messages"] = [{"role": role, "content": content} for role, content in prompt.messages]
    if prompt.token_ids:
        body["token_ids"] = list(prompt.token_ids)
    return body


def each(kind: type[A], name: str) -> Callable[[Json], list[A]]:
    """Reads a list in an answer."""
    return lambda answer: [kind.model_validate(item) for item in answer[name]]


def read_answer(call: Call[T], response: httpx.Response) -> T:
    try:
        return call.parse(response.json())
    except (ValueError, KeyError, TypeError) as error:
        raise PenstockError(f"{response.url} did not answer as a gateway does ({error}); check the URL") from error


def unreachable(url: str, error: Exception) -> Failure:
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return Failure(ConfigError(f"{url!r} is not an http:// or https:// address"), is_transient=False)
    if isinstance(error, httpx.TimeoutException):
        return Failure(DeadlineExceeded(f"the gateway at {url} did not answer in time; try again"), is_transient=True)
    return Failure(Unavailable(f"no gateway answers at {url} ({error}); is it running?"), is_transient=True)


def failure_of(response: httpx.Response) -> Failure:
    is_transient = response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error
    try:
        problem = response.json()
        reason, detail, field = problem["reason"], problem["detail"], problem["field"]
    except (ValueError, KeyError, TypeError):
        return Failure(PenstockError(f"{response.url} answered {response.status_code}; check the URL"), is_transient)
    if field:
        return Failure(InvalidInput(field, detail.removeprefix(f"{field}: ")), is_transient)
    return Failure(ERRORS_BY_REASON.get(reason, PenstockError)(detail), is_transient)


def _parse_submission(answer: Json) -> Submission:
    return Submission(tuple(answer["prompt_ids"]), answer["replayed"])


def _parse_evaluation(answer: Json) -> Evaluation:
    return Evaluation(**answer | {"pass_at": {int(k): share for k, share in answer["pass_at"].items()}})


def poll_pause(evaluation: Evaluation, deadline: float, timeout_s: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineExceeded(
            f"evaluation {evaluation.evaluation_id!r} has {evaluation.num_finished} of {evaluation.num_prompts} "
            f"prompts after {timeout_s:g} s; are rollout servers up?"
        )
    return min(POLL_S, remaining_s)
