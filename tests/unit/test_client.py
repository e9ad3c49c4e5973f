"""The clients against a gateway that is a function: what they retry, what they raise, what they ignore."""

from __future__ import annotations

import dataclasses
import inspect
import json
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from penstock.api import records
from penstock.client import PenstockClient, SyncPenstockClient, retries
from penstock.errors import (
    ERRORS_BY_REASON,
    ConfigError,
    InvalidInput,
    PenstockError,
    PromptTooLong,
    QueueFull,
    RateLimited,
    Unavailable,
)
from penstock.replay import queue_types
from penstock.trajectory import Prompt
from penstock.v1 import runs_pb2
from support.groups import SAMPLE

PROMPT = Prompt(messages=(("user", "2+2?"),))
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)

QUEUE = dict.fromkeys(
    ("pending_prompts", "admitted", "in_flight", "queued", "delivered", "queued_bytes", "trained", "expired",
     "dead_lettered", "conservation_error", "redelivered", "reclaimed", "discarded", "admission_limit",
     "admission_room", "inserted", "saved_bytes"), 1,
)  # fmt: skip
SERVER = {
    "server_id": "s", "address": "a:1", "state": "READY", "policy_version": 1, "heartbeat_age_ms": 2,
    "running_groups": 3, "engine": "torch", "weights_digest": "", "is_drained": False,
}  # fmt: skip
RUN = {
    "run": "r", "step": 1, "policy_version": 1, "term": 1, "queue": QUEUE, "metrics": {"loss": None},
    "servers": [SERVER], "state": "RUNNING", "held_version": None, "detail": "",
}  # fmt: skip
POLICY = {
    "policy_version": 1, "step": 1, "parent_version": None, "published_at_ms": 1, "weights_digest": "",
    "snapshot_path": "", "state": "PUBLISHED", "metrics": {}, "server_ids": [], "is_held": False, "pins": [],
}  # fmt: skip
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8, "seed": None, "top_k": 0, "min_p": 0.0,
            "ignore_eos": False, "stop": []}  # fmt: skip
