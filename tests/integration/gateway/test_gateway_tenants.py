"""A hostile key next to an innocent one: what a key has made, no other key reads, changes, ends or stands in for.

Alice is innocent. Bob has a key of the scope submit and knows every name and number of Alice's. Ann and Ben share a
team, and an operator has the scope admin.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis.asyncio as redis
from pydantic_core import from_json

from penstock.api import records
from penstock.api.conversion import request_of
from penstock.api_keys import make_key
from penstock.codec import encode_group
from penstock.config.run import WeightsConfig
from penstock.config.service import SessionLimits
from penstock.replay.queue import RedisReplayQueue
from penstock.samples import Sample, SampleFile, line_of
from penstock.sessions.task_store import TaskStore
from penstock.store.keys import RunKeys
from penstock.store.notices import Event, Notices
from penstock.v1 import (
    datasets_pb2,
    datasets_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    groups_pb2,
    groups_pb2_grpc,
    policies_pb2,
    policies_pb2_grpc,
    prompts_pb2,
    prompts_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
)
from penstock_services.gateway.run import OPERATIONS
from support.gateways import PROMPT, RUN, Gateway, group_of, run_config, running
from support.scripted_engines import TalkingEngine, make_tokenizer_folder, serving

NAMES = {"alice": "alice", "bob": "bob", "ann": "ann@vision", "ben": "ben@vision", "operator": "operator"}
SERVICES = {
    "PromptService": prompts_pb2_grpc, "TaskService": tasks_pb2_grpc, "SessionService": sessions_pb2_grpc,
    "DatasetService": datasets_pb2_grpc, "RunService": runs_pb2_grpc, "GroupService": groups_pb2_grpc,
    "GenerateService": generate_pb2_grpc, "PolicyService": policies_pb2_grpc,
}  # fmt: skip


@dataclass
class Tenant:
    gateway: Gateway
    secret: str

    async def send(
        self, method: str, path: str, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        wanted = {"Authorization": f"Bearer {self.secret}"} | (headers or {})
        return await self.gateway.rest.request(method, path, headers=wanted, **options)

    async def rest(self, method: str, path: str, **options: Any) -> Any:
        answer = await self.send(method, path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def status(self, method: str, path: str, **options: Any) -> int:
        return (await self.send(method, path, **options)).status_code

    def call(self, service: str, method: str, request: Any) -> Any:
        stub = getattr(SERVICES[service], f"{service}Stub")(self.gateway.channel)
        return getattr(stub, method)(request, metadata=(("authorization", f"Bearer {self.secret}"),))

    async def code(self, service: str, method: str, request: Any) -> str:
        """The code of a call that fails; OK if it does not."""
        try:
            answer = self.call(service, method, request)
            if hasattr(answer, "__aiter__"):
                return "OK" if [chunk async for chunk in answer] else "EMPTY"
            await answer
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def talk(self, session_id: str) -> int:
        body = {"model": "test", "messages": [{"role": "user", "content": "abc"}]}
        return await self.status("POST", "/v1/chat/completions", json=body, headers={"X-Penstock-Session": session_id})


@dataclass
class Tenants:
    alice: Tenant
    bob: Tenant
    ann: Tenant
    ben: Tenant
    operator: Tenant


@pytest.fixture
async def tenants(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> AsyncIterator[Tenants]:
    make_tokenizer_folder(tmp_path)
    (tmp_path / "cluster-key").write_text("secret")
    made = {who: make_key(name, "admin" if who == "operator" else "submit") for who, name in NAMES.items()}
    (tmp_path / "keys").write_text("\n".join(key.line for _, key in made.values()))
    config = run_config(
        redis_process.url, tmp_path, keys_file=tmp_path / "keys", sessions=SessionLimits(task_lease_s=600)
    ).model_copy(update={"weights": WeightsConfig(cluster_key_file=tmp_path / "cluster-key")})
    engines = {"r0": TalkingEngine()}
    async with serving(config, redis_client, tmp_path, engines, heartbeats=True), running(config) as gateway:
        yield Tenants(**{who: Tenant(gateway, secret) for who, (secret, _) in made.items()})


def message(**changes: Any) -> prompts_pb2.Prompt:
    return request_of(prompts_pb2.Prompt, records.SubmittedPrompt.model_validate(PROMPT | changes))


# ── idempotency keys ──


@pytest.mark.parametrize("keys", [{"idempotency_key": "k"}, {"prompt_keys": ["k"]}], ids=["request", "each prompt"])
async def test_a_key_of_prompts_stands_for_one_body_of_one_tenant(tenants: Tenants, keys: dict[str, Any]) -> None:
    async def by_rest(tenant: Tenant, prompt: dict[str, Any]) -> httpx.Response:
        return await tenant.send("POST", f"{RUN}/prompts", json={"prompts": [prompt], **keys})

    async def by_grpc(tenant: Tenant, prompt: prompts_pb2.Prompt) -> list[int]:
        request = prompts_pb2.SubmitPromptsRequest(prompts=[prompt], **keys)
        return list((await tenant.call("PromptService", "SubmitPrompts", request)).prompt_ids)

    other = PROMPT | {"messages": [{"role": "user", "content": "another question"}]}
    [of_alice] = (await by_rest(tenants.alice, PROMPT)).json()["prompt_ids"]
    answer = (await by_rest(tenants.bob, other)).json()
    assert answer["replayed"] is False and answer["prompt_ids"] != [of_alice]
    [of_bob] = answer["prompt_ids"]
    stored = await tenants.operator.rest("GET", f"{RUN}/prompts/{of_bob}")
    assert stored["prompt"]["messages"] == other["messages"], "the stranger's own prompt is stored"
    assert await by_grpc(tenants.alice, message()) == [of_alice], "both protocols mean the same body"
    refused = await by_rest(tenants.alice, other)
    assert (refused.status_code, refused.json()["reason"]) == (409, "CONFLICT")
    request = prompts_pb2.SubmitPromptsRequest(prompts=[message(num_samples=3)], **keys)
    for method, sent in (("SubmitPrompts", request), ("StreamPrompts", iter([request]))):
        assert await tenants.alice.code("PromptService", method, sent) == "FAILED_PRECONDITION"
    assert await by_grpc(tenants.ann, message()) == await by_grpc(tenants.ben, message()), "one team has one key"
    traced = message()
    traced.trace_parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert await by_grpc(tenants.alice, traced) == [of_alice], "another try of the same request has another trace"


async def test_a_key_of_tasks_stands_for_one_body_of_one_tenant(tenants: Tenants) -> None:
    def body(payload: str) -> dict[str, Any]:
        return {"json": {"tasks": [{"payload": payload}], "idempotency_key": "k"}}

    request = tasks_pb2.SubmitTasksRequest(tasks=[tasks_pb2.NewTask(payload_json='"b"')], idempotency_key="k")
    first = await tenants.alice.rest("POST", "/v1/tasks", **body("a"))
    assert (await tenants.alice.rest("POST", "/v1/tasks", **body("a"))) == first | {"replayed": True}
    answer = await tenants.bob.call("TaskService", "SubmitTasks", request)
    assert not answer.replayed and list(answer.task_ids) != first["task_ids"]
    [task_id] = answer.task_ids
    assert (await tenants.operator.rest("GET", f"/v1/tasks/{task_id}"))["payload"] == "b"
    assert await tenants.alice.status("POST", "/v1/tasks", **body("b")) == 409
    assert await tenants.alice.code("TaskService", "SubmitTasks", request) == "FAILED_PRECONDITION"


# ── names ──

NAME_FIELDS = {"name", "evaluation_id", "session_id", "session_ids", "task_id", "worker", "pin"}
"""Fields of requests that name what Redis stores under that name."""
OTHER_TEXTS = {
    "run", "server_id", "letter_id", "format", "kind", "page_token", "cursor", "idempotency_key", "prompt_keys",
    "failure", "names", "text", "stop", "tools_json", "tool_name", "template_arguments_json", "json_schema",
    "data_source",
}  # fmt: skip
"""Compared with what there is, last parts of keys, or values. The data source of a task is checked all the same."""
BAD_NAMES = ["a:b", "x:fingerprint", "a b", "", "-a", "a" * 129, "a/b", "é", "a{b}", "a\n"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
async def test_every_name_that_becomes_part_of_a_key_is_checked_by_the_same_rule(tenants: Tenants, name: str) -> None:
    """Each field of a request that names something which Redis stores under that name."""
    bob, prompt = tenants.bob, message()
    text = "must be 1 to 128 letters, digits or . _ @ -, start with a letter or digit, and not end with @"
    asked: list[tuple[Tenant, str, str, Any]] = [
        (bob, "DatasetService", "UploadDataset", datasets_pb2.UploadDatasetRequest(name=name, format="jsonl")),
        (bob, "DatasetService", "GetDataset", datasets_pb2.GetDatasetRequest(name=name)),
        (bob, "DatasetService", "SubmitDataset", datasets_pb2.SubmitDatasetRequest(name=name)),
        (bob, "RunService", "CreateEvaluation", runs_pb2.CreateEvaluationRequest(evaluation_id=name, prompts=[prompt])),
        (bob, "RunService", "GetEvaluation", runs_pb2.GetEvaluationRequest(evaluation_id=name)),
        (bob, "SessionService", "RewardSession", sessions_pb2.RewardSessionRequest(session_id=name, reward=1)),
        (bob, "SessionService", "GetSession", sessions_pb2.GetSessionRequest(session_id=name)),
        (bob, "TaskService", "GetTask", tasks_pb2.GetTaskRequest(task_id=name)),
        (bob, "TaskService", "LeaseTasks", tasks_pb2.LeaseTasksRequest(worker=name)),
        (bob, "TaskService", "HeartbeatTasks", tasks_pb2.HeartbeatTasksRequest(session_ids=[name])),
        (bob, "TaskService", "ReturnTask", tasks_pb2.ReturnTaskRequest(session_id=name)),
        (tenants.operator, "PolicyService", "PinPolicy", policies_pb2.PinPolicyRequest(pin=name)),
        (tenants.operator, "PolicyService", "UnpinPolicy", policies_pb2.UnpinPolicyRequest(pin=name)),
    ]
    if name:  # An empty one means none.
        task = tasks_pb2.NewTask(task_id=name, data_source="d")
        source = tasks_pb2.NewTask(task_id="t", data_source=name)
        rewarded = sessions_pb2.RewardSessionRequest(session_id="s", reward=1, task_id=name)
        generated = generate_pb2.GenerateRequest(session_id=name, text="a", sampling=prompt.sampling)
        asked += [
            (bob, "TaskService", "SubmitTasks", tasks_pb2.SubmitTasksRequest(tasks=[task])),
            (bob, "TaskService", "SubmitTasks", tasks_pb2.SubmitTasksRequest(tasks=[source])),
            (bob, "SessionService", "RewardSession", rewarded),
            (bob, "GenerateService", "Generate", generated),
        ]
        if name.isascii() and name.isprintable():
            assert await bob.talk(name) == 400
    tried = {(service, method) for _, service, method, _ in asked}
    assert not name or tried == {(service, method) for service, method, fields in texts() if fields & NAME_FIELDS}
    for tenant, service, method, request in asked:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            answer = tenant.call(service, method, request)
            await (anext(aiter(answer)) if hasattr(answer, "__aiter__") else answer)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, method
        assert text in (caught.value.details() or ""), method


def texts() -> Iterator[tuple[str, str, set[str]]]:
    """Service and method of each operation, and the texts in its request and in the tasks that it submits."""
    for operation in OPERATIONS:
        for rpc in operation.rpcs:
            inner = [field.message_type for field in rpc.input_type.fields if field.name == "tasks"]
            fields = [field for kind in (rpc.input_type, *inner) for field in kind.fields]
            found = {field.name for field in fields if field.type == field.TYPE_STRING}
            yield rpc.containing_service.name, rpc.name, found


def test_every_text_of_a_request_is_known_as_a_name_or_as_no_name() -> None:
    assert set().union(*(fields for _, _, fields in texts())) == NAME_FIELDS | OTHER_TEXTS | {"payload_json"}


def test_every_operation_on_what_a_key_has_made_knows_who_calls() -> None:
    resources = NAME_FIELDS - {"pin"} | {"prompt_id", "prompt_ids", "tasks", "prompts"}
    for operation in OPERATIONS:
        for rpc in operation.rpcs:
            named = resources & {field.name for field in rpc.input_type.fields}
            assert operation.takes_caller or not named, rpc.name


async def test_a_dataset_cannot_take_the_place_of_what_is_stored_of_another(tenants: Tenants) -> None:
    lines, headers = b'{"prompt": "a"}\n', {"Content-Type": "application/x-ndjson"}

    async def upload(tenant: Tenant, name: str) -> int:
        return await tenant.status("PUT", f"{RUN}/datasets/{name}", content=lines, headers=headers)

    for suffix in ("fingerprint", "prompts", "owner"):
        assert await upload(tenants.bob, f"x:{suffix}") == 400
    assert await upload(tenants.alice, "x") == 200
    assert (await tenants.alice.rest("POST", f"{RUN}/datasets/x:submit", json={}))["num_submitted"] == 1


def test_the_names_of_keys_and_servers_are_checked_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.api_keys import parse_keys
    from penstock.errors import ConfigError, InvalidInput
    from penstock_rollout.__main__ import main

    for name in ("a:b", "a@"):
        with pytest.raises(InvalidInput, match="must be 1 to 128 letters"):
            make_key(name, "read")
    assert make_key("x@alice", "read")[1].owner != make_key("alice", "read")[1].owner
    with pytest.raises(ConfigError, match="keys:1 is not `NAME SCOPE sha256:HEX`"):
        parse_keys(make_key("ab", "read")[1].line.replace("ab ", "a:b ", 1), tmp_path / "keys")
    assert main(["--config", str(tmp_path / "none.yaml"), "--server-id", "a:b"]) == 1
    assert "--server-id: must be 1 to 128 letters" in capsys.readouterr().err


# ── sessions and tasks ──


async def test_a_stranger_neither_reads_nor_continues_nor_rewards_a_session(tenants: Tenants) -> None:
    alice, bob = tenants.alice, tenants.bob
    assert await alice.talk("s") == 200
    reward = {"json": {"reward": -100.0}}
    rewarded = sessions_pb2.RewardSessionRequest(session_id="s", reward=-100)
    asked = generate_pb2.GenerateRequest(session_id="s", text="a", sampling=message().sampling)
    assert await bob.talk("s") == 404
    assert await bob.code("GenerateService", "Generate", asked) == "NOT_FOUND"
    assert await bob.status("POST", "/v1/sessions/s/reward", **reward) == 404
    assert await bob.code("SessionService", "RewardSession", rewarded) == "NOT_FOUND"
    assert await bob.status("GET", "/v1/sessions/s") == 404
    read = sessions_pb2.GetSessionRequest(session_id="s")
    assert await bob.code("SessionService", "GetSession", read) == "NOT_FOUND"
    assert (await bob.rest("GET", "/v1/sessions"))["sessions"] == []
    for tenant in (alice, tenants.operator):
        session = await tenant.rest("GET", "/v1/sessions/s")
        assert (session["state"], session["num_calls"]) == ("OPEN", 1), "nothing of the stranger's was recorded"
        assert [found["session_id"] for found in (await tenant.rest("GET", "/v1/sessions"))["sessions"]] == ["s"]
    assert (await alice.rest("POST", "/v1/sessions/s/reward", json={"reward": 1.0}))["prompt_ids"] == [1]
    assert await bob.status("POST", "/v1/sessions/s/reward", **reward) == 404, "nor after its end"
    assert await bob.status("GET", "/v1/sessions/s") == 404
    assert await tenants.ann.talk("t") == await tenants.ben.talk("t") == 200, "keys of one team share their sessions"
    assert (await tenants.operator.rest("POST", "/v1/sessions/t/reward", json={"reward": 1.0}))["prompt_ids"] == [2]


async def test_two_keys_that_begin_a_session_at_once_do_not_share_it(tenants: Tenants) -> None:
    """Both have opened it before either has recorded a call. The second call is not recorded."""
    answers = await asyncio.gather(*(tenant.talk("s") for tenant in (tenants.alice, tenants.bob)))
    assert sorted(answers) == [200, 404]
    winner = tenants.alice if answers[0] == 200 else tenants.bob
    assert (await winner.rest("GET", "/v1/sessions/s"))["num_calls"] == 1


async def test_a_stranger_neither_takes_nor_finishes_nor_returns_a_task(tenants: Tenants) -> None:
    alice, bob = tenants.alice, tenants.bob
    task = {"task_id": "victim", "payload": "secret", "num_sessions": 1}
    await alice.rest("POST", "/v1/tasks", json={"tasks": [task]})
    assert await bob.status("GET", "/v1/tasks/victim") == 404
    assert await bob.code("TaskService", "GetTask", tasks_pb2.GetTaskRequest(task_id="victim")) == "NOT_FOUND"
    assert await bob.status("POST", "/v1/tasks", json={"tasks": [task | {"payload": "mine"}]}) == 409
    mine = tasks_pb2.SubmitTasksRequest(tasks=[tasks_pb2.NewTask(task_id="victim")])
    assert await bob.code("TaskService", "SubmitTasks", mine) == "FAILED_PRECONDITION"
    assert (await bob.rest("POST", "/v1/tasks:lease", json={"worker": "w", "max_tasks": 9}))["tasks"] == []
    assert not (await bob.call("TaskService", "LeaseTasks", tasks_pb2.LeaseTasksRequest(worker="w"))).tasks

    for name in ("victim.0.1", "victim.0.7"):
        assert await bob.talk(name) == 200, "a session of his own, whatever its name"
    reward = {"reward": -100.0, "task_id": "victim"}
    assert await bob.status("POST", "/v1/sessions/victim.0.1/reward", json=reward) == 404
    rewarded = sessions_pb2.RewardSessionRequest(session_id="victim.0.1", reward=-100, task_id="victim")
    assert await bob.code("SessionService", "RewardSession", rewarded) == "NOT_FOUND"
    ended = await bob.rest("POST", "/v1/sessions/victim.0.7/reward", json={"reward": -100.0})
    assert len(ended["prompt_ids"]) == 1, "it is its own group"

    [leased] = (await alice.rest("POST", "/v1/tasks:lease", json={"worker": "w"}))["tasks"]
    session = leased["session_id"]
    assert session == "victim.0.2", "a name that the stranger has taken is skipped"
    assert (await bob.rest("POST", "/v1/sessions/victim.0.1/reward", json={"reward": -100.0}))["is_waiting"] is False
    assert await bob.talk(session) == 404, "it belongs to the task's owner before its first call"
    lost = await bob.rest("POST", "/v1/tasks:heartbeat", json={"session_ids": [session]})
    assert lost["lost_session_ids"] == [session]
    assert (await bob.rest("POST", "/v1/tasks:return", json={"session_id": session, "failure": "no"}))[
        "returned"
    ] is False
    assert not (await bob.call("TaskService", "ReturnTask", tasks_pb2.ReturnTaskRequest(session_id=session))).returned
    assert (await alice.rest("POST", "/v1/tasks:heartbeat", json={"session_ids": [session]}))["lost_session_ids"] == []
    assert await alice.talk(session) == 200
    assert await bob.status("POST", f"/v1/sessions/{session}/reward", json={"reward": -100.0}) == 404
    state = await alice.rest("GET", "/v1/tasks/victim")
    assert (state["state"], state["num_rewarded"]) == ("OPEN", 0)
    done = await alice.rest("POST", f"/v1/sessions/{session}/reward", json={"reward": 1.0})
    assert len(done["prompt_ids"]) == 1
    assert (await alice.rest("GET", "/v1/tasks/victim"))["session_ids"] == [session]


async def test_a_session_that_was_never_leased_does_not_finish_its_own_team_s_task(tenants: Tenants) -> None:
    await tenants.ann.rest("POST", "/v1/tasks", json={"tasks": [{"task_id": "t", "payload": 1}]})
    await tenants.ann.rest("POST", "/v1/tasks:lease", json={"worker": "w"})
    assert await tenants.ben.talk("t.0.7") == 200
    await tenants.ben.rest("POST", "/v1/sessions/t.0.7/reward", json={"reward": -100.0})
    assert (await tenants.ann.rest("GET", "/v1/tasks/t"))["num_rewarded"] == 0


async def test_a_task_ends_no_session_that_someone_else_began_under_such_a_name(tenants: Tenants) -> None:
    assert await tenants.bob.talk("job.0.1") == 200
    await tenants.alice.rest("POST", "/v1/tasks", json={"tasks": [{"task_id": "job", "payload": 1}]})
    leased = (await tenants.alice.rest("POST", "/v1/tasks:lease", json={"worker": "w"}))["tasks"]
    assert [task["session_id"] for task in leased] == ["job.0.2"]
    assert await tenants.alice.talk("job.0.2") == 200
    await tenants.alice.rest("POST", "/v1/sessions/job.0.2/reward", json={"reward": 1.0})
    assert (await tenants.alice.rest("GET", "/v1/tasks/job"))["state"] == "FINISHED"
    assert await tenants.bob.talk("job.0.1") == 200
    assert (await tenants.bob.rest("GET", "/v1/sessions/job.0.1"))["num_calls"] == 2


async def test_the_backlog_of_one_key_hides_no_task_of_another(tenants: Tenants) -> None:
    many = [{"payload": number, "num_sessions": 600} for number in range(2)]
    await tenants.bob.rest("POST", "/v1/tasks", json={"tasks": many})
    await tenants.alice.rest("POST", "/v1/tasks", json={"tasks": [{"task_id": "a", "payload": 1}, {"task_id": "b"}]})
    lease = {"json": {"worker": "w", "max_tasks": 9}}
    assert [task["task_id"] for task in (await tenants.alice.rest("POST", "/v1/tasks:lease", **lease))["tasks"]] == [
        "a", "b"
    ]  # fmt: skip
    payloads = [task["payload"] for task in (await tenants.operator.rest("POST", "/v1/tasks:lease", **lease))["tasks"]]
    assert payloads == [0] * 9, "an operator's worker works for all"


async def test_a_task_without_an_owner_is_everyones(tenants: Tenants, redis_client: redis.Redis) -> None:
    """Each of its sessions belongs to the key that has leased it."""
    tasks = TaskStore(redis_client, "test", 60, SessionLimits())
    await tasks.submit([tasks_pb2.NewTask(task_id="open", payload_json="1", num_sessions=1)])
    [lease] = (await tenants.bob.rest("POST", "/v1/tasks:lease", json={"worker": "w"}))["tasks"]
    assert lease["session_id"] == "open.0.1"
    assert await tenants.alice.status("GET", "/v1/tasks/open") == 200
    assert await tenants.alice.talk("open.0.1") == 404
    assert await tenants.bob.talk("open.0.1") == await tenants.bob.talk("open.0.2") == 200
    await tenants.bob.rest("POST", "/v1/sessions/open.0.2/reward", json={"reward": 1.0})
    assert (await tenants.bob.rest("GET", "/v1/tasks/open"))["num_rewarded"] == 0, "it was never leased"
    await tenants.bob.rest("POST", "/v1/sessions/open.0.1/reward", json={"reward": 1.0})
    assert (await tenants.bob.rest("GET", "/v1/tasks/open"))["num_rewarded"] == 1


# ── prompts, groups, samples, datasets, evaluations ──


async def test_a_stranger_neither_reads_nor_cancels_a_prompt(tenants: Tenants, queue: RedisReplayQueue) -> None:
    alice, bob = tenants.alice, tenants.bob
    claimed = message()
    claimed.owner = "bob"
    request = prompts_pb2.SubmitPromptsRequest(prompts=[claimed])
    assert (await alice.call("PromptService", "SubmitPrompts", request)).prompt_ids == [1]
    assert (await tenants.ann.rest("POST", f"{RUN}/prompts", json={"prompts": [PROMPT]}))["prompt_ids"] == [2]
    for path in ("prompts/1", "prompts/1:wait?timeout_s=0", "groups/1"):
        assert await bob.status("GET", f"{RUN}/{path}") == 404, path
    for service, method, request in (
        ("PromptService", "GetPrompt", prompts_pb2.GetPromptRequest(prompt_id=1)),
        ("PromptService", "WaitPrompt", prompts_pb2.WaitPromptRequest(prompt_id=1)),
        ("GroupService", "GetGroup", groups_pb2.GetGroupRequest(prompt_id=1)),
    ):
        assert await bob.code(service, method, request) == "NOT_FOUND", method
    assert (await bob.rest("GET", f"{RUN}/prompts"))["prompts"] == []
    cancelled = await bob.rest("POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [2, 1, 9]})
    assert [record["state"] for record in cancelled["prompts"]] == ["STATE_UNSPECIFIED"] * 3, "as of unknown prompts"
    record = await tenants.ben.call("PromptService", "GetPrompt", prompts_pb2.GetPromptRequest(prompt_id=2))
    assert record.prompt.owner == "@vision"

    for lease in await queue.lease("s", 2):
        await queue.append(lease, encode_group(group_of(lease.prompt_id, lease.attempt)), 3)
    assert await bob.status("GET", f"{RUN}/groups/1") == 404
    assert (await bob.rest("GET", f"{RUN}/groups"))["groups"] == []
    for tenant, ids in ((alice, [1]), (tenants.ben, [2]), (tenants.operator, [1, 2])):
        assert [group["prompt_id"] for group in (await tenant.rest("GET", f"{RUN}/groups"))["groups"]] == ids
        assert (await tenant.rest("GET", f"{RUN}/groups/{ids[0]}"))["trajectories"]
        watched = prompts_pb2.WatchResultsRequest(cursor="0", with_groups=True)
        stream = tenant.call("PromptService", "WatchResults", watched)
        results = [await anext(aiter(stream)) for _ in range(2)]
        assert [result.prompt_id for result in results if result.group] == ids, (
            "others see that it finished, and no more"
        )
        stream.cancel()
    await alice.rest("POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [1]})
    assert (await alice.rest("GET", f"{RUN}/prompts/1"))["state"] == "CANCELLED"


async def test_a_stranger_does_not_cancel_what_is_submitted_meanwhile(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids follow each other, so the next ones are known. Whose they are is not, until they are submitted."""
    read = RedisReplayQueue.prompts

    async def prompts(queue: RedisReplayQueue, prompt_ids: Sequence[int]) -> list[bytes]:
        found = await read(queue, prompt_ids)
        monkeypatch.undo()
        await tenants.alice.rest("POST", f"{RUN}/prompts", json={"prompts": [PROMPT] * 2})
        return found

    monkeypatch.setattr(RedisReplayQueue, "prompts", prompts)
    answer = await tenants.bob.rest("POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [1, 2]})
    assert [record["state"] for record in answer["prompts"]] == ["STATE_UNSPECIFIED"] * 2
    assert (await tenants.alice.rest("GET", f"{RUN}/prompts/1"))["state"] == "PENDING"
    for tenant, state in ((tenants.bob, "STATE_UNSPECIFIED"), (tenants.alice, "CANCELLED"), (tenants.bob, "CANCELLED")):
        answer = await tenant.rest("POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [1]})
        assert [record["state"] for record in answer["prompts"]] == [state]


async def test_the_groups_of_a_session_belong_to_its_owner(tenants: Tenants) -> None:
    assert await tenants.alice.talk("s") == 200
    [prompt_id] = (await tenants.operator.rest("POST", "/v1/sessions/s/reward", json={"reward": 1.0}))["prompt_ids"]
    assert await tenants.bob.status("GET", f"{RUN}/groups/{prompt_id}") == 404
    assert (await tenants.alice.rest("GET", f"{RUN}/groups/{prompt_id}"))["trajectories"]


@pytest.mark.parametrize("validation", ["", "math"])
async def test_a_stranger_does_not_read_trained_or_validated_samples(tenants: Tenants, validation: str) -> None:
    folder = tenants.alice.gateway.config.folder
    file = SampleFile(folder / "validation" if validation else folder, 0)
    file.begin(0)
    for number, owner in enumerate(("alice", "@vision", "")):
        sample = Sample(
            1, 1, number, 0, "d", "p", None, f"of {owner}", 1.0, {}, 1, 0, 0, "stop", False, "s", "", 1, 0, owner=owner,
            validation=validation,
        )  # fmt: skip
        file.write([line_of([sample])])
    for tenant, seen in (
        (tenants.bob, {""}), (tenants.alice, {"", "alice"}), (tenants.ben, {"", "@vision"}),
        (tenants.operator, {"", "alice", "@vision"}),
    ):  # fmt: skip
        for order in ("", "WORST"):
            wanted = {"validation": bool(validation)} | ({"order": order} if order else {})
            found = (await tenant.rest("GET", f"{RUN}/samples", params=wanted))["samples"]
            assert {sample["owner"] for sample in found} == seen


async def test_a_stranger_neither_reads_nor_submits_nor_takes_a_dataset(tenants: Tenants) -> None:
    alice, bob = tenants.alice, tenants.bob
    lines, headers = b'{"prompt": "a"}\n', {"Content-Type": "application/x-ndjson"}
    upload = {"method": "PUT", "path": f"{RUN}/datasets/x", "content": lines, "headers": headers}
    assert await alice.status(**upload) == 200
    assert await bob.status("GET", f"{RUN}/datasets/x") == 404
    assert await bob.status("POST", f"{RUN}/datasets/x:submit", json={}) == 404
    assert await bob.status(**upload) == 409, "even with the same content, which he may only guess"
    request = datasets_pb2.SubmitDatasetRequest(name="x", num_samples=1, sampling=message().sampling)
    assert await bob.code("DatasetService", "SubmitDataset", request) == "NOT_FOUND"
    assert await bob.code("DatasetService", "GetDataset", datasets_pb2.GetDatasetRequest(name="x")) == "NOT_FOUND"
    assert (await alice.rest("GET", f"{RUN}/datasets/x"))["num_submitted"] == 0
    assert (await tenants.operator.rest("POST", f"{RUN}/datasets/x:submit", json={}))["num_submitted"] == 1
    assert await bob.status("GET", f"{RUN}/prompts/1") == 404
    assert (await alice.rest("GET", f"{RUN}/prompts/1"))["state"] == "PENDING", "it is hers, whoever submitted it"
    (alice.gateway.config.folder / "datasets" / "by-hand.jsonl").write_bytes(lines)
    assert (await bob.rest("GET", f"{RUN}/datasets/by-hand"))["num_prompts"] == 1, "it has no owner"
    table = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["b"]}), table)  # type: ignore[no-untyped-call]
    for content, kind in ((lines, "application/x-ndjson"), (table.getvalue(), "application/vnd.apache.parquet")):
        body = {"content": content, "headers": {"Content-Type": kind}}
        assert await bob.status("PUT", f"{RUN}/datasets/by-hand", **body) == (200 if content == lines else 409)
        assert (await alice.rest("GET", f"{RUN}/datasets/by-hand"))["num_prompts"] == 1, "an upload does not take it"


