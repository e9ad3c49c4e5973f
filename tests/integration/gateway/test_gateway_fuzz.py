"""What the gateway accepts it can store, lease, show and train, by REST and gRPC. It refuses all else in one line.

The fields come from the declarations of the operations. A new operation, parameter of a path or stored field that the
tables here do not know fails a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import grpc
import httpx
import numpy as np
import pytest
import redis.asyncio as redis
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from pydantic import TypeAdapter, ValidationError

from penstock.api.conversion import request_of, to_json
from penstock.api.records import SubmittedPrompt
from penstock.codec import decode_prompt
from penstock.config.run import RunConfig, WeightsConfig
from penstock.config.service import ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease
from penstock.samples import SampleFile, line_of
from penstock.v1 import policies_pb2, prompts_pb2
from penstock_rollout.tokenization import Tokenization
from penstock_services.gateway.operations import Operation
from penstock_services.gateway.run import OPERATIONS
from support.fuzzing import (
    Place,
    field_values,
    json_fragments,
    json_places,
    message_places,
    minimal,
    set_field,
    try_examples,
    with_fragment,
)
from support.gateways import Gateway, ageless, publish, run_config, running
from support.redis_server import RedisProcess
from support.scripted_engines import TalkingEngine, make_tokenizer_folder, serving
from support.trained_prompts import trained_samples

RUN = "test"
TIMEOUT_S = 60.0
MAX_URL = 60_000
"""Longest URL that the client sends."""
ENDLESS = r"/results$|:watch$|:wait$|^/metrics$"
"""Operations that end only when the client ends them: streams and waits."""
NUM_EXAMPLES = [pytest.param(3, id="few"), pytest.param(60, id="many", marks=pytest.mark.long)]
"""Each example sends one request for every field."""
BY_NAME = {operation.name: operation for operation in OPERATIONS}
BY_REST = [operation for operation in OPERATIONS if operation.path]
BY_GRPC = [operation for operation in OPERATIONS if operation.rpcs]
FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE,
          grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)  # fmt: skip
_NUMBERS = itertools.count(1)


@dataclass
class Served:
    """A gateway with a rollout server that talks, in a thread of their own, and the doors to it."""

    gateway: Gateway
    queue: RedisReplayQueue
    loop: asyncio.AbstractEventLoop
    rest: httpx.Client
    channel: grpc.Channel
    tokenization: Tokenization
    submitted: dict[int, Any] = field(default_factory=dict)
    """Prompts that were submitted, by id."""
    leases: list[Lease] = field(default_factory=list)
    """Prompts that were leased and not trained yet."""
    num_steps: int = 0
    last_page: str = ""
    """The token of the last page of prompts, as far as they were checked."""

    def wait(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(TIMEOUT_S)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        response = self.rest.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def call(self, operation: Operation, data: bytes) -> tuple[grpc.StatusCode, str, bytes]:
        """Code, details, and the first message of the answer."""
        rpc = operation.rpcs[0]
        path = f"/{rpc.containing_service.full_name}/{rpc.name}"
        options: Any = {
            "metadata": (("authorization", f"Bearer {self.gateway.key}"),),
            "timeout": 0.2 if operation.event else TIMEOUT_S,
        }
        try:
            if not rpc.server_streaming:
                answer: Any = self.channel.unary_unary(path)(data, **options)
                return grpc.StatusCode.OK, "", answer
            stream: Any = self.channel.unary_stream(path)(data, **options)
            answers = [*stream] if operation.event is None else [next(stream)]
            stream.cancel()
            return grpc.StatusCode.OK, "", b"".join(answers[:1])
        except grpc.RpcError as error:
            is_quiet = operation.event and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
            found = grpc.StatusCode.OK if is_quiet else error.code()  # type: ignore[attr-defined]
            return found, error.details() or "", b""  # type: ignore[attr-defined]

    def show(self, name: str, query: Mapping[str, Any] | None = None, /, **params: Any) -> Any:
        """What a reading operation answers: the same by REST and gRPC."""
        operation = BY_NAME[name]
        path = re.sub(r"\{(\w+)\}", lambda found: str(({"run": RUN} | params)[found[1]]), operation.path)
        response = self.rest.get(path, params=query)
        assert response.status_code == 200, (name, params, response.text)
        request = operation.request(**params, **{key: value for key, value in (query or {}).items() if key != "state"})
        if query and "state" in query:
            request.state = prompts_pb2.PromptRecord.State.Value(query["state"])  # type: ignore[attr-defined]
        code, details, data = self.call(operation, request.SerializeToString())
        assert code == grpc.StatusCode.OK, (name, params, details)
        by_rest = json.loads(response.content, parse_constant=_refuse)
        assert ageless(by_rest) == ageless(json.loads(json.dumps(_answer(operation, data)))), (name, params)
        return by_rest

    def lease(self) -> list[Lease]:
        leases: list[Lease] = self.wait(self.queue.lease("worker", 10_000))
        self.leases += leases
        return leases

    def train(self) -> list[Lease]:
        """Make a step of the leased prompts. Its samples are shown as they are."""
        leases, self.leases = self.leases, []
        self.num_steps += 1
        groups = trained_samples(self.num_steps, leases, self.tokenization)
        SampleFile(self.gateway.config.folder, 0).write(map(line_of, groups))
        query = {"min_step": self.num_steps, "page_size": 1000}
        shown = self.show("list_samples", query)["samples"] if groups else []
        assert len(groups) == len(shown) or len(groups) > 1000
        for [sample], found in zip(reversed(groups), shown, strict=False):
            assert_shown(asdict(sample), found)
        return leases

    def prompts(self, **query: Any) -> dict[int, Any]:
        """The prompts that are listed, by id."""
        return self._listed({"page_size": 500, **query})[0]

    def _listed(self, query: dict[str, Any]) -> tuple[dict[int, Any], str]:
        """The prompts on all pages, and the token of the last one."""
        listed: dict[int, Any] = {}
        while True:
            page = self.show("list_prompts", query)
            listed |= {record["prompt_id"]: record["prompt"] for record in page["prompts"]}
            if not page["next_page_token"]:
                return listed, query.get("page_token", "")
            query["page_token"] = page["next_page_token"]

    def check_prompts(self) -> None:
        """Every prompt that was submitted is listed, leased and trained as it was sent."""
        from_last = {"page_token": self.last_page} if self.last_page else {}
        listed, self.last_page = self._listed({"page_size": 50, **from_last})
        for prompt_id, sent in self.submitted.items():
            assert_shown(sent, listed[prompt_id])
        self.lease()
        for lease in self.train():
            payload = prompts_pb2.Prompt.FromString(lease.payload)
            if lease.prompt_id in self.submitted:
                assert_shown(self.submitted[lease.prompt_id], to_json(payload, SubmittedPrompt))
        assert self.wait(self.queue.stat()).conservation_error == 0
        self.submitted.clear()


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _answer(operation: Operation, data: bytes) -> Any:
    assert not isinstance(operation.answer, str)
    return to_json(GetMessageClass(operation.rpcs[0].output_type).FromString(data), operation.answer)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It has a Redis of its own, because other tests empty the shared one."""
    store = RedisProcess(tmp_path_factory.mktemp("redis"))
    store.start()
    folder = make_tokenizer_folder(tmp_path_factory.mktemp("run"))
    (folder / "cluster-key").write_text("secret")
    config = run_config(store.url, folder, max_prompts_per_request=4).model_copy(
        update={
            "weights": WeightsConfig(cluster_key_file=folder / "cluster-key"),
            "replay": ReplayConfig(groups_per_step=100_000, lease_ttl_s=3600, capacity_bytes=2**30),
        }
    )
    ready: Future[tuple[Gateway, RedisReplayQueue, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=asyncio.run, args=(_serve(config, folder, ready),), daemon=True)
    thread.start()
    try:
        gateway, queue, loop, stop = ready.result(150)
        with (
            httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {gateway.key}"}, trust_env=False,
                         timeout=TIMEOUT_S) as rest,
            grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options=[("grpc.enable_http_proxy", 0)]) as channel,
        ):  # fmt: skip
            yield Served(gateway, queue, loop, rest, channel, Tokenization(folder))
        loop.call_soon_threadsafe(stop.set)
        thread.join(150)
        assert not thread.is_alive()
    finally:
        store.kill()


