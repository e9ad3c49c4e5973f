"""Every operation through REST and through gRPC, over the same run: the same answers, the same refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateways import PROMPT, RUN, Gateway, group_of, publish, run_config, running
from penstock.api_keys import make_key
from penstock.codec import encode_group
from penstock.fleet import Fleet, ServerRecord
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.v1 import (
    datasets_pb2,
    datasets_pb2_grpc,
    generate_pb2,
    groups_pb2,
    groups_pb2_grpc,
    policies_pb2,
    policies_pb2_grpc,
    prompts_pb2,
    prompts_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
)
from penstock_services.gateway import policy_bodies, prompt_bodies, run_bodies
from penstock_services.gateway.bodies import plain_fields
from penstock_services.gateway.rpc import services_of
from scripted_engine import make_tokenizer_folder, spelled


@pytest.fixture
async def gateway(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> AsyncIterator[Gateway]:
    make_tokenizer_folder(tmp_path)
    async with running(run_config(redis_process.url, tmp_path)) as started:
        yield started


def stubs(gateway: Gateway) -> tuple[Any, Any, Any, Any]:
    return (
        prompts_pb2_grpc.PromptServiceStub(gateway.channel),
        groups_pb2_grpc.GroupServiceStub(gateway.channel),
        policies_pb2_grpc.PolicyServiceStub(gateway.channel),
        runs_pb2_grpc.RunServiceStub(gateway.channel),
    )


async def rest(gateway: Gateway, method: str, path: str, **options: Any) -> Any:
    response = await gateway.rest.request(method, path, **options)
    assert response.status_code == 200, response.text
    return response.json()


async def both(
    gateway: Gateway, method: str, path: str, answer: Any, to_json: Callable[[Any], Any], **options: Any
) -> Any:
    """The operation by REST and by gRPC; both answer the same, ages apart."""
    by_rest, by_grpc = await rest(gateway, method, path, **options), to_json(await answer)
    assert ageless(by_grpc) == ageless(by_rest), path
    return by_rest


def ageless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: ageless(part) for name, part in value.items() if name != "heartbeat_age_ms"}
    return [ageless(part) for part in value] if isinstance(value, list) else value


async def submit(gateway: Gateway, *prompts: dict[str, Any]) -> list[int]:
    return list((await rest(gateway, "POST", f"{RUN}/prompts", json={"prompts": list(prompts)}))["prompt_ids"])


async def test_prompts_are_listed_filtered_cancelled_and_waited_for(gateway: Gateway, queue: RedisReplayQueue) -> None:
    prompts, groups, _, _ = stubs(gateway)
    ids = await submit(gateway, *[PROMPT] * 3, PROMPT | {"data_source": "other"}, PROMPT)
    [lease, cancelled_lease] = await queue.lease("s", 2)
    await queue.append(lease, encode_group(group_of(1, lease.attempt)), 3)

    pages, token = [], ""
    while not pages or token:
        page = await both(
            gateway, "GET", f"{RUN}/prompts?page_size=2&page_token={token}",
            prompts.ListPrompts(prompts_pb2.ListPromptsRequest(page_size=2, page_token=token)),
            prompt_bodies.prompts_to_json,
        )  # fmt: skip
        pages.append([(record["prompt_id"], record["state"]) for record in page["prompts"]])
        token = page["next_page_token"]
    assert pages == [[(1, "QUEUED"), (2, "LEASED")], [(3, "PENDING"), (4, "PENDING")], [(5, "PENDING")]]
    pending = await rest(gateway, "GET", f"{RUN}/prompts?state=PENDING&data_source=other")
    assert [record["prompt_id"] for record in pending["prompts"]] == [4]
    listed = await both(
        gateway, "GET", f"{RUN}/groups", groups.ListGroups(groups_pb2.ListGroupsRequest()),
        prompt_bodies.groups_to_json,
    )  # fmt: skip
    assert [(group["prompt_id"], group["min_version"], group["max_version"]) for group in listed["groups"]] == [
        (1, 3, 4)
    ]

    body = {"prompt_ids": [ids[0], ids[1], ids[2], 99]}
    first = await rest(gateway, "POST", f"{RUN}/prompts:cancel", json=body)
    assert [record["state"] for record in first["prompts"]] == ["CANCELLED"] * 3 + ["STATE_UNSPECIFIED"]
    again = await prompts.CancelPrompts(prompts_pb2.CancelPromptsRequest(prompt_ids=body["prompt_ids"]))
    assert [r["state"] for r in prompt_bodies.cancelled_to_json(again)["prompts"]] == [
        r["state"] for r in first["prompts"]
    ]
    assert await queue.append(cancelled_lease, encode_group(group_of(2, 1)), 3) == "unknown"
    stat = await queue.stat()
    assert (stat.pending, stat.queued, stat.in_flight, stat.discarded, stat.conservation_error) == (2, 0, 0, 2, 0)
    waited = await both(
        gateway, "GET", f"{RUN}/prompts/1:wait?timeout_s=5",
        prompts.WaitPrompt(prompts_pb2.WaitPromptRequest(prompt_id=1, timeout_s=5)),
        prompt_bodies.prompt_record_to_json,
    )  # fmt: skip
    assert waited["state"] == "CANCELLED"
    assert (await rest(gateway, "GET", f"{RUN}/prompts/4:wait?timeout_s=0"))["state"] == "PENDING"


async def test_what_is_trained_cannot_be_cancelled(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await submit(gateway, PROMPT, PROMPT)
    for lease in await queue.lease("s", 2):
        await queue.append(lease, encode_group(group_of(lease.prompt_id, lease.attempt)), 3)
    await queue.take_term(0)
    assert await queue.take(1, 1) == [1]
    answer = await rest(gateway, "POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [1]})
    assert answer["prompts"][0]["state"] == "QUEUED"
    await queue.commit(1, [1])
    answer = await rest(gateway, "POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [1]})
    assert answer["prompts"][0]["state"] == "TRAINED"
    assert (await queue.stat()).conservation_error == 0


async def test_a_stream_of_submissions_is_answered_one_by_one(gateway: Gateway) -> None:
    prompts, *_ = stubs(gateway)
    body = prompt_bodies.PromptBody.model_validate(PROMPT).to_proto("")

    async def requests() -> AsyncIterator[prompts_pb2.SubmitPromptsRequest]:
        for key, count in (("a", 1), ("b", 2), ("a", 1), ("c", 0)):
            yield prompts_pb2.SubmitPromptsRequest(idempotency_key=key, prompts=[body] * count)

    answers = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for answer in prompts.StreamPrompts(requests()):
            answers.append((list(answer.prompt_ids), answer.replayed))
    assert answers == [([1], False), ([2, 3], False), ([1], True)]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def read_events(response: httpx.Response, count: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                cursor = line.removeprefix("id: ")
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")) | {"event_id": cursor})
            if len(events) == count:
                return events
    raise AssertionError(f"the stream ended after {events}")


async def test_results_are_resumed_by_cursor(gateway: Gateway, queue: RedisReplayQueue) -> None:
    prompts, groups, *_ = stubs(gateway)
    await submit(gateway, *[PROMPT] * 3)
    leases = await queue.lease("s", 3)
    async with gateway.rest.stream("GET", f"{RUN}/results?cursor=0&with_groups=true") as response:
        await queue.append(leases[0], encode_group(group_of(1, 1)), 3)
        await queue.give_back("s", leases[1], "broken reward", is_final=True)
        await rest(gateway, "POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [3]})
        seen = await read_events(response, 3)
    assert [(r["prompt_id"], r["state"], r["reason"]) for r in seen] == [
        (1, "QUEUED", ""), (2, "DEAD_LETTERED", "broken reward"), (3, "CANCELLED", "cancelled"),
    ]  # fmt: skip
    assert all(result["cursor"] == result["event_id"] for result in seen)
    [trajectory] = seen[0]["group"]["trajectories"]
    assert trajectory["policy_versions"] == [3, 3, 4] and len(trajectory["tokens"]) == 3

    by_grpc = []
    request = prompts_pb2.WatchResultsRequest(cursor="0", with_groups=True)
    call = prompts.WatchResults(request)
    async for result in call:
        by_grpc.append(prompt_bodies.result_to_json(result))
        if len(by_grpc) == 3:
            call.cancel()
            break
    assert by_grpc == [{name: part for name, part in result.items() if name != "event_id"} for result in seen]

    headers = {"Last-Event-ID": seen[0]["cursor"]}
    async with gateway.rest.stream("GET", f"{RUN}/results", headers=headers) as response:
        assert [result["prompt_id"] for result in await read_events(response, 2)] == [2, 3]
    async with gateway.rest.stream("GET", f"{RUN}/results?cursor=0&prompt_id=3") as response:
        assert [result["prompt_id"] for result in await read_events(response, 1)] == [3]
    for cursor in ("nonsense", "1-1.0"):
        response = await gateway.rest.get(f"{RUN}/results?cursor={cursor}")
        assert (response.status_code, response.json()["field"]) == (400, "cursor")


async def test_tokens_come_with_text(gateway: Gateway, queue: RedisReplayQueue) -> None:
    from dataclasses import replace

    import numpy as np

    await submit(gateway, PROMPT)
    [lease] = await queue.lease("s", 1)
    group = group_of(1, 1)
    spoken = replace(group.trajectories[0], token_ids=np.array(spelled("ok!"), dtype=np.int32))
    await queue.append(lease, encode_group(replace(group, trajectories=(spoken,))), 3)
    _, groups, *_ = stubs(gateway)
    answer = await both(
        gateway, "GET", f"{RUN}/groups/1", groups.GetGroup(groups_pb2.GetGroupRequest(prompt_id=1)),
        prompt_bodies.group_to_json,
    )  # fmt: skip
    assert (answer["trajectories"][0]["text"], answer["trajectories"][0]["tokens"]) == ("ok!", ["o", "k", "!"])


async def test_policies_are_compared_promoted_held_pinned_and_retired(
    gateway: Gateway, queue: RedisReplayQueue
) -> None:
    _, _, policies, runs = stubs(gateway)
    await publish(queue, 1, 2, 3)
    fleet = Fleet(queue.client, "test")
    await fleet.join(ServerRecord("a", "127.0.0.1:1", "torch", policy_version=3))
    await fleet.set_state("a", "READY")
    change, to_json = policies_pb2.ChangePolicyRequest, policy_bodies.policy_to_json

    compared = await both(
        gateway, "GET", f"{RUN}/policies:compare?policy_version=1&other_version=3",
        policies.ComparePolicies(policies_pb2.ComparePoliciesRequest(policy_version=1, other_version=3)),
        policy_bodies.comparison_to_json,
    )  # fmt: skip
    assert compared["metric_changes"] == {"reward_mean": pytest.approx(0.2)}
    assert (compared["steps_between"], compared["same_weights"]) == (2, True)
    assert compared["other"]["server_ids"] == ["a"]

    path = f"{RUN}/policies/2"
    promoted = await both(gateway, "POST", f"{path}:promote", policies.PromotePolicy(change(policy_version=2)), to_json)
    assert promoted["state"] == "PROMOTED"
    response = await gateway.rest.post(f"{path}:rollback")
    assert (response.status_code, response.json()["reason"]) == (409, "CONFLICT")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await policies.RollBackPolicy(change(policy_version=2))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    pin = await both(
        gateway, "PUT", f"{RUN}/pins/nightly",
        policies.PinPolicy(policies_pb2.PinPolicyRequest(pin="nightly", policy_version=1)), to_json,
        json={"policy_version": 1},
    )  # fmt: skip
    assert pin["pins"] == ["nightly"]
    assert (await gateway.rest.post(f"{RUN}/policies/1:retire")).status_code == 409
    assert await rest(gateway, "DELETE", f"{RUN}/pins/nightly") == {"was_pinned": True}
    assert not (await policies.UnpinPolicy(policies_pb2.UnpinPolicyRequest(pin="nightly"))).was_pinned
    retired = await both(
        gateway, "POST", f"{RUN}/policies/1:retire", policies.RetirePolicy(change(policy_version=1)), to_json
    )
    assert retired["state"] == "RETIRED"
    assert (await gateway.rest.post(f"{RUN}/policies/1:promote")).status_code == 409
    await both(
        gateway, "POST", f"{RUN}/policies:release", policies.ReleasePolicy(policies_pb2.ReleasePolicyRequest()), to_json
    )

    async with gateway.rest.stream("GET", f"{RUN}/policies:watch") as response:
        call = policies.WatchPolicies(policies_pb2.WatchPoliciesRequest())
        first = await anext(aiter(call))
        await rest(gateway, "POST", f"{RUN}/policies/3:promote")
        seen = await read_events(response, 2)
        call.cancel()
    assert to_json(first)["state"] == seen[0]["state"] == "PUBLISHED"
    assert (seen[1]["policy_version"], seen[1]["state"]) == (3, "PROMOTED")
    metrics = await both(
        gateway, "GET", f"{RUN}/metrics?page_size=2&name=reward_mean",
        runs.ListMetrics(runs_pb2.ListMetricsRequest(page_size=2, names=["reward_mean"])), run_bodies.metrics_to_json,
    )  # fmt: skip
    assert [(s["step"], s["metrics"]) for s in metrics["steps"]] == [
        (2, {"reward_mean": 0.2}),
        (3, {"reward_mean": 0.3}),
    ]


async def test_a_pinned_evaluation_waits_for_a_server_of_its_version(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await publish(queue, 1, 2)
    fleet = Fleet(queue.client, "test")
    for server_id, version in (("old", 1), ("new", 2)):
        await fleet.join(ServerRecord(server_id, "127.0.0.1:1", "torch", policy_version=version))
    for name in ("pinned", "free"):
        body = {"evaluation_id": name, "prompts": [PROMPT] * 2}
        await rest(gateway, "POST", f"{RUN}/evaluations", json=body)
    await rest(gateway, "PUT", f"{RUN}/pins/pinned", json={"policy_version": 1})
    evaluations: dict[str, list[str]] = {}
    for server_id in ("new", "unknown", "old"):
        leases = await queue.lease(server_id, 3)
        evaluations[server_id] = [prompts_pb2.Prompt.FromString(lease.payload).evaluation_id for lease in leases]
    assert evaluations == {"new": ["free", "free"], "unknown": [], "old": ["pinned", "pinned"]}


async def test_a_dataset_is_uploaded_and_submitted_once(gateway: Gateway, queue: RedisReplayQueue) -> None:
    datasets: Any = datasets_pb2_grpc.DatasetServiceStub(gateway.channel)
    rows = [{"prompt": f"{i}+{i}=", "data_source": "sums", "reward_model": {"ground_truth": 2 * i}} for i in range(600)]
    content, path = "\n".join(map(json.dumps, rows)).encode(), f"{RUN}/datasets/sums"
    headers = {"Content-Type": "application/x-ndjson"}
    to_json = plain_fields
    upload = datasets_pb2.UploadDatasetRequest(name="sums", format="jsonl", content=content)
    kept = await both(gateway, "PUT", path, datasets.UploadDataset(upload), to_json, content=content, headers=headers)
    assert (kept["num_prompts"], kept["num_submitted"], kept["num_bytes"]) == (600, 0, len(content))
    submit_request = datasets_pb2.SubmitDatasetRequest(
        name="sums", num_samples=2, sampling=prompts_pb2.Sampling(temperature=1, top_p=1, max_tokens=8)
    )
    body = {"num_samples": 2, "sampling": {"max_tokens": 8}}
    done = await both(gateway, "POST", f"{path}:submit", datasets.SubmitDataset(submit_request), to_json, json=body)
    assert done["num_submitted"] == 600 and (await queue.stat()).pending == 600
    got = datasets.GetDataset(datasets_pb2.GetDatasetRequest(name="sums"))
    assert await both(gateway, "GET", path, got, to_json) == done
    record = await rest(gateway, "GET", f"{RUN}/prompts/600")
    assert (record["prompt"]["ground_truth"], record["prompt"]["num_samples"]) == (1198, 2)

    for name, sent, kind, status, field in (
        ("sums", b'{"prompt": "x"}', "application/x-ndjson", 409, ""),
        ("wrong", b'{"prompt": 3}', "application/x-ndjson", 400, "content"),
        ("wrong", b"no parquet", "application/vnd.apache.parquet", 400, "content"),
        ("wrong", b"", "text/csv", 400, "content-type"),
        (".hidden", content, "application/x-ndjson", 400, "name"),
    ):
        answer = await gateway.rest.put(f"{RUN}/datasets/{name}", content=sent, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    assert [path.name for path in (gateway.config.folder / "datasets").iterdir()] == ["sums.jsonl"]


async def test_the_run_is_paused_and_its_servers_drained(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    await submit(gateway, *[PROMPT] * 3)
    await Fleet(queue.client, "test").join(ServerRecord("s", "127.0.0.1:1", "torch"))
    change, to_json = runs_pb2.ChangeRunRequest(), run_bodies.run_to_json

    assert (await both(gateway, "POST", f"{RUN}:pause", runs.PauseRun(change), to_json))["state"] == "PAUSED"
    assert await queue.lease("s", 1) == []
    assert (await both(gateway, "POST", f"{RUN}:resume", runs.ResumeRun(change), to_json))["state"] == "RUNNING"
    assert len(await queue.lease("s", 1)) == 1

    path, request = f"{RUN}/servers/s", runs_pb2.ChangeServerRequest(server_id="s")
    drained = await both(gateway, "POST", f"{path}:drain", runs.DrainServer(request), run_bodies.server_to_json)
    assert drained["is_drained"] and await queue.lease("s", 1) == [] and len(await queue.lease("t", 1)) == 1
    undrained = await both(gateway, "POST", f"{path}:undrain", runs.UndrainServer(request), run_bodies.server_to_json)
    assert not undrained["is_drained"] and len(await queue.lease("s", 1)) == 1
    assert (await gateway.rest.post(f"{RUN}/servers/none:drain")).status_code == 404

    await queue.take_term(0)
    assert (await both(gateway, "POST", f"{RUN}:stop", runs.StopRun(change), to_json))["state"] == "STOPPED"
    await queue.take_term(0)
    [run] = (
        await both(gateway, "GET", "/v1/runs", runs.ListRuns(runs_pb2.ListRunsRequest()), run_bodies.runs_to_json)
    )["runs"]
    assert run["state"] == "PAUSED"


async def test_dead_letters_are_paged_and_requeued(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    await submit(gateway, *[PROMPT] * 3)
    for lease in await queue.lease("s", 3):
        await queue.give_back("s", lease, f"reason_{lease.prompt_id} of it", is_final=True)
    pages, token = [], ""
    while not pages or token:
        request = runs_pb2.ListDeadLettersRequest(page_size=2, page_token=token)
        page = await both(
            gateway, "GET", f"{RUN}/dead-letters?page_size=2&page_token={token}", runs.ListDeadLetters(request),
            run_bodies.dead_letters_to_json,
        )  # fmt: skip
        pages.append([letter["prompt_id"] for letter in page["dead_letters"]])
        token = page["next_page_token"]
    assert pages == [[3, 2], [1]]
    [letter] = (await rest(gateway, "GET", f"{RUN}/dead-letters?kind=reason_2"))["dead_letters"]
    answer = await rest(gateway, "POST", f"{RUN}/dead-letters/{letter['letter_id']}:requeue")
    assert answer == {"prompt_id": 4}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await runs.RequeueDeadLetter(runs_pb2.RequeueDeadLetterRequest(letter_id=letter["letter_id"]))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_roles_limits_and_the_audit_log(redis_process: Any, redis_client: redis.Redis, tmp_path: Path) -> None:
    secrets, lines = {}, []
    for role in ("read", "submit", "admin"):
        secrets[role], key = make_key(f"{role}er", role)  # type: ignore[arg-type]
        lines.append(key.line)
    (tmp_path / "keys").write_text("\n".join(lines))
    config = run_config(
        redis_process.url, tmp_path, keys_file=tmp_path / "keys", requests_per_s=0.001, burst_requests=6
    )
    async with running(config) as gateway:
        runs = runs_pb2_grpc.RunServiceStub(gateway.channel)
        expected = {"read": (200, 403, 403), "submit": (200, 200, 403), "admin": (200, 200, 200)}
        for role, codes in expected.items():
            headers = {"Authorization": f"Bearer {secrets[role]}", "X-Request-Id": f"id-of-{role}"}
            answers = [
                await gateway.rest.get(RUN, headers=headers),
                await gateway.rest.post(f"{RUN}/prompts", json={"prompts": [PROMPT]}, headers=headers),
                await gateway.rest.post(f"{RUN}:pause", headers=headers),
            ]
            assert tuple(answer.status_code for answer in answers) == codes
            assert {answer.headers["x-request-id"] for answer in answers} == {f"id-of-{role}"}
        metadata = (("authorization", f"Bearer {secrets['submit']}"), ("x-request-id", "by-grpc"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await runs.PauseRun(runs_pb2.ChangeRunRequest(run="test"), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert ("x-request-id", "by-grpc") in list(caught.value.trailing_metadata())

        headers = {"Authorization": f"Bearer {secrets['submit']}"}
        codes = [(await gateway.rest.get(RUN, headers=headers)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        refused = await gateway.rest.get(RUN, headers=headers)
        assert refused.json()["reason"] == "RATE_LIMITED" and int(refused.headers["retry-after"]) > 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await runs.GetRun(runs_pb2.GetRunRequest(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

        entries = [json.loads(line) for line in (config.folder / "audit.jsonl").read_text().splitlines()]
    assert [(e["key"], e["operation"], e["outcome"], e["request_id"]) for e in entries] == [
        ("reader", "pause_run", "PERMISSION_DENIED", "id-of-read"),
        ("submiter", "pause_run", "PERMISSION_DENIED", "id-of-submit"),
        ("adminer", "pause_run", "OK", "id-of-admin"),
        ("submiter", "pause_run", "PERMISSION_DENIED", "by-grpc"),
    ]
    assert not any(secret in (tmp_path / "keys").read_text() for secret in secrets.values())


async def test_health_and_reflection(gateway: Gateway) -> None:
    health = health_pb2_grpc.HealthStub(gateway.channel)
    for service in ("", "penstock.v1.RunService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)
    async for answer in stub.ServerReflectionInfo(ask()):
        names = {service.name for service in answer.list_services_response.service}
    assert names > {"penstock.v1.PromptService", "penstock.v1.PolicyService", "grpc.health.v1.Health"}


def test_every_method_of_the_contracts_is_served() -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return Anything()

    served = services_of(Anything())  # type: ignore[arg-type]
    for name, methods in served.items():
        file = next(
            module.DESCRIPTOR
            for module in (datasets_pb2, generate_pb2, groups_pb2, policies_pb2, prompts_pb2, runs_pb2)
            if name.rpartition(".")[2] in module.DESCRIPTOR.services_by_name
        )
        assert set(methods) == set(file.services_by_name[name.rpartition(".")[2]].methods_by_name), name


async def test_watchers_do_not_hold_up_a_gateway_that_stops(gateway: Gateway) -> None:
    prompts, *_ = stubs(gateway)
    async with gateway.rest.stream("GET", f"{RUN}/results") as response:
        call = prompts.WatchResults(prompts_pb2.WatchResultsRequest())
        await call.wait_for_connection()
        gateway.stop.set()
        async with asyncio.timeout(8):  # less than requests in flight have
            assert [line async for line in response.aiter_lines() if line.startswith("data")] == []
            async with aclosing(aiter(call)) as results:  # type: ignore[type-var]
                assert [result async for result in results] == []
            await gateway.task