async def test_a_dataset_has_its_owner_before_it_can_be_found(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    loop, named = asyncio.get_running_loop(), os.link

    def link(partial: Path, path: Path) -> None:
        named(partial, path)
        submission = tenants.bob.status("POST", f"{RUN}/datasets/x:submit", json={})
        seen.append(asyncio.run_coroutine_threadsafe(submission, loop).result(100))

    monkeypatch.setattr(os, "link", link)
    upload = {"content": b'{"prompt": "1+1"}\n', "headers": {"Content-Type": "application/x-ndjson"}}
    await tenants.alice.rest("PUT", f"{RUN}/datasets/x", **upload)
    assert seen == [404]
    assert (await tenants.alice.rest("GET", f"{RUN}/datasets/x"))["num_submitted"] == 0


async def test_a_stranger_neither_reads_nor_takes_an_evaluation(tenants: Tenants) -> None:
    body = {"json": {"evaluation_id": "e", "prompts": [PROMPT]}}
    assert await tenants.alice.status("POST", f"{RUN}/evaluations", **body) == 200
    assert await tenants.bob.status("POST", f"{RUN}/evaluations", **body) == 409
    assert await tenants.bob.status("GET", f"{RUN}/evaluations/e") == 404
    read = runs_pb2.GetEvaluationRequest(evaluation_id="e")
    assert await tenants.bob.code("RunService", "GetEvaluation", read) == "NOT_FOUND"
    for tenant in (tenants.alice, tenants.operator):
        assert (await tenant.rest("GET", f"{RUN}/evaluations/e"))["num_prompts"] == 1
    own = {"json": {"evaluation_id": "validation-train-7", "prompts": [PROMPT]}}
    refused = await tenants.bob.send("POST", f"{RUN}/evaluations", **own)
    assert (refused.status_code, refused.json()["field"]) == (400, "evaluation_id"), "it would stand for the run's own"


async def test_operators_may_repeat_each_others_evaluations(tenants: Tenants, queue: RedisReplayQueue) -> None:
    await queue.create_evaluation("of-the-run", [b"q"])
    for tenant, name in (("alice", "e"), ("operator", "e"), ("operator", "of-the-run")):
        body = {"json": {"evaluation_id": name, "prompts": [PROMPT]}}
        assert (await getattr(tenants, tenant).rest("POST", f"{RUN}/evaluations", **body))["num_prompts"] == 1
    other = {"json": {"evaluation_id": "e", "prompts": [PROMPT | {"num_samples": 3}]}}
    assert await tenants.operator.status("POST", f"{RUN}/evaluations", **other) == 409


async def test_scores_of_a_stranger_are_not_among_those_of_the_run(tenants: Tenants, queue: RedisReplayQueue) -> None:
    """/metrics needs no key, and each name would be one that an evaluation of the run can no longer have."""
    for who, name in (("alice", "secret-2"), ("operator", "math-2")):
        await getattr(tenants, who).rest(
            "POST", f"{RUN}/evaluations", json={"evaluation_id": name, "prompts": [PROMPT]}
        )
        [lease] = await queue.lease("s", 4)
        await queue.record_evaluation(name, lease, [1.0], 0, 0)
    assert (await tenants.alice.rest("GET", f"{RUN}/evaluations/secret-2"))["score"] == 1.0
    assert [found["benchmark"] for found in (await tenants.bob.rest("GET", f"{RUN}/metrics"))["scores"]] == ["math"]
    text = (await tenants.bob.send("GET", "/metrics")).text
    assert 'penstock_eval_score{benchmark="math"} 1.0' in text and "secret" not in text


async def test_an_id_that_is_known_does_not_swallow_another_body(tenants: Tenants) -> None:
    evaluation = {"evaluation_id": "e", "prompts": [PROMPT]}
    task = {"task_id": "t", "payload": 1}
    other = PROMPT | {"num_samples": 3}
    for path, good, bad in (
        (f"{RUN}/evaluations", evaluation, evaluation | {"prompts": [other]}),
        ("/v1/tasks", {"tasks": [task]}, {"tasks": [{"task_id": "new", "payload": 1}, task | {"payload": 2}]}),
    ):
        for body, status in ((good, 200), (good, 200), (bad, 409)):
            assert await tenants.alice.status("POST", path, json=body) == status
    assert await tenants.alice.status("GET", "/v1/tasks/new") == 404, "all tasks are accepted, or none"


async def test_notices_do_not_quote_another_team(tenants: Tenants, redis_client: redis.Redis) -> None:
    notices = Notices(redis_client, "test")
    await notices.record(Event("reward_failed", "place", "the reward of 'secret' failed", "Traceback: secret"))
    await notices.record(Event("server_lost", "r1", "r1 was silent"))
    for path, run in ((RUN, lambda answer: answer), ("/v1/runs", lambda answer: answer["runs"][0])):
        shown = {found["kind"]: found for found in run(await tenants.bob.rest("GET", path))["notices"]}
        assert [*shown] == ["server_lost"] and shown["server_lost"]["text"] == "r1 was silent"
        assert "Traceback: secret" in str(run(await tenants.operator.rest("GET", path))["notices"])


async def test_failures_do_not_quote_another_team(
    tenants: Tenants, queue: RedisReplayQueue, redis_client: redis.Redis
) -> None:
    await tenants.alice.rest("POST", f"{RUN}/prompts", json={"prompts": [PROMPT]})
    [lease] = await queue.lease("s", 1)
    await queue.give_back("s", lease, "corrupt: cannot parse 'secret'", is_final=True)
    opened = {"reason": "corrupt: 'secret'", "failures": 4, "opened_ms": 1, "probe_ms": 2}
    await redis_client.hset(RunKeys("test").breakers, "r0", json.dumps(opened))
    watch = prompts_pb2.WatchResultsRequest(cursor="0")
    for tenant, shown in ((tenants.bob, "corrupt"), (tenants.operator, "corrupt: cannot parse 'secret'")):
        [letter] = (await tenant.rest("GET", f"{RUN}/dead-letters"))["dead_letters"]
        listed = await tenant.call("RunService", "ListDeadLetters", runs_pb2.ListDeadLettersRequest())
        results = tenant.call("PromptService", "WatchResults", watch)
        result = await results.read()
        results.cancel()
        assert [letter["reason"], listed.dead_letters[0].reason, result.reason] == [shown] * 3
        for path in (RUN, f"{RUN}/servers"):
            assert (await tenant.rest("GET", path))["servers"][0]["breaker_reason"] == "corrupt"


@pytest.mark.parametrize("source", ["a\0b", "a\nb", "x" * 257])
async def test_a_data_source_is_a_short_line(tenants: Tenants, source: str) -> None:
    refused = await tenants.alice.send("POST", f"{RUN}/prompts", json={"prompts": [PROMPT | {"data_source": source}]})
    assert (refused.status_code, refused.json()["field"]) == (400, "prompts[0].data_source")
    request = prompts_pb2.SubmitPromptsRequest(prompts=[message(data_source=source)])
    assert await tenants.alice.code("PromptService", "SubmitPrompts", request) == "INVALID_ARGUMENT"


async def test_nested_values_that_are_accepted_can_be_shown(tenants: Tenants) -> None:
    """Every answer with a value inside has at most as many levels as our own client reads."""
    accepted = []
    for num_levels in (180, 189, 190, 191, 201):
        value = "[" * (num_levels - 1) + "]" * (num_levels - 1)
        prompt = message()
        prompt.extra_info_json = f'{{"deep": {value}}}'
        request = prompts_pb2.SubmitPromptsRequest(prompts=[prompt])
        by_rest = {"prompts": [PROMPT | {"extra_info": json.loads(prompt.extra_info_json)}]}
        codes = {await tenants.alice.code("PromptService", "SubmitPrompts", request)}
        codes.add(str(await tenants.alice.status("POST", f"{RUN}/prompts", json=by_rest)))
        if codes == {"OK", "200"}:
            accepted.append(num_levels)
        else:
            assert codes == {"INVALID_ARGUMENT", "400"}
    assert accepted == [180, 189, 190]
    page = await tenants.alice.send("GET", f"{RUN}/prompts")
    assert len(from_json(page.content)["prompts"]) == 6