async def _serve(config: RunConfig, folder: Path, ready: Future[Any]) -> None:
    stop = asyncio.Event()
    async with redis.Redis.from_url(config.redis.url) as client:
        queue = RedisReplayQueue(client, config.run, config.replay)
        await publish(queue, 1, 2, 3)
        async with serving(config, client, folder, {"r0": TalkingEngine()}), running(config) as gateway:
            ready.set_result((gateway, queue, asyncio.get_running_loop(), stop))
            await stop.wait()


@dataclass
class Seed:
    """A request that is accepted."""

    params: dict[str, Any]
    body: Any = None
    """An operation without a model takes rows of a dataset."""
    query: dict[str, Any] = field(default_factory=dict)


PROMPT = {
    "messages": [{"role": "user", "content": "2+2?", "name": "n",
                  "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
    "sampling": {"temperature": 0.5, "max_tokens": 8, "seed": 3, "stop": ["x"]},
    "num_samples": 2, "ground_truth": {"a": [4]}, "extra_info": {"index": 1},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CHAT = {"model": RUN, "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 8}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = {"model": RUN, "max_tokens": 8, "system": [{"type": "text", "text": "s"}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]}  # fmt: skip


def lease_of_new_task(served: Served) -> Any:
    """A lease that need not wait for a task."""
    submitted_task(served)
    return {"worker": "w"}


BODIES: dict[str, Callable[[Served], Any]] = {
    "submit_prompts": lambda _: {"prompts": [PROMPT]},
    "create_evaluation": lambda _: {"evaluation_id": fresh("e"), "prompts": [PROMPT]},
    "submit_dataset": lambda _: {"num_samples": 1},
    "upload_dataset": lambda _: {
        "prompt": [{"role": "user", "content": "a"}], "data_source": fresh("d"), "agent_name": "",
        "reward_model": {"ground_truth": 1}, "extra_info": {"index": 1},
    },
    "pin_policy": lambda served: {"policy_version": published(served)},
    "submit_tasks": lambda _: {"tasks": [{"task_id": fresh("t"), "payload": {"a": [1]}, "data_source": "d"}]},
    "lease_tasks": lease_of_new_task,
    "return_task": lambda served: {"session_id": leased_session(served), "failure": "broken"},
    "heartbeat_tasks": lambda served: {"session_ids": [leased_session(served)]},
    "reward_session": lambda _: {"reward": 1.0, "reward_parts": {"a": 0.5}},
    "cancel_prompts": lambda served: {"prompt_ids": [submitted_prompt(served)]},
    "complete_chat": lambda _: CHAT | {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL]},
                     {"role": "tool", "content": "4", "tool_call_id": "1"}],
        "tools": [TOOL], "chat_template_kwargs": {"a": 1},
    },
    "complete": lambda _: {"model": RUN, "prompt": "2+2?", "max_tokens": 8},
    "create_response": lambda _: {"model": RUN, "input": [{"role": "user", "content": "2+2?"}], "metadata": {"a": "b"}},
    "create_message": lambda _: MESSAGES,
    "count_tokens": lambda _: {name: value for name, value in MESSAGES.items() if name != "max_tokens"},
}  # fmt: skip
"""Bodies of the operations for which the required fields of their models, made up by type, are not accepted."""
QUERIES: dict[str, dict[str, Any]] = {
    "compare_policies": {"policy_version": "1", "other_version": "2"},
    "wait_prompt": {"timeout_s": 0},
}
ABSENT = ("requeue_dead_letter", "file", "get_group")
"""What the parameters name does not exist, so that even the seed is answered with 404."""


def fresh(kind: str) -> str:
    return f"{kind}{next(_NUMBERS)}"


def submitted_prompt(served: Served) -> int:
    """A prompt that is cancelled, so that a wait for it ends at once."""
    [prompt_id] = served.post(f"/v1/runs/{RUN}/prompts", {"prompts": [PROMPT]})["prompt_ids"]
    served.post(f"/v1/runs/{RUN}/prompts:cancel", {"prompt_ids": [prompt_id]})
    return int(prompt_id)


def created_evaluation(served: Served) -> str:
    created = served.post(f"/v1/runs/{RUN}/evaluations", {"evaluation_id": fresh("e"), "prompts": [PROMPT]})
    return str(created["evaluation_id"])


def published(served: Served) -> int:
    """A version with a snapshot."""

    async def publish() -> int:
        version = await served.queue.allocate_version(0)
        policy = policies_pb2.Policy(policy_version=version, snapshot_path="s", state=policies_pb2.Policy.PUBLISHED)
        await served.queue.publish(version, 0, policy.SerializeToString())
        return version

    return int(served.wait(publish()))


def uploaded_dataset(served: Served) -> str:
    name = fresh("d")
    row = json.dumps({"prompt": "a", "data_source": name})
    headers = {"Content-Type": "application/x-ndjson"}
    assert served.rest.put(f"/v1/runs/{RUN}/datasets/{name}", content=row, headers=headers).status_code == 200
    return name


def submitted_task(served: Served) -> str:
    return str(served.post("/v1/tasks", {"tasks": [{"task_id": fresh("t"), "payload": 1}]})["task_ids"][0])


def leased_session(served: Served) -> str:
    task_id = submitted_task(served)
    leased = served.post("/v1/tasks:lease", {"worker": "w", "max_tasks": 1000})["tasks"]
    return str(next(task["session_id"] for task in leased if task["task_id"] == task_id))


def recorded_session(served: Served) -> str:
    session = fresh("s")
    served.post("/v1/chat/completions", CHAT, **{"X-Penstock-Session": session})
    return session


PARAMS: dict[str, Callable[[Served], Any]] = {
    "run": lambda _: RUN,
    "prompt_id": submitted_prompt,
    "policy_version": lambda served: str(published(served)),
    "pin": lambda _: "p",
    "server_id": lambda _: "r0",
    "evaluation_id": created_evaluation,
    "letter_id": lambda _: "1-1",
    "name": uploaded_dataset,
    "model": lambda _: RUN,
    "session_id": recorded_session,
    "task_id": submitted_task,
    "file": lambda _: "index.html",
}
"""Parameters of paths, by name."""


def seed_of(operation: Operation, served: Served) -> Seed:
    params = {name: PARAMS[name](served) for name in re.findall(r"\{(\w+)\}", operation.path)}
    if operation.name == "upload_dataset":
        params["name"] = fresh("d")
    query = dict(QUERIES.get(operation.name, {}))
    body = None
    if operation.has_body and (operation.takes or operation.read):
        body = BODIES[operation.name](served) if operation.name in BODIES else minimal_body(operation)
    return Seed(params, body, query)


def minimal_body(operation: Operation) -> Any:
    return {} if operation.takes is None else minimal(operation.takes)


def rest_places(operation: Operation, seed: Seed) -> list[Place]:
    """Every text, number and name that a request of the operation has: where it is, and its place there."""
    places: list[Place] = [("path", name) for name in seed.params]
    if operation.header is not None:
        places.append(("header", operation.header[0]))
    if operation.takes is not None and not operation.has_body:
        places += [("query", found.alias or name) for name, found in operation.takes.model_fields.items()]
    elif seed.body is not None:
        places += [("body", *place) for place in json_places(operation.takes, seed.body)]
    return places


def http_request(operation: Operation, seed: Seed, place: Place | None, fragment: str) -> tuple[str, dict[str, Any]]:
    """The path and the options of the request with a piece of JSON at this place."""
    where, *rest = place or ("",)
    params = {name: str(value).encode() for name, value in seed.params.items()}
    query = {name: str(value).encode() for name, value in seed.query.items()}
    headers: dict[str, Any] = {}
    if where == "path":
        params[str(rest[0])] = bytes_of(fragment)
    if where == "query":
        query[str(rest[0])] = bytes_of(fragment)
    if where == "header":
        headers[str(rest[0])] = bytes(byte for byte in bytes_of(fragment) if byte > 31 and byte != 127).strip() or b"k"
    path = re.sub(r"\{(\w+)\}", lambda found: quote_from_bytes(params[found[1]], safe=""), operation.path)
    path += "?" + "&".join(f"{name}={quote_from_bytes(value, safe='')}" for name, value in query.items())
    options: dict[str, Any] = {"headers": headers}
    if seed.body is not None:
        is_row = operation.takes is None
        headers["Content-Type"] = "application/x-ndjson" if is_row else "application/json"
        options["content"] = (
            with_fragment(seed.body, tuple(rest), fragment) if where == "body" else json.dumps(seed.body).encode()
        )
    return path, options


def bytes_of(fragment: str) -> bytes:
    """The bytes of a text in JSON, or of other JSON as it is written."""
    try:
        value = json.loads(fragment)
    except (ValueError, RecursionError):
        value = None
    return (value if isinstance(value, str) else fragment).encode("utf-8", "surrogatepass")


def send(served: Served, operation: Operation, seed: Seed, place: Place | None, fragment: str) -> tuple[int, Any]:
    """The status and the answer of a REST request. Anything but success or one line that explains it is a failure."""
    path, options = http_request(operation, seed, place, fragment)
    path = path[:MAX_URL]
    said = (operation.name, place, fragment[:200])
    try:
        with served.rest.stream(operation.verb, path, **options) as response:
            if operation.event is not None and response.status_code == 200:
                return 200, None
            content = response.read()
    except httpx.RemoteProtocolError as error:
        raise AssertionError(f"{said}: no answer: {error}") from error
    assert 200 <= response.status_code < 500, (*said, response.text)
    if response.status_code >= 400:
        problem = response.json()
        detail = problem.get("detail") or problem["error"]["message"]
        assert detail.strip() and "\n" not in detail and "\r" not in detail, (*said, detail)
        return response.status_code, problem
    if "json" not in response.headers.get("content-type", ""):
        return response.status_code, None
    answer = json.loads(content, parse_constant=_refuse)
    if not isinstance(operation.answer, str) and "stream" not in str(place):
        operation.answer.model_validate(answer)
    return response.status_code, answer


def assert_shown(sent: Any, shown: Any, unseen: tuple[str, ...] = (), place: str = "") -> None:
    """Everything that was sent comes back, except fields of `unseen`. What is shown may have more."""
    if isinstance(sent, dict) and isinstance(shown, dict):
        for name, value in sent.items():
            if name in unseen or (name not in shown and value in (None, "", [], {}, ())):
                continue
            assert name in shown, f"{place}.{name} is not shown"
            assert_shown(value, shown[name], unseen, f"{place}.{name}")
        return
    if isinstance(sent, list | tuple) and isinstance(shown, list):
        assert len(sent) == len(shown), place
        for number, (one, other) in enumerate(zip(sent, shown, strict=True)):
            assert_shown(one, other, unseen, f"{place}[{number}]")
        return
    assert same(sent, shown), f"{place}: {str(sent)[:200]!r} was sent, {str(shown)[:200]!r} is shown"


def same(sent: Any, shown: Any) -> bool:
    if sent == shown:
        return True
    if isinstance(shown, bool | int | float):  # of a number that was sent as text, and of a float32
        try:
            value = TypeAdapter(type(shown)).validate_python(sent)
        except ValidationError:
            return False
        return value == shown or (isinstance(shown, float) and float(np.float32(value)) == float(np.float32(shown)))
    return sent in (None, []) and shown in ("", [], {}, 0, False)


def check_submitted(served: Served, sent: Any, answer: Any, _: Seed) -> None:
    if answer["num_replayed"]:
        return
    for prompt_id, prompt in zip(answer["prompt_ids"], sent["prompts"], strict=True):
        assert_shown(prompt, served.show("get_prompt", prompt_id=prompt_id)["prompt"])
        served.submitted[prompt_id] = prompt


def check_evaluation(served: Served, sent: Any, answer: Any, _: Seed) -> None:
    assert served.show("get_evaluation", evaluation_id=sent["evaluation_id"]) == answer
    leased = [lease.payload for lease in served.lease()]
    [payload] = [one for one in leased if decode_prompt(one).evaluation_id == sent["evaluation_id"]]
    shown = to_json(prompts_pb2.Prompt.FromString(payload), SubmittedPrompt)
    assert_shown(sent["prompts"][0], shown, ("evaluation_id",))
    assert shown["evaluation_id"] == sent["evaluation_id"]


def check_tasks(served: Served, sent: Any, answer: Any, _: Seed) -> None:
    if answer["replayed"]:
        return
    for task_id, task in zip(answer["task_ids"], sent["tasks"], strict=True):
        assert_shown(task, served.show("get_task", task_id=task_id), ("task_id", "deadline_s", "num_sessions"))
        assert task_id == task.get("task_id") or not task.get("task_id")
    rpc = BY_NAME["lease_tasks"]
    if next(_NUMBERS) % 2:
        leased = served.post("/v1/tasks:lease", {"worker": "w", "max_tasks": 1024})["tasks"]
    else:
        code, details, data = served.call(rpc, rpc.request(worker="w", max_tasks=1024).SerializeToString())
        assert code == grpc.StatusCode.OK, details
        leased = _answer(rpc, data)["tasks"]
    payloads = {task["task_id"]: task["payload"] for task in leased}
    for task_id, task in zip(answer["task_ids"], sent["tasks"], strict=True):
        assert same(task.get("payload"), payloads[task_id])


def check_returned(served: Served, sent: Any, answer: Any, _: Seed) -> None:
    if answer["returned"]:
        task_id = sent["session_id"].rsplit(".", 2)[0]
        assert served.show("get_task", task_id=task_id)["failure"] == (sent.get("failure") or "")[:500]


def check_rewarded(served: Served, sent: Any, answer: Any, seed: Seed) -> None:
    session_id = sent.get("session_id") or seed.params["session_id"]
    shown = served.show("get_session", session_id=session_id)
    assert_shown(sent, shown, ("run",))
    listed = served.show("list_sessions", {"page_size": 1000})["sessions"]
    assert all(one["reward"] == shown["reward"] for one in listed if one["session_id"] == session_id)
    for prompt_id in answer["prompt_ids"]:
        group = served.show("get_group", prompt_id=prompt_id)
        assert same(sent["reward"], group["trajectories"][0]["reward"])


def check_uploaded(served: Served, sent: Any, answer: Any, seed: Seed) -> None:
    name = sent.get("name") or seed.params["name"]
    assert served.show("get_dataset", name=name) == answer
    served.post(f"/v1/runs/{RUN}/datasets/{name}:submit", {"num_samples": 1})
    if source := sent.get("data_source"):
        query = {"data_source": source} if len(source) < MAX_URL else {}
        *_, shown = [found for found in served.prompts(**query).values() if found["data_source"] == source]
        assert_shown(sent, shown, ("prompt", "reward_model", "name"))
        if isinstance(sent["prompt"], list):
            assert_shown(sent["prompt"], shown["messages"])
        else:
            assert shown["messages"][0]["content"] == sent["prompt"]
        assert same((sent.get("reward_model") or {}).get("ground_truth"), shown["ground_truth"])


def check_dataset(served: Served, sent: Any, answer: Any, seed: Seed) -> None:
    name = sent.get("name") or seed.params["name"]
    assert answer["num_submitted"] == 1
    [shown] = served.prompts(data_source=name).values()
    assert_shown(sent, shown, ("name",))


def check_pinned(served: Served, sent: Any, _: Any, seed: Seed) -> None:
    policy = served.show("get_policy", policy_version=int(sent["policy_version"]))
    assert (sent.get("pin") or seed.params["pin"]) in policy["pins"]


def check_metadata(_: Served, sent: Any, answer: Any, __: Seed) -> None:
    if not sent.get("stream"):
        assert (sent.get("metadata") or {}) == (answer["metadata"] or {})


SHOWN: dict[str, Callable[[Served, Any, Any, Seed], None]] = {
    "submit_prompts": check_submitted, "create_evaluation": check_evaluation, "submit_tasks": check_tasks,
    "return_task": check_returned, "reward_session": check_rewarded, "upload_dataset": check_uploaded,
    "submit_dataset": check_dataset, "pin_policy": check_pinned, "create_response": check_metadata,
}  # fmt: skip
"""Looks at what an operation has stored, by every door that shows it: what was sent, the answer, and the seed."""
NOTHING_SHOWN = {
    "cancel_prompts", "lease_tasks", "heartbeat_tasks", "generate", "complete_chat", "complete", "create_message",
    "count_tokens", "promote_policy", "rewind_policy", "release_policy", "unpin_policy", "retire_policy",
    "pause_run", "resume_run", "stop_run", "drain_server", "undrain_server", "requeue_dead_letter",
}  # fmt: skip
"""Operations that store no value of their request."""


def test_every_operation_that_writes_says_where_its_fields_are_shown() -> None:
    writing = {operation.name for operation in OPERATIONS if operation.scope in ("submit", "admin")}
    assert writing == SHOWN.keys() | NOTHING_SHOWN


@pytest.fixture
def settled(served: Served) -> Iterator[Served]:
    """The gateway, whose run is served again whatever an operator ordered."""
    yield served
    for path in ("resume", "policies:release", "servers/r0:undrain"):
        separator = ":" if path == "resume" else "/"
        assert served.rest.post(f"/v1/runs/{RUN}{separator}{path}").status_code == 200


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("operation", BY_REST, ids=lambda operation: operation.name)
def test_what_rest_accepts_it_shows(settled: Served, operation: Operation, num_examples: int) -> None:
    served, places = settled, rest_places(operation, seed_of(operation, settled))
    status, answer = send(served, operation, seed_of(operation, served), None, "")
    assert status == 200 or operation.name in ABSENT, answer

    def check(chosen: dict[Place, str]) -> None:
        for place, fragment in chosen.items():
            seed = seed_of(operation, served)
            status, answer = send(served, operation, seed, place, fragment)
            if status == 200 and operation.name in SHOWN:
                content = http_request(operation, seed, place, fragment)[1]["content"]
                SHOWN[operation.name](served, json.loads(content), answer, with_param(seed, place, fragment))

    try_examples(
        num_examples, st.fixed_dictionaries({place: json_fragments() for place in places}), check, shrinks=False
    )
    served.check_prompts()


def with_param(seed: Seed, place: Place, fragment: str) -> Seed:
    if place[0] == "path":
        seed.params[str(place[1])] = bytes_of(fragment).decode()
    return seed


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize("operation", BY_GRPC, ids=lambda operation: operation.name)
def test_what_grpc_accepts_it_shows(settled: Served, operation: Operation, num_examples: int) -> None:
    served, places = settled, dict(message_places(operation.request.DESCRIPTOR))
    code, details, _ = served.call(
        operation, message_of_seed(operation, seed_of(operation, served)).SerializeToString()
    )
    assert code == grpc.StatusCode.OK or operation.name in ABSENT, details

    def check(chosen: dict[Place, Any]) -> None:
        for place, value in chosen.items():
            seed = seed_of(operation, served)
            message = message_of_seed(operation, seed)
            code, details, data = served.call(operation, set_field(message, place, value))
            said = (operation.name, place, str(value)[:200], code, details)
            assert code not in FAULTS and "\n" not in details, said
            assert code == grpc.StatusCode.OK or details.strip(), said
            if code == grpc.StatusCode.OK and data and operation.path:
                answer = json.loads(json.dumps(_answer(operation, data), allow_nan=False))
                if operation.name in SHOWN and operation.name != "upload_dataset":
                    SHOWN[operation.name](served, sent_by(operation, message), answer, seed)

    try_examples(
        num_examples,
        st.fixed_dictionaries({place: field_values(kind) for place, kind in places.items()}),
        check,
        shrinks=False,
    )
    served.check_prompts()


def message_of_seed(operation: Operation, seed: Seed) -> Message:
    """The seed as the message of gRPC."""
    if seed.body is not None and operation.takes is not None:
        message: Any = request_of(operation.request, operation.takes.model_validate(seed.body))
    else:
        message = operation.request()
    for name, value in (seed.params | seed.query).items():
        kind = message.DESCRIPTOR.fields_by_name[name]
        setattr(message, name, value if kind.type == kind.TYPE_STRING else type(getattr(message, name))(value))
    if operation.name == "upload_dataset":
        message.format, message.content = "jsonl", json.dumps(seed.body).encode()
    elif operation.name == "generate":
        message.messages.add(role="user", content="2+2?")
        message.sampling.temperature, message.sampling.top_p, message.sampling.max_tokens = 1, 1, 8
    return message


def sent_by(operation: Operation, message: Message) -> Any:
    """A request of gRPC in the form of REST."""
    assert operation.takes is not None
    named = {name: getattr(message, name) for name in re.findall(r"\{(\w+)\}", operation.path) if name != "run"}
    return to_json(message, operation.takes) | named


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    import schemathesis  # every process of a test run collects this file, and only one runs it

    headers = {"Authorization": f"Bearer {served.gateway.key}"}
    url = f"{served.gateway.url}/v1/openapi.json"
    api = schemathesis.openapi.from_url(url, headers=headers, timeout=TIMEOUT_S).exclude(path_regex=ENDLESS)
    api.config.update(headers=headers)
    return api


def call_documented(case: Any) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance

    if "run" in (case.path_parameters or {}):
        case.path_parameters["run"] = RUN
    case.call_and_validate(checks=[not_a_server_error, response_schema_conformance], timeout=TIMEOUT_S)


def send_some(cases: Any, bounds: settings) -> None:
    @bounds
    @given(case=cases)
    def send_one(case: Any) -> None:
        call_documented(case)

    with contextlib.suppress(Unsatisfiable):  # of an operation that takes any text there is nothing wrong to send
        send_one()


def send_documented(api: Any, mode: str, max_examples: int) -> int:
    """Send examples of every operation, `positive` or `negative`. Returns the number of operations."""
    from schemathesis import GenerationMode

    bounds = settings(
        max_examples=max_examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    operations = [found.ok() for found in api.get_all_operations()]
    for operation in operations:
        if mode == "positive" or operation.body or operation.query or operation.path_parameters:
            send_some(operation.as_strategy(generation_mode=GenerationMode(mode)), bounds)
    return len(operations)


def test_no_documented_request_is_a_server_error(api: Any) -> None:
    assert send_documented(api, "positive", max_examples=1) > 35


@pytest.mark.long
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_of_a_long_fuzz_is_a_server_error(api: Any, mode: str) -> None:
    assert send_documented(api, mode, max_examples=60) > 35


def test_the_document_names_every_operation(api: Any) -> None:
    names = {operation["operationId"] for methods in api.raw_schema["paths"].values() for operation in methods.values()}
    assert {"submit_prompts", "watch_results", "rewind_policy", "complete_chat", "reward_session"} <= names