SUBMITTED = {
    "messages": [{"role": "user", "content": "?"}], "token_ids": [], "sampling": SAMPLING, "num_samples": 2,
    "agent_name": "", "data_source": "", "ground_truth": None, "extra_info": {}, "priority": 0, "evaluation_id": "",
}  # fmt: skip
RECORD = {"prompt_id": 1, "state": "QUEUED", "attempt": 1, "prompt": SUBMITTED}
SUMMARY = {
    "prompt_id": 1, "attempt": 1, "server_id": "s", "data_source": "", "num_trajectories": 1, "num_tokens": 2,
    "mean_reward": None, "min_version": 1, "max_version": 1, "finished_at_ms": 1,
}  # fmt: skip
TRAJECTORY = {
    "token_ids": [1], "loss_mask": [1], "log_probs": [-0.5], "policy_versions": [1], "reward": 1.0,
    "reward_parts": {}, "reward_failed": False, "finish_reason": "STOP", "is_baseline": False, "text": "4",
    "tokens": ["4"], "learner_log_probs": [], "sampling_segments": [],
}  # fmt: skip
GROUP = {
    "run": "r", "prompt_id": 1, "attempt": 1, "server_id": "s", "data_source": "", "agent_name": "",
    "sampling": SAMPLING, "prompt_token_ids": [1], "trajectories": [TRAJECTORY], "finished_at_ms": 1,
}  # fmt: skip
EVALUATION = {
    "evaluation_id": "e", "num_prompts": 1, "num_finished": 1, "score": 0.5, "policy_version_min": 1,
    "policy_version_max": 1, "num_samples": 2, "pass_at": {"1": 0.5, "2": 1.0},
}  # fmt: skip
TASK = {
    "task_id": "t", "state": "OPEN", "num_sessions": 4, "num_rewarded": 1, "num_failed": 0, "payload": 1,
    "data_source": "", "session_ids": ["t.0.1"], "prompt_ids": [], "failure": "",
}  # fmt: skip
LEASED_TASK = {"task_id": "t", "session_id": "t.0.1", "attempt": 1, "payload": 1, "lease_s": 60.0}
SESSION = {
    "session_id": "s", "state": "OPEN", "reward": None, "reward_parts": {}, "task_id": "", "num_calls": 1,
    "num_bytes": 9, "prompt_ids": [],
}  # fmt: skip
SESSION_NODE = {
    "number": 0, "parent": None, "server_id": "r", "finish_reason": "stop", "sampling": SAMPLING, "finished_at_ms": 1,
    "num_prompt_tokens": 1, "num_inserted": 1, "num_sampled": 1, "inserted_token_ids": [1], "inserted_tokens": ["a"],
    "token_ids": [2], "tokens": ["b"], "log_probs": [-0.5], "policy_versions": [3],
}  # fmt: skip
SESSION_PATH = {"calls": [0], "trained_calls": [0], "num_trained_tokens": 1, "reward": None}
PAGE = {"next_page_token": ""}
CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "submit": (([PROMPT],), {"prompt_ids": [1], "replayed": False}),
    "prompts": ((), {"prompts": [RECORD], **PAGE}),
    "get_prompt": ((1,), RECORD),
    "cancel": (([1],), {"prompts": [RECORD]}),
    "wait_for_prompt": ((1, 5.0), RECORD),
    "groups": ((), {"groups": [SUMMARY], **PAGE}),
    "get_group": ((1,), GROUP),
    "samples": ((), {"samples": [dataclasses.asdict(SAMPLE)], **PAGE}),
    "create_evaluation": (("e", [PROMPT]), EVALUATION),
    "get_evaluation": (("e",), EVALUATION),
    "wait_for_evaluation": (("e", 5.0), EVALUATION),
    "policies": ((), {"policies": [POLICY], **PAGE}),
    "policy": ((), POLICY),
    "wait_for_policy": ((5.0,), POLICY),
    "compare_policies": (
        (1, 2), {"policy": POLICY, "other": POLICY, "metric_changes": {}, "steps_between": 1, "same_weights": True},
    ),
    "promote_policy": ((1,), POLICY),
    "rewind_policy": ((1,), POLICY),
    "release_policy": ((), POLICY),
    "retire_policy": ((1,), POLICY),
    "pin_policy": (("ci", 1), POLICY),
    "unpin_policy": (("ci",), {"was_pinned": True}),
    "runs": ((), {"runs": [RUN]}),
    "get_run": ((), RUN),
    "pause_run": ((), RUN),
    "resume_run": ((), RUN),
    "stop_run": ((), RUN),
    "metrics": ((), {"steps": [{"step": 1, "policy_version": 1, "published_at_ms": 1, "metrics": {"loss": 0.5}}]}),
    "servers": ((), {"servers": [SERVER]}),
    "drain_server": (("s",), SERVER),
    "undrain_server": (("s",), SERVER),
    "submit_tasks": (([1], 4), {"task_ids": ["t"], "replayed": False}),
    "get_task": (("t",), TASK),
    "lease_tasks": (("w",), {"tasks": [LEASED_TASK]}),
    "heartbeat_tasks": ((["t.0.1"],), {"lost_session_ids": []}),
    "return_task": (("t.0.1",), {"returned": True}),
    "sessions": ((), {"sessions": [SESSION], **PAGE}),
    "get_session": (("s",), SESSION | {"calls": [SESSION_NODE], "paths": [SESSION_PATH]}),
    "reward_session": (("s", 0.5), {"prompt_ids": [1], "replayed": False, "is_waiting": False}),
}  # fmt: skip
"""Each call: its arguments, and what a gateway of this version responds."""
MAPS = ("metrics", "metric_changes", "reward_parts", "pass_at", "extra_info")
"""Fields whose keys are data."""
NOT_PLAIN_CALLS = {"aclose", "from_run_dir", "results"}


def opened(respond: Callable[[httpx.Request], httpx.Response], **options: Any) -> SyncPenstockClient:
    return SyncPenstockClient("http://gateway", transport=httpx.MockTransport(respond), **options)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The pauses of the synchronous client, which are recorded and take no time."""
    pauses: list[float] = []
    monkeypatch.setattr("penstock.client.sync_client.sleep", pauses.append)
    return pauses


def newer(body: Any) -> Any:
    """The same body with a further field in every object, as a newer gateway may send it."""
    if isinstance(body, list):
        return [newer(item) for item in body]
    if not isinstance(body, dict):
        return body
    fields = {name: value if name in MAPS else newer(value) for name, value in body.items()}
    return fields | {"added_later": {"x": 1}}


def test_the_synchronous_client_has_every_method_with_its_signature_and_documentation() -> None:
    for name, method in inspect.getmembers(PenstockClient, inspect.isfunction):
        if name in ("aclose", "results") or name.startswith("_"):
            continue
        blocking = getattr(SyncPenstockClient, name)
        assert inspect.signature(blocking) == inspect.signature(method) and blocking.__doc__ == method.__doc__


@pytest.mark.parametrize("client", [PenstockClient, SyncPenstockClient])
@pytest.mark.parametrize(("url", "times"), [("http://gateway:8080", 0), ("HTTPS://gateway", 1)])
def test_a_client_reads_the_system_s_authorities_only_for_tls(
    client: type, url: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ssl.SSLContext] = []
    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **options: made.append(create(**options)) or made[-1])
    client(url)
    assert len(made) == times
    assert all(context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname for context in made)


def test_threads_share_a_synchronous_client() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=RECORD | {"prompt_id": int(request.url.path.rpartition("/")[2])})

    ids = range(1, 200)
    with opened(respond) as client, ThreadPoolExecutor(8) as threads:
        assert [record.prompt_id for record in threads.map(client.get_prompt, ids)] == list(ids)


async def test_the_synchronous_client_works_in_a_running_event_loop() -> None:
    with opened(lambda _: httpx.Response(200, json=RUN)) as client:
        assert client.get_run().run == "r"


def test_every_call_is_in_the_table() -> None:
    public = {name for name, _ in inspect.getmembers(PenstockClient, inspect.isfunction) if not name.startswith("_")}
    assert public - NOT_PLAIN_CALLS == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_fields_of_a_newer_gateway_are_ignored(name: str) -> None:
    arguments, body = CALLS[name]
    with opened(lambda _: httpx.Response(200, json=body)) as client:
        expected = getattr(client, name)(*arguments)
    with opened(lambda _: httpx.Response(200, json=newer(body))) as client:
        assert getattr(client, name)(*arguments) == expected


def test_fields_of_a_newer_gateway_in_a_result_are_ignored() -> None:
    result = {"cursor": "1-0", "prompt_id": 1, "state": "QUEUED", "reason": "", "attempt": 1, "group": GROUP}
    with opened(lambda _: httpx.Response(200, text=f"data: {json.dumps(newer(result))}\n\n")) as client:
        assert next(client.results()).model_dump(mode="json") == result


def test_an_older_gateway_s_evaluation_has_no_pass_at() -> None:
    body = {name: value for name, value in EVALUATION.items() if name not in ("pass_at", "num_samples")}
    with opened(lambda _: httpx.Response(200, json=body)) as client:
        assert client.get_evaluation("e").pass_at == {}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("header", "least_s"), [("7", 7.0), ("Thu, 01 Jan 2099 00:00:00 GMT", 1e6), ("soon", 0.0)])
def test_a_pause_is_at_least_what_the_gateway_asks_for(
    status: int, header: str, least_s: float, slept: list[float]
) -> None:
    responses = iter([httpx.Response(status, headers={"Retry-After": header}), httpx.Response(200, json=RUN)])
    with opened(lambda _: next(responses), deadline_s=1e12) as client:
        assert client.get_run().run == "r"
    [pause_s] = slept
    assert pause_s >= least_s
    assert least_s or pause_s <= retries.FIRST_PAUSE_S


async def test_the_asyncio_client_honours_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr("penstock.client.client.sleep", sleep)
    responses = iter([httpx.Response(429, headers={"Retry-After": "7"}), httpx.Response(200, json=RUN)])
    async with PenstockClient("http://gateway", transport=httpx.MockTransport(lambda _: next(responses))) as client:
        await client.get_run()
    assert pauses == [7.0]


def test_a_pause_beyond_the_deadline_is_not_begun(slept: list[float]) -> None:
    body = problem("RATE_LIMITED", "more than 1 calls a second")
    with (
        opened(lambda _: httpx.Response(429, json=body, headers={"Retry-After": "61"}), deadline_s=60) as client,
        pytest.raises(RateLimited, match="more than 1") as raised,
    ):
        client.get_run()
    assert slept == [] and raised.value.retry_after_s == 61.0


def test_a_stream_that_is_refused_pauses_as_asked(slept: list[float]) -> None:
    result = {"cursor": "1-0", "prompt_id": 1, "state": "CANCELLED", "reason": "", "attempt": 0, "group": None}
    stream = httpx.Response(200, text=f"data: {json.dumps(result)}\n\n")
    responses = iter([httpx.Response(503, headers={"Retry-After": "9"}), stream])
    with opened(lambda _: next(responses)) as client:
        assert next(client.results()).cursor == "1-0"
    assert slept == [9.0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("", 0.0),
        ("-5", 0.0),
        ("soon", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float) -> None:
    assert retries.retry_after(header, NOW) == seconds


def problem(reason: str, detail: str, field: str = "") -> dict[str, Any]:
    return {"type": "urn:penstock:problem:x", "title": "", "status": 400, "detail": detail, "reason": reason} | (
        {"field": field} if field else {}
    )


@pytest.mark.parametrize("reason", ERRORS_BY_REASON)
def test_an_error_is_raised_as_the_class_that_the_gateway_raised(reason: str) -> None:
    kind = ERRORS_BY_REASON[reason]
    field = "prompts[3]" if issubclass(kind, InvalidInput) else ""
    detail = f"{field}: too bad" if field else "too bad"
    with (
        opened(lambda _: httpx.Response(kind.http_status, json=problem(reason, detail, field)), deadline_s=0) as client,
        pytest.raises(PenstockError) as raised,
    ):
        client.get_run()
    assert type(raised.value) is kind and raised.value.reason == reason and str(raised.value) == detail
    if isinstance(raised.value, InvalidInput):
        assert (raised.value.field, raised.value.message) == (field, "too bad")


def test_every_error_that_a_message_rebuilds_is_in_the_table() -> None:
    """PoisonGroup and RoleDied need more than a message, and an aborted sample stays in its server: they never reach a
    client. Private errors reach it as the error that they are a kind of."""
    kinds, unvisited = set(), [PenstockError]
    while unvisited:
        kind = unvisited.pop()
        if not kind.__name__.startswith("_"):
            kinds.add(kind.__name__)
        unvisited += kind.__subclasses__()
    rebuilt = {kind.__name__ for kind in ERRORS_BY_REASON.values()}
    assert kinds - rebuilt - {"SampleAborted"} == {"PenstockError", "PoisonGroup", "RoleDied"}


def test_a_reason_of_a_newer_gateway_is_kept() -> None:
    with (
        opened(lambda _: httpx.Response(418, json=problem("TEAPOT", "short and stout"))) as client,
        pytest.raises(PenstockError, match="short and stout") as raised,
    ):
        client.get_run()
    assert type(raised.value) is PenstockError and raised.value.reason == "TEAPOT"


@pytest.mark.parametrize(("status", "error"), [(429, QueueFull), (503, Unavailable)])
def test_transient_errors_are_raised_at_the_deadline_only(
    status: int, error: type[PenstockError], slept: list[float]
) -> None:
    failing = [httpx.Response(status, json=problem(error.reason, "not now"))] * 3
    responses = iter([*failing, httpx.Response(200, json=RUN)])
    with opened(lambda _: next(responses)) as client:
        assert client.get_run().run == "r"
    assert len(slept) == 3


def test_a_wrong_request_is_not_repeated(slept: list[float]) -> None:
    body = problem("PROMPT_TOO_LONG", "prompts[0]: 10 tokens are more than 9", "prompts[0]")
    with opened(lambda _: httpx.Response(400, json=body)) as client, pytest.raises(PromptTooLong) as raised:
        client.submit([PROMPT])
    assert raised.value.field == "prompts[0]" and slept == []


def test_queue_statistics_have_one_set_of_names() -> None:
    """The gateway and the clients show a part of the queue's own fields, and one property, under the same names."""
    shown = set(runs_pb2.QueueStat.DESCRIPTOR.fields_by_name)
    assert shown == set(records.QueueStat.model_fields)
    assert shown - {field.name for field in dataclasses.fields(queue_types.QueueStat)} == {"conservation_error"}


@pytest.mark.parametrize("client", [PenstockClient, SyncPenstockClient])
def test_a_url_that_cannot_be_parsed_is_named(client: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match="'http://gateway:port' is not an http:// or https:// address"):
        client("http://gateway:port")
